//! Extended attributes of a file that begins anew: the backing has them with the older one, whose place it
//! takes.

use super::{cluster_of, sync};
use ebb_tests::recoveries::{all_die, ended_with, recover};
use std::path::Path;
use std::process::Command;

fn attributes(path: &Path) -> String {
    let shown = Command::new("getfattr").args(["--absolute-names", "-d"]).arg(path).output();
    let text = String::from_utf8(shown.expect("getfattr").stdout).expect("text");
    let mut all: Vec<&str> = text.lines().filter(|line| line.starts_with("user.")).collect();
    all.sort_unstable();
    all.join(" ")
}

#[test]
fn what_is_written_over_keeps_its_extended_attributes() {
    let ways = [
        ("printf newer > f", "user.kept=\"1\" user.old=\"2\""),
        ("cp new f", "user.kept=\"1\" user.old=\"2\""),
        ("printf newer > f; setfattr -x user.old f", "user.kept=\"1\""),
        ("printf newer > f; setfattr -n user.kept -v 3 f", "user.kept=\"3\" user.old=\"2\""),
    ];
    for (model, by) in [("session", 0), ("session", 1), ("posix", 0), ("posix", 1)] {
        for (what, wanted) in ways {
            let Some(mut cluster) = cluster_of(model, 2) else { return };
            let node = cluster.node(0);
            node.shell(
                "printf older > f; setfattr -n user.kept -v 1 f; setfattr -n user.old -v 2 f",
            );
            node.shell("printf newer > new");
            node.drain();
            let file = cluster.backing().join("f");
            let before = attributes(&file);
            assert_eq!(before, "user.kept=\"1\" user.old=\"2\"", "the backing has them");
            let node = cluster.node(by);
            node.shell(what);
            node.shell("sync f");
            assert_eq!(attributes(&node.path("f")), wanted, "{what}: on the mount");
            sync(node);
            assert_eq!(std::fs::read(&file).expect("read"), b"older", "{what}: it begins anew");
            all_die(&mut cluster);
            for node in cluster.nodes() {
                let _ = recover(&cluster, node, &["--wait", "0s"]);
            }
            for node in cluster.nodes() {
                ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
            }
            assert_eq!(std::fs::read(&file).expect("read"), b"newer", "{what}: {model}, {by}");
            assert_eq!(attributes(&file), wanted, "{what}: {model}, written by node {by}");
        }
    }
}
