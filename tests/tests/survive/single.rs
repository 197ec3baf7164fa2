//! Single things that must survive, and what happens when nothing can.

use ebb_testkit::{Cluster, mounts, skip_reason};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn one(model: &str) -> Option<Cluster> {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return None;
    }
    Some(Cluster::builder().supervised().consistency(model).flush("end").start())
}

/// The testkit's own check: without it, any test passes that is run with supervisors and has none.
#[test]
fn a_cluster_that_wants_supervisors_does_not_come_up_without() {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return;
    }
    let cluster = Cluster::builder().supervised().prepare();
    let node = cluster.node(0);
    let config = cluster.root().join("config.toml");
    fs::write(&config, "supervise = \"off\"\n").unwrap();
    let config = config.display().to_string();
    let mounting = || node.mount_with(&["--config", &config]);
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(mounting));
    let said = failed.expect_err("it has no supervisor");
    let said = said.downcast_ref::<String>().expect("a text");
    assert!(said.contains("no supervisor") && said.contains("--supervise off"), "{said}");
    assert!(node.status()["supervisor"].is_null(), "it is mounted, and by that reason failed");
    node.umount();
    node.mount();
    assert_eq!(node.status()["supervisor"]["alive"], true);
}

#[test]
fn open_files_and_positions_in_directories_go_on() {
    let Some(cluster) = one("session") else { return };
    let node = cluster.node(0);
    let names: Vec<String> = (0..3000).map(|i| format!("name-{i:05}")).collect();
    fs::create_dir(node.path("d")).unwrap();
    names.iter().for_each(|n| drop(File::create(node.path("d").join(n)).unwrap()));
    let mut file =
        File::options().read(true).append(true).create(true).open(node.path("f")).unwrap();
    file.write_all(b"before ").unwrap();
    let mut listing = fs::read_dir(node.path("d")).unwrap();
    let mut seen: Vec<String> =
        listing.by_ref().take(500).map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(node.kill_daemon());
    file.write_all(b"after").unwrap();
    seen.extend(listing.map(|e| e.unwrap().file_name().into_string().unwrap()));
    seen.sort();
    assert_eq!(seen, names, "every name once");
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before after");
    let status = node.status();
    assert_eq!(status["supervisor"]["restarts"], 1);
    assert_eq!(status["supervisor"]["reason"], "killed by signal 9");
    drop(file);
    node.umount();
    assert_eq!(fs::read(cluster.backing().join("f")).unwrap(), b"before after");
}

#[test]
fn a_file_without_a_name_goes_on_and_leaves_nothing() {
    for model in ["session", "posix"] {
        let Some(cluster) = one(model) else { return };
        let node = cluster.node(0);
        fs::write(cluster.backing().join("old"), vec![b'o'; 100_000]).unwrap();
        let old = File::options().read(true).write(true).open(node.path("old")).unwrap();
        let new = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(node.path("new"))
            .unwrap();
        new.write_all_at(b"written before", 5).unwrap();
        old.write_all_at(b"OVER", 50_000).unwrap();
        fs::remove_file(node.path("old")).unwrap();
        fs::remove_file(node.path("new")).unwrap();
        new.write_all_at(b"nameless", 100).unwrap();
        assert!(node.kill_daemon());
        new.write_all_at(b"after", 200).unwrap();
        assert!(node.kill_daemon());
        let mut bytes = [0; 205];
        new.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes[5..19], b"written before");
        assert_eq!(&bytes[100..108], b"nameless");
        assert_eq!(&bytes[200..], b"after");
        let mut bytes = vec![0; 100_000];
        old.read_exact_at(&mut bytes, 0).unwrap();
        let mut wanted = vec![b'o'; 100_000];
        wanted[50_000..50_004].copy_from_slice(b"OVER");
        assert!(bytes == wanted, "bytes of the backing and of the buffer");
        drop((old, new));
        node.umount();
        assert_eq!(fs::read_dir(cluster.backing()).unwrap().count(), 0);
        assert!(!node.cache().join("journal").exists());
    }
}

/// What it had on the backing went there while it was open, and is no longer there under any name.
#[test]
fn a_file_that_was_flushed_and_lost_its_name_is_whole_for_who_has_it_open() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    for supervised in [false, true] {
        let builder = Cluster::builder().consistency("session").flush("immediate");
        // What is written past the daemon is flushed when it is closed.
        let builder = builder.option("--io-path", "daemon");
        let cluster = if supervised { builder.supervised() } else { builder }.start();
        let node = cluster.node(0);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).open(node.path("f")).unwrap();
        file.write_all_at(b"behind a hole", 100_000).unwrap();
        let on_backing = || fs::metadata(cluster.backing().join("f")).is_ok();
        assert!(mounts::wait_until(Duration::from_secs(20), on_backing));
        fs::remove_file(node.path("f")).unwrap();
        if supervised {
            assert!(node.kill_daemon());
        }
        let mut bytes = vec![1; 100_013];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[..100_000].iter().all(|b| *b == 0), "supervised: {supervised}");
        assert_eq!(&bytes[100_000..], b"behind a hole");
        drop(file);
        node.umount();
        assert_eq!(fs::read_dir(cluster.backing()).unwrap().count(), 0);
    }
}

#[test]
fn locks_stay_and_whoever_waits_gets_them() {
    let Some(cluster) = one("posix") else { return };
    let node = cluster.node(0);
    let path = node.path("locked");
    let held = File::create(&path).unwrap();
    held.lock().unwrap();
    let other = File::open(&path).unwrap();
    assert!(other.try_lock().is_err());
    let waiter = {
        let path = path.clone();
        std::thread::spawn(move || {
            let file = File::open(path).unwrap();
            file.lock().unwrap();
            Instant::now()
        })
    };
    std::thread::sleep(Duration::from_millis(300));
    assert!(node.kill_daemon());
    assert!(other.try_lock().is_err(), "held by the first one still");
    std::thread::sleep(Duration::from_millis(300));
    assert!(!waiter.is_finished());
    let given_back = Instant::now();
    held.unlock().unwrap();
    assert!(waiter.join().unwrap() >= given_back);
    drop((held, other));
    node.umount();
}

#[test]
fn record_locks_end_with_the_close_that_ends_them() {
    let Some(cluster) = one("commit") else { return };
    let node = cluster.node(0);
    let path = node.path("records");
    fs::write(&path, [0; 100]).unwrap();
    let script = "import fcntl,sys\nf=open(sys.argv[1],'r+b')\nfcntl.lockf(f,fcntl.LOCK_EX|fcntl.LOCK_NB,10,20)\n\
                  print('held',flush=True)\nsys.stdin.readline()\nf.close()\nprint('closed',flush=True)\nsys.stdin.readline()";
    let mut python = std::process::Command::new("python3");
    python.args(["-c", script]).arg(&path);
    python.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = python.spawn().expect("python3");
    let (mut to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(from));
    assert_eq!(lines.next().unwrap().unwrap(), "held");
    let free = || {
        let check = "import fcntl,sys\nf=open(sys.argv[1],'r+b')\nfcntl.lockf(f,fcntl.LOCK_EX|fcntl.LOCK_NB,5,25)";
        let done = std::process::Command::new("python3")
            .args(["-c", check])
            .arg(&path)
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        done.success()
    };
    assert!(!free());
    assert!(node.kill_daemon());
    assert!(!free(), "the lock outlives the daemon");
    writeln!(to, "go on").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "closed");
    assert!(free(), "and ends with the close");
    drop(to);
    child.wait().unwrap();
    node.umount();
}

#[test]
fn a_large_copy_and_a_mapping_do_not_notice() {
    let Some(cluster) = one("session") else { return };
    let node = cluster.node(0);
    let source = cluster.root().join("source");
    let content: Vec<u8> =
        (0..48_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(&source, &content).unwrap();
    let script = "import mmap,sys,time\nf=open(sys.argv[1],'r+b')\nm=mmap.mmap(f.fileno(),1<<20)\n\
                  for i in range(256):\n m[i*4096:i*4096+4]=b'%04d'%i\n time.sleep(0.004)\nm.flush()\nm.close()\nf.close()";
    fs::write(node.path("mapped"), vec![b'.'; 1 << 20]).unwrap();
    let mut mapper = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(node.path("mapped"))
        .spawn()
        .unwrap();
    let mut copy = std::process::Command::new("dd")
        .arg("bs=1M")
        .arg("status=none")
        .arg(format!("if={}", source.display()))
        .arg(format!("of={}", node.path("copy").display()))
        .arg("oflag=dsync")
        .spawn()
        .unwrap();
    let mut kills = 0;
    while copy.try_wait().unwrap().is_none() || mapper.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(150));
        if kills < 4 {
            kills += u32::from(node.kill_daemon());
        }
    }
    assert!(copy.wait().unwrap().success() && mapper.wait().unwrap().success());
    assert!(kills >= 1, "it was killed meanwhile");
    assert!(fs::read(node.path("copy")).unwrap() == content);
    let mapped = fs::read(node.path("mapped")).unwrap();
    for i in 0..256 {
        assert_eq!(&mapped[i * 4096..i * 4096 + 4], format!("{i:04}").as_bytes());
        assert_eq!(mapped[i * 4096 + 4], b'.');
    }
    node.umount();
}

#[test]
fn without_a_daemon_that_can_start_everything_fails_in_time_and_nothing_hangs() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let cluster =
        Cluster::builder().supervised().option("--restart-timeout", "2s").flush("end").start();
    let node = cluster.node(0);
    let mut file = File::create(node.path("f")).unwrap();
    file.write_all(b"kept").unwrap();
    file.sync_all().unwrap();
    // No daemon goes on without the journal of the service.
    fs::rename(node.cache().join("meta"), node.cache().join("meta.away")).unwrap();
    let killed = Instant::now();
    assert!(node.kill_daemon_only());
    let failed = file.write_all(b"waits").unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc_eio()), "{failed}");
    assert!(killed.elapsed() < Duration::from_secs(15), "{:?}", killed.elapsed());
    let later = mounts::wait_until(Duration::from_secs(5), || {
        fs::metadata(node.path("f")).is_err_and(|e| e.raw_os_error() == Some(107))
    });
    assert!(later, "a dead mount");
    drop(file);
    fs::rename(node.cache().join("meta.away"), node.cache().join("meta")).unwrap();
    let output = node.ebb("umount", &[], &[]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    node.mount();
    assert_eq!(fs::read(node.path("f")).unwrap(), b"kept");
    node.umount();
    assert_eq!(fs::read(cluster.backing().join("f")).unwrap(), b"kept");
}

fn libc_eio() -> i32 {
    5
}

#[test]
fn a_daemon_goes_on_without_its_supervisor() {
    let Some(cluster) = one("session") else { return };
    let node = cluster.node(0);
    let file = File::create(node.path("f")).unwrap();
    let supervisor = node.status()["supervisor"]["pid"].as_u64().unwrap() as i32;
    let supervisor = rustix::process::Pid::from_raw(supervisor).unwrap();
    assert!(node.status()["unsupervised"].is_null());
    rustix::process::kill_process(supervisor, Signal::KILL).unwrap();
    file.write_all_at(b"alone", 0).unwrap();
    let status = node.wait_status(Duration::from_secs(5), |s| s["supervisor"]["alive"] == false);
    assert_eq!(status["supervisor"]["restarts"], 0);
    drop(file);
    node.umount();
    assert_eq!(fs::read(cluster.backing().join("f")).unwrap(), b"alone");
}

#[test]
fn a_restart_on_request_and_a_signal_to_the_supervisor_work() {
    let Some(cluster) = one("session") else { return };
    let node = cluster.node(0);
    let file = File::create(node.path("f")).unwrap();
    let before = node.status();
    let output = node.ebb("restart", &[], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    file.write_all_at(b"by another one", 0).unwrap();
    let after = node.status();
    assert_ne!(before["pid"], after["pid"]);
    assert_eq!(before["meta"], after["meta"]);
    assert_eq!(before["listen"], after["listen"]);
    let supervisor = after["supervisor"]["pid"].as_u64().unwrap() as i32;
    let supervisor = rustix::process::Pid::from_raw(supervisor).unwrap();
    rustix::process::kill_process(supervisor, Signal::HUP).unwrap();
    let third = node.wait_status(Duration::from_secs(20), |s| s["pid"] != after["pid"]);
    assert_eq!(third["supervisor"]["restarts"], 2);
    drop(file);
    // A drain and an unmount, as when the daemon itself gets it.
    rustix::process::kill_process(supervisor, Signal::TERM).unwrap();
    assert!(mounts::wait_until(Duration::from_secs(20), || !mounts::is_mounted(node.mountpoint())));
    let gone = || rustix::process::test_kill_process(supervisor).is_err();
    assert!(mounts::wait_until(Duration::from_secs(10), gone));
    assert_eq!(fs::read(cluster.backing().join("f")).unwrap(), b"by another one");
}

#[test]
fn two_nodes_see_each_other_through_the_death_of_one() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let cluster =
        Cluster::builder().supervised().nodes(2).consistency("commit").flush("end").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let mine = File::create(a.path("f")).unwrap();
    mine.write_all_at(b"aaaa", 0).unwrap();
    mine.sync_all().unwrap();
    mine.write_all_at(b"unpublished", 100).unwrap();
    // A program that another test starts just now closes its copy of the descriptor, which publishes.
    let all = [&b"aaaa"[..], &[0; 96], b"unpublished"].concat();
    let as_published = |seen: Vec<u8>| seen == b"aaaa" || seen == all;
    assert!(as_published(fs::read(b.path("f")).unwrap()));
    // The first one has the service inside.
    assert!(a.kill_daemon());
    assert!(as_published(fs::read(b.path("f")).unwrap()));
    mine.sync_all().unwrap();
    let theirs = File::options().write(true).open(b.path("f")).unwrap();
    assert!(b.kill_daemon());
    theirs.write_all_at(b"BB", 2).unwrap();
    theirs.sync_all().unwrap();
    let seen = fs::read(a.path("f")).unwrap();
    assert_eq!((&seen[..4], &seen[100..]), (&b"aaBB"[..], &b"unpublished"[..]));
    drop((mine, theirs));
    cluster.umount_all();
}
