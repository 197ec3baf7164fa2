//! Which kinds of locks were taken under which others, and what is wrong with that.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::panic::Location;
use std::sync::{LazyLock, Mutex, PoisonError};

/// What a lock holds, by the name of the type.
type Kind = &'static str;
type Place = &'static Location<'static>;

/// A lock that this thread has.
#[derive(Clone, Copy)]
struct Had {
    kind: Kind,
    lock: usize,
    place: Place,
}

/// That a lock of one kind was taken under another: where that one was taken, and where this one.
#[derive(Clone, Copy)]
struct Under {
    outer: Place,
    inner: Place,
}

/// By the outer kind, then by the inner one.
type Order = HashMap<Kind, HashMap<Kind, Under>>;

static ORDER: LazyLock<Mutex<Order>> = LazyLock::new(Mutex::default);

thread_local! {
    static HAD: RefCell<Vec<Had>> = const { RefCell::new(Vec::new()) };
    /// What this thread has noted, so that it need not look again.
    static NOTED: RefCell<HashSet<(Kind, Kind)>> = RefCell::default();
}

/// A lock that is had, as long as this lives.
pub(crate) struct Having {
    lock: usize,
}

impl Drop for Having {
    fn drop(&mut self) {
        // A guard may outlive the list when its thread ends.
        let _ = HAD.try_with(|had| {
            let mut had = had.borrow_mut();
            if let Some(at) = had.iter().rposition(|h| h.lock == self.lock) {
                had.remove(at);
            }
        });
    }
}

/// A lock is about to be waited for.
pub(crate) fn before(kind: Kind, lock: usize, place: Place) {
    let had = HAD.with_borrow(Clone::clone);
    for outer in had {
        if outer.lock == lock {
            tell(&format!("{kind} at {place} while this thread has it since {}", outer.place));
        } else if outer.kind == kind {
            tell(&format!("two of {kind}: at {place}, the other since {}", outer.place));
        } else if NOTED.with_borrow_mut(|noted| noted.insert((outer.kind, kind))) {
            let under = Under { outer: outer.place, inner: place };
            if let Some(circle) = note(outer.kind, kind, under) {
                tell(&circle);
            }
        }
    }
}

/// It is had now.
pub(crate) fn after(kind: Kind, lock: usize, place: Place) -> Having {
    HAD.with_borrow_mut(|had| had.push(Had { kind, lock, place }));
    Having { lock }
}

/// Notes one step of the order; what circle it closes.
fn note(outer: Kind, inner: Kind, under: Under) -> Option<String> {
    let mut order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
    if order.entry(outer).or_default().insert(inner, under).is_some() {
        return None;
    }
    let back = path(&order, inner, outer)?;
    let mut told = format!("a circle: {}", step(outer, inner, under));
    for (outer, inner, under) in back {
        told = format!("{told}; {}", step(outer, inner, under));
    }
    Some(told)
}

fn step(outer: Kind, inner: Kind, under: Under) -> String {
    format!("{inner} at {} under {outer} since {}", under.inner, under.outer)
}

/// The steps from one kind to another.
fn path(order: &Order, from: Kind, to: Kind) -> Option<Vec<(Kind, Kind, Under)>> {
    let mut seen = HashSet::from([from]);
    let mut ways = vec![(from, Vec::new())];
    while let Some((at, way)) = ways.pop() {
        for (&next, &under) in order.get(at).into_iter().flatten() {
            let mut way = way.clone();
            way.push((at, next, under));
            if next == to {
                return Some(way);
            }
            if seen.insert(next) {
                ways.push((next, way));
            }
        }
    }
    None
}

fn tell(what: &str) {
    static TOLD: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let file = std::env::var_os("LOCK_ORDER_FILE");
    assert!(file.is_some(), "{what}");
    let first = TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(what.to_owned());
    let Some(file) = file.filter(|_| first) else { return };
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
    let written = opened.and_then(|mut f| f.write_all(format!("{what}\n").as_bytes()));
    if let Err(e) = written {
        panic!("{}: {e}; {what}", file.display());
    }
}
