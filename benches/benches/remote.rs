//! First reads of another node's bytes, 1 MiB after another: over plain TCP, through a FUSE daemon that
//! does nothing but fetch, store and hand over, and through Ebb. In turn, round by round. What the
//! second leaves of the first is what this machine leaves to any daemon.
//!
//! Variables: EBB_BENCH_ROUNDS, EBB_BENCH_REMOTE_MIB.

use ebb_benches::fetching::Fetching;
use ebb_benches::one_file::NAME;
use ebb_benches::{Spread, rounds};
use ebb_testkit::{Cluster, skip_reason};
use ebb_workloads::remote::{Ends, FirstTouch};
use ebb_workloads::{Place, Publish};

const PIECE: usize = 1 << 20;

fn main() {
    if let Some(why) = skip_reason() {
        println!("SKIPPED: {why}");
        return;
    }
    let mib = std::env::var("EBB_BENCH_REMOTE_MIB").ok().and_then(|v| v.parse().ok());
    let bytes = mib.unwrap_or(64) * PIECE;
    let touch = FirstTouch { bytes, size: PIECE, random: false };
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    let nodes = cluster.nodes().iter().map(|n| n.mountpoint().to_owned()).collect();
    let place = Place { nodes, per_node: 1, publish: Publish::Close };
    let dir = cluster.root().join("bare");
    let at = cluster.root().join("fetching");
    std::fs::create_dir(&dir).expect("mkdir");
    std::fs::create_dir(&at).expect("mkdir");
    let (from, to) = (dir.join("from"), dir.join("to"));
    let least = Fetching::mount(&at, touch, &from, &to).expect("mount");
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=rounds() as u64 {
        let one = |measures: Vec<ebb_workloads::Measure>| measures[0].value;
        let plain = one(touch.plain_tcp(&dir, round, Ends::HERE).expect("plain TCP"));
        drop(touch.fill(&from, round).expect("fill"));
        let fetching = touch.read(&at.join(NAME), round).expect("the least daemon").value;
        std::fs::remove_file(&to).expect("remove");
        let ebb = one(touch.run(&place, round).expect("Ebb"));
        // The first one warms memory and connections up.
        if round > 0 {
            all.iter_mut().zip([plain, fetching, ebb]).for_each(|(v, speed)| v.push(speed));
        }
    }
    drop(least);
    let [plain, fetching, ebb] = all.map(Spread::of);
    println!("First reads of another node's bytes, 1 MiB in order (MiB/s)");
    for (name, speed) in [("plain TCP", plain), ("the least daemon", fetching), ("session", ebb)] {
        let Spread { median, least, most } = speed;
        let ratio = median / plain.median;
        println!("  {name:<18} {median:6.0} ({least:.0} to {most:.0})  {ratio:.2} of plain TCP");
    }
    println!("  session beside the least daemon: {:.2}", ebb.median / fetching.median);
}
