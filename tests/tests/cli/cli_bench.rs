//! `ebb bench`: a small run leaves its report and nothing else; wrong settings are named.

use ebb_testkit::{Cluster, Network, describe, skip_reason};
use std::fs;
use std::process::Stdio;

#[test]
fn a_small_run_leaves_a_report_and_no_mounts() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().prepare();
    let buffer = cluster.root().join("buffer");
    fs::create_dir(&buffer).expect("mkdir");
    let out = cluster.root().join("report");
    let done = cluster
        .ebb()
        .args(["bench", "--quick", "--nodes", "1,2", "--rounds", "1", "--large", "64KiB"])
        .args(["--models", "session,commit", "--workloads", "shared,files,remote,pairs", "--naive"])
        .arg("--buffer")
        .arg(&buffer)
        .arg("--out")
        .arg(&out)
        .output()
        .expect("ebb can be started");
    assert!(done.status.success(), "{}", describe(&done));
    let csv = fs::read_to_string(out.join("report.csv")).expect("report.csv");
    for line in [
        "One shared file,CC-R 8 KiB,read,2,session,MiB/s,",
        "One shared file,SN-W 64 KiB,write,1,commit naive,MiB/s,",
        "Small files,400 files of 4 KiB,unlink,1,bare directory,1/s,",
        "3 files of 10 x 64 KiB,written and read,2,session,MiB/s,",
        "3 files of 10 x 64 KiB,written and read,2,bare directory,",
        "First reads of another node's bytes (bare: plain TCP),8 KiB at random,first read,2,",
    ] {
        assert!(csv.contains(line), "{line} is not in\n{csv}");
    }
    let page = fs::read_to_string(out.join("report.html")).expect("report.html");
    assert!(page.contains("<svg") && page.contains("kernel"), "{page}");
    let left: Vec<_> = fs::read_dir(&buffer).expect("list").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The nodes are in networks of their own, which go with them; a rate that is none is named.
#[test]
fn nodes_can_have_links_between_them() {
    if skip_reason().is_some()
        || Network::new(1).inspect_err(|why| println!("SKIPPED: {why}")).is_err()
    {
        return;
    }
    let cluster = Cluster::builder().prepare();
    let out = cluster.root().join("report");
    let run = |rate: &str| {
        let spaces = || fs::read_dir("/run/netns").expect("namespaces").flatten();
        let mut bench = cluster.ebb();
        bench.args(["bench", "--quick", "--nodes", "2", "--rounds", "1", "--models", "session"]);
        bench.args(["--workloads", "remote", "--links", rate, "--buffer"]).arg(cluster.root());
        bench.arg("--out").arg(&out).stdout(Stdio::piped()).stderr(Stdio::piped());
        let bench = bench.spawn().expect("ebb can be started");
        let own = format!("ebb-links-{}-", bench.id());
        let done = bench.wait_with_output().expect("ebb ends");
        let left = spaces().find(|s| s.file_name().to_string_lossy().starts_with(&own));
        assert!(left.is_none(), "{left:?}");
        done
    };
    let done = run("400mbit");
    assert!(done.status.success(), "{}", describe(&done));
    let csv = fs::read_to_string(out.join("report.csv")).expect("report.csv");
    let speed = |variant: &str| {
        let line = csv.lines().find(|l| l.contains("1 MiB in order") && l.contains(variant));
        let fields: Vec<&str> = line.expect(variant).split(',').collect();
        fields[6].parse::<f64>().expect("a number")
    };
    // 48 MiB/s; what the link lets through at once is a half of the file.
    for variant in ["bare directory", "session"] {
        assert!((10.0..200.0).contains(&speed(variant)), "{variant}: {}", speed(variant));
    }
    let page = fs::read_to_string(out.join("report.html")).expect("report.html");
    assert!(page.contains("400mbit"), "{page}");
    let done = run("fast");
    assert_eq!(done.status.code(), Some(1), "{}", describe(&done));
    assert!(String::from_utf8_lossy(&done.stderr).contains("fast"), "{}", describe(&done));
}

#[test]
fn wrong_settings_are_named() {
    let cluster = Cluster::builder().prepare();
    for (arguments, named) in [
        (["--models", "sesion"], "sesion"),
        (["--nodes", "0"], "--nodes"),
        (["--rounds", "0"], "--rounds"),
    ] {
        let done = cluster.ebb().arg("bench").args(arguments).output().expect("ebb");
        assert_eq!(done.status.code(), Some(2), "{}", describe(&done));
        assert!(String::from_utf8_lossy(&done.stderr).contains(named), "{}", describe(&done));
    }
}
