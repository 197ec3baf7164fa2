//! Every message that carries a name, a path or a range, with every value that it must not have:
//! each gets an error, nothing outside the backing is touched, and nothing in it changes.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

use crate::common::{ROOT, Service};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::request::Op;

/// Names that are none, or lead elsewhere.
fn bad_names() -> Vec<Vec<u8>> {
    let long = vec![b'x'; 256];
    let huge = vec![b'x'; 100_000];
    let plain: [&[u8]; 12] = [
        b"",
        b".",
        b"..",
        b"/",
        b"/etc/passwd",
        b"../outside",
        b"../outside/secret",
        b"a/../../outside",
        b"d/f",
        b"f\0",
        b"\0",
        b".ebb-part-1",
    ];
    plain.iter().map(|n| n.to_vec()).chain([long, huge]).collect()
}

/// Every operation that takes a name, with this one.
fn with_name(name: &[u8], file: u64, dir: u64) -> Vec<Op> {
    let name = name.to_vec();
    let make = |mode, target: &[u8]| {
        let target = target.to_vec();
        let (name, mode) = (name.clone(), mode | 0o644);
        Op::Make(pb::Make { parent: ROOT, name, mode, target, ..Default::default() })
    };
    let rename = |parent, name: &[u8], new_parent, new_name: &[u8]| {
        let (name, new_name) = (name.to_vec(), new_name.to_vec());
        Op::Rename(pb::Rename {
            parent,
            name,
            new_parent,
            new_name,
            flags: 0,
            ..Default::default()
        })
    };
    vec![
        Op::Lookup(pb::Lookup { parent: ROOT, name: name.clone(), ..Default::default() }),
        make(libc::S_IFREG, b""),
        make(libc::S_IFDIR, b""),
        make(libc::S_IFLNK, b"target"),
        make(libc::S_IFIFO, b""),
        Op::Unlink(pb::Unlink {
            parent: ROOT,
            name: name.clone(),
            dir: false,
            ..Default::default()
        }),
        Op::Unlink(pb::Unlink {
            parent: ROOT,
            name: name.clone(),
            dir: true,
            ..Default::default()
        }),
        rename(ROOT, &name, ROOT, b"new"),
        rename(ROOT, b"f", ROOT, &name),
        rename(ROOT, b"f", dir, &name),
        Op::Link(pb::Link {
            ino: file,
            new_parent: ROOT,
            new_name: name.clone(),
            ..Default::default()
        }),
    ]
}

/// Everything below a directory: names and contents.
fn listing(dir: &std::path::Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let shown = path.display().to_string();
        if path.is_dir() {
            found.push((shown, Vec::new()));
            found.extend(listing(&path));
        } else {
            found.push((shown, std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn bad_names_are_refused_in_every_message() {
    let s = Service::start().await;
    let outside = s.dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), b"s").unwrap();
    std::fs::create_dir(s.backing().join("d")).unwrap();
    std::fs::write(s.backing().join("d/f"), b"inner").unwrap();
    std::fs::write(s.backing().join("f"), b"f").unwrap();
    let mut a = s.node("a").await;
    let f = a.lookup(ROOT, "f").await.unwrap().ino;
    let d = a.lookup(ROOT, "d").await.unwrap().ino;
    let before = (listing(&s.backing()), listing(&outside), a.names(ROOT).await);
    for name in bad_names() {
        for op in with_name(&name, f, d) {
            let shown = format!("{:.60?} with {:.40}", op, String::from_utf8_lossy(&name));
            let answer = a.ask(op).await;
            assert!(answer.is_err(), "{shown}: {answer:?}");
        }
        // A place in a directory may be any name, also one that is no more; not a path.
        let after = pb::ReadDir { ino: ROOT, after: name.clone(), limit: 0, ..Default::default() };
        let answer = a.ask(Op::ReadDir(after)).await;
        let is_name = name.is_empty() || name.starts_with(b".ebb-part-");
        assert_eq!(answer.is_ok(), is_name, "{:.40}", String::from_utf8_lossy(&name));
    }
    let now = (listing(&s.backing()), listing(&outside), a.names(ROOT).await);
    assert_eq!(now, before);
}

#[tokio::test]
async fn bad_targets_and_attribute_names_are_refused() {
    let s = Service::start().await;
    std::fs::write(s.backing().join("f"), b"f").unwrap();
    let mut a = s.node("a").await;
    let f = a.lookup(ROOT, "f").await.unwrap().ino;
    for target in [&b""[..], b"a\0b", &[b'x'; 4096], &[b'/'; 100_000]] {
        let make = pb::Make {
            parent: ROOT,
            name: b"link".to_vec(),
            mode: libc::S_IFLNK | 0o777,
            target: target.to_vec(),
            ..Default::default()
        };
        let answer = a.ask(Op::Make(make)).await;
        assert!(answer.is_err(), "a target of {} bytes: {answer:?}", target.len());
    }
    for name in [&b""[..], b"user.a\0b", b"user.", &[b'u'; 300]] {
        let set = |value: &[u8]| {
            let (name, value) = (name.to_vec(), value.to_vec());
            Op::SetXattr(pb::SetXattr { ino: f, name, value, flags: 0 })
        };
        assert!(a.ask(set(b"v")).await.is_err(), "{name:?} is set");
        let get = pb::GetXattr { ino: f, name: name.to_vec(), tell: false };
        assert!(a.ask(Op::GetXattr(get)).await.is_err(), "{name:?} is read");
        let remove = pb::RemoveXattr { ino: f, name: name.to_vec() };
        assert!(a.ask(Op::RemoveXattr(remove)).await.is_err(), "{name:?} is removed");
    }
    let large = pb::SetXattr { ino: f, name: b"user.a".to_vec(), value: vec![1; 70_000], flags: 0 };
    assert!(a.ask(Op::SetXattr(large)).await.is_err(), "more than Linux allows");
    let flags = pb::SetXattr { ino: f, name: b"user.a".to_vec(), value: vec![1], flags: 0xff };
    assert!(a.ask(Op::SetXattr(flags)).await.is_err(), "flags that nobody defined");
    assert_eq!(a.names(ROOT).await, ["f"]);
}

/// Ranges that are none: backwards, or behind the largest offset that a file has.
const BAD_RANGES: [(u64, u64); 5] = [
    (1, 0),
    (u64::MAX, 0),
    (0, u64::MAX),
    (i64::MAX as u64, i64::MAX as u64 + 1),
    (u64::MAX - 1, u64::MAX),
];

#[tokio::test]
async fn bad_ranges_are_refused_in_every_message() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let f = a.create(ROOT, "f").await;
    a.attach(f, 0, 100).await;
    let before = a.query(f).await;
    for (start, end) in BAD_RANGES {
        let ranges = vec![pb::Range { start, end }];
        let ops = vec![
            Op::Attach(pb::Attach { ino: f, ranges: ranges.clone(), ..Default::default() }),
            Op::Detach(pb::Detach { ino: f, ranges: ranges.clone(), anew: true }),
            Op::FlushBegin(pb::FlushBegin { ino: f, ranges: ranges.clone() }),
        ];
        for op in ops {
            let answer = a.ask(op.clone()).await;
            assert!(answer.is_err(), "{op:?}: {answer:?}");
        }
        // A query and a lock may reach to the end of all files; never backwards.
        if start > end {
            let query = pb::Query { ino: f, range: Some(ranges[0]), ..Default::default() };
            assert_eq!(a.ask(Op::Query(query)).await, Err(Errno::EPROTO));
        }
    }
    let len = pb::Append { ino: f, len: u64::MAX - 50, ..Default::default() };
    assert!(a.ask(Op::Append(len)).await.is_err());
    assert_eq!(a.query(f).await, before);
}
