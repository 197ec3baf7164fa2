//! A service that waits for another one to fall silent, with a copy of what that one knows.
//!
//! It takes over when the service can answer nothing any more ([`Succession`]) and has told nobody of anything as
//! lasting that is not in the copy: as long as it was in step when it heard of the service last, and the service has
//! not gone on without it since ([`ebb_meta_server::BEATS`]). Otherwise it says so, and waits.

use crate::exit::Failure;
use ebb_coordinator::{CoordinatorError, Seen, Succession, Taken, Term};
use ebb_meta_client::{Followed, follow};
use ebb_meta_server::{BEATS, Copy, JournalError};
use ebb_transport::Secure;
use ebb_transport::auth::Token;
use ebb_wire::pb;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;
use tokio::task::{block_in_place, spawn_blocking};

/// A service that is there answers within this time, and says something as often.
const SAYS_WITHIN: Duration = Duration::from_secs(3);

/// Before it is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// Between two looks at the terms.
const LOOK_LEAST: Duration = Duration::from_millis(20);
const LOOK_MOST: Duration = Duration::from_millis(250);

/// One of them.
pub struct Standby<'a> {
    /// The directory of terms.
    pub dir: &'a Path,
    /// Where its copy is.
    pub state: &'a Path,
    /// Where it will be reached.
    pub address: &'a str,
    /// The job's secret.
    pub token: Option<Token>,
    /// What must be encrypted.
    pub secure: Secure,
    /// Of its term.
    pub lease: Duration,
}

/// What it has of a service.
#[derive(Clone, Copy, Debug, Default)]
struct Knows {
    in_step: bool,
    /// The last beat that it heard of.
    beat: u64,
}

impl Knows {
    /// True when the service cannot have gone on without it.
    fn all_of(&self, heir: &Succession) -> bool {
        self.in_step && heir.beat() < self.beat + BEATS
    }
}

impl Standby<'_> {
    /// Follows one service after the other until it can take the place of one.
    pub async fn succeed(&self) -> Result<Taken, Failure> {
        let mut copy = block_in_place(|| Copy::take(self.state)).map_err(|e| match e {
            JournalError::Locked { .. } => Failure::usage(format!("--state: {e}")),
            e => Failure::failed(format!("--state: {e}")),
        })?;
        let said = Said::default();
        loop {
            match self.succeed_one(&mut copy, &said).await {
                Ok(Some(taken)) => return Ok(taken),
                Ok(None) => {}
                Err(e) => said.say(format!("--coordinator: {e}")),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Follows the service of the newest term until it takes its place, or another one has come.
    async fn succeed_one(
        &self,
        copy: &mut Copy,
        said: &Said,
    ) -> Result<Option<Taken>, CoordinatorError> {
        let dir = self.dir.to_owned();
        let Some(heir) = blocking(move || Succession::of(&dir)).await? else {
            said.say(format!("waits for the first service in {}", self.dir.display()));
            return Ok(None);
        };
        let term = heir.term().clone();
        let knows = Cell::new(Knows::default());
        let heir = tokio::select! {
            never = self.keep_following(&term, copy, &knows, said) => match never {},
            silent = self.silence_of(heir, &knows, said) => silent?,
        };
        let Some(heir) = heir else { return Ok(None) };
        said.say(format!("the service of term {} is silent: takes over", term.number));
        let (address, lease) = (self.address.to_owned(), self.lease);
        blocking(move || heir.take(&address, lease)).await
    }

    /// Follows it again and again.
    async fn keep_following(
        &self,
        term: &Term,
        copy: &mut Copy,
        knows: &Cell<Knows>,
        said: &Said,
    ) -> Infallible {
        let (at, name) = (&term.address, self.address);
        let mut failed = String::new();
        loop {
            match follow(at, name, self.token.as_ref(), self.secure, SAYS_WITHIN).await {
                Ok(followed) => {
                    said.say(format!("follows the service of term {} at {at}", term.number));
                    failed.clear();
                    knows.set(Knows::default());
                    let why = self.keep(copy, followed, knows, said).await;
                    said.say(format!("does not hear of the service any more: {why}"));
                }
                Err(e) => {
                    let why = e.to_string();
                    if why != failed {
                        said.say(why.clone());
                        failed = why;
                    }
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Keeps what the service says, until it says nothing more.
    async fn keep(
        &self,
        copy: &mut Copy,
        mut followed: Followed,
        knows: &Cell<Knows>,
        said: &Said,
    ) -> String {
        copy.begin();
        loop {
            let heard = tokio::time::timeout(SAYS_WITHIN, followed.heard.message()).await;
            let heard = match heard {
                Ok(Ok(Some(heard))) => heard,
                Ok(Ok(None)) => return "it has ended".to_owned(),
                Ok(Err(e)) => return e.message().to_owned(),
                Err(_) => return "it says nothing".to_owned(),
            };
            let before = knows.get();
            match block_in_place(|| take_in(copy, &heard)) {
                Ok(false) => {}
                Ok(true) => {
                    let has = pb::Following { has: heard.upto, ..pb::Following::default() };
                    // When nobody listens the stream ends, too.
                    let _ = followed.say.send(has).await;
                }
                Err(e) => {
                    // It has something that cannot be gone on with.
                    knows.set(Knows::default());
                    return format!("what it says cannot be kept: {e}");
                }
            }
            let in_step = before.in_step || heard.in_step;
            knows.set(Knows { in_step, beat: before.beat.max(heard.beat) });
            if in_step && !before.in_step {
                said.say("in step: takes over when that service is silent".to_owned());
            }
        }
    }

    /// Comes back when its place can be taken; none: another one has come.
    async fn silence_of(
        &self,
        mut heir: Succession,
        knows: &Cell<Knows>,
        said: &Said,
    ) -> Result<Option<Succession>, CoordinatorError> {
        let mut told = false;
        let pause = (heir.term().lease / 20).clamp(LOOK_LEAST, LOOK_MOST);
        loop {
            let (back, seen) = blocking(move || {
                let seen = heir.look();
                Ok((heir, seen))
            })
            .await?;
            heir = back;
            match seen? {
                Seen::Silent if knows.get().all_of(&heir) => return Ok(Some(heir)),
                Seen::Replaced => return Ok(None),
                Seen::Silent if !std::mem::replace(&mut told, true) => said.say(format!(
                    "the service of term {} is silent, and may have known more than this standby: begin one on its \
                     state, or with --rebuild NODES",
                    heir.term().number
                )),
                Seen::Silent => {}
                Seen::Lives => told = false,
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// True when all up to `upto` is on stable storage here.
fn take_in(copy: &mut Copy, heard: &pb::Followed) -> Result<bool, JournalError> {
    if heard.job != 0 {
        copy.snapshot_begins(heard.job);
    }
    if !heard.snapshot.is_empty() {
        copy.snapshot(&heard.snapshot)?;
    }
    if heard.snapshot_ends {
        copy.snapshot_ends()?;
    }
    copy.records(&heard.records)?;
    Ok((heard.upto > 0 || heard.snapshot_ends) && copy.sync()?)
}

/// The directory may hang; nobody waits in its place.
async fn blocking<T: Send + 'static>(
    look: impl FnOnce() -> Result<T, CoordinatorError> + Send + 'static,
) -> Result<T, CoordinatorError> {
    match spawn_blocking(look).await {
        Ok(looked) => looked,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}

/// What was said last is not said again.
#[derive(Default)]
struct Said(RefCell<String>);

impl Said {
    fn say(&self, text: String) {
        if *self.0.borrow() != text {
            println!("ebb meta: {text}");
            tracing::info!("standby: {text}");
            self.0.replace(text);
        }
    }
}
