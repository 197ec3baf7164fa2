//! Where the `ebb` binary is, and whether this machine can mount.

use ebb_links::{Network, Port};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A binary of this workspace: `EBB_BIN` for `ebb` itself, else beside the running test.
pub(crate) fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let built = test.ancestors().skip(1).take(3).map(|dir| dir.join(name));
    built.into_iter().find(|p| p.is_file()).unwrap_or_else(|| {
        panic!(
            "no binary `{name}` near {}: run `cargo build --release --workspace` first (or `make \
             test`), or set EBB_BIN",
            test.display()
        )
    })
}

/// The `ebb` binary under test.
#[must_use]
pub fn ebb_binary() -> PathBuf {
    match std::env::var_os("EBB_BIN") {
        Some(path) => {
            let path = std::path::absolute(path).expect("EBB_BIN is a path");
            assert!(path.is_file(), "EBB_BIN: no file {}", path.display());
            path
        }
        None => binary("ebb"),
    }
}

/// The program behind [`crate::Steps`].
#[must_use]
pub fn steps_binary() -> PathBuf {
    binary("ebb-steps")
}

/// Why tests that mount cannot run here, if so. With `EBB_REQUIRE_FUSE=1` that is a failure.
///
/// # Panics
/// When it is required to mount, and impossible.
#[must_use]
pub fn skip_reason() -> Option<String> {
    let reason = match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) if may_mount() => return None,
        Ok(_) => "neither root nor fusermount3 (package fuse3) is there to mount".to_owned(),
        Err(e) => format!("/dev/fuse: {e}"),
    };
    let required = std::env::var_os("EBB_REQUIRE_FUSE").is_some_and(|v| v == "1");
    assert!(!required, "EBB_REQUIRE_FUSE=1, but {reason}");
    println!("skipped: {reason}");
    Some(reason)
}

fn may_mount() -> bool {
    rustix::process::geteuid().is_root()
        || Command::new("fusermount3").arg("--version").output().is_ok_and(|o| o.status.success())
}

/// An `ebb` command line that nothing of the surroundings reaches: no settings of the user, a
/// registry, a home and a TMPDIR of its own below `root`.
#[must_use]
pub fn ebb_command(root: &Path) -> Command {
    shut_off(Command::new(ebb_binary()), root)
}

/// The same of a program that runs `ebb`.
#[must_use]
pub fn shut_off(mut command: Command, root: &Path) -> Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("EBB_") {
            command.env_remove(name);
        }
    }
    command
        .env("HOME", root)
        .env("TMPDIR", root.join("tmp"))
        .env("EBB_RUNTIME_DIR", root.join("run"));
    command
}

/// The same command, started by another one (`nsenter`, `setpriv`).
#[must_use]
pub fn wrapped(command: &Command, by: &str, options: &[&str]) -> Command {
    let mut outer = Command::new(by);
    outer.args(options).arg("--").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

/// The same command, in its place on a network.
pub(crate) fn entered(command: &Command, network: &Network, port: Port) -> Command {
    wrapped(command, "nsenter", &[&format!("--net={}", network.space(port).display())])
}
