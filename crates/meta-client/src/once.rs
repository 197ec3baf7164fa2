//! Requests that an application's call stands behind: when the daemon that served the call dies
//! and the next one is asked again, what must not be done twice goes out under the same id, and
//! the service knows its answer.

use ebb_wire::pb::request::Op;
use std::cell::Cell;
use std::future::Future;

/// Ids made from calls are above all that are counted.
const MADE: u64 = 1 << 62;
/// Calls have numbers below this.
const CALL_MAX: u64 = 1 << 58;

/// A call of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its number, the same when it is asked again, and never that of another call.
    pub number: u64,
    /// A daemon that is no more has been asked it before.
    pub again: bool,
}

struct Scope {
    caller: Caller,
    /// Kinds of requests of which one was done for it, or may have been.
    used: Cell<u8>,
}

tokio::task_local! {
    static SCOPE: Scope;
}

/// Runs `work` for a call.
pub fn on_behalf_of<F: Future>(caller: Caller, work: F) -> impl Future<Output = F::Output> {
    SCOPE.scope(Scope { caller, used: Cell::new(0) }, work)
}

/// The same for work that does not wait.
pub fn on_behalf_of_now<T>(caller: Caller, work: impl FnOnce() -> T) -> T {
    SCOPE.sync_scope(Scope { caller, used: Cell::new(0) }, work)
}

/// The call for which the current task works.
#[must_use]
pub fn caller() -> Option<Caller> {
    SCOPE.try_with(|s| s.caller).ok()
}

/// The id of a request that must not be done twice; none when it can be, when no call stands
/// behind it, or when such a request of the call was done, or may have been.
pub(crate) fn id(op: &Op) -> Option<u64> {
    let kind = kind(op)?;
    let id = |scope: &Scope| {
        let used = scope.used.get();
        let number = scope.caller.number;
        if used & (1 << kind) != 0 || number >= CALL_MAX {
            return None;
        }
        scope.used.set(used | (1 << kind));
        Some(MADE | (number << 3) | kind)
    };
    SCOPE.try_with(id).ok().flatten()
}

/// Nothing came of a request of this kind: the call sends the next one under the same id. With another
/// one the next daemon, which begins with the first, would do once more what the second has done.
pub(crate) fn not_done(kind: u64) {
    let free = |scope: &Scope| scope.used.set(scope.used.get() & !(1 << kind));
    // Without a call nothing is to be freed.
    let _ = SCOPE.try_with(free);
}

/// What [`not_done`] is to be told of a request.
pub(crate) fn kind(op: &Op) -> Option<u64> {
    match op {
        Op::Make(_) => Some(0),
        Op::Unlink(_) => Some(1),
        Op::Rename(_) => Some(2),
        Op::Link(_) => Some(3),
        Op::Append(_) => Some(4),
        Op::SetXattr(x) if x.flags != 0 => Some(5),
        Op::RemoveXattr(_) => Some(6),
        Op::Leave(l) if l.asks => Some(7),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_wire::pb;

    #[tokio::test]
    async fn a_call_that_is_asked_again_sends_the_same_ids_and_each_only_once() {
        let unlink = Op::Unlink(pb::Unlink::default());
        let make = Op::Make(pb::Make::default());
        let query = Op::Query(pb::Query::default());
        assert_eq!((id(&make), caller()), (None, None), "nobody asked");
        let ids = async || [id(&make), id(&unlink), id(&make), id(&query)];
        let first = Caller { number: 12, again: false };
        let [a, b, twice, free] = on_behalf_of(first, ids()).await;
        assert!(a.is_some() && b.is_some() && a != b);
        assert_eq!((twice, free), (None, None));
        let again = on_behalf_of(Caller { again: true, ..first }, ids()).await;
        assert_eq!(again, [a, b, None, None]);
        let other = on_behalf_of(Caller { number: 14, again: false }, ids()).await;
        assert!(other[0] != a && other[0] != b && other[1] != a);
        // The first append was refused, the second one made, and the daemon is killed.
        let append = Op::Append(pb::Append::default());
        let refused_first = async || {
            let refused = id(&append);
            not_done(kind(&append).unwrap());
            [refused, id(&append), id(&append)]
        };
        let tries = on_behalf_of(first, refused_first()).await;
        assert_eq!((tries[0], tries[2]), (tries[1], None));
        let next = on_behalf_of(Caller { again: true, ..first }, async { id(&append) }).await;
        assert_eq!(next, tries[1], "the next daemon asks for what was made");
        let strange = Caller { number: u64::MAX, again: false };
        assert_eq!(on_behalf_of(strange, ids()).await[0], None);
    }
}
