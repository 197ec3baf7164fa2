//! What a model would ask of the metadata service for the calls of a trace, as its row says. Leases and
//! quiet writes make it less; this is the most.

use ebb_consistency::{Model, SyncEvent};
use std::collections::HashMap;
use std::sync::Arc;

/// Requests of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests {
    /// The model's name.
    pub model: String,
    /// Times that written bytes are published.
    pub attaches: u64,
    /// Times that somebody asks who has what.
    pub queries: u64,
}

impl Requests {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.attaches + self.queries
    }
}

/// Counts for several models at once; a bit is a model.
#[derive(Debug)]
pub(crate) struct Counter {
    names: Vec<String>,
    attach: [u32; 9],
    query: [u32; 9],
    attaches: Vec<u64>,
    asked: [u64; 9],
    /// Per process and file: under which models something is not published.
    dirty: HashMap<(u32, u32), u32>,
}

impl Counter {
    /// At most 32 models are counted.
    pub fn new(models: &[Arc<Model>]) -> Counter {
        let models = &models[..models.len().min(32)];
        let bits = |does: &dyn Fn(&Model, SyncEvent) -> bool| {
            let of = |event| {
                let set = models.iter().enumerate().filter(|(_, m)| does(m, event));
                set.fold(0u32, |bits, (i, _)| bits | 1 << i)
            };
            SyncEvent::ALL.map(of)
        };
        Counter {
            names: models.iter().map(|m| m.name().to_owned()).collect(),
            attach: bits(&|m, e| m.on(e).attach.is_some()),
            query: bits(&|m, e| m.on(e).query.is_some()),
            attaches: vec![0; models.len()],
            asked: [0; 9],
            dirty: HashMap::new(),
        }
    }

    pub fn event(&mut self, process: u32, file: u32, event: SyncEvent) {
        self.asked[event as usize] += 1;
        let attach = self.attach[event as usize];
        if event != SyncEvent::Write && attach == 0 {
            return;
        }
        let dirty = self.dirty.entry((process, file)).or_default();
        if event == SyncEvent::Write {
            *dirty = u32::MAX;
        }
        let mut done = *dirty & attach;
        *dirty &= !attach;
        while done != 0 {
            self.attaches[done.trailing_zeros() as usize] += 1;
            done &= done - 1;
        }
    }

    pub fn requests(&self) -> Vec<Requests> {
        let queries = |i: usize| -> u64 {
            let asks = |e: &usize| self.query[*e] & (1 << i) != 0;
            (0..self.asked.len()).filter(asks).map(|e| self.asked[e]).sum()
        };
        let of = |(i, name): (usize, &String)| Requests {
            model: name.clone(),
            attaches: self.attaches[i],
            queries: queries(i),
        };
        self.names.iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_consistency::ModelTable;

    #[test]
    fn requests_are_those_of_the_rows() {
        let table = ModelTable::builtin();
        let models: Vec<_> = ["posix", "commit", "session"].map(|n| table.get(n).unwrap()).into();
        let mut counter = Counter::new(&models);
        use SyncEvent::{Close, Fsync, Open, Read, Write};
        for event in [Open, Write, Write, Fsync, Fsync, Read, Read, Read, Write, Close, Close] {
            counter.event(1, 2, event);
        }
        let found = counter.requests();
        let of = |i: usize| (found[i].attaches, found[i].queries);
        assert_eq!(of(0), (3, 4), "posix: each write, the open and each read");
        assert_eq!(of(1), (2, 3), "commit: fsync and close with something new, each read");
        assert_eq!(of(2), (1, 1), "session: one close, the open");
    }
}
