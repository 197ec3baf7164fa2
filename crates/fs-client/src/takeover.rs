//! The part of a daemon's start that is about its predecessor: joining under its name, putting its
//! files together again, and beginning a journal of its own.

use crate::daemon::{RunError, local};
use crate::leftover::{self, Leftover};
use crate::node::Node;
use crate::ops::reopen;
use crate::restore;
use ebb_handover::{Heirloom, Inheritance};
use ebb_meta_client::{ConnectError, ConnectOptions, MetaClient};
use ebb_node_journal::{Image, Journal};
use ebb_transport::auth;
use ebb_types::{Errno, Ino};
use ebb_wire::pb::Welcome;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the service may believe that a dead daemon is alive: a lease, and some.
pub(crate) const JOIN_WITHIN: Duration = Duration::from_secs(15);

/// A service that hangs up on a node that comes is tried again for so long: when all nodes of a job come
/// at once, it may have to. Where nobody is there that is said at once: it may be a mistake.
const STORM: Duration = Duration::from_secs(5);

/// The first pause before it is tried again, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// Joins the job. Whatever is in the cache, the service may believe for a while that an earlier
/// daemon of this name is alive: the end of its connection may be lost with a broken link.
pub(crate) async fn join(
    options: ConnectOptions,
    patience: Duration,
) -> Result<(MetaClient, Welcome), RunError> {
    let began = Instant::now();
    let [mut pause, longest] = PAUSES;
    loop {
        match MetaClient::connect(options.clone()).await {
            Err(cause) if may_pass(&cause, began.elapsed(), patience) => {
                tracing::info!(error = %cause, "joining again in a moment");
                // Up to twice as long, so that not all come again at once.
                let more = pause.mul_f64(f64::from(auth::nonce()[0]) / 255.0);
                tokio::time::sleep(pause + more).await;
                pause = (pause * 2).min(longest);
            }
            Err(cause) => return Err(RunError::Meta(cause)),
            Ok(joined) => return Ok(joined),
        }
    }
}

fn may_pass(cause: &ConnectError, waited: Duration, patience: Duration) -> bool {
    match cause {
        ConnectError::NameTaken(_) => waited < JOIN_WITHIN,
        ConnectError::HungUp(_) => waited < patience.max(STORM),
        // Whatever else is there will not have gone in a moment.
        ConnectError::Stranger(_) => false,
        cause => cause.may_pass() && waited < patience,
    }
}

/// What an earlier daemon left in the cache is this node's again; from here on it is noted.
pub(crate) fn take_over(
    runtime: &tokio::runtime::Runtime,
    node: &Arc<Node>,
    left: &mut Leftover,
    welcome: &Welcome,
    inherited: Option<&Inheritance>,
) -> Result<(), RunError> {
    let cache = &node.config.cache;
    restore::part_from_writers(&node.cache, left, inherited.is_some())
        .map_err(local("cannot part the cache from programs of before"))?;
    let left = &*left;
    let mut image = Image::default();
    let open: Option<HashSet<Ino>> = inherited.map(|i| i.opened.iter().map(|o| o.ino).collect());
    let failed = local("cannot tell the service what an earlier daemon knew");
    let reassert = async {
        loop {
            let to = node.meta.listener();
            if let Some(found) = left.found().filter(|_| left.is_of_job(welcome.job)) {
                node.reassert_noted(found).await?;
            }
            if !welcome.reassert {
                return Ok(());
            }
            // Of what is locked through handles that go on nothing is known here.
            match node.meta.reasserted(to, None, None).await {
                // The service has begun again meanwhile.
                Err(Errno::ESTALE) if node.meta.listener() != to => {}
                told => return told.map(drop),
            }
        }
    };
    runtime.block_on(reassert).map_err(|e: Errno| failed(e.into()))?;
    if let Some(found) = left.found() {
        let restored = runtime
            .block_on(restore::take_over(node, found, left.is_of_job(welcome.job), open.as_ref()))
            .map_err(|e| local("cannot take the cache over")(e.into()))?;
        let names = !left.is_of_job(welcome.job) && !left.names().is_empty();
        if !restored.unknown.is_empty() || names {
            return Err(RunError::Config(leftover::orphaned_text(&node.config, found)));
        }
        tracing::info!(
            files = restored.files,
            bytes = restored.bytes,
            untold = restored.untold,
            lost = restored.lost.len(),
            aside = restored.aside.len(),
            "took over what an earlier daemon left"
        );
        image = restored.image;
        if left.is_of_job(welcome.job) {
            image.book = found.image.book.clone();
            image.lives = found.image.lives.clone();
            image.asked = found.image.asked.clone();
        }
    }
    if let Some(inherited) = inherited {
        let _ = node.placed.set(reopen::certain(inherited, &image));
    }
    image.life = Some(leftover::life(&node.config, welcome));
    image.lives.begin(welcome.life, welcome.lives);
    node.cache.sync_dirs().map_err(local("cache directory"))?;
    let journal = Journal::start(cache, image).map_err(|e| RunError::Config(e.to_string()))?;
    if let Some(heir) = node.heir.get() {
        // What is in the old ring is in the journal that has just been made.
        journal.mirror(heir.ring());
    }
    let journal = Arc::new(journal);
    let _ = node.journal.set(Arc::clone(&journal));
    if let Err(error) = runtime.block_on(node.ask_doubts(&journal)) {
        tracing::warn!(%error, "it is asked again what came of changes of names");
    }
    runtime.spawn(Node::keep_notes(Arc::downgrade(node)));
    runtime.spawn(Node::keep_places(Arc::downgrade(node)));
    Ok(())
}

/// The kernel's handles of a dead daemon work again.
pub(crate) fn go_on(
    runtime: &tokio::runtime::Runtime,
    node: &Arc<Node>,
    heir: &Heirloom,
    inherited: &Inheritance,
) -> Result<(), RunError> {
    let handles = runtime
        .block_on(node.reopen(&inherited.opened))
        .map_err(|e| local("cannot go on with the open files")(e.into()))?;
    if node.meta.was_given_up() {
        node.given_up();
    }
    tracing::warn!(
        handles,
        restarts = heir.restarts,
        reason = heir.reason,
        "goes on for a daemon that ended"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use tokio::net::TcpListener;

    /// A new mount that finds nobody, or somebody who hangs up; how long it took and how often it came.
    async fn joined(hangs_up: bool) -> (Duration, u32, RunError) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let came = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&came);
        if hangs_up {
            tokio::spawn(async move {
                while listener.accept().await.is_ok() {
                    counted.fetch_add(1, Relaxed);
                }
            });
        } else {
            drop(listener);
        }
        let began = Instant::now();
        let options = ConnectOptions::new(address.clone(), "a");
        let Err(error) = join(options, Duration::ZERO).await else { panic!("joined {address}") };
        assert!(error.to_string().contains(&address), "{error}");
        (began.elapsed(), came.load(Relaxed), error)
    }

    #[tokio::test]
    async fn a_new_mount_comes_again_where_it_is_hung_up_on_and_not_where_nobody_is() {
        let (took, came, error) = joined(true).await;
        assert!(took >= STORM && took < STORM * 2 && came >= 3, "{took:?} {came} {error}");
        let (took, _, error) = joined(false).await;
        assert!(took < Duration::from_secs(1), "{took:?} {error}");
    }
}
