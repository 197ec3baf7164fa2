//! `ebb trace`, `ebb check` and `ebb advise` on small programs in which races are planted, or none:
//! every one is found, under the models under which it is one, and nothing else. Then the advice is
//! tried on real mounts.

use ebb_testkit::{Cluster, ebb_binary};
use ebb_tests::tools::{available, run, try_run};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// The weakest built-in model under which a program has no race.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Needs {
    Session,
    Mpiio,
    /// commit and romio, which ask for the same.
    Commit,
    Posix,
    /// It races under every model.
    Repair,
}
use Needs::{Commit, Mpiio, Posix, Repair, Session};

impl Needs {
    /// The models under which it races.
    fn racing(self) -> BTreeSet<&'static str> {
        let at = [
            ("session", Session),
            ("mpiio", Mpiio),
            ("romio", Commit),
            ("commit", Commit),
            ("posix", Posix),
        ];
        at.into_iter().filter(|(_, is)| *is < self).map(|(name, _)| name).collect()
    }
}

/// What is planted: bytes that are raced for, and the two calls.
type Planted = Option<(u64, u64, [&'static str; 2])>;

/// Program, ranks, what it needs, what is planted.
type Row = (&'static str, u32, Needs, Planted);

const READ: Planted = Some((0, 10, ["pread", "pwrite"]));
const WRITE: Planted = Some((0, 10, ["pwrite", "pwrite"]));

#[rustfmt::skip]
const MPI: [Row; 55] = [
    ("plain_unordered",           2, Repair,  WRITE),
    ("overlap_by_one",            2, Repair,  Some((100, 101, ["pwrite", "pwrite"]))),
    ("disjoint",                  2, Session, None),
    ("only_reads",                2, Session, None),
    ("truncate_against_write",    2, Repair,  Some((5, 10, ["ftruncate", "pwrite"]))),
    ("all_truncate",              2, Repair,  Some((0, 20, ["open", "pwrite"]))),
    ("root_truncates",            2, Session, None),
    ("barrier_only",              2, Posix,   READ),
    ("fsync_barrier",             2, Commit,  READ),
    ("fsync_barrier_fsync",       2, Mpiio,   READ),
    ("close_barrier_open",        2, Session, None),
    ("close_barrier",             2, Commit,  READ),
    ("close_after_barrier",       2, Posix,   READ),
    ("fsync_after_barrier",       2, Posix,   READ),
    ("read_then_overwrite",       2, Session, None),
    ("overwrite",                 2, Session, None),
    ("overwrite_unseen",          2, Commit,  WRITE),
    ("steps",                     2, Session, None),
    ("message",                   2, Session, None),
    ("message_wrong_way",         2, Repair,  READ),
    ("message_later",             2, Session, None),
    ("message_not_awaited",       2, Repair,  READ),
    ("message_from_anybody",      2, Session, None),
    ("message_too_early",         2, Repair,  READ),
    ("second_message_first",      2, Session, None),
    ("requests_kept",             2, Session, None),
    ("passed_on",                 3, Session, None),
    ("ring",                      3, Session, None),
    ("bcast_from_writer",         2, Session, None),
    ("bcast_from_reader",         2, Repair,  READ),
    ("reduce_to_reader",          2, Session, None),
    ("reduce_to_writer",          2, Repair,  READ),
    ("allreduce",                 2, Session, None),
    ("allgather",                 2, Session, None),
    ("scatter",                   2, Session, None),
    ("gather_to_writer",          2, Repair,  READ),
    ("scan_up",                   2, Session, None),
    ("scan_down",                 2, Repair,  READ),
    ("barrier_later",             2, Session, None),
    ("barrier_not_awaited",       2, Repair,  READ),
    ("barrier_of_a_part",         4, Session, None),
    ("barrier_of_the_other_part", 4, Repair,  READ),
    ("barrier_of_a_copy",         2, Session, None),
    ("locked",                    2, Session, None),
    ("locked_until_closed",       2, Session, None),
    ("flocked",                   2, Session, None),
    ("lock_is_shared",            2, Repair,  WRITE),
    ("lock_of_other_bytes",       2, Repair,  WRITE),
    ("reader_without_lock",       2, Repair,  READ),
    ("appends",                   2, Posix,   Some((9, 10, ["write", "write"]))),
    ("appends_in_turn",           2, Session, None),
    ("file_sync_barrier_sync",    2, Commit,  Some((0, 10, ["pread", "pwrite"]))),
    ("file_close_open",           2, Session, None),
    ("file_barrier_only",         2, Posix,   Some((0, 10, ["pread", "pwrite"]))),
    ("file_collective",           2, Session, None),
];

#[rustfmt::skip]
const POSIX: [Row; 17] = [
    ("child_reads",               1, Session, None),
    ("parent_writes_after_fork",  1, Repair,  READ),
    ("children_write",            1, Repair,  WRITE),
    ("children_write_halves",     1, Session, None),
    ("parent_waits",              1, Session, None),
    ("parent_does_not_wait",      1, Repair,  READ),
    ("closed_by_the_end",         1, Session, None),
    ("parent_keeps_it_open",      1, Commit,  READ),
    ("stream_is_closed",          1, Session, None),
    ("stream_is_only_flushed",    1, Posix,   Some((0, 10, ["fflush", "fread"]))),
    ("system_reads",              1, Session, None),
    ("shell_writes",              1, Session, None),
    ("shell_in_the_background",   1, Repair,  Some((0, 10, ["pread", "write"]))),
    ("another_program",           1, Session, None),
    ("children_take_turns",       1, Session, None),
    ("mapping_against_read",      1, Repair,  Some((0, 10, ["munmap", "pread"]))),
    ("copy_is_closed",            1, Session, None),
];

fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

fn compile(compiler: &str, source: &str, into: &Path) -> PathBuf {
    let program = into.join(source.trim_end_matches(".c"));
    let mut command = Command::new(compiler);
    let source = programs().join("races").join(source);
    command
        .current_dir(into)
        .args(["-O1", "-g", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(source);
    run(&mut command, LIMIT);
    program
}

fn ebb() -> Command {
    Command::new(ebb_binary())
}

/// Traces a command into a new directory.
fn trace(dir: &Path, mpicc: &str, command: &[&str]) {
    let mut traced = ebb();
    traced.arg("trace").arg("-o").arg(dir).args(["--mpicc", mpicc, "--"]).args(command);
    run(&mut traced, LIMIT);
}

/// What `ebb check` says, which must be what its status says.
fn check(dir: &Path, options: &[&str]) -> Value {
    let mut command = ebb();
    let ended = try_run(command.arg("check").arg(dir).arg("--json").args(options), LIMIT);
    let ended = ended.expect("run");
    let said: Value =
        serde_json::from_str(&ended.out).unwrap_or_else(|e| panic!("{e}: {}", ended.err));
    let races = |m: &Value| m["races"].as_u64().expect("a number") > 0;
    let any = said["models"].as_array().expect("models").iter().any(races);
    let code = ended.status.and_then(|s| s.code());
    assert_eq!(code, Some(i32::from(any)), "{said:#}");
    said
}

/// What is wrong with a verdict.
fn judge(row: &Row, said: &Value) -> Result<(), String> {
    let (name, _, needs, planted) = row;
    let models = said["models"].as_array().expect("models");
    let racing = models.iter().filter(|m| m["races"].as_u64() > Some(0));
    let racing: BTreeSet<&str> = racing.filter_map(|m| m["model"].as_str()).collect();
    if racing != needs.racing() {
        return Err(format!("{name}: races under {racing:?}, not {:?}", needs.racing()));
    }
    if !said["notes"].as_array().is_some_and(Vec::is_empty) {
        return Err(format!("{name}: {}", said["notes"]));
    }
    let groups = models.iter().flat_map(|m| m["groups"].as_array().expect("groups"));
    let mut is_found = planted.is_none();
    for group in groups {
        let is_ours = group["file"].as_str().is_some_and(|f| f.ends_with("/data"));
        let mut calls =
            [&group["first"], &group["second"]].map(|p| p["call"].as_str().unwrap_or(""));
        calls.sort_unstable();
        let (start, end) = (group["start"].as_u64(), group["end"].as_u64());
        let hit = planted.is_some_and(|(from, to, of)| {
            calls == of && start >= Some(from) && start < Some(to) && end > Some(from)
        });
        if !is_ours {
            return Err(format!("{name}: a race elsewhere: {group}"));
        }
        is_found |= hit;
    }
    if !is_found {
        return Err(format!("{name}: not these calls and bytes: {said:#}"));
    }
    Ok(())
}

fn all_hold(rows: &[Row], verdict: impl Fn(&Row) -> Value) {
    let wrong: Vec<String> =
        rows.iter().filter_map(|row| judge(row, &verdict(row)).err()).collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

#[test]
fn races_of_mpi_programs_are_found() {
    if !available(&["mpicc.mpich", "mpiexec.mpich"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("mpicc.mpich", "races_mpi.c", scratch.path());
    all_hold(&MPI, |(name, ranks, ..)| {
        let dir = scratch.path().join(name);
        std::fs::create_dir(&dir).expect("mkdir");
        let (ranks, file) = (ranks.to_string(), dir.join("data"));
        let (program, file) = (program.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
        trace(&dir.join("t"), "mpicc.mpich", &["mpiexec.mpich", "-n", &ranks, program, name, file]);
        check(&dir.join("t"), &[])
    });
}

#[test]
fn races_of_posix_programs_are_found() {
    if !available(&["cc"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("cc", "races_posix.c", scratch.path());
    all_hold(&POSIX, |(name, ..)| {
        let dir = scratch.path().join(name);
        std::fs::create_dir(&dir).expect("mkdir");
        let file = dir.join("data");
        let (program, file) = (program.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
        trace(&dir.join("t"), "none", &[program, name, file]);
        check(&dir.join("t"), &["--nodes", "each"])
    });
}

/// Processes of one host share its node's view, unless a launcher may put them elsewhere.
#[test]
fn processes_of_one_host_need_no_more_than_order() {
    if !available(&["cc"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("cc", "races_posix.c", scratch.path());
    let (dir, file) = (scratch.path().join("t"), scratch.path().join("data"));
    let (program, file) = (program.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    trace(&dir, "none", &[program, "parent_keeps_it_open", file]);
    let races =
        |options: &[&str]| check(&dir, options)["models"].to_string().contains("\"pwrite\"");
    assert!(!races(&[]) && !races(&["--nodes", "hosts"]) && races(&["--nodes", "each"]));
}

/// The report names lines of the source, and its page is whole and says nothing unescaped.
#[test]
fn reports_name_lines_and_are_whole_pages() {
    if !available(&["cc", "addr2line"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("cc", "races_posix.c", scratch.path());
    let file = scratch.path().join("<b>&data");
    let (program, shown) = (program.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    let (dir, page) = (scratch.path().join("t"), scratch.path().join("page.html"));
    trace(&dir, "none", &[program, "children_write", shown]);
    let mut command = ebb();
    let ended =
        try_run(command.arg("check").arg(&dir).arg("--html").arg(&page), LIMIT).expect("run");
    assert!(ended.out.contains("at races.h:") && ended.out.contains(shown), "{}", ended.out);
    assert!(ended.out.contains("nothing orders them"), "{}", ended.out);
    let page = std::fs::read_to_string(page).expect("the page");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    assert!(page.contains("&lt;b&gt;&amp;data") && !page.contains("<b>&data"), "escaped");
    assert!(page.contains("What both did around it") && !page.contains("http"), "self-contained");
}

/// A killed process leaves everything up to its last call; what was damaged later is said.
#[test]
fn what_a_killed_process_did_is_in_its_trace() {
    let scratch = tempfile::tempdir().expect("tempdir");
    let dir = scratch.path().join("t");
    let script = format!("echo one >{0}/a; cat {0}/a; kill -9 $$", scratch.path().display());
    let mut command = ebb();
    command.arg("trace").arg("-o").arg(&dir).args(["--mpicc", "none", "--", "bash", "-c", &script]);
    let ended = try_run(&mut command, LIMIT).expect("run");
    assert_eq!(ended.status.and_then(|s| s.code()), Some(128 + 9), "the command's own status");
    let said = check(&dir, &[]);
    assert!(said["files"].as_u64() > Some(0) && said["notes"] == serde_json::json!([]), "{said:#}");

    let files = std::fs::read_dir(&dir).expect("list").flatten().map(|e| e.path());
    let largest = files.max_by_key(|p| p.metadata().map_or(0, |m| m.len())).expect("a file");
    let mut bytes = std::fs::read(&largest).expect("read");
    bytes[4096 + 4] = 0xff;
    bytes[4096 + 6] = 0xff;
    std::fs::write(&largest, bytes).expect("write");
    let said = check(&dir, &[]);
    assert!(said["notes"].to_string().contains("block 0: it is cut off"), "{said:#}");
}

#[test]
fn wrong_use_is_refused_in_words() {
    let scratch = tempfile::tempdir().expect("tempdir");
    let dir = scratch.path().join("t");
    let refused = |arguments: &[&str]| {
        let ended = try_run(ebb().args(arguments), LIMIT).expect("run");
        assert_eq!(ended.status.and_then(|s| s.code()), Some(2), "{arguments:?}: {}", ended.err);
        ended.err
    };
    let shown = dir.to_str().expect("UTF-8");
    assert!(refused(&["check", shown]).contains(shown));
    std::fs::create_dir(&dir).expect("mkdir");
    assert!(refused(&["check", shown]).contains("no trace files here"));
    std::fs::write(dir.join("x-1-0.ebbtrace"), "something else").expect("write");
    assert!(refused(&["check", shown]).contains("not a trace file"));
    let trace = ["trace", "-o", shown, "--mpicc", "none", "--", "true"];
    assert!(refused(&trace).contains("is not empty"));
    assert!(refused(&["check", shown, "--model", "sesion"]).contains("unknown model 'sesion'"));
}

/// Runs a program with a rank on each of the cluster's two nodes; whether it saw what it wanted.
fn on_mounts(cluster: &Cluster, job: &Path, program: &Path, name: &str, file: &str) -> bool {
    let mounts: Vec<String> =
        cluster.nodes().iter().map(|n| n.path("").display().to_string()).collect();
    let mut command = Command::new("mpiexec.mpich");
    command.args(["-n", "2"]).arg(programs().join("rank.sh")).arg(program).arg(name);
    command.arg(job.join(file)).env("EBB_JOB", job).env("EBB_MOUNTS", mounts.join(" "));
    command.env("EXPECT", "1");
    let ended = try_run(&mut command, LIMIT).expect("run");
    let code = ended.status.and_then(|s| s.code());
    assert!(matches!(code, Some(0 | 3)), "{name}: {code:?}: {}", ended.err);
    code == Some(0)
}

/// What is advised for each of these gives right results on two nodes, again and again; the next
/// weaker model does not.
#[test]
fn advice_holds_on_mounts() {
    // SAFETY: no arguments, no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root || !available(&["mpicc.mpich", "mpiexec.mpich", "unshare"]) {
        println!("SKIPPED: mount namespaces for the ranks need root, and MPI");
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("mpicc.mpich", "races_mpi.c", scratch.path());
    let job = scratch.path().join("job");
    std::fs::create_dir(&job).expect("mkdir");
    let names = [
        "barrier_only",
        "fsync_barrier",
        "fsync_barrier_fsync",
        "close_barrier",
        "close_after_barrier",
    ];
    let mut advised = Vec::new();
    for name in names {
        let (dir, file) = (scratch.path().join(name), scratch.path().join(format!("{name}.data")));
        let (own, file) = (program.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
        trace(&dir, "mpicc.mpich", &["mpiexec.mpich", "-n", "2", own, name, file]);
        let said = run(ebb().arg("advise").arg(&dir).arg("--json"), LIMIT);
        let said: Value = serde_json::from_str(&said).expect("JSON");
        advised.push((name, said["model"].as_str().expect("a model").to_owned()));
    }
    let weaker = |model: &str| match model {
        "posix" => "commit",
        "commit" | "romio" => "mpiio",
        "mpiio" => "session",
        other => panic!("nothing is weaker than {other}"),
    };
    for model in ["posix", "commit", "romio", "mpiio", "session"] {
        let right: Vec<_> = advised.iter().filter(|(_, m)| m == model).collect();
        let wrong: Vec<_> = advised.iter().filter(|(_, m)| weaker(m) == model).collect();
        if right.is_empty() && wrong.is_empty() {
            continue;
        }
        let cluster = Cluster::builder().nodes(2).consistency(model).start();
        for (name, _) in right {
            for turn in 0..5 {
                let is_right = on_mounts(&cluster, &job, &program, name, &format!("{name}-{turn}"));
                assert!(is_right, "{name} reads something old under {model}");
            }
        }
        for (name, _) in wrong {
            let fails = (0..20)
                .any(|turn| !on_mounts(&cluster, &job, &program, name, &format!("{name}-{turn}")));
            assert!(fails, "{name} never failed under {model}, which is weaker than what it needs");
        }
        cluster.umount_all();
    }
}
