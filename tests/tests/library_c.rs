//! libebb for C: the header and the library have the same functions, the manual page names all of them, and
//! the examples that users copy compile without a warning and run on mounts of two nodes, linked either way,
//! with what `make install` installs.

use ebb_testkit::{Cluster, describe, ebb_binary};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[allow(dead_code)]
#[path = "../../crates/ebb-api/examples/halo.rs"]
mod halo;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).expect(path)
}

/// Where cargo puts what it has built.
fn built() -> PathBuf {
    ebb_binary().parent().expect("a directory").to_owned()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().expect("it can be started");
    assert!(output.status.success(), "{command:?}: {}", describe(&output));
    output
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).expect("text")
}

/// Words that begin so and are followed by a parenthesis.
fn functions_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let before = text.split('(').map(|part| part.trim_end());
    let names = before.filter_map(|part| part.rsplit(|c| !is_part(c)).next());
    names.filter(|name| name.starts_with("ebb_")).map(str::to_owned).collect()
}

fn exported() -> BTreeSet<String> {
    let symbols =
        stdout(Command::new("nm").args(["-D", "--defined-only"]).arg(built().join("libebb.so")));
    let names = symbols.lines().filter_map(|line| line.split_ascii_whitespace().nth(2));
    names.map(str::to_owned).collect()
}

#[test]
fn the_header_has_the_functions_of_the_library() {
    let declared = functions_in(&text("crates/ebb-api/include/ebb.h"));
    assert!(declared.len() > 25, "{declared:?}");
    assert_eq!(declared, exported(), "declared, and exported");
    let manual = text("docs/man/libebb.3").replace(" (", "(").replace(" ()", "()");
    let told = functions_in(&manual);
    let missing: Vec<_> = declared.difference(&told).collect();
    assert!(missing.is_empty() && told.is_subset(&declared), "the manual lacks {missing:?}");
}

/// Installed into a directory of its own.
struct Installed {
    prefix: tempfile::TempDir,
}

impl Installed {
    fn new() -> Installed {
        let prefix = tempfile::tempdir().expect("a directory");
        let target = built().parent().expect("the target directory").to_owned();
        run(Command::new("make")
            .arg("-C")
            .arg(root())
            .arg("install")
            .arg(format!("PREFIX={}", prefix.path().display()))
            .arg(format!("TARGET={}", target.display())));
        Installed { prefix }
    }

    fn lib(&self) -> PathBuf {
        self.prefix.path().join("lib")
    }

    /// What pkg-config says of it.
    fn flags(&self, which: &[&str]) -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", self.lib().join("pkgconfig")).args(which).arg("libebb");
        stdout(&mut command).split_ascii_whitespace().map(str::to_owned).collect()
    }

    fn compile(&self, source: &Path, name: &str, link: &[&str]) -> PathBuf {
        let program = self.prefix.path().join(name);
        let warnings = ["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1"];
        let mut cc = Command::new("cc");
        cc.args(warnings).arg(source).args(self.flags(&["--cflags"])).arg("-o").arg(&program);
        run(cc.args(link));
        program
    }

    fn example(&self, name: &str, is_static: bool) -> PathBuf {
        let source = root().join("crates/ebb-api/examples").join(name).with_extension("c");
        let all: Vec<String> = match is_static {
            false => self.flags(&["--libs"]),
            true => {
                let archive = self.lib().join("libebb.a").display().to_string();
                let others = self.flags(&["--static", "--libs"]);
                let others = others.into_iter().filter(|flag| flag != "-lebb");
                std::iter::once(archive).chain(others).collect()
            }
        };
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        self.compile(&source, &format!("{name}-{is_static}"), &all)
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.lib());
        command
    }
}

fn cluster() -> Cluster {
    Cluster::builder().nodes(2).consistency("session").token().start()
}

#[test]
fn the_example_of_primitives_runs_in_c_and_rust() {
    let installed = Installed::new();
    let cluster = cluster();
    for (n, is_static) in [false, true].into_iter().enumerate() {
        let program = installed.example("halo", is_static);
        let path = |node: usize| cluster.node(node).path(format!("f{n}"));
        let other = installed.command(&program).arg(path(1)).arg("1").spawn().expect("start");
        let said = stdout(installed.command(&program).arg(path(0)).arg("0"));
        assert_eq!(said, "the edge of the other half is right\n");
        assert!(other.wait_with_output().expect("it ends").status.success());
    }
    // One half in C, the other in Rust.
    let program = installed.example("halo", false);
    let other = installed.command(&program).arg(cluster.node(1).path("g")).arg("1").spawn();
    halo::run(&cluster.node(0).path("g"), "0").expect("the Rust half");
    assert!(other.expect("start").wait_with_output().expect("it ends").status.success());
}

#[test]
fn the_example_of_lists_and_handles_runs() {
    let installed = Installed::new();
    let cluster = cluster();
    let program = installed.example("columns", false);
    let handle = stdout(installed.command(&program).arg(cluster.node(0).path("matrix")));
    let mount = cluster.node(1).mountpoint();
    let said = stdout(installed.command(&program).arg(mount).arg(handle.trim()));
    assert_eq!(said, "all columns are right\n");
}

/// Three producers and two consumers on two nodes.
#[test]
fn the_example_of_buffers_runs() {
    let installed = Installed::new();
    let cluster = cluster();
    let program = installed.example("pipeline", false);
    let start = |node: usize, words: &[&str]| {
        let mut command = installed.command(&program);
        command.arg(cluster.node(node).path("steps")).args(words).stdout(Stdio::piped());
        command.spawn().expect("start")
    };
    let readers = [start(0, &["get", "2"]), start(1, &["get", "2"])];
    let writers = ["0", "1", "2"].map(|rank| start(usize::from(rank == "1"), &["put", rank, "3"]));
    let ended = |program: std::process::Child, wanted: &str| {
        let output = program.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", describe(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), wanted);
    };
    writers.into_iter().for_each(|program| ended(program, ""));
    readers.into_iter().for_each(|program| ended(program, "4500000 bytes are right\n"));
    // What a signal ends.
    let mut waits = start(0, &["get", "1"]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(waits.try_wait().expect("wait").is_none(), "it waits");
    run(Command::new("kill").args(["-INT", &waits.id().to_string()]));
    assert_eq!(waits.wait().expect("it ends").signal(), Some(libc::SIGINT));
}

/// What only C can do wrong, and the layers from C.
#[test]
fn a_c_program_is_told_what_is_wrong() {
    let installed = Installed::new();
    let cluster = cluster();
    let source = installed.prefix.path().join("wrong.c");
    std::fs::write(&source, WRONG).expect("write");
    let flags = installed.flags(&["--libs"]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = installed.compile(&source, "wrong", &flags);
    let said = stdout(
        installed.command(&program).arg(cluster.node(0).path("f")).arg(cluster.node(1).path("f")),
    );
    assert_eq!(said, "done\n");
}

/// The program of docs/libebb.md is compiled and run as it stands there.
#[test]
fn the_program_of_the_documentation_runs() {
    let page = text("docs/libebb.md");
    let program = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next());
    let installed = Installed::new();
    let source = installed.prefix.path().join("page.c");
    std::fs::write(&source, program.expect("a program")).expect("write");
    let flags = installed.flags(&["--libs"]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = installed.compile(&source, "page", &flags);
    let cluster = cluster();
    let said = stdout(installed.command(&program).arg(cluster.node(0).path("f")));
    assert!(page.contains(said.trim()), "the page shows what it prints: {said}");
}

const WRONG: &str = r#"
#include <ebb.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAILS(call, with) do { \
    errno = 0; \
    if ((call) != -1 || errno != (with)) { \
        printf("line %d: %s: errno %d\n", __LINE__, #call, errno); \
        exit(1); \
    } } while (0)
#define HOLDS(what) do { \
    if (!(what)) { printf("line %d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)

int main(int argc, char **argv)
{
    HOLDS(argc == 3);
    char got[16] = "";
    struct ebb_stat stat;
    struct ebb_owner owners[2];
    unsigned char handle[EBB_HANDLE_SIZE] = { 0 };
    HOLDS(sizeof stat == 32 && sizeof owners[0] == 24);
    HOLDS(strchr(ebb_version(), '.') != NULL);

    FAILS(ebb_open(NULL, O_RDONLY, 0), EFAULT);
    FAILS(ebb_open("/nowhere", O_RDONLY, 0), ENOENT);
    FAILS(ebb_open("/etc/passwd", O_RDONLY, 0), ENOTTY);
    FAILS(ebb_attach(-1, 0, 1), EBADF);
    FAILS(ebb_attach_file(1000), EBADF);
    int null = open("/dev/null", O_RDWR);
    FAILS(ebb_attach_file(null), ENOTTY);
    FAILS(ebb_handle_get(null, handle), ENOTTY);

    int a = ebb_open(argv[1], O_RDWR | O_CREAT, 0600);
    int b = ebb_open(argv[2], O_RDWR, 0);
    HOLDS(a >= 0 && b >= 0);
    FAILS(ebb_write(a, NULL, 5, 0), EFAULT);
    FAILS(ebb_read(a, NULL, 5, 0, EBB_NOBODY), EFAULT);
    FAILS(ebb_stat(a, NULL), EFAULT);
    FAILS(ebb_query_file(a, NULL, 1), EFAULT);
    FAILS(ebb_handle_get(a, NULL), EFAULT);
    FAILS(ebb_handle_open(NULL, handle, O_RDONLY), EFAULT);
    FAILS(ebb_handle_open("/tmp", NULL, O_RDONLY), EFAULT);
    char path[200];
    FAILS(ebb_handle_path("/tmp", NULL, path, sizeof path), EFAULT);
    FAILS(ebb_handle_path("/tmp", handle, NULL, sizeof path), EFAULT);
    ssize_t len = ebb_handle_path("/tmp", handle, path, sizeof path);
    HOLDS(len == (ssize_t)strlen(path) && !strncmp(path, "/tmp/.ebb/", 10));
    FAILS(ebb_handle_path("/tmp", handle, path, len), ERANGE);
    HOLDS(ebb_handle_path("/tmp", handle, path, len + 1) == len);
    FAILS(ebb_attach(a, UINT64_MAX, 2), EINVAL);
    FAILS(ebb_query(a, UINT64_MAX - 1, 1, owners, 2), EINVAL);
    FAILS(ebb_attach(a, 0, 1), ENODATA);
    FAILS(ebb_detach(a, 0, 1), ENODATA);

    struct ebb_piece none = { .offset = 0, .data = NULL, .len = 3 };
    FAILS(ebb_writex(a, &none, 1), EFAULT);
    FAILS(ebb_readx(a, &none, 1, NULL), EFAULT);
    FAILS(ebb_writex(a, NULL, 1), EFAULT);
    FAILS(ebb_writex(a, &none, SIZE_MAX), EINVAL);
    struct ebb_piece meet[2] = { { 0, got, 5 }, { 9, got + 4, 5 } };
    FAILS(ebb_readx(a, meet, 2, NULL), EINVAL);
    HOLDS(ebb_writex(a, NULL, 0) == 0);

    HOLDS(ebb_write(a, "0123456789", 10, 0) == 10);
    HOLDS(ebb_seek(a, 3, SEEK_SET) == 3 && ebb_tell(a) == 3);
    HOLDS(ebb_attach(a, 2, 2) == 0 && ebb_attach(a, 6, 2) == 0);
    HOLDS(ebb_query(b, 0, 100, owners, 1) == 2);
    HOLDS(owners[0].offset == 2 && owners[0].len == 2);
    HOLDS(ebb_stat(a, &stat) == 0 && stat.size == 10 && stat.unattached == 6);
    HOLDS(stat.node == owners[0].node && stat.node != EBB_NOBODY);
    HOLDS(ebb_read(b, got, 2, 6, stat.node) == 2 && !memcmp(got, "67", 2));
    FAILS(ebb_read(b, got, 3, 5, stat.node), ESTALE);
    size_t had[2];
    struct ebb_piece pieces[2] = { { 2, got, 2 }, { 7, got + 5, 5 } };
    HOLDS(ebb_readx(b, pieces, 2, had) == 3 && had[0] == 2 && had[1] == 1);
    HOLDS(ebb_flush(a, 0, 10) == 0 && ebb_flush_file(a) == 0);
    HOLDS(ebb_attach_file(a) == 0 && ebb_detach(a, 0, 10) == 0 && ebb_detach_file(a) == 0);
    HOLDS(ebb_query_file(b, NULL, 0) == 0);

    FAILS(ebb_exchange(NULL, NULL), EFAULT);
    FAILS(ebb_exchange("/tmp", NULL), ENOTTY);
    FAILS(ebb_exchange(argv[1], NULL), ENOTDIR);
    FAILS(ebb_put(-1, "f", "1", 1, 0, 1), EBADF);
    FAILS(ebb_put(a, NULL, "1", 1, 0, 1), EFAULT);
    FAILS(ebb_put(a, "f", NULL, 1, 0, 1), EFAULT);
    FAILS(ebb_put(a, "f", "1", 1, 0, 1), ENOTDIR);
    FAILS(ebb_get(a, "f", NULL, 1, 0, 1), EFAULT);
    FAILS(ebb_get(a, "f", got, 5, 0, 1), ENOTDIR);
    FAILS(ebb_getx(a, "f", meet, 2, NULL, 1), EINVAL);
    FAILS(ebb_putx(a, "f", NULL, 1, 1), EFAULT);

    HOLDS(ebb_posix_write(a, "posix", 5, 0) == 5);
    HOLDS(ebb_posix_read(b, got, 5, 0) == 5 && !memcmp(got, "posix", 5));
    HOLDS(ebb_commit_write(a, "commi", 5, 0) == 5);
    HOLDS(ebb_commit_read(b, got, 5, 0) == 5 && !memcmp(got, "posix", 5));
    HOLDS(ebb_commit(a) == 0);
    HOLDS(ebb_commit_read(b, got, 5, 0) == 5 && !memcmp(got, "commi", 5));
    HOLDS(ebb_session_write(a, "sessi", 5, 0) == 5 && ebb_session_close(a) == 0);
    HOLDS(ebb_session_read(b, got, 5, 0) == 5 && !memcmp(got, "commi", 5));
    HOLDS(ebb_session_open(b) == 0);
    HOLDS(ebb_session_read(b, got, 5, 0) == 5 && !memcmp(got, "sessi", 5));
    HOLDS(ebb_close(a) == 0 && ebb_close(b) == 0);
    FAILS(ebb_close(b), EBADF);
    puts("done");
    return 0;
}
"#;
