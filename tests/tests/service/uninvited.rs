//! Who is not of the job gets nothing and harms nothing: no token, a wrong one, a replayed
//! handshake, another user, garbage, and floods of connections that say nothing, against a real
//! daemon's service, peer port and control socket, while its mount goes on working.

use ebb_testkit::{Cluster, Node, describe, skip_reason};
use ebb_tests::content;
use ebb_tests::tools::wait_until;
use ebb_transport::{PeerPool, PoolOptions, ReadRequest, Token};
use ebb_types::{ByteRange, Ino};
use rand::{Rng, RngCore, SeedableRng};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Connections of a flood.
const FLOOD: usize = 10_000;
/// What a flood may cost the daemon: strangers of service and peers, and some.
const DESCRIPTORS_MAX: usize = 700;
const MEMORY_KIB_MAX: u64 = 64 << 10;
/// Where TLS is spoken, more is waited for after this.
const HALF_A_TLS_HELLO: &[u8] = b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03and random bytes";
/// The user that nobody is.
const STRANGER: u32 = 65_534;

fn meta_address(node: &Node) -> String {
    node.status()["meta"].as_str().expect("address of the service").to_owned()
}

fn peer_address(node: &Node) -> String {
    let text = std::fs::read(node.path(".ebb/config")).expect("the effective configuration");
    let config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    config["listen"].as_str().expect("the peer address").to_owned()
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

fn memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a living daemon");
    let line = status.lines().find(|l| l.starts_with("VmRSS")).expect("VmRSS");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

/// The mount does what a mount does, and in time.
fn works(node: &Node, round: u64) {
    let start = Instant::now();
    let name = node.path(format!("works-{round}"));
    let data = content::bytes(1, round, 0, 100_000);
    std::fs::write(&name, &data).expect("write");
    assert!(std::fs::read(&name).expect("read") == data);
    std::fs::remove_file(&name).expect("unlink");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

fn nodes_of_service(node: &Node) -> usize {
    let output = node.ebb("status", &["--json"], &[]);
    assert!(output.status.success(), "{}", describe(&output));
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    status["peers"].as_array().map_or(0, Vec::len)
}

fn raise_descriptors() -> usize {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, Rlimit { ..files }).expect("up to the hard limit");
    files.current.map_or(usize::MAX, |n| n as usize)
}

#[test]
fn ten_thousand_half_open_connections_harm_nobody() {
    if skip_reason().is_some() {
        return;
    }
    let room = raise_descriptors();
    let flood = FLOOD.min(room.saturating_sub(500));
    assert!(flood > 500, "descriptors for a flood");
    let cluster = Cluster::builder().nodes(2).token().prepare();
    let node = cluster.node(0);
    node.mount();
    let pid = node.pid().expect("a daemon");
    works(node, 0);
    for (round, address) in [meta_address(node), peer_address(node)].iter().enumerate() {
        let before = (descriptors(pid), memory_kib(pid));
        let beginnings: [&[u8]; 5] =
            [b"", b"PRI * HTTP/2.0\r\n", b"EbP2\x01\x00", &[0xff; 900], HALF_A_TLS_HELLO];
        let mut open = Vec::with_capacity(flood);
        let mut most = before;
        for i in 0..flood {
            let mut stream = TcpStream::connect(address).expect("connect");
            // It may be closed already.
            let _ = stream.write_all(beginnings[i % beginnings.len()]);
            open.push(stream);
            if i % 1000 == 999 {
                most = (most.0.max(descriptors(pid)), most.1.max(memory_kib(pid)));
                works(node, i as u64);
            }
        }
        // A node joins in the middle of it.
        cluster.node(1).mount();
        works(cluster.node(1), 1);
        cluster.node(1).umount();
        println!("{flood} to {address}: descriptors, KiB before {before:?}, at most {most:?}");
        assert!(most.0 <= before.0 + DESCRIPTORS_MAX, "{most:?} after {before:?}");
        assert!(most.1 <= before.1 + MEMORY_KIB_MAX, "{most:?} after {before:?}");
        drop(open);
        wait_until(Duration::from_secs(20), "the flood is gone", || {
            descriptors(pid) <= before.0 + 16
        });
        works(node, 90 + round as u64);
    }
    cluster.node(0).umount();
}

#[test]
fn connections_that_stay_silent_are_closed_in_time() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().token().start();
    let node = cluster.node(0);
    let half: [(String, &[u8]); 6] = [
        (meta_address(node), HALF_A_TLS_HELLO),
        (peer_address(node), HALF_A_TLS_HELLO),
        (meta_address(node), b""),
        (meta_address(node), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
        (peer_address(node), b""),
        (peer_address(node), b"EbP2\x01\x00"),
    ];
    let mut streams: Vec<TcpStream> = Vec::new();
    for (address, beginning) in &half {
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.write_all(beginning).expect("send");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("deadline");
        streams.push(stream);
    }
    for (stream, (address, _)) in streams.iter_mut().zip(&half) {
        let ended = stream.read_to_end(&mut Vec::new());
        let closed =
            ended.map_or_else(|e| e.kind() == std::io::ErrorKind::ConnectionReset, |_| true);
        assert!(closed, "{address} keeps a silent connection open");
    }
    works(node, 1);
    node.umount();
}

#[test]
fn garbage_gets_nothing_and_changes_nothing() {
    if skip_reason().is_some() {
        return;
    }
    let seed = ebb_testkit::random::seed();
    println!("seed {seed}");
    let mut dice = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let cluster = Cluster::builder().token().start();
    let node = cluster.node(0);
    std::fs::write(node.path("kept"), b"kept").expect("write");
    let pid = node.pid().expect("a daemon");
    let (meta, peers) = (meta_address(node), peer_address(node));
    let before = memory_kib(pid);
    for round in 0..400u64 {
        let address = if round % 2 == 0 { &meta } else { &peers };
        let mut garbage = match round % 3 {
            0 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            1 => b"EbP2\x01\x00\x00\x00".to_vec(),
            _ => Vec::new(),
        };
        let mut noise = vec![0; dice.random_range(1..200_000)];
        dice.fill_bytes(&mut noise);
        garbage.extend_from_slice(&noise);
        let mut stream = TcpStream::connect(address).expect("connect");
        let _ = stream.write_all(&garbage);
    }
    works(node, 1);
    let after = memory_kib(pid);
    assert!(after <= before + MEMORY_KIB_MAX, "{before} KiB before, {after} KiB after");
    // It also finds the control socket, which is a matter of this user's own processes.
    for round in 0..50 {
        let mut stream = UnixStream::connect(node.cache().join("control.sock")).expect("connect");
        let mut noise = vec![0; 100 * round + 1];
        dice.fill_bytes(&mut noise);
        noise.push(b'\n');
        let _ = stream.write_all(&noise);
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.contains("not a request"), "{answer}");
    }
    node.umount();
    let kept = std::fs::read(cluster.backing().join("kept")).expect("read");
    assert_eq!(kept, b"kept");
    assert_eq!(std::fs::read_dir(cluster.backing()).expect("list").count(), 1);
}

#[test]
fn without_the_token_nobody_joins_and_nobody_reads() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().token().start();
    let node = cluster.node(0);
    std::fs::write(node.path("secret"), vec![7; 10_000]).expect("write");
    let other = cluster.root().join("other-token");
    let made = cluster.ebb().arg("token").arg(&other).output().expect("ebb token");
    assert!(made.status.success(), "{}", describe(&made));
    let point = cluster.root().join("stranger");
    std::fs::create_dir(&point).expect("mount point");
    let (meta, peers) = (meta_address(node), peer_address(node));
    let before = nodes_of_service(node);
    for token in [None, Some(&other)] {
        let mut command = cluster.ebb();
        command.args(["mount", "--meta", &meta, "--node", "stranger", "--cache"]);
        command.arg(cluster.root().join("stranger-cache"));
        if let Some(token) = token {
            command.arg("--token-file").arg(token);
        }
        let output = command.arg(cluster.backing()).arg(&point).output().expect("ebb mount");
        assert_eq!(output.status.code(), Some(2), "{token:?}: {}", describe(&output));
        assert!(!ebb_testkit::mounts::is_mounted(&point));
    }
    assert_eq!(nodes_of_service(node), before);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ino = Ino(std::fs::metadata(node.path("secret")).expect("stat").ino());
    let request = ReadRequest::of_owner(ino, vec![ByteRange::new(0, 10_000)]);
    runtime.expect("runtime").block_on(async {
        let wrong = Token::load(&other).expect("token");
        let right = Token::load(cluster.root().join("token")).expect("token");
        for token in [None, Some(Arc::new(wrong))] {
            let pool = PeerPool::new(token, PoolOptions::default());
            let read = pool.read(&peers, &request).await;
            assert!(read.is_err(), "{read:?}");
        }
        // With the right one the same request is answered: what was refused was worth asking.
        let pool = PeerPool::new(Some(Arc::new(right)), PoolOptions::default());
        let read = pool.read(&peers, &request).await.expect("the job's own");
        assert!(read == vec![7; 10_000]);
    });
    works(node, 1);
    node.umount();
}

/// What went from the client to the server through [`record`].
type Taken = Arc<Mutex<Vec<u8>>>;

/// Stands between a client and `server`, once, and keeps what the client says.
fn record(server: &str) -> (String, Taken) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("address").to_string();
    let (server, taken) = (server.to_owned(), Taken::default());
    let keep = Arc::clone(&taken);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(mut client), Ok(mut out)) = (client, TcpStream::connect(&server)) else {
                return;
            };
            let (mut answers, mut back) =
                (out.try_clone().expect("dup"), client.try_clone().expect("dup"));
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let keep = Arc::clone(&keep);
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = client.read(&mut buffer) {
                    keep.lock().expect("no panic").extend_from_slice(&buffer[..n]);
                    if out.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, taken)
}

#[test]
fn a_replayed_handshake_is_refused() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().token().start();
    let node = cluster.node(0);
    let (meta, peers) = (meta_address(node), peer_address(node));
    // A node joins through somebody who listens, and does things.
    let (proxy, taken) = record(&meta);
    let point = cluster.root().join("second");
    std::fs::create_dir(&point).expect("mount point");
    let mut command = cluster.ebb();
    command.args(["mount", "--meta", &proxy, "--node", "second", "--cache"]);
    command.arg(cluster.root().join("second-cache"));
    command.arg("--token-file").arg(cluster.root().join("token"));
    let output = command.arg(cluster.backing()).arg(&point).output().expect("ebb mount");
    assert!(output.status.success(), "{}", describe(&output));
    std::fs::create_dir(point.join("made")).expect("mkdir");
    let said = taken.lock().expect("no panic").clone();
    assert!(said.len() > 100, "the handshake was taken");
    std::fs::remove_dir(point.join("made")).expect("rmdir");
    // Said again, word for word, it makes no directory and throws nobody out.
    for _ in 0..3 {
        let mut again = TcpStream::connect(&meta).expect("connect");
        let _ = again.write_all(&said);
        again.set_read_timeout(Some(Duration::from_secs(3))).expect("deadline");
        let mut answer = Vec::new();
        let _ = again.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(text.contains("the job token differs"), "{text:?}");
    }
    assert!(!point.join("made").exists() && !node.path("made").exists());
    std::fs::write(point.join("alive"), b"x").expect("the second node was not thrown out");
    let output = cluster.ebb().arg("umount").arg(&point).output().expect("ebb umount");
    assert!(output.status.success(), "{}", describe(&output));

    // The same with a peer's handshake.
    let (proxy, taken) = record(&peers);
    let token = Token::load(cluster.root().join("token")).expect("token");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let request = ReadRequest::of_owner(Ino(1), vec![ByteRange::new(0, 1)]);
    let _ = runtime.expect("runtime").block_on(async {
        PeerPool::new(Some(Arc::new(token)), PoolOptions::default()).read(&proxy, &request).await
    });
    let said = taken.lock().expect("no panic").clone();
    assert!(said.len() >= 72 + 48, "hello, proof and a request: {}", said.len());
    let mut again = TcpStream::connect(&peers).expect("connect");
    let _ = again.write_all(&said);
    again.set_read_timeout(Some(Duration::from_secs(8))).expect("deadline");
    let mut answer = Vec::new();
    let _ = again.read_to_end(&mut answer);
    // Its challenge, and at most the word that the proof is wrong.
    assert!((72..=80).contains(&answer.len()), "{} bytes", answer.len());
    if let Some(verdict) = answer.get(72..80) {
        assert_ne!(&verdict[6..], [0, 0], "not welcome");
    }
    works(node, 1);
    node.umount();
}

/// Runs a shell script as nobody.
fn as_stranger(script: &str) -> (bool, String) {
    let mut command = Command::new("bash");
    command.args(["-c", script]).current_dir("/").uid(STRANGER).gid(STRANGER);
    // The tests' own settings are none of the command's.
    std::env::vars().filter(|(k, _)| k.starts_with("EBB_")).for_each(|(k, _)| {
        command.env_remove(k);
    });
    let output = command.output().expect("bash can be started");
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn other_users_get_nothing() {
    if skip_reason().is_some() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: needs root to become another user");
        return;
    }
    // No token: on this machine only this user is served.
    let cluster = Cluster::builder().start();
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![7; 5000]).expect("write");
    let open = |dir: &Path| {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    };
    // As if somebody had opened the directories above.
    open(cluster.root());
    let home = node.cache().parent().expect("a directory above");
    open(home);
    let cache = node.cache().display();
    for script in [
        format!("ls {cache}"),
        format!("cat {cache}/journal"),
        format!("cat {cache}/ebb.log"),
        format!("ls {}", node.mountpoint().display()),
    ] {
        let (worked, text) = as_stranger(&script);
        assert!(!worked && text.contains("ermission denied"), "{script}: {text}");
    }
    // The cache itself open as well: the files in it still are this user's alone.
    open(node.cache());
    let socket = node.cache().join("control.sock");
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o777)).expect("chmod");
    let (worked, text) = as_stranger(&format!("cat {cache}/journal {cache}/ebb.log"));
    assert!(!worked && !text.contains("EBBNODE"), "{text}");
    if ebb_tests::tools::find("python3").is_some() {
        let client = format!(
            "exec python3 -c 'import socket,sys; s=socket.socket(socket.AF_UNIX); \
             s.connect(\"{}\"); s.sendall(b\"{{\\\"cmd\\\":\\\"status\\\"}}\\n\"); \
             print(len(s.recv(100)))'",
            socket.display()
        );
        let (_, text) = as_stranger(&client);
        let is_closed = text.contains("ConnectionReset") || text.contains("BrokenPipe");
        assert!(text.trim() == "0" || is_closed, "{text}");
    }

    let binary = ebb_testkit::ebb_binary();
    let asked =
        format!("HOME=/ XDG_RUNTIME_DIR=/tmp {} status {}", binary.display(), meta_address(node));
    let (worked, text) = as_stranger(&asked);
    assert!(!worked && text.contains("only this user's processes"), "{text}");
    // The peer port, by hand: a hello is answered to this user and to nobody else.
    let (host, port) = peer_address(node)
        .rsplit_once(':')
        .map(|(h, p)| (h.to_owned(), p.to_owned()))
        .expect("HOST:PORT");
    let hello = format!(
        "exec 3<>/dev/tcp/{host}/{port}; printf 'EbP2\\x01\\0\\0\\0%032d' 0 >&3; \
         timeout 8 head -c 4 <&3"
    );
    let (_, text) = as_stranger(&hello);
    assert!(!text.contains("EbP2"), "{text}");
    let own = Command::new("bash").args(["-c", &hello]).output().expect("bash");
    assert_eq!(own.stdout, b"EbP2", "{}", describe(&own));
    works(node, 1);
    node.umount();
}

fn modes(dir: &Path, found: &mut Vec<(String, u32)>) {
    for entry in std::fs::read_dir(dir).expect("list") {
        let path = entry.expect("entry").path();
        let meta = std::fs::symlink_metadata(&path).expect("stat");
        found.push((path.display().to_string(), meta.mode() & 0o7777));
        if meta.is_dir() {
            modes(&path, found);
        }
    }
}

#[test]
fn nothing_that_is_kept_can_be_read_by_others() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().separate_meta().token().start();
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![7; 5000]).expect("write");
    let mut found = Vec::new();
    for dir in [node.cache(), &cluster.root().join("meta")] {
        let mode = std::fs::metadata(dir).expect("stat").mode() & 0o7777;
        assert_eq!(mode, 0o700, "{}", dir.display());
        modes(dir, &mut found);
    }
    let names: Vec<&str> = found.iter().filter_map(|(p, _)| p.rsplit('/').next()).collect();
    for name in ["journal", "control.sock", "ebb.log", "lock"] {
        assert!(names.contains(&name), "{name} is kept: {names:?}");
    }
    for (path, mode) in &found {
        assert_eq!(mode & 0o077, 0, "{path} has mode {mode:04o}");
    }
    let log = cluster.root().join("own.log");
    let mut command = cluster.ebb();
    command.args(["meta", "--listen", "127.0.0.1:0", "--log"]).arg(&log);
    command.arg("--state").arg(cluster.root().join("own-state")).arg(cluster.backing());
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().expect("ebb meta");
    wait_until(Duration::from_secs(10), "a log", || log.exists());
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(std::fs::metadata(&log).expect("stat").mode() & 0o7777, 0o600);
    node.umount();
}

/// Another user may write to the directory of the backing, and makes the files that the job needs next.
#[test]
fn a_stranger_in_a_shared_directory_gets_and_changes_nothing() {
    if skip_reason().is_some() || !rustix::process::geteuid().is_root() {
        return;
    }
    let cluster = Cluster::builder().nodes(1).flush("end").start();
    let (node, backing) = (cluster.node(0), cluster.backing());
    for (dir, mode) in [(cluster.root(), 0o755), (backing, 0o777)] {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).expect("chmod");
    }
    std::fs::write(node.path("first"), "x").expect("write");
    let first = std::fs::metadata(node.path("first")).expect("stat").ino();
    let next = |n: u64| backing.join(format!(".ebb-part-{:x}", first + n));
    let made = Command::new("touch").args((0..40).map(next)).uid(STRANGER).gid(STRANGER).status();
    assert!(made.expect("touch").success());
    for name in ["secret", "other"] {
        std::fs::write(node.path(name), format!("the {name} of root")).expect("write");
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(node.path(name), private).expect("chmod");
    }
    let ino = std::fs::metadata(node.path("secret")).expect("stat").ino();
    assert!((first..first + 40).contains(&ino), "names of before would have been among these");
    node.drain();
    for name in ["secret", "other"] {
        let meta = std::fs::metadata(backing.join(name)).expect("published");
        assert_eq!((meta.uid(), meta.mode() & 0o7777, meta.nlink()), (0, 0o600, 1), "{name}");
        let content = std::fs::read_to_string(backing.join(name)).expect("read");
        assert_eq!(content, format!("the {name} of root"));
    }
    for n in 0..40 {
        let meta = std::fs::metadata(next(n)).expect("the stranger's files are left to him");
        assert_eq!((meta.uid(), meta.len()), (STRANGER, 0));
    }
    for name in ["status.json", "config", "metrics"] {
        let meta = std::fs::metadata(node.path(".ebb").join(name)).expect("stat");
        assert_eq!(meta.mode() & 0o777, 0o400, "{name} tells of everybody's files");
    }
    node.umount();
}

/// The part file in a directory of the backing.
fn part_of(backing: &Path) -> PathBuf {
    let entries = std::fs::read_dir(backing).expect("list").flatten().map(|e| e.path());
    let is_part = |p: &PathBuf| p.to_string_lossy().contains("/.ebb-part-");
    let parts: Vec<_> = entries.filter(is_part).collect();
    assert_eq!(parts.len(), 1, "{parts:?}");
    parts[0].clone()
}

/// A file is partly in its part file, and another user puts something else in the place of that: a file of
/// his own, or a link to a file of somebody whose directory he may not write to.
#[test]
fn a_part_file_that_a_stranger_swaps_is_not_written_to_nor_published() {
    if skip_reason().is_some() || !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: needs mounts and root to become another user");
    }
    for links in [false, true] {
        let cluster = Cluster::builder().nodes(2).separate_meta().flush("end").start();
        let (one, two, backing) = (cluster.node(0), cluster.node(1), cluster.backing());
        for (dir, mode) in [(cluster.root(), 0o755), (backing, 0o777)] {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).expect("chmod");
        }
        let (first, rest) = (content::bytes(1, 1, 0, 100_000), content::bytes(2, 1, 0, 50_000));
        for (node, at, data) in [(one, 0, &first), (two, 100_000, &rest)] {
            let mut how = std::fs::File::options();
            let file = how.write(true).create(true).truncate(false).open(node.path("f"));
            file.expect("open").write_all_at(data, at).expect("write");
            node.wait_closed();
        }
        let _ = two.ebb("drain", &["--timeout", "10s"], &[]);
        assert!(!backing.join("f").exists(), "it is not whole");
        let part = part_of(backing);
        let victim = match links {
            true => cluster.root().join("victim"),
            false => backing.join("victim"),
        };
        let (path, aside) = (part.display(), backing.join("aside"));
        if links {
            std::fs::write(&victim, "the victim's").expect("write");
            std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o600))
                .expect("chmod");
            let moved = as_stranger(&format!("mv {path} {}", aside.display()));
            assert!(moved.0, "{moved:?}");
            // Where the kernel protects no links he makes it himself.
            std::fs::hard_link(&victim, &part).expect("link");
        } else {
            let victim = victim.display();
            let script = format!(
                "echo -n \"the victim's\" > {victim} && mv {path} {} && ln {victim} {path}",
                aside.display()
            );
            let moved = as_stranger(&script);
            assert!(moved.0, "{moved:?}");
        }
        let of = |p: &Path| {
            let m = std::fs::metadata(p).expect("stat");
            (m.ino(), m.len(), m.mode(), m.uid(), m.nlink(), m.mtime(), m.mtime_nsec())
        };
        let before = of(&victim);
        let drain = one.ebb("drain", &["--timeout", "20s"], &[]);
        assert_eq!(drain.status.code(), Some(3), "links: {links}: {}", describe(&drain));
        println!("links: {links}: {}", describe(&drain));
        assert!(!backing.join("f").exists(), "another file never gets the name");
        assert_eq!((of(&victim), of(&part)), (before, before), "links: {links}");
        let there = std::fs::read_to_string(&victim).expect("read");
        assert_eq!(there, "the victim's", "links: {links}");
        // Nor are bytes of it read; nothing is lost, and the file is whole when its own part is back.
        let whole = [&first[..], &rest[..]].concat();
        let read = std::fs::read(one.path("f"));
        println!("links: {links}: read meanwhile: {:?}", read.as_ref().map(Vec::len));
        if let Ok(read) = read {
            content::same("f", &read, &whole);
        }
        std::fs::rename(&aside, &part).expect("put it back");
        one.drain();
        two.drain();
        content::same("f", &std::fs::read(backing.join("f")).expect("published"), &whole);
        cluster.umount_all();
    }
}
