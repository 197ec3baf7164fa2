//! Daemons that die under their supervisors while their bytes have copies with a partner.

use ebb_testkit::skip_reason;
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::{builder, clear, has_partner, lose, wait_adopted};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

const PIECE: u64 = 300_000;

/// Both die in turn, and go on; then one is lost with all it had.
#[test]
fn what_was_synced_around_deaths_has_its_copies() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder(2, "commit").separate_meta().supervised().start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    cluster.nodes().iter().for_each(has_partner);
    let file = File::create(a.path("f")).expect("create");
    let mut whole = Vec::new();
    let mut more = |piece: u64| {
        let data = bytes(7, piece, piece * PIECE, PIECE);
        file.write_all_at(&data, piece * PIECE).expect("write");
        file.sync_all().expect("fsync");
        whole.extend(data);
    };
    more(0);
    assert!(a.kill_daemon());
    more(1);
    assert!(b.kill_daemon());
    more(2);
    has_partner(a);
    assert!(a.kill_daemon());
    assert!(b.kill_daemon());
    more(3);
    has_partner(a);
    lose(a);
    drop(file);
    wait_adopted(b, 4 * PIECE);
    same("f", &fs::read(b.path("f")).expect("read"), &whole);
    clear(a);
    b.umount();
    same("f", &fs::read(cluster.backing().join("f")).expect("read"), &whole);
}
