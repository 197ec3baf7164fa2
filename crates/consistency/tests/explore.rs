//! Every generated race-free program under every model.
use ebb_consistency::explore::{Bounds, Fault, Program, explore, generate, is_race_free};
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
        let h2t = generate::handoffs(&m, 2, true);
        let h3 = generate::handoffs(&m, 3, false);
        let h3t = generate::handoffs(&m, 3, true);
        run("h2t split 2,2,1", &m, &h2t, Bounds::split(2, 2, 1));
        run("h3t split 0", &m, &h3t, Bounds::split(0, 0, 0));
        if m.reads_ask() {
            run("h3t split 0 cold", &m, &h3t, Bounds { cold: true, ..Bounds::split(0, 0, 0) });
        }
        run("h3t split 1,1,0", &m, &h3t, Bounds::split(1, 1, 0));
        run("locked plain", &m, &generate::locked(), Bounds::plain());
        run("locked split", &m, &generate::locked()[..100], Bounds::split(0, 0, 0));
        let raw: Vec<_> = generate::raw(&m, 3, 3).collect();
        run("raw33 split", &m, &raw, Bounds::split(0, 0, 0));
        let c: Vec<_> = h3.iter().map(generate::crowded).collect();
        run("crowded", &m, &c, Bounds::split(0, 0, 0));
    }
}
#[test]
fn faults() {
    let table = ModelTable::builtin();
    for fault in Fault::ALL {
        let t = Instant::now();
        let mut caught = vec![];
        for name in table.names() {
            let m = table.get(name).unwrap();
            let h2 = generate::handoffs(&m, 2, true);
            let h3 = generate::handoffs(&m, 3, true);
            for (label, ps, b) in [
                ("h2 0", &h2, Bounds::split(0, 0, 0)),
                ("h3 0", &h3, Bounds::split(0, 0, 0)),
                ("h2 111", &h2, Bounds::split(1, 1, 1)),
                ("h2 212", &h2, Bounds::split(2, 1, 2)),
                ("h3 110", &h3, Bounds::split(1, 1, 0)),
                ("h3 101", &h3, Bounds::split(1, 0, 1)),
            ] {
                if t.elapsed().as_secs() > 20 {
                    break;
                }
                if let Some(f) = ps.iter().find_map(|p| explore(p, &m, b, Some(fault)).failure) {
                    caught.push(format!("{name}/{label}: {} :: {:?}", f.program, f.wrong));
                    break;
                }
            }
        }
        eprintln!("{fault:?} {:?}: {caught:#?}", t.elapsed());
    }
}
