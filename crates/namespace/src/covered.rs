//! Which objects of the backing job-local names hide until they replace them. Such an object may
//! have other names that the job sees, and those show one link less.

use crate::inode::BackingKey;
use ebb_types::{Ino, Name};
use std::collections::HashMap;

/// The hidden objects by name, and how many names of each are hidden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Covered {
    names: HashMap<(Ino, Name), BackingKey>,
    counts: HashMap<BackingKey, u32>,
}

impl Covered {
    /// What the name hides now; `None` for nothing that is known.
    pub fn set(&mut self, parent: Ino, name: &Name, key: Option<BackingKey>) {
        if self.names.is_empty() && key.is_none() {
            return;
        }
        let place = (parent, name.clone());
        let old = match key {
            Some(key) => self.names.insert(place, key),
            None => self.names.remove(&place),
        };
        if let Some(key) = key {
            *self.counts.entry(key).or_default() += 1;
        }
        if let Some(old) = old
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    /// What the name hides.
    pub fn at(&self, parent: Ino, name: &Name) -> Option<BackingKey> {
        if self.names.is_empty() {
            return None;
        }
        self.names.get(&(parent, name.clone())).copied()
    }

    /// How many names of the object are hidden.
    pub fn count(&self, key: BackingKey) -> u32 {
        self.counts.get(&key).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(ino: u8) -> BackingKey {
        BackingKey { dev: 1, ino: ino.into() }
    }

    proptest! {
        #[test]
        fn counts_are_those_of_the_names(
            steps in proptest::collection::vec((0u8..6, proptest::option::of(0u8..3)), 0..40)
        ) {
            let mut covered = Covered::default();
            let mut names = std::collections::BTreeMap::new();
            for (name, object) in steps {
                let text = Name::new(&[b'a' + name]).unwrap();
                covered.set(Ino::ROOT, &text, object.map(key));
                names.remove(&name);
                names.extend(object.map(|o| (name, o)));
                prop_assert_eq!(covered.at(Ino::ROOT, &text), object.map(key));
                for o in 0..3 {
                    let count = names.values().filter(|v| **v == o).count();
                    prop_assert_eq!(covered.count(key(o)), count as u32);
                }
            }
            prop_assert_eq!(covered.counts.len() <= 3, true);
        }
    }
}
