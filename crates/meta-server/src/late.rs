//! Effects that are being carried out on the backing, also when nobody waits for them any more: a call
//! that hangs may take effect much later. Until it has ended nothing else is done under its names,
//! so that a late unlink or rename never meets what was put there since.

use ebb_locks::Mutex;
use ebb_namespace::{BackingPath, Effect};
use ebb_types::Errno;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;

/// How long a change waits for an earlier one of the same names that was given up.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });

/// The names that lists of effects change, by a number of each list.
#[derive(Debug, Default)]
pub struct UnderWay(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    lists: Mutex<(u64, BTreeMap<u64, Vec<BackingPath>>)>,
    ended: Notify,
}

/// A list of effects under way: it ends when this is dropped.
#[derive(Debug)]
pub struct Going {
    shared: Arc<Shared>,
    id: u64,
    given_up: Arc<AtomicBool>,
}

/// Held by whoever waits for it.
#[derive(Debug)]
pub struct Waiting(Arc<AtomicBool>);

impl UnderWay {
    /// Begins lists of effects that belong together, when no earlier one has anything to do with
    /// their names. ETIMEDOUT when one that was given up does not end.
    pub async fn begin(&self, lists: &[&[Effect]]) -> Result<Vec<(Going, Waiting)>, Errno> {
        let names: Vec<Vec<BackingPath>> = lists.iter().map(|l| names_of(l)).collect();
        let patient = async {
            loop {
                let ended = self.0.ended.notified();
                if let Some(begun) = self.try_begin(&names) {
                    return begun;
                }
                ended.await;
            }
        };
        tokio::time::timeout(PATIENCE, patient).await.map_err(|_late| {
            let names = names.iter().flatten().next();
            tracing::warn!(?names, "an earlier change there still hangs on the backing");
            Errno::ETIMEDOUT
        })
    }

    fn try_begin(&self, lists: &[Vec<BackingPath>]) -> Option<Vec<(Going, Waiting)>> {
        let mut guard = self.0.lists.lock();
        let (next, going) = &mut *guard;
        let meets = |path: &BackingPath| going.values().flatten().any(|other| meet(path, other));
        if !going.is_empty() && lists.iter().flatten().any(meets) {
            return None;
        }
        let begin = |names: &Vec<BackingPath>| {
            *next += 1;
            going.insert(*next, names.clone());
            let given_up = Arc::new(AtomicBool::new(false));
            let waiting = Waiting(Arc::clone(&given_up));
            (Going { shared: Arc::clone(&self.0), id: *next, given_up }, waiting)
        };
        Some(lists.iter().map(begin).collect())
    }
}

impl Going {
    /// False when nobody waits for it any more.
    pub fn is_wanted(&self) -> bool {
        !self.given_up.load(Relaxed)
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        self.shared.lists.lock().1.remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn names_of(effects: &[Effect]) -> Vec<BackingPath> {
    effects.iter().flat_map(Effect::names).flatten().cloned().collect()
}

/// True when one is the other, or below it.
fn meet(a: &BackingPath, b: &BackingPath) -> bool {
    a.names().iter().zip(b.names()).all(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::Name;

    fn path(text: &str) -> BackingPath {
        let names = text.split('/').map(|n| Name::new(n.as_bytes()).unwrap());
        names.fold(BackingPath::ROOT, |path, name| path.join(&name))
    }

    fn unlink(text: &str) -> Vec<Effect> {
        vec![Effect::Unlink { path: path(text) }]
    }

    #[tokio::test]
    async fn nothing_is_done_under_a_name_while_a_late_change_of_it_may_come() {
        let under_way = UnderWay::default();
        let mut begun = under_way.begin(&[&unlink("d/f")]).await.unwrap();
        let (late, waiting) = begun.pop().unwrap();
        assert!(late.is_wanted());
        drop(waiting);
        assert!(!late.is_wanted(), "what is left of it is not begun");
        for name in ["d/f", "d", "d/f/g"] {
            let refused = under_way.begin(&[&unlink(name)]).await;
            assert_eq!(refused.unwrap_err(), Errno::ETIMEDOUT, "{name}");
        }
        assert!(under_way.begin(&[&unlink("d/g"), &unlink("d/f2")]).await.is_ok());
        let lists = unlink("d/f");
        let lists = [&lists[..]];
        let (again, ()) = tokio::join!(under_way.begin(&lists), async { drop(late) });
        assert!(again.is_ok(), "it has ended");
    }
}
