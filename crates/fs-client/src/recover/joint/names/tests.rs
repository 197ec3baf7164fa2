//! Who speaks of names, and when.

use super::*;
use crate::recover::places::Places;

/// What a node says that has heard of no names, in a job of so many nodes of which it was the last.
fn said_by_one_of(nodes: u32) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let places = Places::open(dir.path()).unwrap();
    let board = Board::open(&places, "1").unwrap();
    let mut image = Image::default();
    image.lives.begin(nodes, nodes);
    Names::gather(&board, "last", &image, None, Duration::ZERO).unwrap();
    board.said().unwrap()
}

/// The others wait until all have said what they know.
#[test]
fn who_has_nothing_to_say_of_names_says_so_where_there_are_others() {
    assert_eq!(said_by_one_of(3), 1);
    assert_eq!(said_by_one_of(1), 0, "nobody waits");
}
