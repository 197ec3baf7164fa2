//! A service that waits for another one to fall silent, with a copy of what that one knows.
//!
//! It takes over when the service can answer nothing any more ([`Succession`]) and has told nobody of anything as
//! lasting that is not in the copy: as long as it was in step when it heard of the service last, and the service has
//! not gone on without it since ([`ebb_meta_server::BEATS`]). Otherwise it says so, and waits.

use crate::exit::Failure;
use ebb_coordinator::{CoordinatorError, Seen, Succession, Taken, Term};
use ebb_meta_client::{Followed, follow};
use ebb_meta_server::{BEATS, Copy, Fits, JournalError};
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
const AGAIN_MOST: Duration = Duration::from_secs(30);

/// Between two looks at the terms.
const LOOK_LEAST: Duration = Duration::from_millis(20);
const LOOK_MOST: Duration = Duration::from_millis(250);

/// One of them.
pub struct Standby<'a> {
    wish: Wish<'a>,
    copy: Copy,
    said: Said,
}

/// What it is to be.
pub struct Wish<'a> {
    /// The directory of terms.
    pub dir: &'a Path,
    /// Where its copy is.
    pub state: &'a Path,
    /// What it will be told when it begins.
    pub fits: Fits,
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
        self.in_step && heir.beat() < self.most()
    }

    /// When it has beaten so often it has gone on.
    fn most(&self) -> u64 {
        self.beat.saturating_add(BEATS)
    }
}

/// A service whose place can be taken, and how often it may have beaten.
pub struct Ready(Succession, u64);

impl<'a> Standby<'a> {
    /// With its copy in `state`.
    pub fn new(wish: Wish<'a>) -> Result<Standby<'a>, Failure> {
        let fits = Some(wish.fits.clone());
        let copy = block_in_place(|| Copy::take(wish.state, fits)).map_err(|e| match e {
            JournalError::Locked { .. } => Failure::usage(format!("--state: {e}")),
            e => Failure::failed(format!("--state: {e}")),
        })?;
        Ok(Standby { wish, copy, said: Said::default() })
    }

    /// Follows one service after the other until it can take the place of one. Can be given up at any point.
    pub async fn ready(&mut self) -> Result<Ready, Failure> {
        loop {
            let dir = self.wish.dir.to_owned();
            match blocking(move || Succession::of(&dir)).await {
                Ok(Some(heir)) => {
                    if heir.end_if_mine() {
                        let why = "a term was taken and cannot be used (see what was said before)";
                        return Err(Failure::failed(format!("--coordinator: {why}")));
                    }
                    if let Some(ready) = self.wish.silence(heir, &mut self.copy, &self.said).await {
                        return Ok(ready);
                    }
                }
                Ok(None) => {
                    let dir = self.wish.dir.display();
                    self.said.say(format!("waits for the first service in {dir}"));
                }
                Err(e) => self.said.say(format!("--coordinator: {e}")),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Takes its place, unless it lives after all, or another one has taken it.
    pub async fn take(&self, Ready(heir, most): Ready) -> Option<Taken> {
        let number = heir.term().number;
        self.said.say(format!("the service of term {number} is silent: takes over"));
        let (address, lease) = (self.wish.address.to_owned(), self.wish.lease);
        let taken = blocking(move || heir.take(&address, lease, most)).await;
        taken.unwrap_or_else(|e| {
            self.said.say(format!("--coordinator: {e}"));
            None
        })
    }
}

impl Wish<'_> {
    /// Follows a service until its place can be taken; none: another one has come.
    async fn silence(&self, heir: Succession, copy: &mut Copy, said: &Said) -> Option<Ready> {
        let term = heir.term().clone();
        let knows = Cell::new(Knows::default());
        let heir = tokio::select! {
            never = self.keep_following(&term, copy, &knows, said) => match never {},
            silent = self.silence_of(heir, &knows, said) => silent,
        };
        heir.map(|heir| Ready(heir, knows.get().most()))
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
        let (mut failed, mut pause) = (String::new(), AGAIN);
        loop {
            match follow((at, term.number), name, self.token.as_ref(), self.secure, SAYS_WITHIN)
                .await
            {
                Ok(followed) => {
                    said.say(format!("follows the service of term {} at {at}", term.number));
                    failed.clear();
                    knows.set(Knows::default());
                    match self.keep(copy, followed, knows, said).await {
                        Ok(why) => {
                            said.say(format!("does not hear of the service any more: {why}"));
                            pause = AGAIN;
                        }
                        Err(e) => {
                            said.say(format!("what the service says cannot be kept: {e}"));
                            // Each time costs the service a snapshot.
                            pause = (pause * 2).min(AGAIN_MOST);
                        }
                    }
                }
                Err(e) => {
                    let why = e.to_string();
                    if why != failed {
                        said.say(why.clone());
                        failed = why;
                    }
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Keeps what the service says, until it says nothing more, and why that is so.
    async fn keep(
        &self,
        copy: &mut Copy,
        mut followed: Followed,
        knows: &Cell<Knows>,
        said: &Said,
    ) -> Result<String, JournalError> {
        copy.begin();
        loop {
            let heard = tokio::time::timeout(SAYS_WITHIN, followed.heard.message()).await;
            let heard = match heard {
                Ok(Ok(Some(heard))) => heard,
                Ok(Ok(None)) => return Ok("it has ended".to_owned()),
                Ok(Err(e)) => return Ok(e.message().to_owned()),
                Err(_) => return Ok("it says nothing".to_owned()),
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
                    return Err(e);
                }
            }
            let in_step = before.in_step || heard.in_step;
            // After its last word it says nothing to anybody.
            let beat = if heard.last { u64::MAX } else { heard.beat };
            knows.set(Knows { in_step, beat: before.beat.max(beat) });
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
    ) -> Option<Succession> {
        let mut told = false;
        let pause = (heir.term().lease / 20).clamp(LOOK_LEAST, LOOK_MOST);
        loop {
            let looks = spawn_blocking(move || {
                let seen = heir.look();
                (heir, seen)
            });
            let seen;
            (heir, seen) = looked(looks.await);
            match seen {
                Err(e) => said.say(format!("--coordinator: {e}")),
                Ok(Seen::Silent) if knows.get().all_of(&heir) => return Some(heir),
                Ok(Seen::Replaced) => return None,
                Ok(Seen::Silent) if !std::mem::replace(&mut told, true) => said.say(format!(
                    "the service of term {} is silent, and may have known more than this standby: begin one on its \
                     state, or with --rebuild NODES",
                    heir.term().number
                )),
                Ok(Seen::Silent) => {}
                Ok(Seen::Lives) => told = false,
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
    looked(spawn_blocking(look).await)
}

fn looked<T>(done: Result<T, tokio::task::JoinError>) -> T {
    done.unwrap_or_else(|e| std::panic::resume_unwind(e.into_panic()))
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
