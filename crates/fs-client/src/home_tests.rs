//! Random changes and looks, some at the same time, against a backing file that knows its state.

use super::*;
use ebb_node_journal::Seen;
use ebb_types::Time;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Begin(bool),
    /// Of the changes under way, one is carried out.
    CarryOut(usize),
    End(usize),
    Look,
    /// Of the looks under way, one sees the file.
    See(usize),
    Tell(usize),
    Move,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        any::<bool>().prop_map(Step::Begin),
        (0usize..3).prop_map(Step::CarryOut),
        (0usize..3).prop_map(Step::End),
        Just(Step::Look),
        (0usize..3).prop_map(Step::See),
        (0usize..3).prop_map(Step::Tell),
        Just(Step::Move),
    ]
}

fn found(size: u64) -> Home {
    let seen = Some(Seen { size, mtime: Time::default() });
    Home { path: b"f".to_vec(), ino: 7, seen, changing: false }
}

fn seen(whereabouts: &Whereabouts) -> Option<u64> {
    Some(whereabouts.home()?.seen?.size)
}

proptest! {
    #[test]
    fn what_is_told_of_the_file_is_what_it_is_like(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut whereabouts = Whereabouts::default();
        let mut size = 0;
        let mut changes = 0;
        let mut looks: Vec<(Look, Option<u64>)> = Vec::new();
        for step in steps {
            match step {
                Step::Begin(placed) => {
                    changes += 1;
                    whereabouts.changes(placed.then_some((b"f", 7)));
                }
                Step::CarryOut(n) if n < changes => size += 1,
                Step::End(n) if n < changes => {
                    changes -= 1;
                    whereabouts.changed();
                }
                Step::Look => looks.push((whereabouts.look(), None)),
                Step::See(n) if n < looks.len() => looks[n].1 = Some(size),
                Step::Tell(n) if n < looks.len() => {
                    let (look, saw) = looks.remove(n);
                    let Some(saw) = saw else { continue };
                    let alone = look.quiet && look.begun == whereabouts.begun;
                    whereabouts.found(look, Some(found(saw)));
                    prop_assert_eq!(seen(&whereabouts).is_some(), alone);
                }
                Step::Move => whereabouts.moved(b"g"),
                _ => {}
            }
            // A daemon may be killed at any time, and what was told is compared with the file.
            prop_assert!(seen(&whereabouts).is_none_or(|s| s == size));
        }
    }
}

#[test]
fn a_look_with_nothing_in_between_counts() {
    let mut whereabouts = Whereabouts::default();
    whereabouts.changes(None);
    whereabouts.changed();
    let look = whereabouts.look();
    whereabouts.found(look, Some(found(3)));
    assert_eq!(seen(&whereabouts), Some(3));
    assert!(whereabouts.changes(None), "there is something new to note");
    assert_eq!(seen(&whereabouts), None);
    assert!(!whereabouts.changes(None), "there is nothing new to note");
}
