//! What the node's journal hears of names. That a name is going to be changed it hears before the service
//! does, and what the service tells along with its answers before whoever has asked: so it knows what came
//! of every change, or which ones it has to ask about.

use crate::client::{Answer, Inner, MetaClient};
use ebb_types::{Errno, Facts, Subjects};
use ebb_wire::pb::{self, request::Op};

/// Who keeps what is heard of names.
pub trait NameNotes: Send + Sync {
    /// A request that may change these is going to be sent; the number by which it is known.
    fn asking(&self, about: Subjects) -> u64;

    /// The service has answered it.
    fn answered(&self, number: u64);

    /// Nobody waits for it any more, and whether it was done is not known.
    fn unanswered(&self, number: u64);

    /// What names and inodes are now.
    fn heard(&self, facts: Facts);
}

/// A request that may change names, until it is answered.
pub(crate) struct Asking<'a> {
    notes: &'a dyn NameNotes,
    number: u64,
    answered: bool,
}

impl Asking<'_> {
    /// Nothing came of it, or all of it has been heard.
    pub fn end(mut self, answer: &Answer) {
        self.answered = match answer {
            Ok(_) => true,
            Err(e) => e.is_answer(),
        };
    }

    /// It was not sent.
    pub fn taken_back(mut self) {
        self.answered = true;
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if self.answered {
            self.notes.answered(self.number);
        } else {
            self.notes.unanswered(self.number);
        }
    }
}

impl Inner {
    pub fn hear_facts(&self, replies: &mut [pb::Reply]) {
        let Some(notes) = self.notes.get() else { return };
        for facts in replies.iter_mut().filter_map(|reply| reply.facts.take()) {
            match ebb_wire::facts_from_pb(facts) {
                Ok(facts) => notes.heard(facts),
                Err(_) => tracing::warn!("the service told something of names that cannot be"),
            }
        }
    }

    /// Notes what a request may change.
    pub fn asking(&self, op: &Op) -> Option<Asking<'_>> {
        let notes = self.notes.get()?.as_ref();
        let number = notes.asking(ebb_wire::changed_by(op)?);
        Some(Asking { notes, number, answered: false })
    }
}

impl MetaClient {
    /// Who keeps what is heard of names; only the first one does.
    pub fn keep_notes(&self, notes: Box<dyn NameNotes>) {
        let _ = self.inner.notes.set(notes);
    }

    /// Has it told how these are now. What is not there any more is told, too.
    pub async fn tell(&self, about: &Subjects) -> Result<(), Errno> {
        let names = about.names.iter().map(|(parent, name)| {
            let (parent, name) = (parent.0, name.as_bytes().to_vec());
            Op::Lookup(pb::Lookup { parent, name, lease: 0, tell: true })
        });
        let inos = about
            .inos
            .iter()
            .map(|ino| Op::GetAttr(pb::GetAttr { ino: ino.0, lease: 0, tell: true }));
        let xattrs = about.xattrs.iter().map(|(ino, name)| {
            Op::GetXattr(pb::GetXattr { ino: ino.0, name: name.to_vec(), tell: true })
        });
        for op in names.chain(inos).chain(xattrs) {
            match self.call_explained(op).await {
                Err(e) if !e.is_answer() => return Err(e.errno),
                _ => {}
            }
        }
        Ok(())
    }
}
