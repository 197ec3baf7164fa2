//! The files whose bytes could not be brought to the backing: why, since when, and when it will
//! be tried again. An entry goes when its file is clean or no more.

use crate::options::Options;
use crate::source::FlushError;
use ebb_types::{Ino, Time};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

/// One such file, for status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorRecord {
    /// The file.
    pub path: String,
    /// What was tried.
    pub operation: String,
    /// What the system said.
    pub errno: i32,
    /// In words.
    pub text: String,
    /// When it failed for the first time.
    pub since: Time,
    /// How often by now.
    pub attempts: u32,
}

#[derive(Default)]
pub(crate) struct ErrorTable {
    // Ordered, so that status lists them in the same order every time.
    entries: BTreeMap<Ino, Entry>,
}

struct Entry {
    record: ErrorRecord,
    failed_at: Instant,
}

impl ErrorTable {
    /// Another failed attempt; the pause before the next one grows.
    pub(crate) fn failed(&mut self, ino: Ino, error: &FlushError, now: Instant) {
        let before = self.entries.get(&ino).map(|e| (e.record.since, e.record.attempts));
        let (since, attempts) = before.unwrap_or_else(|| (Time::now(), 0));
        let attempts = attempts.saturating_add(1);
        let record = ErrorRecord {
            path: String::new(),
            operation: error.operation().to_owned(),
            errno: error.errno().0,
            text: error.to_string(),
            since,
            attempts,
        };
        self.entries.insert(ino, Entry { record, failed_at: now });
    }

    /// The file is well.
    pub(crate) fn cleared(&mut self, ino: Ino) {
        self.entries.remove(&ino);
    }

    /// It failed and is not well yet.
    pub(crate) fn has(&self, ino: Ino) -> bool {
        self.entries.contains_key(&ino)
    }

    /// Forgets files that are not dirty any more (removed, overtaken).
    pub(crate) fn keep_only(&mut self, dirty: &HashSet<Ino>) {
        self.entries.retain(|ino, _| dirty.contains(ino));
    }

    /// True when the background should leave the file alone for now. `pressed`: who writes may be waiting for
    /// the room that its bytes take.
    pub(crate) fn must_wait(
        &self,
        ino: Ino,
        now: Instant,
        pressed: bool,
        options: &Options,
    ) -> bool {
        self.entries.get(&ino).is_some_and(|e| {
            let pause = match pressed {
                true => options.short_backoff(e.record.attempts),
                false => options.backoff(e.record.attempts),
            };
            e.failed_at + pause > now
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All records, without their paths: only the source knows what a file is called now, and
    /// it is not asked while the table is locked.
    pub(crate) fn records(&self) -> Vec<(Ino, ErrorRecord)> {
        self.entries.iter().map(|(ino, e)| (*ino, e.record.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::Errno;
    use std::time::Duration;

    #[test]
    fn pauses_grow_and_success_clears() {
        let options = Options::default();
        let (mut table, now) = (ErrorTable::default(), Instant::now());
        let error = FlushError::Cache { offset: 5, errno: Errno::EIO };
        table.failed(Ino(2), &error, now);
        let since = table.records()[0].1.since;
        let waits =
            |table: &ErrorTable, at, pressed| table.must_wait(Ino(2), at, pressed, &options);
        assert!(waits(&table, now, false));
        assert!(!waits(&table, now + options.backoff_first, false));
        table.failed(Ino(2), &error, now);
        assert!(waits(&table, now + options.backoff_first, false));
        let record = &table.records()[0].1;
        assert_eq!((record.attempts, record.since), (2, since));
        assert_eq!((record.errno, record.operation.as_str()), (libc::EIO, "read cache"));
        for _ in 0..100 {
            table.failed(Ino(2), &error, now);
        }
        let most = options.backoff_most + Duration::from_millis(1);
        assert!(!waits(&table, now + most, false), "the pause has an upper bound");
        let short = Duration::from_secs(3);
        assert!(waits(&table, now + short, false) && waits(&table, now, true));
        assert!(!waits(&table, now + short, true), "a short one where somebody may wait for room");
        table.cleared(Ino(2));
        assert!(table.is_empty() && !waits(&table, now, true));
    }

    #[test]
    fn files_that_are_no_more_are_forgotten() {
        let mut table = ErrorTable::default();
        let error = FlushError::Mismatch { range: ebb_types::ByteRange::at(0, 1) };
        for ino in [3, 4] {
            table.failed(Ino(ino), &error, Instant::now());
        }
        table.keep_only(&HashSet::from([Ino(4)]));
        let left: Vec<Ino> = table.records().into_iter().map(|r| r.0).collect();
        assert_eq!(left, [Ino(4)]);
    }
}
