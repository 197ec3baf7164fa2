//! A daemon that dies after a sync that published nothing, and the one that takes its cache over:
//! what `fs-client/src/restore.rs` and `overtaken.rs` decide, in miniature. Others go on in
//! between, and the dead one's bytes can still be read: that they cannot for a while is no question of
//! right and wrong.

use super::actors::Flusher;
use super::fault::Fault;
use super::past::{BLOCK, Past, byte, has, runs};
use super::world::{Bytes, FILE, LEN, Setup, World};
use crate::claim::Claim;
use crate::ownership::Owned;
use crate::view::FileView;
use ebb_types::{ByteRange, NodeId, Version};

/// What the journal says of the bytes of a cache file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Left {
    /// Written and not published; and of these, parts of blocks past the daemon.
    written: [bool; LEN],
    guessed: [bool; LEN],
    /// Published and not flushed.
    owned: [bool; LEN],
    /// Published, perhaps flushed, and perhaps written again.
    again: [bool; LEN],
    known: Version,
}

/// What becomes of a byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Owned(Version),
    Dirty,
    Guessed,
    GiveBack,
    Gone,
}

fn marks(list: &[ByteRange]) -> [bool; LEN] {
    std::array::from_fn(|i| has(list, i))
}

impl World {
    /// Everything is looked for and noted, and then the daemon is gone.
    pub(super) fn die(&mut self, setup: &Setup<'_>, n: usize) {
        self.look(setup, n);
        let node = &mut self.nodes[n];
        node.flusher = Flusher::Idle;
        let unattached = node.view.unattached(FILE);
        let (_, guessed) = node.view.by_precision(&unattached);
        let unflushed: Vec<_> = node.view.unflushed(FILE).into_iter().map(|(r, _)| r).collect();
        let written = marks(&unattached);
        let owned = marks(&unflushed);
        let is_noted = node.past.due && setup.fault != Some(Fault::AgainNotNoted);
        let again = if is_noted { marks(&node.view.owned(FILE)) } else { [false; LEN] };
        node.past.left = Some(Left {
            written,
            guessed: marks(&guessed),
            owned: std::array::from_fn(|i| owned[i] && !written[i]),
            again,
            known: node.view.heard_version(),
        });
    }

    /// Another daemon judges what is there.
    pub(super) fn revive(&mut self, setup: &Setup<'_>, p: usize, n: usize) {
        let id = self.nodes[n].id;
        let Some(left) = self.nodes[n].past.left.take() else { return };
        let held = runs(|i| left.owned[i]);
        let renewed = self.service.grantable(id, &held).into_iter().map(|o| o.range);
        // What was flushed may be older than what was synced: published again where nobody took it.
        let again = runs(|i| left.again[i]).into_iter();
        let again = again.flat_map(|r| self.service.judge_claim(id, r, Claim::Again).0);
        let mine: Vec<_> = renewed.chain(again).collect();
        self.service.claim(id, &[], &mine);
        let fates: Vec<Fate> = (0..LEN).map(|i| self.fate(setup, n, &left, i)).collect();
        let back = runs(|i| fates[i] == Fate::GiveBack);
        let given = self.service.detach_anew(id, &back);
        debug_assert!(given.is_ok(), "only flushed bytes are given back");
        let answer = self.service.query(FILE, Version::ZERO);
        let owned: Vec<_> = fates
            .iter()
            .enumerate()
            .filter_map(|(i, f)| if let Fate::Owned(v) = f { Some((byte(i), *v)) } else { None })
            .collect();
        let dirty = runs(|i| matches!(fates[i], Fate::Dirty | Fate::Guessed));
        let mut view = FileView::restored(id, &answer, &owned, &dirty);
        view.guess(&runs(|i| fates[i] == Fate::Guessed));
        let kept = |i: usize| !matches!(fates[i], Fate::Gone | Fate::GiveBack);
        let cache: Bytes =
            std::array::from_fn(|i| if kept(i) { self.nodes[n].cache[i] } else { 0 });
        let mut past = Past { turn: Some(p), size: answer.size, ..Past::default() };
        let blocks = (0..LEN).filter(|i| kept(*i));
        blocks.for_each(|i| past.touch(i / BLOCK * BLOCK..i + 1));
        past.len = view.size().min(LEN as u64) as usize;
        past.changed = false;
        let node = &mut self.nodes[n];
        (node.view, node.cache, node.past) = (view, cache, past);
    }

    fn fate(&self, setup: &Setup<'_>, n: usize, left: &Left, i: usize) -> Fate {
        let today = self.service.owned().find(|o: &Owned| o.range.overlaps(byte(i)));
        let id = self.nodes[n].id;
        let mine = today.filter(|o| o.node == id);
        match mine {
            Some(o) if !o.flushed && (left.owned[i] || left.again[i]) => Fate::Owned(o.version),
            _ if left.written[i] => self.fate_of_written(setup, n, left, i, today),
            Some(o) if o.flushed => Fate::GiveBack,
            _ => Fate::Gone,
        }
    }

    fn fate_of_written(
        &self,
        setup: &Setup<'_>,
        n: usize,
        left: &Left,
        i: usize,
        today: Option<Owned>,
    ) -> Fate {
        let node = &self.nodes[n];
        let back = if left.guessed[i] { Fate::Guessed } else { Fate::Dirty };
        let overtaken = match today {
            Some(o) => o.node != node.id && o.version > left.known,
            None => has(&self.service.changed_after(left.known), i),
        };
        if !overtaken {
            return back;
        }
        let is_empty = left.guessed[i] && node.cache[i] == 0;
        let by_guess = has(&self.service.guessed_after(left.known), i)
            && setup.fault != Some(Fault::GuessesOvertake);
        match !is_empty && by_guess && self.shows_zero(n, i, today.map(|o| o.node)) {
            true => Fate::Dirty,
            false => Fate::Gone,
        }
    }

    /// Whether there is nothing at a byte now, as far as can be found out.
    fn shows_zero(&self, n: usize, i: usize, owner: Option<NodeId>) -> bool {
        let Some(owner) = owner else {
            return i as u64 >= self.service.base_len() || self.backing[i] == 0;
        };
        let peer = self.nodes.iter().find(|p| p.id == owner && p.id != self.nodes[n].id);
        peer.is_none_or(|p| !p.view.local(byte(i)) || p.past.left.is_some() || p.cache[i] == 0)
    }
}
