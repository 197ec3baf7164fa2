//! Depth-first search over every step of a run, every state once.

use super::fault::Fault;
use super::past::Telling;
use super::program::Program;
use super::world::{Budget, Setup, Step, World, Wrong};
use crate::model::Model;
use std::collections::HashSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// How much is explored, and in which variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// How often the actors may begin.
    pub budget: Budget,
    /// Operations are split at requests and replies.
    pub split: bool,
    /// Queries about a range are answered about that range only.
    pub narrow: bool,
    /// Questions about the whole file are answered about its beginning.
    pub windows: bool,
    /// Nodes know nothing at the start.
    pub cold: bool,
    /// Answers come with leases, as far as the model wants them.
    pub leases: bool,
    /// Who alone uses the file writes without telling, as far as the model publishes each write.
    pub quiet: bool,
    /// The kernel reads and writes past the nodes, which look for it at sync events.
    pub past: bool,
    /// Whom it tells what was written.
    pub telling: Telling,
    /// The file sits at the first node, and only there it is passed by.
    pub seat: bool,
    /// States after which the search of one program is given up.
    pub states_max: usize,
}

impl Bounds {
    /// No actors, whole operations.
    #[must_use]
    pub fn plain() -> Bounds {
        let budget = Budget::default();
        Bounds {
            budget,
            split: false,
            narrow: false,
            windows: false,
            cold: false,
            leases: false,
            quiet: false,
            past: false,
            telling: Telling::Nobody,
            seat: false,
            states_max: 2_000_000,
        }
    }

    /// Split operations, and the actors as often as given.
    #[must_use]
    pub fn split(flushes: u8, evictions: u8, aheads: u8) -> Bounds {
        let budget = Budget { flushes, evictions, aheads };
        Bounds { budget, split: true, narrow: true, ..Bounds::plain() }
    }

    /// The same where opens hear of the beginning of the file.
    #[must_use]
    pub fn windows(flushes: u8, evictions: u8, aheads: u8) -> Bounds {
        Bounds { windows: true, ..Bounds::split(flushes, evictions, aheads) }
    }

    /// The same with all opens past the daemon. Nothing is evicted then, nor read ahead.
    #[must_use]
    pub fn past(flushes: u8) -> Bounds {
        Bounds { narrow: false, past: true, ..Bounds::split(flushes, 0, 0) }
    }

    /// The same where the kernel tells what was written.
    #[must_use]
    pub fn told(flushes: u8, telling: Telling) -> Bounds {
        Bounds { telling, ..Bounds::past(flushes) }
    }

    /// Where the file sits at the first node, and the actors of the others.
    #[must_use]
    pub fn seated(flushes: u8, evictions: u8, aheads: u8) -> Bounds {
        let split = Bounds::split(flushes, evictions, aheads);
        Bounds { narrow: false, past: true, telling: Telling::All, seat: true, ..split }
    }

    /// The same with leases, which whole answers come with.
    #[must_use]
    pub fn leased(flushes: u8, evictions: u8, aheads: u8) -> Bounds {
        Bounds { narrow: false, leases: true, ..Bounds::split(flushes, evictions, aheads) }
    }

    /// The same with quiet writes.
    #[must_use]
    pub fn quiet(flushes: u8, evictions: u8, aheads: u8) -> Bounds {
        Bounds { quiet: true, ..Bounds::leased(flushes, evictions, aheads) }
    }
}

/// A run that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The program, as text.
    pub program: String,
    /// The model's name.
    pub model: String,
    /// The planted bug, when there is one.
    pub fault: Option<Fault>,
    /// The bounds; they decide what a step is.
    pub bounds: Bounds,
    /// The steps taken.
    pub schedule: Vec<Step>,
    /// What was wrong after them.
    pub wrong: Wrong,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<String> = self.schedule.iter().map(Step::to_string).collect();
        writeln!(f, "model:    {} (fault: {:?}, {:?})", self.model, self.fault, self.bounds)?;
        writeln!(f, "program:  {}", self.program)?;
        writeln!(f, "schedule: {}", steps.join(" "))?;
        write!(f, "wrong:    {:?}", self.wrong)
    }
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// States visited.
    pub states: usize,
    /// True when the search was given up.
    pub cut_short: bool,
    /// The first run that went wrong.
    pub failure: Option<Failure>,
}

/// Runs `program` through all of its schedules. Whether it is race-free is the caller's question.
#[must_use]
pub fn explore(program: &Program, model: &Model, bounds: Bounds, fault: Option<Fault>) -> Report {
    let setup = setup(program, model, bounds, fault);
    let mut search = Search {
        setup: &setup,
        bounds,
        seen: HashSet::new(),
        schedule: Vec::new(),
        report: Report::default(),
    };
    search.visit(World::new(&setup, bounds.budget));
    search.report
}

fn setup<'a>(
    program: &'a Program,
    model: &'a Model,
    bounds: Bounds,
    fault: Option<Fault>,
) -> Setup<'a> {
    let Bounds { split, narrow, windows, cold, past, telling, seat, .. } = bounds;
    let leases = bounds.leases && model.wants_leases();
    let quiet = bounds.quiet && leases && model.writes_publish();
    Setup {
        program,
        model,
        fault,
        split,
        narrow,
        windows,
        cold,
        leases,
        quiet,
        past,
        telling,
        seat,
    }
}

struct Search<'a> {
    setup: &'a Setup<'a>,
    bounds: Bounds,
    /// Two hashes of each state seen.
    seen: HashSet<(u64, u64)>,
    schedule: Vec<Step>,
    report: Report,
}

impl Search<'_> {
    fn visit(&mut self, world: World) {
        self.report.states += 1;
        self.report.cut_short |= self.report.states >= self.bounds.states_max;
        let steps = match next_steps(&world, self.setup) {
            Ok(steps) => steps,
            Err(wrong) => return self.fail(wrong),
        };
        for step in steps {
            if self.report.cut_short || self.report.failure.is_some() {
                return;
            }
            let mut next = world.clone();
            self.schedule.push(step);
            match next.step(self.setup, step) {
                Err(wrong) => self.fail(wrong),
                Ok(()) if self.seen.insert(hashes(&next)) => self.visit(next),
                Ok(()) => {}
            }
            self.schedule.pop();
        }
    }

    fn fail(&mut self, wrong: Wrong) {
        self.report.failure = Some(Failure {
            program: self.setup.program.to_string(),
            model: self.setup.model.name().to_owned(),
            fault: self.setup.fault,
            bounds: self.bounds,
            schedule: self.schedule.clone(),
            wrong,
        });
    }
}

/// The steps that can be taken; none after a good end.
fn next_steps(world: &World, setup: &Setup<'_>) -> Result<Vec<Step>, Wrong> {
    if world.is_done(setup) {
        world.clone().drain(setup)?;
        return Ok(Vec::new());
    }
    let mut steps = world.ready(setup);
    steps.extend(world.stirring(setup));
    if steps.is_empty() { Err(Wrong::Stuck) } else { Ok(steps) }
}

fn hashes(world: &World) -> (u64, u64) {
    let mut first = DefaultHasher::new();
    world.hash(&mut first);
    let one = first.finish();
    // The same input behind a prefix: two hashes collide together with probability 2^-128.
    let mut second = DefaultHasher::new();
    one.hash(&mut second);
    world.hash(&mut second);
    (one, second.finish())
}

/// Takes the steps of a failure's schedule (`p0 p1 f0 ...`) and returns what goes wrong.
pub fn replay(
    program: &Program,
    model: &Model,
    bounds: Bounds,
    fault: Option<Fault>,
    schedule: &str,
) -> Result<(), Wrong> {
    let setup = setup(program, model, bounds, fault);
    let mut world = World::new(&setup, bounds.budget);
    for word in schedule.split_whitespace() {
        let steps = next_steps(&world, &setup)?;
        let Some(step) = steps.into_iter().find(|s| s.to_string() == word) else {
            return Err(Wrong::Stuck);
        };
        world.step(&setup, step)?;
    }
    next_steps(&world, &setup).map(|_| ())
}
