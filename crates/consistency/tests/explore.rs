//! Every generated race-free program, under every built-in model, through every schedule: reads
//! return what sequential consistency gives, and a drain leaves the file on the backing.
//!
//! The default takes seconds in a debug build. `EBB_EXPLORE_DEPTH=1` (about a minute with --release)
//! and `=2` (for a night) look at more programs and let the actors begin more often.

use ebb_consistency::claim::shared_claims_are_exact;
use ebb_consistency::explore::{Bounds, Program, Telling, explore, generate, is_race_free};
use ebb_consistency::path::wants_seat;
use ebb_consistency::{Model, ModelTable};
use std::sync::Arc;

fn depth() -> usize {
    std::env::var("EBB_EXPLORE_DEPTH").ok().and_then(|d| d.parse().ok()).unwrap_or(0)
}

fn models() -> Vec<Arc<Model>> {
    let table = ModelTable::builtin();
    table.names().into_iter().filter_map(|n| table.get(n)).collect()
}

/// Explores the race-free ones of every `stride`-th program; returns how many those were.
fn all(model: &Model, programs: &[Program], stride: usize, bounds: Bounds) -> usize {
    let mut explored = 0;
    // Another place to begin for each model, so that together they see more programs.
    let first = model.name().len() % stride;
    for program in programs.iter().skip(first).step_by(stride) {
        if !is_race_free(program, model, false) {
            continue;
        }
        let report = explore(program, model, bounds, None);
        if let Some(failure) = report.failure {
            panic!("{failure}");
        }
        assert!(!report.cut_short, "{program}: too many states");
        explored += 1;
    }
    explored
}

/// The larger the depth, the smaller the stride.
fn stride(steps: [usize; 3]) -> usize {
    steps[depth().min(2)]
}

#[test]
fn handoffs_of_three_accesses() {
    for model in models() {
        let programs = generate::handoffs(&model, 3, true);
        let explored = all(&model, &programs, stride([2, 1, 1]), Bounds::split(0, 0, 0));
        assert!(explored > 400, "by construction none of them races: {explored}");
        assert!(all(&model, &programs, stride([4, 1, 1]), Bounds::plain()) > 200);
        if model.reads_ask() {
            let cold = Bounds { cold: true, ..Bounds::split(0, 0, 0) };
            assert!(all(&model, &programs, stride([5, 1, 1]), cold) > 150);
        }
        if depth() > 1 {
            let longer = generate::handoffs(&model, 4, false);
            assert!(all(&model, &longer, 1, Bounds::split(0, 0, 0)) > 10_000);
        }
    }
}

#[test]
fn handoffs_between_processes_that_share_a_node() {
    for model in models() {
        let programs = generate::handoffs(&model, 3, true);
        let crowded: Vec<_> = programs.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, stride([5, 1, 1]), Bounds::split(0, 0, 0)) > 150);
        let busy = Bounds::split(1, 0, 1);
        assert!(all(&model, &crowded, stride([150, 20, 2]), busy) > 4);
    }
}

#[test]
fn handoffs_beside_flusher_evictor_and_read_ahead() {
    for model in models() {
        let pairs = generate::handoffs(&model, 2, true);
        assert!(all(&model, &pairs, stride([3, 1, 1]), Bounds::split(1, 1, 1)) >= 8);
        let triples = generate::handoffs(&model, 3, true);
        assert!(all(&model, &triples, stride([40, 2, 1]), Bounds::split(1, 1, 0)) > 20);
        if depth() > 0 {
            assert!(all(&model, &pairs, 1, Bounds::split(2, 2, 1)) > 20);
        }
        if depth() > 1 {
            assert!(all(&model, &triples, 1, Bounds::split(1, 1, 1)) > 500);
        }
    }
}

/// Of a large file an open hears of the beginning only, and each read asks about what it reads.
#[test]
fn opens_that_hear_of_a_part() {
    for model in models() {
        let pairs = generate::handoffs(&model, 2, true);
        assert!(all(&model, &pairs, stride([3, 1, 1]), Bounds::windows(1, 1, 1)) >= 8);
        let triples = generate::handoffs(&model, 3, true);
        assert!(all(&model, &triples, stride([3, 1, 1]), Bounds::windows(0, 0, 0)) > 250);
        assert!(all(&model, &triples, stride([40, 2, 1]), Bounds::windows(1, 1, 0)) > 20);
        if model.reads_ask() {
            let cold = Bounds { cold: true, ..Bounds::windows(0, 0, 0) };
            assert!(all(&model, &triples, stride([11, 1, 1]), cold) > 20);
        }
        let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, stride([11, 1, 1]), Bounds::windows(0, 0, 0)) > 80);
        assert!(all(&model, &crowded, stride([150, 20, 2]), Bounds::windows(1, 0, 1)) > 4);
        let locked = generate::locked();
        assert!(all(&model, &locked, stride([12, 1, 1]), Bounds::windows(0, 0, 0)) > 50);
        if model.wants_leases() {
            let leased = Bounds { windows: true, ..Bounds::leased(0, 0, 0) };
            assert!(all(&model, &pairs, 1, leased) > 20);
        }
    }
}

/// Where every read asks, a lease makes most of the questions unnecessary, and changes nothing else.
#[test]
fn leases() {
    for model in models().into_iter().filter(|m| m.wants_leases()) {
        let pairs = generate::handoffs(&model, 2, true);
        assert!(all(&model, &pairs, 1, Bounds::leased(0, 0, 0)) > 20);
        assert!(all(&model, &pairs, stride([3, 1, 1]), Bounds::leased(1, 0, 0)) >= 8);
        let triples = generate::handoffs(&model, 3, true);
        assert!(all(&model, &triples, stride([11, 2, 1]), Bounds::leased(0, 0, 0)) > 40);
        let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, stride([23, 3, 1]), Bounds::leased(0, 0, 0)) > 20);
        let locked = generate::locked();
        assert!(all(&model, &locked, stride([29, 5, 1]), Bounds::leased(0, 0, 0)) > 10);
        if depth() > 0 {
            assert!(all(&model, &pairs, 1, Bounds::leased(1, 1, 1)) > 20);
        }
    }
}

/// Where every write publishes, a node that alone uses the file writes without telling, and nobody
/// notices.
#[test]
fn quiet_writes() {
    for model in models().into_iter().filter(|m| m.writes_publish()) {
        let pairs = generate::handoffs(&model, 2, true);
        assert!(all(&model, &pairs, 1, Bounds::quiet(0, 0, 0)) > 20);
        assert!(all(&model, &pairs, stride([11, 1, 1]), Bounds::quiet(1, 0, 0)) > 1);
        // Whole operations: three nodes that tell each other have too many schedules else.
        let whole = |flushes| Bounds { split: false, ..Bounds::quiet(flushes, 0, 0) };
        let triples = generate::handoffs(&model, 3, true);
        assert!(all(&model, &triples, stride([23, 3, 1]), whole(0)) > 20);
        let two: Vec<_> = triples.iter().filter(|p| p.nodes() < 3).cloned().collect();
        assert!(all(&model, &two, stride([23, 3, 1]), whole(1)) > 3);
        let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, stride([61, 7, 1]), whole(0)) > 3);
        let locked = generate::locked();
        assert!(all(&model, &locked, stride([97, 11, 1]), whole(0)) > 2);
        if depth() > 0 {
            assert!(all(&model, &pairs, 1, Bounds::quiet(1, 0, 0)) > 20);
            assert!(all(&model, &crowded, stride([1, 61, 7]), whole(1)) > 3);
            assert!(all(&model, &locked, stride([1, 97, 11]), whole(1)) > 2);
            assert!(all(&model, &pairs, 1, Bounds { split: false, ..Bounds::quiet(2, 1, 1) }) > 20);
        }
    }
}

/// A file sits at a node, which is written and read past its daemon under models that ask at each read
/// or write, and the others do there what they want to change.
#[test]
fn files_that_sit_at_a_node() {
    let seated = models().into_iter().filter(|m| wants_seat(m));
    for model in seated {
        let pairs = generate::handoffs(&model, 2, true);
        assert!(all(&model, &pairs, 1, Bounds::seated(0, 0, 0)) > 20);
        assert!(all(&model, &pairs, 1, Bounds::seated(1, 1, 1)) > 5);
        let triples = generate::handoffs(&model, 3, true);
        assert!(all(&model, &triples, 1, Bounds::seated(0, 0, 0)) > 100);
        assert!(all(&model, &triples, stride([5, 1, 1]), Bounds::seated(1, 0, 0)) > 10);
        let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, 1, Bounds::seated(0, 0, 0)) > 30);
        let locked = generate::locked();
        assert!(all(&model, &locked, stride([3, 1, 1]), Bounds::seated(0, 0, 0)) > 10);
        let zeroed: Vec<_> = pairs.iter().map(|p| generate::blank(p, 1)).collect();
        let losing = Bounds { telling: Telling::Losing, ..Bounds::seated(0, 0, 0) };
        assert!(all(&model, &zeroed, 1, losing) > 20);
        assert!(all(&model, &triples, stride([3, 1, 1]), losing) > 20);
    }
}

/// Models under which nodes may share a file that is written past the daemon.
fn past_models() -> Vec<Arc<Model>> {
    models().into_iter().filter(|m| shared_claims_are_exact(m)).collect()
}

/// Writers past the daemon leave only guesses of what they wrote, and zeros hardly a trace: every
/// choice of writes that are zeros.
#[test]
fn writers_past_the_daemon() {
    assert_eq!(past_models().len(), 2);
    for model in past_models() {
        let zeroed = |programs: Vec<Program>, choices: usize| -> Vec<Program> {
            programs
                .iter()
                .flat_map(|p| (0..choices).map(|which| generate::blank(p, which)))
                .collect()
        };
        let pairs = zeroed(generate::handoffs(&model, 2, true), 4);
        assert!(all(&model, &pairs, 1, Bounds::past(0)) > 80);
        assert!(all(&model, &pairs, stride([3, 1, 1]), Bounds::past(1)) > 20);
        let triples = zeroed(generate::handoffs(&model, 3, true), 8);
        assert!(all(&model, &triples, stride([9, 1, 1]), Bounds::past(0)) > 300);
        assert!(all(&model, &triples, stride([97, 7, 1]), Bounds::past(1)) > 20);
        let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
        assert!(all(&model, &crowded, stride([31, 3, 1]), Bounds::past(0)) > 50);
        let locked = zeroed(generate::locked(), 4);
        assert!(all(&model, &locked, stride([43, 5, 1]), Bounds::past(0)) > 20);
        if depth() > 1 {
            let longer = zeroed(generate::handoffs(&model, 4, false), 16);
            assert!(all(&model, &longer, 11, Bounds::past(0)) > 1000);
        }
    }
}

/// The same where the kernel tells some nodes or all of them what was written, and where it now and
/// then loses some of it.
#[test]
fn writers_past_the_daemon_that_are_told_of() {
    for (i, model) in past_models().iter().enumerate() {
        for (k, telling) in [Telling::Some, Telling::All, Telling::Losing].into_iter().enumerate() {
            let zeroed = |programs: Vec<Program>, choices: usize| -> Vec<Program> {
                let blank = |p: &Program| (0..choices).map(|w| generate::blank(p, w)).collect();
                programs.iter().flat_map(|p| -> Vec<Program> { blank(p) }).collect()
            };
            let pairs = zeroed(generate::handoffs(model, 2, true), 4);
            assert!(all(model, &pairs, stride([3, 1, 1]), Bounds::told(0, telling)) > 20);
            assert!(all(model, &pairs, stride([11, 1, 1]), Bounds::told(1, telling)) > 5);
            let triples = zeroed(generate::handoffs(model, 3, true), 8);
            // Other programs for each of them.
            let rest: Vec<_> = triples.iter().skip(i + 2 * k).cloned().collect();
            assert!(all(model, &rest, stride([29, 3, 1]), Bounds::told(0, telling)) > 50);
            assert!(all(model, &rest, stride([307, 17, 1]), Bounds::told(1, telling)) > 5);
            let crowded: Vec<_> = triples.iter().map(generate::crowded).collect();
            assert!(all(model, &crowded, stride([97, 7, 1]), Bounds::told(0, telling)) > 10);
            let died: Vec<_> = pairs.iter().flat_map(generate::interrupted).collect();
            assert!(all(model, &died, stride([127, 5, 1]), Bounds::told(0, telling)) > 5);
        }
    }
}

/// A daemon dies after a sync that published nothing, and another one takes its cache over: what was
/// synced is there again, also where others have claimed the blocks around it.
#[test]
fn daemons_that_die_after_a_sync() {
    for model in past_models() {
        let pairs = generate::handoffs(&model, 2, true);
        let pairs: Vec<_> = pairs
            .iter()
            .flat_map(|p| (0..4).map(|which| generate::blank(p, which)))
            .flat_map(|p| generate::interrupted(&p))
            .collect();
        assert!(all(&model, &pairs, stride([61, 2, 1]), Bounds::past(0)) > 10);
        if depth() > 0 {
            assert!(all(&model, &pairs, stride([1, 29, 3]), Bounds::past(1)) > 20);
        }
        let beside: Vec<_> = generate::beside(&model)
            .iter()
            .flat_map(|p| (0..4).map(|which| generate::blank(p, which)))
            .flat_map(|p| generate::interrupted(&p))
            .collect();
        assert!(all(&model, &beside, stride([11, 2, 1]), Bounds::past(0)) > 10);
        assert!(all(&model, &beside, stride([307, 7, 1]), Bounds::past(1)) > 0);
    }
}

#[test]
fn critical_sections() {
    for model in models() {
        let programs = generate::locked();
        assert!(all(&model, &programs, stride([4, 1, 1]), Bounds::plain()) > 150);
        assert!(all(&model, &programs, stride([12, 1, 1]), Bounds::split(0, 0, 0)) > 50);
        let busy = Bounds::split(1, 1, 0);
        assert!(all(&model, &programs, stride([100, 5, 1]), busy) > 5);
    }
}

/// Programs that were not made to be race-free: the checker says which ones are.
#[test]
fn arbitrary_pairs_of_call_sequences() {
    for model in models() {
        let programs: Vec<_> = generate::raw(&model, 3, 3).collect();
        let explored = all(&model, &programs, stride([7, 1, 1]), Bounds::split(0, 0, 0));
        assert!(explored > 20 && explored < programs.len() / 2, "{explored}");
        if depth() > 0 {
            assert!(all(&model, &programs, stride([1, 37, 5]), Bounds::split(1, 1, 0)) > 5);
        }
    }
}

/// A model that a user made up is explored like the built-in ones: entry consistency, where only
/// locks publish and observe, and a session whose fsync publishes as well.
#[test]
fn user_defined_models() {
    let text = r#"
        [models.entry]
        lock = ["query file"]
        unlock = ["attach file"]
        [models.eager]
        base = "session"
        fsync = ["attach file"]
        stat = ["query file"]
    "#;
    let table = ModelTable::builtin().with_user(text).expect("two good models");
    let entry = table.get("entry").expect("just added");
    let explored = all(&entry, &generate::locked(), stride([12, 1, 1]), Bounds::split(0, 0, 0));
    assert!(explored > 50, "{explored}");
    let unlocked = generate::handoffs(&entry, 3, false);
    let by_message = all(&entry, &unlocked, 1, Bounds::plain());
    assert!(by_message < unlocked.len() / 2, "messages order a write after a read, no more");

    let eager = table.get("eager").expect("just added");
    let programs = generate::handoffs(&eager, 3, true);
    assert!(all(&eager, &programs, stride([5, 1, 1]), Bounds::split(0, 0, 0)) > 150);
}
