//! The decision as a table, and what holds for every row of it.

use super::*;
use crate::ownership::FileState;
use crate::table::ModelTable;
use ebb_types::{ByteRange, NodeId};
use std::sync::Arc;

const ME: NodeId = NodeId(1);
const OTHER: NodeId = NodeId(2);

fn model(name: &str) -> Arc<Model> {
    ModelTable::builtin().get(name).expect("a built-in model")
}

/// Views of a file as an open may find it.
fn view(kind: &str) -> FileView {
    let mut file = FileState::new(if kind == "base" || kind == "cached" { 100 } else { 0 });
    let mut view = FileView::new(ME);
    match kind {
        "unknown" => return view,
        "theirs" => drop(file.attach(OTHER, &[ByteRange::new(0, 10)])),
        _ => {}
    }
    let answer = file.query(ByteRange::ALL, Version::ZERO);
    view.apply(&answer);
    match kind {
        "own" => view.write(ByteRange::new(0, 10)),
        "cached" => drop(view.fetched(ByteRange::new(0, 100), answer.version)),
        _ => {}
    }
    view
}

fn usual<'a>(model: &'a Model, access: Access) -> Circumstances<'a> {
    Circumstances {
        model,
        access,
        beside: Beside::Nobody,
        seated: false,
        sole: false,
        privileged: false,
        obstacle: None,
        crowded: false,
        confined: true,
        told: false,
        pinned: false,
    }
}

#[test]
fn first_opens_by_model_and_content() {
    use Access::*;
    use IoPath::Daemon;
    use Reason::*;
    // (model, what is known of the file, access, what comes out)
    let table = [
        ("session", "unknown", Read, Daemon(NotLocal)),
        ("session", "blank", Read, IoPath::Read),
        ("session", "own", Read, IoPath::Read),
        ("session", "cached", Read, IoPath::Read),
        ("session", "base", Read, Daemon(NotLocal)),
        ("session", "theirs", Read, Daemon(NotLocal)),
        ("session", "unknown", Write, Daemon(NotEmpty)),
        ("session", "blank", Write, IoPath::Write),
        ("session", "blank", ReadWrite, IoPath::Write),
        ("session", "own", Write, Daemon(NotEmpty)),
        ("session", "cached", ReadWrite, Daemon(NotEmpty)),
        ("session", "base", Write, Daemon(NotEmpty)),
        ("session", "theirs", Write, Daemon(NotEmpty)),
        ("mpiio", "own", Read, IoPath::Read),
        ("mpiio", "blank", Write, Daemon(Shared)),
        ("commit", "own", Read, Daemon(ModelAsks)),
        ("commit", "blank", Write, Daemon(ModelAsks)),
        ("posix", "own", Read, Daemon(ModelAsks)),
        ("posix", "blank", Write, Daemon(ModelAsks)),
    ];
    for (name, kind, access, expected) in table {
        let model = model(name);
        let got = decide(&view(kind), &usual(&model, access));
        assert_eq!(got, expected, "{name}, {kind} file, {access:?}");
    }
}

#[test]
fn what_the_service_says_opens_the_way() {
    let (mpiio, posix) = (model("mpiio"), model("posix"));
    let alone =
        |model, seated| Circumstances { sole: true, seated, ..usual(model, Access::ReadWrite) };
    assert_eq!(decide(&view("blank"), &alone(&mpiio, false)), IoPath::Write);
    assert_eq!(decide(&view("blank"), &alone(&posix, true)), IoPath::Write);
    let elsewhere = decide(&view("blank"), &alone(&posix, false));
    assert_eq!(elsewhere, IoPath::Daemon(Reason::ModelAsks));
    // Not where others have it open as well.
    let seated = Circumstances { seated: true, ..usual(&posix, Access::Write) };
    assert_eq!(decide(&view("blank"), &seated), IoPath::Daemon(Reason::ModelAsks));
    let reading = Circumstances { seated: true, ..usual(&posix, Access::Read) };
    assert_eq!(decide(&view("own"), &reading), IoPath::Read);
}

#[test]
fn what_is_in_the_way_of_writers() {
    let session = model("session");
    let of = usual(&session, Access::Write);
    let cases = [
        (Circumstances { privileged: true, ..of }, Reason::SetId),
        (Circumstances { crowded: true, ..of }, Reason::BufferNearlyFull),
        (Circumstances { confined: false, ..of }, Reason::CacheSize),
        (Circumstances { obstacle: Some(Reason::Kernel), ..of }, Reason::Kernel),
        (Circumstances { beside: Beside::Daemon, ..of }, Reason::OtherOpens),
    ];
    for (of, reason) in cases {
        assert_eq!(decide(&view("blank"), &of), IoPath::Daemon(reason));
    }
}

/// What is read past the daemon stays in the buffer; what is written there has no other end than the
/// disk's.
#[test]
fn room_in_the_buffer_is_looked_after() {
    let session = model("session");
    let reading = Circumstances { pinned: true, ..usual(&session, Access::Read) };
    assert_eq!(decide(&view("own"), &reading), IoPath::Daemon(Reason::BufferPinned));
    let again = Circumstances { beside: Beside::Readers, ..reading };
    assert_eq!(decide(&view("own"), &again), IoPath::Read, "it is there already");
    let unconfined = Circumstances { confined: false, ..usual(&session, Access::Read) };
    assert_eq!(decide(&view("own"), &unconfined), IoPath::Read, "readers bring nothing");
}

/// The kernel's rule: all opens of an inode are of one kind.
#[test]
fn later_opens_are_of_the_kind_of_the_first() {
    let is_passed = |path| !matches!(path, IoPath::Daemon(_));
    let mut seen = [0; 2];
    for name in ["posix", "commit", "session", "mpiio"] {
        let model = model(name);
        for kind in ["unknown", "blank", "own", "cached", "base", "theirs"] {
            for access in [Access::Read, Access::Write, Access::ReadWrite] {
                for bits in 0..256u32 {
                    let on = |bit: u32| bits & (1 << bit) != 0;
                    let of = |beside| Circumstances {
                        beside,
                        seated: on(0),
                        sole: on(1),
                        privileged: on(2),
                        crowded: on(3),
                        obstacle: on(4).then_some(Reason::Privilege),
                        confined: !on(5),
                        pinned: on(6),
                        told: on(7),
                        ..usual(&model, access)
                    };
                    let view = view(kind);
                    assert!(!is_passed(decide(&view, &of(Beside::Daemon))));
                    for beside in [Beside::Readers, Beside::Writers] {
                        assert!(is_passed(decide(&view, &of(beside))), "{beside:?}");
                    }
                    let first = decide(&view, &of(Beside::Nobody));
                    assert!(!matches!(first, IoPath::DaemonBeside(_)));
                    assert!(!(on(4) && is_passed(first)), "an obstacle is one");
                    seen[usize::from(is_passed(first))] += 1;
                }
            }
        }
    }
    assert!(seen.iter().all(|n| *n > 20), "both happen: {seen:?}");
}

/// Writes that are told of may go over what is there; the rest of what speaks against a writer stays.
#[test]
fn files_with_content_are_rewritten_where_writes_are_told_of() {
    use Access::*;
    use IoPath::{Daemon, DaemonBeside};
    use Reason::*;
    let table = [
        ("session", "unknown", Daemon(NotEmpty)),
        ("session", "blank", IoPath::Write),
        ("session", "own", IoPath::Write),
        ("session", "cached", IoPath::Write),
        ("session", "base", Daemon(NotEmpty)),
        ("session", "theirs", Daemon(NotEmpty)),
        ("mpiio", "own", Daemon(Shared)),
        ("commit", "own", Daemon(ModelAsks)),
        ("posix", "own", Daemon(ModelAsks)),
    ];
    for (name, kind, expected) in table {
        let model = model(name);
        for access in [Write, ReadWrite] {
            let told = Circumstances { told: true, ..usual(&model, access) };
            assert_eq!(decide(&view(kind), &told), expected, "{name}, {kind} file");
            let beside = Circumstances { beside: Beside::Readers, ..told };
            let expected = match expected {
                Daemon(reason) => DaemonBeside(reason),
                write => write,
            };
            assert_eq!(decide(&view(kind), &beside), expected, "{name}, {kind} file, readers");
        }
    }
    let session = model("session");
    let told = Circumstances { told: true, ..usual(&session, Write) };
    let pinned = Circumstances { pinned: true, ..told };
    assert_eq!(decide(&view("own"), &pinned), Daemon(BufferPinned));
    assert_eq!(decide(&view("blank"), &pinned), IoPath::Write, "it keeps nothing yet");
    let unconfined = Circumstances { confined: false, ..told };
    assert_eq!(decide(&view("own"), &unconfined), Daemon(CacheSize));
}

/// A twin of others' bytes is made at the open: of few.
#[test]
fn large_files_of_others_are_not_rewritten_past_the_daemon() {
    let session = model("session");
    let told = Circumstances { told: true, ..usual(&session, Access::Write) };
    for (len, expected) in
        [(TWIN_BYTES_MAX, IoPath::Write), (TWIN_BYTES_MAX + 1, IoPath::Daemon(Reason::NotEmpty))]
    {
        let file = FileState::new(len);
        let mut view = FileView::new(ME);
        let answer = file.query(ByteRange::ALL, Version::ZERO);
        view.apply(&answer);
        let all = ByteRange::new(0, len);
        view.fetched(all, answer.version);
        assert_eq!(decide(&view, &told), expected);
        view.write(all);
        assert_eq!(decide(&view, &told), IoPath::Write, "own bytes need none");
    }
}

/// Who writes past the daemon leaves only guesses behind: these must be exact.
#[test]
fn nobody_writes_past_the_daemon_where_guesses_are_not_exact() {
    for name in ["posix", "commit", "session", "mpiio"] {
        let model = model(name);
        for (sole, seated) in [(false, false), (false, true), (true, false), (true, true)] {
            let of = Circumstances { sole, seated, ..usual(&model, Access::Write) };
            if decide(&view("blank"), &of) == IoPath::Write {
                assert!(shared_claims_are_exact(&model) || (sole && seated), "{name}");
            }
        }
    }
}

#[test]
fn names_of_reasons_differ() {
    let names: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|r| r.name()).collect();
    assert_eq!(names.len(), Reason::ALL.len());
}
