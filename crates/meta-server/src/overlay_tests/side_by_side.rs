//! Changes that are carried out side by side, on a backing where something fails.

use super::Overlay;
use super::unnoted::{names, on_a_runtime};
use ebb_namespace::{BackingPath, Effect, Plan, Replace, Step};
use ebb_types::{Ino, Name};
use std::cell::Cell;
use std::sync::Arc;

const FILES: u64 = 4;

/// None of these does so much on the backing.
const EFFECTS: u32 = 16;

/// What publishing does: a new file takes the place of an old one.
fn publishing(i: u64) -> Plan {
    let name = |n: String| BackingPath::ROOT.join(&Name::new(n.as_bytes()).unwrap());
    let part = name(format!(".ebb-part-{i}"));
    let rename =
        Effect::Rename { from: part.clone(), to: name(format!("f{i}")), replace: Replace::Yes };
    let effects = vec![
        Effect::CreatePart { path: part, striping: None },
        rename,
        Effect::SyncDir { path: BackingPath::ROOT },
    ];
    Plan { steps: vec![Step { effects, ..Step::default() }], ino: None }
}

/// Asks for all of them in one round; how each ended.
async fn publish_all(o: &Overlay) -> Vec<bool> {
    let turn = o.core.turn().await;
    let asked = (0..FILES).map(|i| {
        let core = Arc::clone(&o.core);
        tokio::spawn(
            async move { core.in_round(Ino(100 + i), move |_| Ok(Some(publishing(i)))).await },
        )
    });
    let asked: Vec<_> = asked.collect();
    tokio::task::yield_now().await;
    drop(turn);
    let mut ended = Vec::new();
    for asked in asked {
        ended.push(asked.await.unwrap().is_ok());
    }
    ended
}

#[test]
fn what_fails_in_a_round_leaves_nothing_done_and_the_others_alone() {
    let (failures, whole) = (&Cell::new(0), &Cell::new(0));
    for effects in 0..EFFECTS {
        on_a_runtime(|o, backing| async move {
            o.core.backing.death.fails_after(effects);
            let ended = publish_all(&o).await;
            o.core.backing.death.fails_after(u32::MAX);
            let there = |(i, ok): (usize, &bool)| ok.then(|| format!("f{i}"));
            let expected: Vec<String> = ended.iter().enumerate().filter_map(there).collect();
            assert_eq!(names(&backing), expected, "the effect after {effects} failed");
            failures.set(failures.get() + ended.iter().filter(|ok| !*ok).count());
            whole.set(whole.get() + usize::from(ended.iter().all(|ok| *ok)));
            assert!(publish_all(&o).await.iter().all(|ok| *ok), "asked again after {effects}");
        });
    }
    let (failures, whole) = (failures.get(), whole.get());
    assert!(failures >= 12 && whole > 0, "{failures} failed, {whole} rounds were whole");
}
