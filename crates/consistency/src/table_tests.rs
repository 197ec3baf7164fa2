//! The table against the papers' definitions, cell by cell, and what users may write.

use super::*;
use SyncEvent::*;

fn model(name: &str) -> Arc<Model> {
    ModelTable::builtin().get(name).unwrap()
}

/// Every cell of every row, as the legend of the module says it.
#[test]
fn every_cell() {
    let expected = [
        ("posix", "Qf Qf Qr Ar - - Qf Af Af"),
        ("commit", "- Qf Qr - Af Af Qf Af Af"),
        ("session", "Qf - - - - Af Qf Af Af"),
        ("mpiio", "Qf Qf - - AfQf Af Qf Af AfQf"),
        ("romio", "Qf Qf Qr - AfQf Af Qf Af AfQf"),
    ];
    assert_eq!(ModelTable::builtin().names(), ["commit", "mpiio", "posix", "romio", "session"]);
    for (name, row) in expected {
        let m = model(name);
        for (event, cell) in SyncEvent::ALL.into_iter().zip(row.split(' ')) {
            let scope = |s: Scope| if s == Scope::File { 'f' } else { 'r' };
            let actions = m.on(event);
            let mut text = String::new();
            text.extend(actions.attach.map(|s| format!("A{}", scope(s))));
            text.extend(actions.query.map(|s| format!("Q{}", scope(s))));
            assert_eq!(if text.is_empty() { "-" } else { &text }, cell, "{name} {event:?}");
        }
    }
}

/// The published definitions know only some of our events (a POSIX program has no explicit
/// commit, the papers' session has no locks). On those, the derived chain is the published one.
#[test]
fn the_minimum_synchronisation_is_the_published_one() {
    // (model, its published events, s1, s2); None: the access itself does it.
    let published: [(&str, &[SyncEvent], Option<&[SyncEvent]>, Option<&[SyncEvent]>); 4] = [
        ("posix", &[], None, None),
        ("commit", &[Fsync, Commit], Some(&[Fsync, Commit]), None),
        ("session", &[Open, Close], Some(&[Close]), Some(&[Open])),
        ("mpiio", &[Open, Close, Fsync], Some(&[Fsync, Close]), Some(&[Open, Fsync])),
    ];
    for (name, known, s1, s2) in published {
        let msc = model(name).msc();
        let only = |set: Option<Vec<SyncEvent>>| {
            set.map(|s| s.into_iter().filter(|e| known.contains(e)).collect::<Vec<_>>())
        };
        assert_eq!(only(msc.publish).as_deref(), s1, "{name} s1");
        assert_eq!(only(msc.observe).as_deref(), s2, "{name} s2");
    }
}

/// Whatever the chain asks for, the row does: each s1 attaches the whole file, each s2 queries
/// it, and where no s1 (s2) is needed the write (read) does it itself. Locks are acquire and
/// release in every model.
#[test]
fn every_chain_is_carried_out_by_its_row() {
    for name in ModelTable::builtin().names() {
        let m = model(name);
        let msc = m.msc();
        assert!(msc.is_possible(), "{name}");
        match &msc.publish {
            None => assert!(m.on(Write).attach.is_some(), "{name}"),
            Some(s1) => assert!(s1.iter().all(|e| m.on(*e).attach == Some(Scope::File)), "{name}"),
        }
        match &msc.observe {
            None => assert!(m.on(Read).query.is_some(), "{name}"),
            Some(s2) => assert!(s2.iter().all(|e| m.on(*e).query == Some(Scope::File)), "{name}"),
        }
        assert_eq!(m.on(Lock).query, Some(Scope::File), "{name}");
        assert_eq!(m.on(Unlock).attach, Some(Scope::File), "{name}");
        assert_eq!(m.on(Commit).attach, Some(Scope::File), "{name}");
    }
    assert!(model("posix").append_is_atomic());
    assert!(!model("commit").append_is_atomic());
    assert!(model("commit").reads_ask());
    assert!(!model("session").reads_ask());
}

#[test]
fn descriptions_are_unlike() {
    let table = ModelTable::builtin();
    let mut seen = std::collections::BTreeSet::new();
    for name in table.names() {
        let text = model(name).describe();
        assert!(!text.contains('\n') && text.starts_with(name));
        assert!(seen.insert(text));
    }
}

#[test]
fn a_user_row_starts_from_a_base() {
    let text = r#"
        other = 1
        [models.lazy]
        base = "entry"
        close = ["attach file", "query file"]
        [models.entry]
        lock = ["query file"]
        unlock = ["attach file"]
        read = []
        write = ["attach range", "query range"]
    "#;
    let table = ModelTable::builtin().with_user(text).unwrap();
    let lazy = table.get("lazy").unwrap();
    assert_eq!(lazy.on(Close), AF_QF);
    assert_eq!(lazy.on(Lock), QF);
    assert_eq!(lazy.on(Write).query, Some(Scope::Range));
    assert_eq!(table.get("entry").unwrap().on(Close), NO);
    assert_eq!(table.names().len(), 7);
    assert_eq!(ModelTable::builtin().with_user("x = 3").unwrap().names().len(), 5);
}

#[test]
fn errors_name_the_key() {
    let cases = [
        ("[models.a]\nopne = []", "models.a.opne"),
        ("[models.a]\nopen = \"attach file\"", "models.a.open"),
        ("[models.a]\nopen = [1]", "models.a.open"),
        ("[models.a]\nopen = [\"attach range\"]", "models.a.open"),
        ("[models.a]\nread = [\"query everything\"]", "models.a.read"),
        ("[models.a]\nread = [\"query file\", \"query range\"]", "models.a.read"),
        ("[models.posix]\nopen = []", "models.posix"),
        ("[models.\"a b\"]\nopen = []", "models.a b"),
        ("[models.a]\nbase = \"b\"", "models.a.base"),
        ("[models.a]\nbase = 3", "models.a.base"),
        ("[models.a]\nbase = \"b\"\n[models.b]\nbase = \"a\"", ".base"),
        ("[models.a]\nopen = [\"query file\"]", "models.a"),
        ("[models.a]\nclose = [\"attach file\"]", "models.a"),
        ("models = 3", "models"),
        ("[models]\na = 3", "models.a"),
        ("[models.a]\nopen = []\nopen = []", "open"),
        ("[models.a", "TOML"),
    ];
    for (text, named) in cases {
        let error = ModelTable::builtin().with_user(text).unwrap_err().to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
}
