//! The minimum synchronisation (MSC) of a model: what must stand between two conflicting
//! operations so that they do not race. It is read off the model's row, so that user-defined
//! models can be checked too.
//!
//! With X a write of process p and Y a conflicting operation of process q, the general form is
//!
//! ```text
//!   X  po  s1  hb  s2  po  Y        s1 in `publish`, s2 in `observe`
//! ```
//!
//! * `po`: program order of one process, `hb`: happens-before (program order and messages).
//! * A row that attaches at write needs no s1: X itself publishes, and `X hb ...` is enough.
//! * A row that asks at read needs no s2: Y itself observes, and `... hb Y` is enough. Such a
//!   row needs none before a *write* Y either: what Y overwrites is decided by the order of the
//!   attaches, and the reads of the writer ask for themselves.
//! * A row that does neither needs s2 before writes as well, as its definition says: Y's process
//!   must have seen X before it may build on it.
//!
//! A query at `stat` is not an observation: it refreshes attributes, and a program that must
//! not race cannot rely on somebody's stat.

use crate::model::{Model, SyncEvent};

/// The shortest chain of sync operations between conflicting operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Msc {
    /// The writer's sync operations, one of which must follow X in program order; `None` when
    /// the write itself publishes.
    pub publish: Option<Vec<SyncEvent>>,
    /// The other's sync operations, one of which must precede Y in program order; `None` when
    /// the access itself observes.
    pub observe: Option<Vec<SyncEvent>>,
}

const SYNC_EVENTS: [SyncEvent; 6] = [
    SyncEvent::Open,
    SyncEvent::Fsync,
    SyncEvent::Close,
    SyncEvent::Lock,
    SyncEvent::Unlock,
    SyncEvent::Commit,
];

impl Msc {
    /// Reads the chain off a row.
    #[must_use]
    pub fn of(model: &Model) -> Msc {
        let which = |acts: &dyn Fn(SyncEvent) -> bool| -> Vec<SyncEvent> {
            SYNC_EVENTS.into_iter().filter(|e| acts(*e)).collect()
        };
        Msc {
            publish: (!model.append_is_atomic()).then(|| which(&|e| model.on(e).attach.is_some())),
            observe: (!model.reads_ask()).then(|| which(&|e| model.on(e).query.is_some())),
        }
    }

    /// False for a row under which no conflicting pair of two processes can ever be in order.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        let some = |set: &Option<Vec<SyncEvent>>| set.as_ref().is_none_or(|s| !s.is_empty());
        some(&self.publish) && some(&self.observe)
    }

    /// True when whatever is properly synchronised under this is so under `other`, too, and not the
    /// other way round: a program that needs no more than this has no use for the other.
    #[must_use]
    pub fn is_weaker_than(&self, other: &Msc) -> bool {
        let within = |a: &Option<Vec<SyncEvent>>, b: &Option<Vec<SyncEvent>>| match (a, b) {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(a), Some(b)) => a.iter().all(|e| b.contains(e)),
        };
        let below =
            |a: &Msc, b: &Msc| within(&a.publish, &b.publish) && within(&a.observe, &b.observe);
        below(self, other) && !below(other, self)
    }

    /// True when the chain ends with a sync operation of the second process (papers: session,
    /// mpiio), so that a process that builds on another's bytes has always asked first.
    #[must_use]
    pub fn ends_with_observation(&self) -> bool {
        self.observe.is_some()
    }
}

#[cfg(test)]
mod tests {
    use crate::table::ModelTable;

    #[test]
    fn the_built_in_models_are_in_a_row() {
        let table = ModelTable::builtin();
        let msc = |name: &str| table.get(name).unwrap().msc();
        let row = ["session", "mpiio", "romio", "posix"];
        for (i, a) in row.into_iter().enumerate() {
            for (j, b) in row.into_iter().enumerate() {
                assert_eq!(msc(a).is_weaker_than(&msc(b)), i < j, "{a} {b}");
            }
        }
        assert!(!msc("romio").is_weaker_than(&msc("commit")), "they ask for the same");
        assert!(!msc("commit").is_weaker_than(&msc("romio")));
    }
}
