//! Every generated race-free program under every model.
use ebb_consistency::explore::{Bounds, Program, explore, generate, is_race_free};
use ebb_consistency::{Model, ModelTable};
use std::time::Instant;

fn run(label: &str, model: &Model, programs: &[Program], bounds: Bounds) {
    let t = Instant::now();
    let (mut free, mut states, mut max) = (0, 0, 0);
    for p in programs {
        if !is_race_free(p, model, false) {
            continue;
        }
        free += 1;
        let r = explore(p, model, bounds, None);
        states += r.states;
        max = max.max(r.states);
        if let Some(f) = r.failure {
            panic!("{f}")
        }
        assert!(!r.cut_short);
    }
    eprintln!(
        "{label} {}: {} programs, {free} free, {states} states (max {max}), {:?}",
        model.name(),
        programs.len(),
        t.elapsed()
    );
}

#[test]
fn experiment() {
    let table = ModelTable::builtin();
    for name in table.names() {
        let m = table.get(name).unwrap();
        let h2 = generate::handoffs(&m, 2, false);
        let h3 = generate::handoffs(&m, 3, false);
        run("h2 plain", &m, &h2, Bounds::plain());
        run("h2 split 1,0,0", &m, &h2, Bounds::split(1, 0, 0));
        run("h2 split 1,1,0", &m, &h2, Bounds::split(1, 1, 0));
        run("h2 split 1,1,1", &m, &h2, Bounds::split(1, 1, 1));
        run("h3 plain", &m, &h3, Bounds::plain());
        run("h3 split 0", &m, &h3, Bounds::split(0, 0, 0));
        run("h3 split 1,0,0", &m, &h3[..200.min(h3.len())], Bounds::split(1, 0, 0));
    }
}
