//! kill -9 of the metadata service at random moments while programs on two nodes write, under
//! each model: their operations wait and go on when it is back, and no acknowledged byte is lost
//! or wrong, on their own node, on the other one, and on the backing. Now and then a daemon is
//! killed too. `EBB_SERVICE_KILLS` kills in all (12), `EBB_SEED` repeats the operations; the
//! moments of the kills are a matter of the machine.

use ebb_testkit::{Cluster, Node, describe, random, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::load::{Load, Mix, Order, Setup, Work, all_right};
use ebb_tests::model::{Model, close};
use ebb_tests::recoveries::{all_die, recover};
use ebb_tests::tools::amount;
use rand::Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const NODES: usize = 2;
/// In each so many rounds the daemon of the first node dies too.
const DAEMON_KILLED_EVERY: u64 = 3;
/// An operation over a restart of the service may take so long, and not longer.
const OPERATION_MAX: Duration = Duration::from_secs(15);
/// For everything that a program does until it answers.
const ANSWER_MAX: Duration = Duration::from_secs(60);

fn start_loads(cluster: &Cluster, model: Model, mix: Mix, seed: u64) -> Vec<Load> {
    let setup = |who: usize| Setup {
        model,
        mix,
        seed,
        who: who as u64,
        of: NODES as u64,
        root: cluster.node(who).mountpoint().to_owned(),
        elsewhere: cluster.node((who + 1) % NODES).mountpoint().to_owned(),
        blocks: 0,
        log: std::env::temp_dir().join(format!("ebb-service-kill-{seed}-{}-{who}", model.name())),
        extra: ebb_tests::load::Extra::default(),
    };
    let binary = Path::new(env!("CARGO_BIN_EXE_ebb-load"));
    (0..NODES).map(|who| Load::start(binary, setup(who))).collect()
}

fn mount_again(node: &Node) {
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    node.mount();
}

/// One kill under load, and how it went for each program.
fn kill(cluster: &mut Cluster, loads: &mut [Load], dice: &mut impl Rng, round: u64) -> Vec<Work> {
    let mut pause = |ms| std::thread::sleep(Duration::from_millis(dice.random_range(ms)));
    loads.iter_mut().for_each(|load| load.tell(&Order::Go { round }));
    pause(20..400);
    cluster.kill_meta();
    pause(0..300);
    if round.is_multiple_of(DAEMON_KILLED_EVERY) {
        cluster.node(0).kill9();
    }
    cluster.restart_meta();
    pause(50..400);
    loads.iter_mut().for_each(|load| load.tell(&Order::Pause));
    loads.iter().map(|load| load.paused(ANSWER_MAX)).collect()
}

fn rounds(model: Model, flush: &str, mix: Mix) {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut cluster = Cluster::builder()
        .nodes(NODES)
        .consistency(model.name())
        .flush(flush)
        .separate_meta()
        // A killed service is gone when its last fsync is, which a busy disk can make long.
        .below("/dev/shm")
        .start();
    let mut dice = random::generator(seed);
    let mut loads = start_loads(&cluster, model, mix, seed);
    let kills = amount("EBB_SERVICE_KILLS", 12).div_ceil(4);
    let (mut operations, mut read_elsewhere, mut longest) = (0, 0, 0);
    for round in 1..=kills {
        let what = format!("seed {seed}, {} {flush}, kill {round}", model.name());
        let kills_daemon = round.is_multiple_of(DAEMON_KILLED_EVERY);
        let done = kill(&mut cluster, &mut loads, &mut dice, round);
        for (node, work) in done.iter().enumerate() {
            let may_fail = kills_daemon && node == 0;
            assert!(may_fail || work.failure.is_none(), "{what}: node {node}: {work:?}");
            assert!(u128::from(work.longest_ms) < OPERATION_MAX.as_millis(), "{what}: {work:?}");
            operations += work.operations;
            read_elsewhere += work.read_elsewhere;
            longest = longest.max(work.longest_ms);
        }
        if kills_daemon {
            mount_again(cluster.node(0));
        }
        all_right(&mut loads, ANSWER_MAX, |_| Order::Settle(what.clone()));
        all_right(&mut loads, ANSWER_MAX, |setup| Order::Compare {
            what: format!("{what}, on the other node"),
            root: setup.elsewhere.clone(),
        });
    }
    cluster.umount_all();
    all_right(&mut loads, ANSWER_MAX, |_| Order::Compare {
        what: format!("seed {seed}, drained"),
        root: cluster.backing().to_owned(),
    });
    println!(
        "{} {flush}: {kills} kills of the service, {operations} operations, {read_elsewhere} \
         reads on the other node, the longest operation {longest} ms",
        model.name()
    );
    assert!(operations > kills && (kills < 3 || read_elsewhere > 0), "they hardly did anything");
}

#[test]
fn posix_goes_on_over_killed_services() {
    rounds(Model::Posix, "immediate", Mix::Data);
}

#[test]
fn commit_goes_on_over_killed_services() {
    rounds(Model::Commit, "close", Mix::All);
}

#[test]
fn session_goes_on_over_killed_services() {
    rounds(Model::Session, "end", Mix::All);
}

#[test]
fn mpiio_goes_on_over_killed_services() {
    rounds(Model::Mpiio, "idle", Mix::All);
}

/// An fsync to the backing that the service's death interrupts is begun again, not refused.
#[test]
fn an_fsync_to_the_backing_goes_on_over_killed_services() {
    if skip_reason().is_some() {
        return;
    }
    let mut dice = random::generator(random::seed());
    let mut cluster = Cluster::builder()
        .nodes(1)
        .separate_meta()
        .flush("end")
        .option("--durability", "backing")
        .below("/dev/shm")
        .start();
    let stop = cluster.root().join("stop");
    let append = "open(my $f, '>>', $ARGV[0]) or die; while (!-e $ARGV[1]) { \
                  syswrite($f, 'x' x 4000) or die qq(write: $!); \
                  $f->sync or die qq(fsync: $!); $n++ } print $n";
    let mut perl = Command::new("perl");
    perl.args(["-MIO::Handle", "-e", append]).arg(cluster.node(0).path("log")).arg(&stop);
    let writer = perl.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("perl");
    for _ in 0..amount("EBB_SERVICE_KILLS", 12) {
        std::thread::sleep(Duration::from_millis(dice.random_range(50..300)));
        cluster.kill_meta();
        cluster.restart_meta();
    }
    std::fs::write(&stop, "").expect("write");
    let output = writer.wait_with_output().expect("perl");
    assert!(output.status.success(), "{}", describe(&output));
    let synced: u64 = String::from_utf8_lossy(&output.stdout).parse().expect("a number");
    let there = std::fs::read(cluster.backing().join("log")).expect("read");
    assert_eq!(there.len() as u64, synced * 4000, "every fsync brought its bytes there");
    assert!(there.iter().all(|b| *b == b'x'));
}

/// So often the service dies under a node that flushes all the time.
const FLUSHES_CUT: u64 = 4;
const KILLS: u64 = 6;
/// Of each of the files that are written meanwhile; the buffer has room for twenty.
const FILE_BYTES: u64 = 20_000;
/// Until the node's journal is written.
const NOTED_WITHIN: Duration = Duration::from_millis(1_500);

/// The service has ended a flush and dies before it says so: the node hears of it with another answer, and
/// gives the bytes up when it needs room. A recovery must not take the holes for bytes then.
#[test]
fn a_flush_whose_end_was_not_heard_is_not_recovered_as_holes() {
    if skip_reason().is_some() {
        return;
    }
    let (mut dice, mut unheard) = (random::generator(random::seed()), 0);
    for round in 0..FLUSHES_CUT {
        let cluster = Cluster::builder().nodes(1).separate_meta().consistency("session");
        let cluster = cluster.flush("immediate").option("--cache-size", "400KiB");
        let mut cluster = cluster.start();
        let (root, stop) = (cluster.node(0).mountpoint().to_owned(), AtomicBool::new(false));
        let written = std::thread::scope(|s| {
            let writer = s.spawn(|| {
                let write = |n: u64| {
                    let file = File::create(root.join(format!("f-{n}")))?;
                    file.write_all_at(&bytes(round, n, 0, FILE_BYTES), 0)?;
                    close(file)
                };
                (0..).take_while(|n| !stop.load(Relaxed) && write(*n).is_ok()).count() as u64
            });
            for _ in 0..KILLS {
                std::thread::sleep(Duration::from_millis(dice.random_range(100..300)));
                cluster.kill_meta();
                cluster.restart_meta();
            }
            // Room is needed for what comes after.
            std::thread::sleep(Duration::from_millis(600));
            stop.store(true, Relaxed);
            writer.join().expect("the writer ends")
        });
        std::thread::sleep(NOTED_WITHIN);
        unheard += cluster.node(0).log().matches("no such grant").count();
        all_die(&mut cluster);
        let ended = recover(&cluster, cluster.node(0), &[]);
        assert!(matches!(ended.status.code(), Some(0 | 3)), "{}", describe(&ended));
        for n in 0..written {
            let what = format!("round {round}, file {n} of {written}: {}", describe(&ended));
            let path = cluster.backing().join(format!("f-{n}"));
            let there = std::fs::read(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            same(&what, &there, &bytes(round, n, 0, FILE_BYTES));
        }
    }
    assert!(unheard > 0, "every end of a flush was heard");
}
