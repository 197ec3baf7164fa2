//! What terms and coupled files are, against a history of opens and closes.

use super::*;
use ebb_types::NodeId;
use proptest::prelude::*;
use std::time::Duration;

fn terms(text: &str) -> Terms {
    text.parse().expect("terms")
}

fn user(node: u32, handle: u64) -> User {
    User { node: NodeId(node), handle }
}

#[test]
fn terms_are_read_as_they_are_written() {
    let full = terms("producers=4 consumers=2 keep=pfs wait=1500ms");
    let wait = Duration::from_millis(1500);
    assert_eq!(full, Terms { producers: 4, consumers: 2, keep: Keep::Pfs, wait });
    let short = terms(" consumers=1\tproducers=1 ");
    assert_eq!(short.to_string(), "producers=1 consumers=1 keep=none wait=30s");
    for text in ["producers=1 consumers=1 wait=2ms", "producers=9 consumers=7 keep=pfs wait=2h"] {
        assert_eq!(terms(text), terms(&terms(text).to_string()));
    }
}

#[test]
fn what_is_not_terms_says_what_is_wrong() {
    let long = format!("producers=1 consumers=1 {}", "x".repeat(400));
    for (text, what) in [
        ("", "producers= is missing"),
        ("producers=1", "consumers= is missing"),
        ("producers=0 consumers=1", "producers must be a number"),
        ("producers=1 consumers=-1", "consumers must be a number"),
        ("producers=1 producers=1 consumers=1", "producers is there twice"),
        ("producers=1 consumers=1 keep=all", "keep must be none or pfs"),
        ("producers=1 consumers=1 wait=0s", "wait must be longer"),
        ("producers=1 consumers=1 wait=25h", "wait must be longer"),
        ("producers=1 consumers=1 wait=5", "wait"),
        ("producers=1 consumers=1 stream", "there is no 'stream'"),
        (&long, "too long"),
    ] {
        let error = text.parse::<Terms>().expect_err(text).to_string();
        assert!(error.contains(what), "{text}: {error}");
    }
}

#[test]
fn a_file_is_handed_on() {
    let mut file = Coupled::new(terms("producers=2 consumers=1"));
    let step = |file: &mut Coupled, step| {
        file.apply(step);
        file.state()
    };
    assert_eq!(step(&mut file, Step::Produces(user(1, 1))), State::Awaited);
    assert_eq!(step(&mut file, Step::Leaves(user(1, 1), true)), State::Awaited);
    assert_eq!(step(&mut file, Step::Produces(user(2, 1))), State::Awaited);
    // The second one truncates what the first one wrote: that is missing again.
    assert_eq!(step(&mut file, Step::Anew), State::Awaited);
    assert_eq!(step(&mut file, Step::Leaves(user(2, 1), true)), State::Awaited);
    assert_eq!(step(&mut file, Step::Produces(user(1, 5))), State::Awaited);
    // An open that came to nothing changes nothing.
    assert_eq!(step(&mut file, Step::Produces(user(1, 6))), State::Awaited);
    assert_eq!(step(&mut file, Step::Withdraws(user(1, 6))), State::Awaited);
    assert_eq!(step(&mut file, Step::Leaves(user(1, 5), true)), State::Ready);
    assert_eq!(step(&mut file, Step::Consumes(user(3, 7))), State::Ready);
    // Killed: it does not count, and the next one does.
    assert_eq!(step(&mut file, Step::Leaves(user(3, 7), false)), State::Ready);
    assert_eq!(step(&mut file, Step::Consumes(user(3, 9))), State::Ready);
    assert!(!file.is_to_go());
    assert_eq!(step(&mut file, Step::Leaves(user(3, 9), true)), State::Consumed);
    assert!(file.is_to_go());
    // Written anew it is another one.
    assert_eq!(step(&mut file, Step::Anew), State::Awaited);
    assert_eq!(step(&mut file, Step::Produces(user(1, 2))), State::Awaited);
    assert_eq!(step(&mut file, Step::Leaves(user(1, 2), false)), State::Lost(NodeId(1)));
    assert_eq!(step(&mut file, Step::Anew), State::Awaited);
}

fn after(terms_: &str, steps: &[Step]) -> Coupled {
    let mut file = Coupled::new(terms(terms_));
    steps.iter().for_each(|step| file.apply(*step));
    file
}

/// Who still reads the last time step has not read the next one.
#[test]
fn a_reader_of_the_old_content_does_not_count_for_the_new_one() {
    let (a, b, r) = (user(1, 1), user(1, 2), user(2, 1));
    let first = [Step::Produces(a), Step::Leaves(a, true), Step::Consumes(r)];
    let anew = [Step::Anew, Step::Produces(b), Step::Leaves(r, true), Step::Leaves(b, true)];
    let file = after("producers=1 consumers=1", &[&first[..], &anew].concat());
    assert_eq!((file.state(), file.is_to_go()), (State::Ready, false));
}

/// What it wrote before a lost file was begun anew is cut off.
#[test]
fn who_wrote_a_lost_file_does_not_count_when_it_is_begun_anew() {
    let (a, b, c, d) = (user(1, 1), user(2, 1), user(1, 2), user(2, 2));
    let lost = [Step::Produces(a), Step::Produces(b), Step::Leaves(a, false)];
    let anew = [Step::Anew, Step::Produces(c), Step::Leaves(c, true)];
    let mut file = after("producers=1 consumers=1", &[&lost[..], &anew].concat());
    assert_eq!(file.state(), State::Awaited, "somebody may still write into it");
    file.apply(Step::Leaves(b, true));
    assert_eq!(file.state(), State::Ready);
    let two = [Step::Leaves(b, true), Step::Produces(d), Step::Leaves(d, true)];
    let file = after("producers=2 consumers=1", &[&lost[..], &anew, &two].concat());
    assert_eq!(file.state(), State::Ready);
    let file = after("producers=2 consumers=1", &[&lost[..], &anew, &two[..1]].concat());
    assert_eq!(file.state(), State::Awaited);
}

#[test]
fn what_is_to_be_kept_does_not_go() {
    let mut file = Coupled::new(terms("producers=1 consumers=1 keep=pfs"));
    for step in [Step::Produces(user(1, 1)), Step::Leaves(user(1, 1), true)] {
        file.apply(step);
    }
    for step in [Step::Consumes(user(1, 2)), Step::Leaves(user(1, 2), true)] {
        file.apply(step);
    }
    assert_eq!((file.state(), file.is_to_go()), (State::Consumed, false));
}

/// Of how many each one is they say themselves, and nobody is one more.
#[test]
fn who_joins_says_of_how_many_it_is_one() {
    let (a, b, c) = (user(1, 1), user(2, 1), user(2, 2));
    let mut file = after("producers=1 consumers=1", &[Step::Produces(a), Step::Joins(a, 2)]);
    assert_eq!((file.may_join(a, 0), file.may_join(a, 3)), (Ok(()), Ok(())));
    assert_eq!(file.may_join(a, 1), Err(NotOne::AreMore));
    assert_eq!(file.may_join(b, 2), Err(NotOne::IsNotThere));
    file.apply(Step::Leaves(a, true));
    assert_eq!(file.state(), State::Awaited, "one of two");
    file.apply(Step::Produces(b));
    assert_eq!((file.may_join(b, 2), file.may_join(b, 0)), (Ok(()), Ok(())));
    file.apply(Step::Produces(c));
    assert_eq!(file.may_join(c, 2), Err(NotOne::IsProduced));
    file.apply(Step::Withdraws(c));
    file.apply(Step::Leaves(b, true));
    assert_eq!(file.state(), State::Ready);
    for reader in [a, b] {
        file.apply(Step::Consumes(reader));
        assert_eq!(file.may_join(reader, 2), Ok(()));
        file.apply(Step::Joins(reader, 2));
    }
    file.apply(Step::Produces(c));
    assert_eq!(file.may_join(c, 9), Err(NotOne::IsProduced), "it may have been read");
    file.apply(Step::Withdraws(c));
    file.apply(Step::Consumes(c));
    assert_eq!((file.may_join(c, 0), file.may_join(c, 3)), (Err(NotOne::IsConsumed), Ok(())));
    assert_eq!(file.may_join(a, 1), Err(NotOne::IsConsumed));
    file.apply(Step::Withdraws(c));
    file.apply(Step::Leaves(a, true));
    assert_eq!(file.state(), State::Ready);
    assert_eq!(file.may_join(b, 1), Err(NotOne::IsConsumed));
    assert!(file.has(b) && !file.has(c));
    file.apply(Step::Leaves(b, true));
    assert_eq!(file.state(), State::Consumed);
    let lost = [Step::Produces(a), Step::Leaves(a, false), Step::Produces(b)];
    assert_eq!(after("producers=1 consumers=1", &lost).may_join(b, 1), Err(NotOne::IsLost));
}

/// What was opened and closed since the file was written anew, as a list.
#[derive(Default)]
struct Reference {
    opened: Vec<(User, bool, Option<bool>)>,
    /// Writers of before it was begun anew.
    stale: Vec<User>,
    died: Option<NodeId>,
}

impl Reference {
    fn state(&self, terms: &Terms) -> State {
        let count = |writes: bool, left: Option<bool>| {
            self.opened.iter().filter(|o| o.1 == writes && o.2 == left).count() as u32
        };
        if let Some(node) = self.died {
            State::Lost(node)
        } else if !self.stale.is_empty()
            || count(true, None) > 0
            || count(true, Some(true)) < terms.producers
        {
            State::Awaited
        } else if count(false, None) > 0 || count(false, Some(true)) < terms.consumers {
            State::Ready
        } else {
            State::Consumed
        }
    }
}

fn a_step() -> impl Strategy<Value = (u8, u32, u64, bool)> {
    (0u8..12, 1u32..4, 0u64..5, any::<bool>())
}

proptest! {
    #[test]
    fn a_file_is_as_its_history_says(
        producers in 1u32..4,
        consumers in 1u32..4,
        steps in proptest::collection::vec(a_step(), 0..60),
    ) {
        let mut terms = terms(&format!("producers={producers} consumers={consumers}"));
        let (mut file, mut reference) = (Coupled::new(terms), Reference::default());
        for (kind, node, handle, through) in steps {
            // Who writes has other numbers than who reads.
            let handle = handle + if kind % 2 == 0 { 0 } else { 100 };
            let who = user(node, handle);
            let there = |r: &Reference| r.opened.iter().any(|o| o.0 == who && o.2.is_none());
            let step = match kind {
                0..4 => {
                    let writes = kind % 2 == 0;
                    if !there(&reference) {
                        reference.opened.push((who, writes, None));
                    }
                    if writes { Step::Produces(who) } else { Step::Consumes(who) }
                }
                4..8 => {
                    let open = |o: &&mut (User, bool, Option<bool>)| o.0 == who && o.2.is_none();
                    reference.stale.retain(|u| *u != who);
                    if let Some(o) = reference.opened.iter_mut().find(open) {
                        o.2 = Some(through);
                        if o.1 && !through {
                            reference.died = Some(who.node);
                        }
                    }
                    Step::Leaves(who, through)
                }
                8 => {
                    let is_lost = reference.died.take().is_some();
                    reference.opened.retain(|o| o.1 && o.2.is_none());
                    if is_lost {
                        reference.stale.extend(reference.opened.drain(..).map(|o| o.0));
                    }
                    Step::Anew
                }
                10.. => {
                    let open = |o: &&(User, bool, Option<bool>)| o.0 == who && o.2.is_none();
                    // Who wrote a lost file is none of those who write it anew.
                    match reference.opened.iter().find(open) {
                        Some(o) if o.1 => terms.producers = node,
                        Some(_) => terms.consumers = node,
                        None => {}
                    }
                    Step::Joins(who, node)
                }
                _ => {
                    reference.opened.retain(|o| !(o.0 == who && o.2.is_none()));
                    reference.stale.retain(|u| *u != who);
                    Step::Withdraws(who)
                }
            };
            file.apply(step);
            prop_assert_eq!(file.state(), reference.state(&terms));
            let mut once_more = file.clone();
            once_more.apply(step);
            if !matches!(step, Step::Anew) {
                prop_assert_eq!(&once_more, &file, "done twice");
            }
            let bytes = postcard::to_stdvec(&file).expect("encodes");
            prop_assert_eq!(&postcard::from_bytes::<Coupled>(&bytes).expect("decodes"), &file);
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in ".{0,300}") {
        let _ = text.parse::<Terms>();
    }
}
