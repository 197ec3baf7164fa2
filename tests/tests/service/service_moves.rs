//! The service says in a directory where it is, and begins again somewhere else, when its machine is lost, stands
//! still, or is wanted for something else: the mounts go on, and of two services only the newer one answers.

use ebb_testkit::{Builder, Cluster, Node, describe, mounts, random, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{open, went_past};
use rand::Rng;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LEN: u64 = 200_000;
const REBUILD: [&str; 2] = ["--rebuild", "3"];

pub fn builder(model: &str) -> Builder {
    let cluster = Cluster::builder().nodes(3).flush("end").coordinator().lease("2s");
    cluster.consistency(model).option("--request-timeout", "60s")
}

/// With what each node has made.
pub fn begun(builder: Builder) -> Option<Cluster> {
    let cluster = skip_reason().is_none().then(|| builder.start())?;
    write_all(&cluster, 0);
    Some(cluster)
}

pub fn content(stream: u64) -> Vec<u8> {
    bytes(13, stream, 0, LEN)
}

fn sync(node: &Node) {
    fs::File::open(node.mountpoint()).and_then(|dir| dir.sync_all()).expect("fsync of the root");
}

/// Each node makes a file that the others have read, and one that only it knows.
pub fn write_all(cluster: &Cluster, round: u64) {
    for (n, node) in (0..).zip(cluster.nodes()) {
        fs::create_dir_all(node.path(format!("d{round}"))).expect("mkdir");
        for (what, stream) in [("seen", 10 * round + n), ("own", 100 + 10 * round + n)] {
            let path = node.path(format!("d{round}/{what}{n}"));
            fs::write(&path, content(stream)).expect("write");
        }
        sync(node);
    }
    for node in cluster.nodes() {
        for n in 0..3 {
            let path = node.path(format!("d{round}/seen{n}"));
            same("seen", &fs::read(path).expect("read"), &content(10 * round + n));
        }
    }
}

fn all_is_there(dir: impl Fn(String) -> std::path::PathBuf, round: u64, what: &str) {
    for n in 0..3 {
        for (name, stream) in [("seen", 10 * round + n), ("own", 100 + 10 * round + n)] {
            let path = dir(format!("d{round}/{name}{n}"));
            let got = fs::read(&path).unwrap_or_else(|e| panic!("{what}: {}: {e}", path.display()));
            same(what, &got, &content(stream));
        }
    }
}

/// What was written before is there on all nodes, and what is written now gets to the others and the backing.
pub fn goes_on(cluster: &Cluster, rounds: u64, what: &str) {
    for node in cluster.nodes() {
        (0..rounds).for_each(|round| all_is_there(|name| node.path(name), round, what));
    }
    write_all(cluster, rounds);
    let address = cluster.meta_address().expect("a service");
    for node in cluster.nodes() {
        assert_eq!(node.status()["meta"], address, "{what}: where it is now");
    }
    cluster.umount_all();
    (0..=rounds).for_each(|round| all_is_there(|name| cluster.backing().join(name), round, what));
}

#[test]
fn a_service_whose_machine_is_lost_begins_on_another_one() {
    for model in ["posix", "session"] {
        let Some(mut cluster) = begun(builder(model)) else { return };
        let before = cluster.meta_address().expect("a service").to_owned();
        cluster.kill_meta();
        fs::remove_dir_all(cluster.meta_state()).expect("the state is lost");
        drop(cluster.begin_meta_elsewhere("elsewhere", &REBUILD));
        assert_ne!(cluster.meta_address(), Some(before.as_str()));
        goes_on(&cluster, 1, model);
    }
}

/// With its state, and under the supervisors of the nodes.
#[test]
fn a_service_takes_its_state_along() {
    let Some(mut cluster) = begun(builder("posix").supervised().token()) else { return };
    let file = open(&cluster.node(0).path("d0/own0"));
    cluster.kill_meta();
    fs::rename(cluster.meta_state(), cluster.root().join("moved")).expect("rename");
    drop(cluster.begin_meta_elsewhere("moved", &[]));
    file.write_all_at(&content(100)[..10], 0).expect("through a handle from before");
    drop(file);
    // The daemon after this one looks there, too.
    assert!(cluster.node(1).kill_daemon(), "no other daemon");
    goes_on(&cluster, 1, "with its state");
}

/// It stands still, for as long as it takes another one to begin in its place; then it goes on.
#[test]
fn a_service_that_stood_still_says_nothing_any_more() {
    let Some(mut cluster) = begun(builder("posix")) else { return };
    // A process of its own: what this one has open is closed by each program that it starts.
    let asks = format!("sleep 1; printf asked > {}", cluster.node(2).path("asked").display());
    let mut asks = Command::new("sh").args(["-c", &asks]).spawn().expect("sh");
    cluster.signal_meta(Signal::STOP);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(asks.try_wait().expect("wait").is_none(), "it is answered");
    let begun = Instant::now();
    let extra = [&REBUILD[..], &["--take-over"]].concat();
    let mut old = cluster.begin_meta_elsewhere("elsewhere", &extra);
    assert!(begun.elapsed() >= Duration::from_secs(2), "it may still answer for its lease");
    assert!(asks.wait().expect("wait").success(), "asked of the one that stands still");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(fs::read(cluster.node(0).path("asked")).expect("read"), b"asked");
    write_all(&cluster, 1);
    fs::remove_file(cluster.node(0).path("d1/own0")).expect("remove");
    fs::write(cluster.node(0).path("d1/own0"), content(110)).expect("write");
    cluster.node(1).drain();
    old.signal(Signal::CONT);
    let status = old.ends_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(1), "{status:?}");
    let log = fs::read_to_string(cluster.root().join("meta.log")).expect("its log");
    assert!(log.contains("another metadata service has taken over: term 2"), "{log}");
    goes_on(&cluster, 2, "after one that stood still");
}

#[test]
fn a_service_that_answers_is_not_replaced_without_a_word() {
    let Some(mut cluster) = begun(builder("session")) else { return };
    let (terms, state) = (cluster.root().join("terms"), cluster.root().join("second"));
    let terms = format!("dir:{}", terms.display());
    let second = |extra: &[&str]| {
        let state = state.display().to_string();
        let backing = cluster.backing().display().to_string();
        let line = ["meta", "--listen", "127.0.0.1:0", "--state", &state, "--coordinator", &terms];
        cluster.run_ebb(&[&line[..], extra, &[&backing]].concat())
    };
    let refused = second(&[]);
    assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
    let said = describe(&refused);
    assert!(said.contains("has not ended") && said.contains("--rebuild"), "{said}");
    let refused = second(&["--take-over"]);
    assert_eq!(refused.status.code(), Some(2), "without its state: {}", describe(&refused));
    let refused = second(&REBUILD);
    assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
    let said = describe(&refused);
    assert!(said.contains("answers at") && said.contains("--take-over"), "{said}");
    let refused = second(&["--rebuild", "3", "--take-over", "--lease", "0s"]);
    assert_eq!(refused.status.code(), Some(2), "no such term: {}", describe(&refused));
    write_all(&cluster, 1);
    let extra = [&REBUILD[..], &["--take-over"]].concat();
    let begun = Instant::now();
    let mut old = cluster.begin_meta_elsewhere("elsewhere", &extra);
    assert_eq!(old.ends_within(Duration::from_secs(10)).code(), Some(1));
    assert!(begun.elapsed() < Duration::from_secs(20));
    goes_on(&cluster, 2, "taken over");
}

#[test]
fn nobody_else_says_where_the_service_is() {
    let Some(cluster) = begun(builder("session")) else { return };
    let terms = cluster.root().join("terms");
    fs::set_permissions(&terms, PermissionsExt::from_mode(0o777)).expect("chmod");
    let point = cluster.root().join("m");
    fs::create_dir(&point).expect("mkdir");
    let (named, point) = (format!("dir:{}", terms.display()), point.display().to_string());
    let backing = cluster.backing().display().to_string();
    let refused = cluster.run_ebb(&["mount", "--meta", &named, &backing, &point]);
    assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
    assert!(describe(&refused).contains("others can write to it"), "{}", describe(&refused));
    // The service, too, believes nothing there, and goes on when it is right again.
    let node = cluster.node(0);
    std::thread::sleep(Duration::from_secs(3));
    let path = node.path("f");
    let waits = std::thread::spawn(move || fs::write(path, "1"));
    std::thread::sleep(Duration::from_secs(1));
    assert!(!waits.is_finished(), "it answers");
    fs::set_permissions(&terms, PermissionsExt::from_mode(0o755)).expect("chmod");
    waits.join().expect("no panic").expect("write");
    for (wrong, why) in [("terms", "dir:DIR"), ("dir:terms", "begins with /")] {
        let line = ["meta", "--listen", "127.0.0.1:0", "--state", "/s", "--coordinator", wrong];
        let refused = cluster.run_ebb(&[&line[..], &[&backing]].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", describe(&refused));
        assert!(describe(&refused).contains(why), "{}", describe(&refused));
    }
    let begun = Instant::now();
    let nowhere = format!("dir:{}/nowhere", cluster.root().display());
    let refused = cluster.run_ebb(&["mount", "--meta", &nowhere, &backing, &point]);
    assert!(!refused.status.success() && begun.elapsed() < Duration::from_secs(20));
    assert!(describe(&refused).contains("no service has come yet"), "{}", describe(&refused));
    cluster.umount_all();
}

/// A mount may begin before the service does.
#[test]
fn a_mount_waits_for_the_first_service() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(0).prepare();
    let at = |name: &str| cluster.root().join(name).display().to_string();
    let (terms, state, point) = (format!("dir:{}", at("terms")), at("state"), at("m"));
    let backing = cluster.backing().display().to_string();
    fs::create_dir(&point).expect("mkdir");
    let mut mount = cluster.ebb();
    mount.args(["mount", "--meta", &terms, "--cache", &at("cache"), &backing, &point]);
    let mounting = mount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ebb mount");
    std::thread::sleep(Duration::from_secs(2));
    let mut service = cluster.ebb();
    service.args(["meta", "--listen", "127.0.0.1:0", "--state", &state]);
    service.args(["--coordinator", &terms, &backing]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut service = service.spawn().expect("ebb meta");
    let mounted = mounting.wait_with_output().expect("wait");
    assert!(mounted.status.success(), "{}", describe(&mounted));
    fs::write(format!("{point}/f"), "1").expect("write");
    let unmounted = cluster.run_ebb(&["umount", &point]);
    assert!(unmounted.status.success(), "{}", describe(&unmounted));
    assert_eq!(fs::read(cluster.backing().join("f")).expect("read"), b"1");
    service.kill().and_then(|()| service.wait()).expect("kill");
}

/// A program that writes its own records to a shared file and reads those of others, which must not be older than
/// what was written before, until it is to stop. Its arguments: the file, a directory for notes, who it is.
const LOAD: &str = r#"
    use strict;
    my ($path, $notes, $who) = @ARGV;
    sub told { open(my $c, '<', "$notes/$_[0]") or return 0; return <$c> + 0 }
    sub note { my ($name, $n) = @_; open(my $c, '>', "$notes/$name.new") or die; print $c $n; close $c;
               rename("$notes/$name.new", "$notes/$name") or die }
    open(my $f, '+<', $path) or die "open: $!";
    for (my $n = 1; !-e "$notes/stop"; $n++) {
        note("begun$who", $n);
        sysseek($f, $who * 4096, 0);
        (syswrite($f, pack('Q<', $n) x 512) // 0) == 4096 or die "write $n: $!";
        note("done$who", $n);
        my $other = ($who + 1 + $n % 2) % 3;
        my $least = told("done$other");
        sysseek($f, $other * 4096, 0);
        (sysread($f, my $got, 4096) // 0) == 4096 or die "read $n: $!";
        my $most = told("begun$other");
        for (unpack('Q<512', $got)) {
            next if $_ >= $least && $_ <= $most;
            my $later = '';
            for (1 .. 4) {
                select(undef, undef, undef, 0.3);
                sysseek($f, $other * 4096, 0);
                sysread($f, my $again, 8);
                $later .= ' ' . unpack('Q<', $again) . '/' . told("done$other");
            }
            die "$who has read $_ of $other, not $least to $most; later$later";
        }
    }
"#;

/// Under load, in each of the ways and at random points: nobody reads anything old, nothing is lost.
#[test]
fn a_service_moves_again_and_again_under_load() {
    moves_under_load(builder("posix"), |_| true);
}

/// The file sits at one of the nodes, which writes it without asking anybody.
#[test]
fn a_service_moves_again_and_again_under_load_past_the_daemon() {
    moves_under_load(builder("posix").option("--io-path", "auto"), went_past);
}

/// `way`: that some node went the way that is tried.
fn moves_under_load(builder: Builder, way: impl Fn(&Value) -> bool) {
    let moves = std::env::var("EBB_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(4_u64);
    let moves_on = |cluster: &mut Cluster, seed: u64, n: u64| {
        let (way, state) = ((n + seed) % 4, format!("state{n}"));
        let take_over = [&REBUILD[..], &["--take-over"]].concat();
        match way {
            0 => {
                cluster.kill_meta();
                fs::rename(cluster.meta_state(), cluster.root().join(&state)).expect("rename");
                drop(cluster.begin_meta_elsewhere(&state, &[]));
            }
            1 => {
                cluster.kill_meta();
                drop(cluster.begin_meta_elsewhere(&state, &REBUILD));
            }
            2 => {
                cluster.signal_meta(Signal::STOP);
                let mut old = cluster.begin_meta_elsewhere(&state, &take_over);
                old.signal(Signal::CONT);
                assert_eq!(old.ends_within(Duration::from_secs(10)).code(), Some(1));
            }
            _ => {
                let mut old = cluster.begin_meta_elsewhere(&state, &take_over);
                assert_eq!(old.ends_within(Duration::from_secs(10)).code(), Some(1));
            }
        }
        format!("way {way}")
    };
    under_load(builder, moves, moves_on, |statuses| {
        assert!(statuses.iter().any(way), "nobody went that way");
        // One of four ways loses the state.
        assert!(moves < 4 || statuses.iter().all(has_told_again), "{statuses:?}");
    });
}

/// The node has told a service what it knows.
pub fn has_told_again(status: &Value) -> bool {
    status["rpc"]["reassert"].as_u64() > Some(0)
}

/// Programs that check each other, while the service moves on as `moves_on` does it, which says how. `shows`: what the
/// nodes show in the end.
pub fn under_load(
    builder: Builder,
    moves: u64,
    mut moves_on: impl FnMut(&mut Cluster, u64, u64) -> String,
    shows: impl FnOnce(&[Value]),
) {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut dice = random::generator(seed);
    let mut cluster = builder.start();
    let paths: Vec<_> = cluster.nodes().iter().map(|node| node.path("shared")).collect();
    fs::write(&paths[0], [0; 3 * 4096]).expect("write");
    let notes = cluster.root().join("notes");
    fs::create_dir(&notes).expect("mkdir");
    let noted = |name: String| {
        let text = fs::read_to_string(notes.join(name)).unwrap_or_default();
        text.parse::<u64>().unwrap_or(0)
    };
    let programs = (0..).zip(&paths).map(|(who, path)| {
        let mut perl = Command::new("perl");
        perl.args(["-e", LOAD]).arg(path).arg(&notes).arg(format!("{who}"));
        perl.stderr(Stdio::piped()).spawn().expect("perl")
    });
    let programs: Vec<Child> = programs.collect();
    for n in 0..moves {
        std::thread::sleep(Duration::from_millis(dice.random_range(200..1500)));
        let how = moves_on(&mut cluster, seed, n);
        // Everybody goes on.
        let now: Vec<u64> = (0..3).map(|who| noted(format!("done{who}"))).collect();
        let on = || (0..3).all(|who| noted(format!("done{who}")) > now[who] + 10);
        let on = mounts::wait_until(Duration::from_secs(40), on);
        if !on {
            fs::write(notes.join("stop"), "").expect("write");
            for program in programs {
                eprintln!("{}", describe(&program.wait_with_output().expect("wait")));
            }
            panic!("seed {seed}: move {n}, {how}: not everybody goes on");
        }
    }
    fs::write(notes.join("stop"), "").expect("write");
    for program in programs {
        let ended = program.wait_with_output().expect("wait");
        assert!(ended.status.success(), "seed {seed}: {}", describe(&ended));
    }
    let last: Vec<u8> =
        (0..3).flat_map(|who| noted(format!("done{who}")).to_le_bytes().repeat(512)).collect();
    paths.iter().for_each(|path| same("read", &fs::read(path).expect("read"), &last));
    let statuses: Vec<Value> = cluster.nodes().iter().map(Node::status).collect();
    for status in &statuses {
        assert_eq!(status["meta"], cluster.meta_address().expect("a service"), "it has found it");
    }
    shows(&statuses);
    cluster.umount_all();
    same("flushed", &fs::read(cluster.backing().join("shared")).expect("read"), &last);
}
