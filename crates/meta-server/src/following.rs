//! Standbys: each keeps a copy of the journal elsewhere, and takes over when this service is silent.
//!
//! ```text
//!   (comes) -> copying -> catching up -> in step -> (ends) -> counted on for some more beats -> gone
//! ```
//!
//! Consistency: nothing counts as on stable storage, for nodes and for whoever waits for it, that a standby which is
//! in step has not. A standby whose stream has ended can see by the beats in the directory of terms whether this
//! service has gone on ([`BEATS`]): then it is not counted on any more, and must not take over.
//! Retries: a standby that comes again gets a new snapshot.
//! Completion: one that says nothing for [`PATIENCE`] is not waited for; while it takes in a snapshot, for as long as
//! that may take ([`TAKES_IN`]).

use crate::core::Core;
use crate::journal::{Keeper, Tap};
use crate::state;
use ebb_locks::Mutex;
use ebb_wire::pb;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};

/// So many of them at a time.
const STANDBYS_MAX: usize = 4;

/// Longest name of one.
const NAME_MAX: usize = 300;

/// A piece of a snapshot, or of records.
const PIECE_BYTES: usize = 1 << 20;

/// One that has something to say, and does not, is not waited for any longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// So many bytes of a snapshot it takes in at least in a second.
const TAKES_IN: u64 = 10 << 20;

/// So long a service that ends waits for them.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A standby that has heard of a beat, and sees one so much later, knows that this service has gone on without it.
pub const BEATS: u64 = 4;

/// A copy that is so much longer than a snapshot is begun anew.
const GROWS: u64 = 64 << 20;

/// The standbys that are there.
#[derive(Debug)]
pub struct Standbys {
    all: Mutex<Vec<Arc<Standby>>>,
    /// This service ends: what there is they get, and no more.
    ends: watch::Sender<bool>,
}

impl Default for Standbys {
    fn default() -> Standbys {
        Standbys { all: Mutex::default(), ends: watch::Sender::new(false) }
    }
}

/// What is known of one.
#[derive(Debug)]
struct Standby {
    name: String,
    /// What it has; 0: it is not in step.
    has: AtomicU64,
}

impl Standbys {
    fn add(&self, name: String) -> Result<Arc<Standby>, Status> {
        let mut all = self.all.lock();
        if all.len() >= STANDBYS_MAX {
            return Err(Status::resource_exhausted(format!(
                "{STANDBYS_MAX} standbys follow this service already"
            )));
        }
        let standby = Arc::new(Standby { name, has: AtomicU64::new(0) });
        all.push(Arc::clone(&standby));
        Ok(standby)
    }

    /// They get what there is, and their streams end.
    pub fn end(&self) {
        self.ends.send_replace(true);
    }

    fn remove(&self, standby: &Arc<Standby>) {
        self.all.lock().retain(|other| !Arc::ptr_eq(other, standby));
    }

    /// For people.
    pub fn list(&self, tail: u64) -> Vec<pb::Standby> {
        let one = |standby: &Arc<Standby>| {
            let has = standby.has.load(Relaxed);
            let behind = tail.saturating_sub(has);
            pb::Standby { name: standby.name.clone(), in_step: has > 0, behind }
        };
        self.all.lock().iter().map(one).collect()
    }
}

/// One standby, as long as its stream lasts.
struct Follower {
    core: Arc<Core>,
    standby: Arc<Standby>,
    beats: watch::Receiver<u64>,
    out: mpsc::Sender<Result<pb::Followed, Status>>,
    tap: Arc<Tap>,
    /// Pieces of a snapshot that is on its way.
    coming: Option<mpsc::Receiver<Vec<u8>>>,
    snapshot_bytes: u64,
    records_bytes: u64,
    /// Up to where it was sent everything.
    sent: u64,
    has: u64,
    /// It has said something that was asked for, or nothing is; and may then be silent for so long.
    heard: Instant,
    patience: Duration,
    /// What must be there before it is in step; none: nothing is counted on yet.
    counted: Option<(Keeper, u64)>,
    in_step: bool,
}

/// Serves a standby until one of both ends.
pub async fn serve(
    core: Arc<Core>,
    mut heard: Streaming<pb::Following>,
    out: mpsc::Sender<Result<pb::Followed, Status>>,
) {
    let refused = |why: Status| async {
        // Whoever does not listen is not told.
        let _ = out.send(Err(why)).await;
    };
    let Some(beats) = core.tenure.beats() else {
        let why = "without --coordinator nobody can take the place of this service";
        return refused(Status::failed_precondition(why)).await;
    };
    if core.job() == 0 {
        return refused(Status::unavailable("the service is being rebuilt")).await;
    }
    let first = tokio::time::timeout(PATIENCE, heard.message()).await;
    let Ok(Ok(Some(pb::Following { name, term, .. }))) = first else { return };
    if name.is_empty() || name.len() > NAME_MAX {
        return refused(Status::invalid_argument("a standby needs a name")).await;
    }
    if term != core.tenure.number() {
        let why = format!("this is the service of term {}", core.tenure.number());
        return refused(Status::failed_precondition(why)).await;
    }
    let standby = match core.standbys.add(name) {
        Ok(standby) => standby,
        Err(why) => return refused(why).await,
    };
    tracing::info!(name = standby.name, "a standby begins to follow");
    let mut follower = Follower {
        tap: core.journal.follow(),
        sent: 0,
        core: Arc::clone(&core),
        standby: Arc::clone(&standby),
        beats,
        out,
        coming: None,
        snapshot_bytes: 0,
        records_bytes: 0,
        has: 0,
        heard: Instant::now(),
        patience: PATIENCE,
        counted: None,
        in_step: false,
    };
    let why = follower.run(&mut heard).await.err().unwrap_or("it has ended");
    tracing::warn!(name = standby.name, why, "a standby does not follow any more");
    standby.has.store(0, Relaxed);
    follower.part().await;
    core.standbys.remove(&standby);
}

type Step = Result<(), &'static str>;

impl Follower {
    async fn run(&mut self, heard: &mut Streaming<pb::Following>) -> Step {
        self.begin_snapshot().await?;
        let core = Arc::clone(&self.core);
        let mut ends = core.standbys.ends.subscribe();
        let mut until = None;
        loop {
            if until.is_some() && self.in_step && self.has >= core.journal.tail() {
                return self.say_the_last().await;
            }
            let tap = Arc::clone(&self.tap);
            tokio::select! {
                () = set(&mut ends), if until.is_none() => {
                    until = Some(tokio::time::Instant::now() + LAST_WORDS);
                }
                () = sleep_until(until), if until.is_some() => return Err("this service ends"),
                said = heard.message() => match said {
                    Ok(Some(said)) => self.hear(said.has).await?,
                    Ok(None) => return Ok(()),
                    Err(_) => return Err("the connection is broken"),
                },
                piece = next_piece(&mut self.coming) => self.send_snapshot(piece).await?,
                () = tap.some() => self.send_records().await?,
                beat = next(&mut self.beats) => self.tell_beat(beat).await?,
            }
        }
    }

    async fn send(&self, what: pb::Followed) -> Step {
        let sent = tokio::time::timeout(PATIENCE, self.out.send(Ok(what))).await;
        sent.map_err(|_| "it takes nothing")?.map_err(|_| "the connection is broken")
    }

    /// It has all that there is, and nothing more will be: it is counted on for ever.
    async fn say_the_last(&mut self) -> Step {
        let last = pb::Followed { in_step: true, last: true, ..pb::Followed::default() };
        self.send(last).await?;
        if let Some((keeper, _)) = self.counted.take() {
            std::mem::forget(keeper);
        }
        Ok(())
    }

    /// The records up to a moment, and the state of that moment.
    async fn begin_snapshot(&mut self) -> Step {
        if self.core.journal.has_failed() {
            // What is in memory is not in it.
            return Err("the journal has failed");
        }
        let (copied, records) = {
            let state = self.core.state();
            (state.copy(), self.tap.take())
        };
        self.send_taken(records).await?;
        self.send(pb::Followed { job: self.core.job(), ..pb::Followed::default() }).await?;
        let (pieces, coming) = mpsc::channel(4);
        tokio::task::spawn_blocking(move || {
            let snapshot = state::encode_snapshot(copied.entries());
            for piece in snapshot.chunks(PIECE_BYTES) {
                if pieces.blocking_send(piece.to_vec()).is_err() {
                    return;
                }
            }
        });
        self.coming = Some(coming);
        (self.snapshot_bytes, self.records_bytes) = (0, 0);
        Ok(())
    }

    async fn send_snapshot(&mut self, piece: Option<Vec<u8>>) -> Step {
        let snapshot_ends = piece.is_none();
        if snapshot_ends {
            self.coming = None;
        }
        let snapshot = piece.unwrap_or_default();
        self.snapshot_bytes += snapshot.len() as u64;
        if snapshot_ends {
            // It has something to say from now on.
            self.heard = Instant::now();
            self.patience = PATIENCE + Duration::from_secs(self.snapshot_bytes / TAKES_IN);
        }
        let upto = if snapshot_ends { self.sent } else { 0 };
        self.send(pb::Followed { snapshot, snapshot_ends, upto, ..pb::Followed::default() }).await
    }

    async fn send_records(&mut self) -> Step {
        let records = self.tap.take();
        self.send_taken(records).await
    }

    async fn send_taken(&mut self, records: crate::journal::Records) -> Step {
        if records.lost {
            return Err("it is too far behind");
        }
        if self.has >= self.sent {
            self.heard = Instant::now();
        }
        self.records_bytes += records.bytes.len() as u64;
        let mut pieces = records.bytes.chunks(PIECE_BYTES).peekable();
        while let Some(piece) = pieces.next() {
            let upto = if pieces.peek().is_none() { records.upto } else { 0 };
            self.send(pb::Followed { records: piece.to_vec(), upto, ..pb::Followed::default() })
                .await?;
        }
        self.sent = records.upto;
        Ok(())
    }

    async fn hear(&mut self, has: u64) -> Step {
        if has > self.sent {
            return Err("it says that it has what it was not sent");
        }
        if self.coming.is_some() && self.counted.is_none() {
            return Err("it says that it has what it cannot have");
        }
        (self.heard, self.patience) = (Instant::now(), PATIENCE);
        self.has = has.max(self.has);
        let (keeper, _) = self.counted.get_or_insert_with(|| {
            let keepers = self.core.journal.keepers();
            let keeper = keepers.count_on(self.has);
            // So far nodes may have been told without it.
            (keeper, self.core.journal.tail())
        });
        keeper.has(self.has);
        self.look_whether_in_step().await
    }

    async fn look_whether_in_step(&mut self) -> Step {
        let Some((_, least)) = &self.counted else { return Ok(()) };
        // By the next beats it will know that this service lives.
        let beat = *self.beats.borrow();
        if !self.in_step && self.has >= *least && beat > 0 {
            self.in_step = true;
            self.send(pb::Followed { beat, in_step: true, ..pb::Followed::default() }).await?;
        }
        if self.in_step {
            self.standby.has.store(self.has.max(1), Relaxed);
        }
        Ok(())
    }

    async fn tell_beat(&mut self, beat: u64) -> Step {
        if self.core.journal.has_failed() {
            return Err("the journal has failed");
        }
        let waits_for_it = self.coming.is_none() && self.has < self.sent;
        let first = self.coming.is_none() && self.counted.is_none();
        if (waits_for_it || first) && self.heard.elapsed() > self.patience {
            return Err("it does not answer");
        }
        self.send(pb::Followed { beat, ..pb::Followed::default() }).await?;
        self.look_whether_in_step().await?;
        let grown = self.records_bytes > GROWS.max(self.snapshot_bytes.saturating_mul(4));
        match grown && self.coming.is_none() {
            true => self.begin_snapshot().await,
            false => Ok(()),
        }
    }

    /// It is counted on until it can know that this service goes on without it.
    async fn part(self) {
        let Follower { core, mut beats, counted, .. } = self;
        // The rest goes now.
        let Some(_counted) = counted else { return };
        let last = *beats.borrow();
        let beats = async { beats.wait_for(|beat| *beat >= last + BEATS).await.map(drop) };
        tokio::select! {
            _ = beats => {}
            // Nobody is told anything any more.
            _ = core.tenure.over() => {}
        }
    }
}

async fn set(flag: &mut watch::Receiver<bool>) {
    // The sender lives as long as the service.
    let _ = flag.wait_for(|set| *set).await;
}

async fn next(beats: &mut watch::Receiver<u64>) -> u64 {
    if beats.changed().await.is_err() {
        // The sender lives as long as the service.
        std::future::pending().await
    }
    *beats.borrow_and_update()
}

async fn sleep_until(until: Option<tokio::time::Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

/// None: that was all of it.
async fn next_piece(coming: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match coming {
        Some(coming) => coming.recv().await,
        None => std::future::pending().await,
    }
}
