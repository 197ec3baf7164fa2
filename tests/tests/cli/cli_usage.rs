//! The command line without a mount: what it refuses, with which exit status and which words,
//! and where settings come from.

use ebb_testkit::describe;
use ebb_testkit::environment::ebb_command;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = TempDir::with_prefix("ebb-cli-").expect("temporary directory");
        for name in ["tmp", "backing", "mnt", "cache"] {
            std::fs::create_dir(dir.path().join(name)).expect("directory");
        }
        Place { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn ebb(&self, arguments: &[&str]) -> Command {
        let mut command = ebb_command(self.dir.path());
        command.args(arguments);
        command
    }

    fn config_file(&self, text: &str) -> String {
        let path = self.path("config.toml");
        std::fs::write(&path, text).expect("config file");
        path
    }
}

fn run(command: &mut Command) -> Output {
    command.output().expect("ebb can be started")
}

/// Refused with this status, and with all of these words.
fn refused(command: &mut Command, status: i32, words: &[&str]) {
    let output = run(command);
    assert_eq!(output.status.code(), Some(status), "{command:?}: {}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(said.contains(word), "{command:?}: no '{word}' in: {said}");
    }
}

fn settings(command: &mut Command) -> Value {
    let output = run(command);
    assert!(output.status.success(), "{}", describe(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn every_command_has_help_with_an_example() {
    let place = Place::new();
    for name in ["mount", "umount", "drain", "status", "stats", "meta", "run", "token", "config"] {
        let output = run(&mut place.ebb(&[name, "--help"]));
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(&format!("  ebb {name}")), "no example in: {text}");
    }
}

#[test]
fn wrong_usage_is_status_2() {
    let place = Place::new();
    let (backing, mnt) = (place.path("backing"), place.path("mnt"));
    refused(&mut place.ebb(&[]), 2, &["Usage"]);
    refused(&mut place.ebb(&["frobnicate"]), 2, &["frobnicate"]);
    refused(&mut place.ebb(&["mount", "--frob", &backing, &mnt]), 2, &["--frob"]);
    refused(&mut place.ebb(&["mount", &backing]), 2, &["MOUNTPOINT"]);
    refused(&mut place.ebb(&["umount", "--timeout", "10", &mnt]), 2, &["10", "ms, s, m or h"]);
    refused(&mut place.ebb(&["run", &backing, &mnt]), 2, &["CMD"]);
    for (flag, value, word) in [
        ("--cache-size", "3 parsecs", "parsecs"),
        ("--wait-interval", "10", "--wait-interval"),
        ("--low-watermark", "10", "--low-watermark"),
        ("--flush", "sometimes", "immediate"),
        ("--flush-threads", "0", "--flush-threads"),
        ("--durability", "perhaps", "backing"),
        ("--transport", "pigeon", "tcp"),
        ("--transport", "rdma", "tcp"),
        ("--consistency", "sesion", "session"),
        ("--rule", "*.log", "GLOB=MODEL"),
        ("--rule", "*.log=sesion", "sesion"),
        ("--listen", "nowhere", "HOST:PORT"),
        ("--listen", "0.0.0.0:0", "--token-file"),
        ("--meta", "127.0.0.1", "HOST:PORT"),
        ("--low-watermark", "60%", "--high-watermark"),
        ("--token-file", "/nonexistent/token", "/nonexistent/token"),
        ("--config", "/nonexistent/config.toml", "/nonexistent/config.toml"),
        ("--log-level", "=,=", "--log-level"),
    ] {
        refused(&mut place.ebb(&["mount", flag, value, &backing, &mnt]), 2, &[word]);
    }
}

#[test]
fn settings_come_from_file_then_environment_then_flags() {
    let place = Place::new();
    let file = place.config_file(
        "consistency = 'posix'\nflush = 'end'\nflush-threads = 3\nrule = ['*.a=commit']\n",
    );
    let show = ["config", "--show", "--json"];
    let with_file = |more: &[&str]| {
        let mut command = place.ebb(&show);
        command.args(["--config", &file]).args(more);
        command.env("EBB_CONSISTENCY", "commit").env("EBB_FLUSH", "close");
        command
    };
    let shown = settings(&mut with_file(&["--consistency", "mpiio", "--rule", "*.b=posix"]));
    let is = |key: &str, value: &str, origin: &str| {
        assert_eq!(shown[key]["value"], value, "{key}");
        assert_eq!(shown[key]["origin"], origin, "{key}");
    };
    is("consistency", "mpiio", "flag --consistency");
    is("flush", "close", "env EBB_FLUSH");
    is("flush-threads", "3", &format!("file {file}"));
    is("durability", "local", "default");
    assert_eq!(shown["rule"]["value"], serde_json::json!(["*.b=posix"]));

    let from_variable = settings(place.ebb(&show).env("EBB_CONFIG", &file));
    assert_eq!(from_variable["consistency"]["value"], "posix");
    let own = place.dir.path().join(".config/ebb");
    std::fs::create_dir_all(&own).expect("directory");
    std::fs::write(own.join("config.toml"), "flush = 'periodic'\n").expect("file");
    let from_home = settings(&mut place.ebb(&show));
    assert_eq!(from_home["flush"]["value"], "periodic");
    assert_eq!(from_variable["flush"]["value"], "end", "$EBB_CONFIG replaces the user's own");
}

#[test]
fn what_is_shown_as_text_is_a_config_file_again() {
    let place = Place::new();
    let flags = ["--cache-size", "3GiB", "--allow-other", "--rule", "a b=commit", "--flush", "end"];
    let text = run(place.ebb(&["config", "--show"]).args(flags));
    assert!(text.status.success(), "{}", describe(&text));
    let file = place.config_file(&String::from_utf8_lossy(&text.stdout));
    let show = ["config", "--show", "--json"];
    let (direct, again) = (
        settings(place.ebb(&show).args(flags)),
        settings(place.ebb(&show).args(["--config", &file])),
    );
    for (key, value) in direct.as_object().expect("an object") {
        assert_eq!(again[key]["value"], value["value"], "{key}");
    }
}

#[test]
fn unknown_keys_and_units_are_errors_that_name_them() {
    let place = Place::new();
    for (text, word) in [
        ("flush-thread = 3", "flush-thread"),
        ("wait-interval = 10", "wait-interval"),
        ("cache-size = '1 league'", "cache-size"),
        ("[daemon]\nflush = 'idle'", "daemon"),
        ("consistency = 'mine'", "mine"),
        ("[models.mine]\nteleport = ['attach file']", "teleport"),
        ("flush = ", "config.toml"),
    ] {
        let file = place.config_file(text);
        refused(&mut place.ebb(&["config", "--show", "--config", &file]), 2, &[word]);
    }
    refused(place.ebb(&["config", "--show"]).env("EBB_CONSISTENCE", "x"), 2, &["EBB_CONSISTENCE"]);
    refused(
        place.ebb(&["config", "--show"]).env("EBB_WAIT_INTERVAL", "1"),
        2,
        &["EBB_WAIT_INTERVAL"],
    );
}

#[test]
fn a_model_of_the_config_file_can_be_named() {
    let place = Place::new();
    let file = place.config_file("[models.mine]\nbase = 'session'\nwrite = ['attach range']\n");
    let shown = settings(&mut place.ebb(&[
        "config",
        "--show",
        "--json",
        "--config",
        &file,
        "--consistency",
        "mine",
        "--rule",
        "*.x=mine",
    ]));
    assert_eq!(shown["consistency"]["value"], "mine");
}

#[test]
fn a_token_is_private_and_never_overwritten() {
    let place = Place::new();
    let file = place.path("token");
    assert!(run(&mut place.ebb(&["token", &file])).status.success());
    let mode = std::fs::metadata(&file).expect("made").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let before = std::fs::read(&file).expect("readable");
    refused(&mut place.ebb(&["token", &file]), 1, &[&file]);
    assert_eq!(std::fs::read(&file).expect("readable"), before);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("chmod");
    let (backing, mnt) = (place.path("backing"), place.path("mnt"));
    refused(
        &mut place.ebb(&["mount", "--token-file", &file, &backing, &mnt]),
        2,
        &[&file, "chmod"],
    );
}

#[test]
fn what_is_not_mounted_is_said_to_be_so() {
    let place = Place::new();
    let mnt = place.path("mnt");
    for command in ["umount", "drain", "status", "stats"] {
        refused(&mut place.ebb(&[command, &mnt]), 1, &[&mnt, "no mount of Ebb"]);
    }
    refused(&mut place.ebb(&["status", "127.0.0.1:1"]), 5, &["127.0.0.1:1"]);
}

#[test]
fn arrangements_that_contain_themselves_are_refused() {
    let place = Place::new();
    let (backing, mnt, cache) = (place.path("backing"), place.path("mnt"), place.path("cache"));
    for name in ["backing/mnt", "backing/cache", "cache/mnt", "cache/backing"] {
        std::fs::create_dir(place.path(name)).expect("directory");
    }
    let inside = |cache: &str, backing: &str, mnt: &str| {
        refused(&mut place.ebb(&["mount", "--cache", cache, backing, mnt]), 2, &["inside"]);
    };
    inside(&cache, &backing, &place.path("backing/mnt"));
    inside(&cache, &backing, &place.path("cache/mnt"));
    inside(&place.path("mnt/cache"), &backing, &mnt);
    inside(&place.path("backing/cache"), &backing, &mnt);
    inside(&cache, &place.path("cache/backing"), &mnt);
    inside(&cache, &mnt, &mnt);
    assert!(!Path::new(&place.path("mnt/cache")).exists(), "nothing was made");
    std::os::unix::fs::symlink(&backing, place.path("link")).expect("link");
    inside(&cache, &place.path("link"), &place.path("backing/mnt"));
}
