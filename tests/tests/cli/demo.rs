//! `make demo` does what it tells, and waits for what it says it waited for.

use ebb_testkit::environment::shut_off;
use ebb_testkit::{describe, ebb_binary, skip_reason};
use std::process::Command;

#[test]
fn the_demo_shows_what_it_says() {
    if skip_reason().is_some() {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/demo.sh");
    let scratch = tempfile::tempdir().expect("tempdir");
    std::fs::create_dir(scratch.path().join("tmp")).expect("mkdir");
    let mut demo = shut_off(Command::new(script), scratch.path());
    let output = demo.env("EBB_BIN", ebb_binary()).output().expect("the demo starts");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", describe(&output));
    let mut rest: &str = &String::from_utf8_lossy(&output.stdout);
    for line in [
        "Checkpoint: 4 ranks",
        "Compute phase",
        "dirty        0B not on the backing yet",
        "dirty is 0 on both nodes now",
        "Unmount: drains the rest",
        "is byte for byte what the ranks wrote",
    ] {
        let after = rest.split_once(line);
        rest = after
            .unwrap_or_else(|| panic!("no '{line}' where it belongs: {}", describe(&output)))
            .1;
    }
}
