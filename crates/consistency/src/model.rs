//! One consistency model: which of {attach, query} happens at which sync event. A row of data,
//! not code; the rows themselves are in [`crate::table`].

use crate::msc::Msc;
use std::fmt;

/// A call at which a model may make bytes visible or look for those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SyncEvent {
    /// A file is opened.
    Open,
    /// Its attributes are asked for.
    Stat,
    /// Bytes are read.
    Read,
    /// Bytes are written.
    Write,
    /// fsync or fdatasync.
    Fsync,
    /// A descriptor is closed (FUSE FLUSH).
    Close,
    /// A byte-range or whole-file lock was granted.
    Lock,
    /// A lock is about to be given up.
    Unlock,
    /// The explicit commit of the control interface.
    Commit,
}

impl SyncEvent {
    /// Every event, in the order of the table's columns.
    pub const ALL: [SyncEvent; 9] = [
        SyncEvent::Open,
        SyncEvent::Stat,
        SyncEvent::Read,
        SyncEvent::Write,
        SyncEvent::Fsync,
        SyncEvent::Close,
        SyncEvent::Lock,
        SyncEvent::Unlock,
        SyncEvent::Commit,
    ];

    /// Its name in configuration files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SyncEvent::Open => "open",
            SyncEvent::Stat => "stat",
            SyncEvent::Read => "read",
            SyncEvent::Write => "write",
            SyncEvent::Fsync => "fsync",
            SyncEvent::Close => "close",
            SyncEvent::Lock => "lock",
            SyncEvent::Unlock => "unlock",
            SyncEvent::Commit => "commit",
        }
    }

    /// The event of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<SyncEvent> {
        SyncEvent::ALL.into_iter().find(|e| e.name() == name)
    }

    /// True for the events that have a byte range of their own; the others speak of the file.
    #[must_use]
    pub fn has_range(self) -> bool {
        matches!(self, SyncEvent::Read | SyncEvent::Write)
    }

    fn column(self) -> usize {
        self as usize
    }
}

/// How much of the file an action is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The bytes of the call.
    Range,
    /// The whole file.
    File,
}

impl Scope {
    /// Its name in configuration files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Scope::Range => "range",
            Scope::File => "file",
        }
    }
}

/// What happens at one event. When both do, the attach is finished before the query starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Actions {
    /// Written bytes become this node's, for everyone who asks.
    pub attach: Option<Scope>,
    /// The node asks who owns what.
    pub query: Option<Scope>,
}

impl Actions {
    /// Nothing happens.
    pub const NONE: Actions = Actions { attach: None, query: None };

    /// The words of a configuration file for these actions.
    fn words(self) -> Vec<String> {
        let attach = self.attach.map(|s| format!("attach {}", s.name()));
        let query = self.query.map(|s| format!("query {}", s.name()));
        attach.into_iter().chain(query).collect()
    }
}

/// One row of the table: the actions of each event.
pub type Row = [Actions; SyncEvent::ALL.len()];

/// A named row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    name: String,
    row: Row,
}

impl Model {
    /// A model of that name and row.
    #[must_use]
    pub fn new(name: &str, row: Row) -> Model {
        Model { name: name.to_owned(), row }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What happens at `event`.
    #[must_use]
    pub fn on(&self, event: SyncEvent) -> Actions {
        self.row[event.column()]
    }

    pub(crate) fn row(&self) -> &Row {
        &self.row
    }

    /// True when a write is visible as soon as it returns: nothing that was written waits for a
    /// later event.
    #[must_use]
    pub fn writes_publish(&self) -> bool {
        self.on(SyncEvent::Write).attach.is_some()
    }

    /// True when O_APPEND must reserve its place at the service. Under models whose writes do not
    /// publish, two appends of two nodes without a sync operation between them are a storage race.
    #[must_use]
    pub fn append_is_atomic(&self) -> bool {
        self.writes_publish()
    }

    /// True when an append that is not atomic must ask where the end is: wherever a look at the size
    /// or at the bytes would.
    #[must_use]
    pub fn append_asks(&self) -> bool {
        self.on(SyncEvent::Stat).query.is_some() || self.reads_ask()
    }

    /// True when every read asks, so that what was learned earlier does not fix what it sees.
    #[must_use]
    pub fn reads_ask(&self) -> bool {
        self.on(SyncEvent::Read).query.is_some()
    }

    /// True when a lease saves more than it costs: where every read asks. Where only rare events
    /// ask, the recalls of a shared file would be more than the questions.
    #[must_use]
    pub fn wants_leases(&self) -> bool {
        self.reads_ask()
    }

    /// The minimum synchronisation between two conflicting operations, read off the row.
    #[must_use]
    pub fn msc(&self) -> Msc {
        Msc::of(self)
    }

    /// Name and row as one line. Two nodes of a job agree on a model when these are equal.
    #[must_use]
    pub fn describe(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.name)?;
        for event in SyncEvent::ALL {
            let words = self.on(event).words();
            let text = if words.is_empty() { "-".to_owned() } else { words.join("+") };
            write!(f, " {}={text};", event.name())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_the_order_of_all() {
        for (i, e) in SyncEvent::ALL.into_iter().enumerate() {
            assert_eq!(e.column(), i);
            assert_eq!(SyncEvent::from_name(e.name()), Some(e));
        }
        assert_eq!(SyncEvent::from_name("opne"), None);
    }

    #[test]
    fn an_append_asks_wherever_a_reader_would() {
        let asking = |event: SyncEvent| {
            let mut row = [Actions::NONE; 9];
            row[event.column()].query = Some(Scope::File);
            Model::new("m", row).append_asks()
        };
        let events = SyncEvent::ALL.into_iter().filter(|e| asking(*e));
        assert_eq!(events.collect::<Vec<_>>(), [SyncEvent::Stat, SyncEvent::Read]);
    }

    #[test]
    fn the_description_tells_rows_apart() {
        let quiet = Model::new("m", [Actions::NONE; 9]);
        let mut row = [Actions::NONE; 9];
        row[SyncEvent::Close.column()].attach = Some(Scope::File);
        let loud = Model::new("m", row);
        assert_ne!(quiet.describe(), loud.describe());
        assert!(loud.describe().contains("close=attach file;"), "{loud}");
        assert_ne!(loud.describe(), Model::new("n", row).describe());
    }
}
