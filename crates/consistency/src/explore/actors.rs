//! The actors that work on a node without being asked: flusher, evictor, read-ahead; and the
//! drain at the end of a run.

use super::fault::Fault;
use super::world::{FILE, Setup, Step, World, Wrong, indexes};
use crate::lease::LeaseSeq;
use crate::ownership::{Detached, Owned};
use crate::view::Piece;
use ebb_types::{ByteRange, Version, split_by};

/// Steps after which a drain that goes on is called endless.
const DRAIN_STEPS: usize = 200;

/// Attach early, get a grant, copy, mark, take note.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flusher {
    Idle,
    Taken(Vec<ByteRange>),
    Attaching(Vec<ByteRange>, Version, u64, LeaseSeq),
    Attached,
    /// Chosen to be flushed, with quiet writes.
    Picked(Vec<ByteRange>),
    Granted(Vec<Owned>),
    Copied(Vec<Owned>),
    Marked(Vec<Owned>, Vec<ByteRange>),
}

impl Flusher {
    pub(super) fn is_attaching(&self) -> bool {
        matches!(self, Flusher::Taken(_) | Flusher::Attaching(..))
    }

    /// True when a grant is out that meets `range`.
    pub(super) fn holds(&self, range: ByteRange) -> bool {
        match self {
            Flusher::Granted(g) | Flusher::Copied(g) => g.iter().any(|o| o.range.overlaps(range)),
            _ => false,
        }
    }
}

/// Give flushed bytes to the backing, take note, drop.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Evictor {
    Idle,
    Detached(Vec<ByteRange>, Detached),
    Droppable,
}

/// Plan and fetch, then fill.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ahead {
    Idle,
    Fetched(Vec<(Piece, Vec<u8>)>),
}

impl World {
    /// The steps of actors that can be taken now.
    #[must_use]
    pub fn stirring(&self, setup: &Setup<'_>) -> Vec<Step> {
        let mut steps = Vec::new();
        if setup.leases && self.lending.may_tick() {
            steps.push(Step::Tick);
        }
        if setup.seat && self.may_leave(setup) {
            steps.push(Step::Leave);
        }
        for (i, node) in self.nodes.iter().enumerate() {
            let flush = match &node.flusher {
                Flusher::Idle if setup.is_seated_elsewhere(i) && self.seat_is_taken() => false,
                Flusher::Idle if setup.passes(i) => {
                    let work = node.view.unflushed_bytes() > 0 || self.shows_past(i);
                    self.left.flushes > 0 && work && self.has_turn(i)
                }
                Flusher::Idle if setup.quiet => {
                    let told = !node.view.has_unattached();
                    self.left.flushes > 0 && told && node.view.unflushed_bytes() > 0
                }
                Flusher::Picked(_) if self.must_settle(setup, i) => self.may_knock(),
                Flusher::Idle => {
                    self.left.flushes > 0 && node.view.unflushed_bytes() > 0 && !node.cutting
                }
                Flusher::Attached => !self.others_hold(i),
                Flusher::Attaching(_, _, _, upto) => !self.is_owed(setup, *upto),
                _ => true,
            };
            let evict = match &node.evictor {
                Evictor::Idle => {
                    let answered = !self.must_settle(setup, i) || self.may_knock();
                    self.left.evictions > 0 && node.view.clean_bytes() > 0 && answered
                }
                _ => true,
            };
            let evict = evict && !setup.passes(i);
            let ahead = match &node.ahead {
                Ahead::Idle => {
                    self.left.aheads > 0 && !setup.passes(i) && !node.view.local(self.content())
                }
                _ => true,
            };
            let steps_of =
                [(flush, Step::Flush(i)), (evict, Step::Evict(i)), (ahead, Step::Ahead(i))];
            steps.extend(steps_of.into_iter().filter(|(can, _)| *can).map(|(_, s)| s));
            if setup.quiet && self.may_tell(setup, i) {
                steps.push(Step::Tell(i));
            }
            if self.lending.has_mail(i) {
                steps.push(Step::Mail(i));
            }
        }
        steps
    }

    fn content(&self) -> ByteRange {
        ByteRange::new(0, self.service.size())
    }

    /// No two flushes of the same bytes: the service lets the second one wait.
    fn others_hold(&self, n: usize) -> bool {
        let mine = self.nodes[n].view.unflushed(FILE);
        let others = self.nodes.iter().enumerate().filter(|(i, _)| *i != n);
        others.into_iter().any(|(_, o)| mine.iter().any(|(r, _)| o.flusher.holds(*r)))
    }

    /// Takes a step, of whomever.
    pub fn step(&mut self, setup: &Setup<'_>, step: Step) -> Result<(), Wrong> {
        match step {
            Step::Process(p) => return self.go(setup, p),
            Step::Flush(n) => self.flush(setup, n),
            Step::Evict(n) => self.evict(setup, n),
            Step::Ahead(n) => self.read_ahead(setup, n),
            Step::Tell(n) => self.tell(setup, n),
            Step::Leave => self.leave_seat(setup),
            Step::Mail(n) => self.open_mail(setup, n),
            Step::Tick => self.lending.tick(),
        }
        Ok(())
    }

    fn flush(&mut self, setup: &Setup<'_>, n: usize) {
        let now = std::mem::replace(&mut self.nodes[n].flusher, Flusher::Idle);
        self.nodes[n].flusher = match now {
            Flusher::Idle if setup.quiet => {
                self.left.flushes -= 1;
                Flusher::Attached
            }
            Flusher::Attached if setup.quiet => {
                let ranges = self.unflushed(n);
                self.note_flushing(setup, n, &ranges, &[]);
                Flusher::Picked(ranges)
            }
            Flusher::Picked(ranges) if self.must_settle(setup, n) => {
                self.knock(setup);
                Flusher::Picked(ranges)
            }
            Flusher::Picked(ranges) => {
                let next = self.begin(setup, n, ranges.clone());
                let granted: Vec<_> = match &next {
                    Flusher::Granted(granted) => granted.iter().map(|g| g.range).collect(),
                    _ => Vec::new(),
                };
                self.note_flushing(setup, n, &granted, &ranges);
                next
            }
            Flusher::Idle => {
                self.left.flushes -= 1;
                if setup.passes(n) {
                    self.publish_past(setup, n);
                    self.nodes[n].flusher = Flusher::Attached;
                    return;
                }
                if self.sits {
                    let ranges = self.nodes[n].view.take_unattached(FILE);
                    let bytes = self.nodes[n].cache;
                    self.store_at_seat(setup, &ranges, &bytes);
                    self.gone_to_seat(setup, n, &ranges);
                    self.nodes[n].flusher = Flusher::Attached;
                    return;
                }
                match self.nodes[n].view.take_unattached(FILE) {
                    ranges if ranges.is_empty() => Flusher::Attached,
                    ranges => Flusher::Taken(ranges),
                }
            }
            Flusher::Taken(ranges) => {
                let (version, size) = self.serve_attach(setup, n, &ranges);
                Flusher::Attaching(ranges, version, size, self.lending.upto())
            }
            Flusher::Attaching(ranges, version, size, _) => {
                self.end_attach(setup, n, &ranges, version, size);
                Flusher::Attached
            }
            Flusher::Attached => self.begin(setup, n, self.unflushed(n)),
            Flusher::Granted(granted) => {
                for i in granted.iter().flat_map(|g| indexes(g.range)) {
                    self.backing[i] = self.nodes[n].cache[i];
                }
                Flusher::Copied(granted)
            }
            Flusher::Copied(mut granted) => {
                let id = self.nodes[n].id;
                if setup.fault == Some(Fault::MarkWithoutGrant) {
                    let ranges: Vec<_> = granted.iter().map(|g| g.range).collect();
                    granted = self.service.grantable(id, &ranges);
                }
                self.service.mark_flushed(id, &granted);
                let newer = match setup.fault {
                    Some(Fault::NewerCountsAsFlushed) => Vec::new(),
                    _ => self.service.newer_than_granted(id, &granted),
                };
                Flusher::Marked(granted, newer)
            }
            Flusher::Marked(granted, newer) => {
                let ranges: Vec<_> = granted.iter().map(|g| g.range).collect();
                self.note_flushing(setup, n, &[], &ranges);
                let marked = |g: &Owned| {
                    let version = g.version;
                    split_by(&[g.range], &newer).0.into_iter().map(move |r| (r, version))
                };
                let list: Vec<_> = granted.iter().flat_map(marked).collect();
                self.nodes[n].view.flushed(&list);
                Flusher::Idle
            }
        };
    }

    /// Asks for a grant. What is not granted was taken by others: the node learns of it.
    fn begin(&mut self, setup: &Setup<'_>, n: usize, ranges: Vec<ByteRange>) -> Flusher {
        let node = self.nodes[n].id;
        if setup.fault == Some(Fault::FlushWithoutGrant) {
            let wanted = self.nodes[n].view.unflushed(FILE);
            let own = |(range, version)| Owned { range, node, version, flushed: false };
            return Flusher::Granted(wanted.into_iter().map(own).collect());
        }
        let granted = self.service.grantable(node, &ranges);
        let bytes =
            |list: &mut dyn Iterator<Item = ByteRange>| list.map(ByteRange::len).sum::<u64>();
        if bytes(&mut granted.iter().map(|g| g.range)) < bytes(&mut ranges.iter().copied()) {
            if setup.passes(n) || setup.quiet {
                self.learn_anew(setup, n);
                if setup.passes(n) {
                    self.bring_all(setup, n);
                }
            } else {
                let answer = self.serve_query(setup, n, FILE, false);
                self.learn(setup, n, &answer);
            }
        }
        if granted.is_empty() { Flusher::Idle } else { Flusher::Granted(granted) }
    }

    fn unflushed(&self, n: usize) -> Vec<ByteRange> {
        self.nodes[n].view.unflushed(FILE).into_iter().map(|(r, _)| r).collect()
    }

    /// These bytes are flushed from now on, and those not any more.
    fn note_flushing(
        &mut self,
        setup: &Setup<'_>,
        n: usize,
        begun: &[ByteRange],
        ended: &[ByteRange],
    ) {
        if setup.fault != Some(Fault::QuietBesideFlush) {
            let writes = &mut self.nodes[n].quietly.writes;
            writes.begin_flush(begun);
            writes.end_flush(ended);
        }
    }

    fn evict(&mut self, setup: &Setup<'_>, n: usize) {
        if matches!(self.nodes[n].evictor, Evictor::Idle) && self.must_settle(setup, n) {
            return self.knock(setup);
        }
        let id = self.nodes[n].id;
        let now = std::mem::replace(&mut self.nodes[n].evictor, Evictor::Idle);
        self.nodes[n].evictor = match now {
            Evictor::Idle => {
                self.left.evictions -= 1;
                let ranges = self.nodes[n].view.detachable(FILE);
                match self.service.detach(id, &ranges) {
                    Ok(answer) => Evictor::Detached(ranges, answer),
                    Err(_) => Evictor::Idle,
                }
            }
            Evictor::Detached(ranges, answer) => {
                self.nodes[n].view.detached(&ranges, answer);
                Evictor::Droppable
            }
            Evictor::Droppable => {
                let dropped = self.nodes[n].view.drop_clean(FILE);
                self.scramble(n, &dropped);
                Evictor::Idle
            }
        };
    }

    fn read_ahead(&mut self, setup: &Setup<'_>, n: usize) {
        let now = std::mem::replace(&mut self.nodes[n].ahead, Ahead::Idle);
        self.nodes[n].ahead = match now {
            Ahead::Idle => {
                self.left.aheads -= 1;
                let plan = self.nodes[n].view.plan_read(FILE);
                let fetch = |piece: Piece| Some((piece, self.bytes_of(n, &piece)?));
                Ahead::Fetched(plan.into_iter().filter_map(fetch).collect())
            }
            Ahead::Fetched(list) => {
                let (plan, data): (Vec<_>, Vec<_>) = list.into_iter().unzip();
                self.fill(setup, n, &plan, &data);
                Ahead::Idle
            }
        };
    }

    /// After the end of all processes: every node flushes what it has, and then the backing has
    /// the file.
    pub fn drain(mut self, setup: &Setup<'_>) -> Result<(), Wrong> {
        self.end_of_quiet();
        for _ in 0..DRAIN_STEPS {
            if setup.past {
                self.publish_last(setup);
            }
            self.left.flushes = u8::MAX;
            // A flush that waits for leases goes on when they have come back.
            let steps = self.stirring(setup);
            let first = |is: fn(&Step) -> bool| steps.iter().copied().find(is);
            let step = first(|s| matches!(s, Step::Tell(_)))
                .or_else(|| first(|s| matches!(s, Step::Flush(_))))
                .or_else(|| first(|s| matches!(s, Step::Mail(_))));
            let Some(step) = step else { break };
            self.step(setup, step)?;
        }
        if !self.service.is_clean() || self.nodes.iter().any(|n| n.view.unflushed_bytes() > 0) {
            return Err(Wrong::NotDrained);
        }
        if self.backing != *self.memory() {
            let (got, expected) = (self.backing.to_vec(), self.memory().to_vec());
            return Err(Wrong::Drained { got, expected });
        }
        Ok(())
    }
}
