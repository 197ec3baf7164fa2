//! What the service tells along with its answers for the node's journal. It is handed on before the
//! answer is: whoever has the answer can rely on the journal.

use crate::client::{Inner, MetaClient};
use ebb_types::Facts;
use ebb_wire::pb;

/// Hears what names and inodes are now.
pub type OnFacts = Box<dyn Fn(Facts) + Send + Sync>;

impl Inner {
    pub fn hear_facts(&self, replies: &mut [pb::Reply]) {
        let Some(on_facts) = self.on_facts.get() else { return };
        for facts in replies.iter_mut().filter_map(|reply| reply.facts.take()) {
            match ebb_wire::facts_from_pb(facts) {
                Ok(facts) => on_facts(facts),
                Err(_) => tracing::warn!("the service told something of names that cannot be"),
            }
        }
    }
}

impl MetaClient {
    /// Whom to tell; only the first one is told.
    pub fn on_facts(&self, on_facts: OnFacts) {
        let _ = self.inner.on_facts.set(on_facts);
    }
}
