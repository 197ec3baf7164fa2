//! One request for all who ask for the same at the same time: programs that sync files of their own (of one file the
//! kernel lets one sync in at a time), or that look how much room there is.

use ebb_types::Errno;
use std::future::Future;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// What was answered last.
#[derive(Debug)]
pub(crate) struct Lately<T> {
    last: Mutex<Option<Last<T>>>,
}

#[derive(Debug)]
struct Last<T> {
    /// When it was asked for,
    began: Instant,
    /// and how long somebody was ready to wait.
    patience: Duration,
    answer: Result<T, Errno>,
}

impl<T> Default for Lately<T> {
    fn default() -> Lately<T> {
        Lately { last: Mutex::new(None) }
    }
}

impl<T: Clone> Lately<T> {
    /// An answer to what was asked after this call, or not longer than `age` before it. Who comes while somebody asks
    /// waits for that, and asks only when it began too early, as long as he has `patience` left; so two are asked, however
    /// many come at a time. A failure is shared by those who would not have waited longer.
    pub async fn get<F: Future<Output = Result<T, Errno>>>(
        &self,
        age: Duration,
        patience: Duration,
        ask: impl FnOnce(Duration) -> F,
    ) -> Result<T, Errno> {
        let came = Instant::now();
        let mut last = self.last.lock().await;
        let patience = patience.saturating_sub(came.elapsed());
        let serves = |last: &&mut Last<T>| match last.answer {
            Ok(_) => came.saturating_duration_since(last.began) <= age,
            Err(_) => last.began >= came && last.patience >= patience,
        };
        if let Some(last) = last.as_mut().filter(serves) {
            return last.answer.clone();
        }
        let began = Instant::now();
        let answer = ask(patience).await;
        *last = Some(Last { began, patience, answer: answer.clone() });
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use tokio::sync::Semaphore;
    use tokio::task::{JoinHandle, LocalSet, spawn_local, yield_now};

    const FOR_EVER: Duration = Duration::from_secs(1 << 30);

    /// Answers when it is let to: how often it was asked.
    #[derive(Clone)]
    struct Slow {
        lately: Rc<Lately<(u32, Instant)>>,
        asked: Rc<Cell<u32>>,
        gate: Rc<Semaphore>,
    }

    impl Slow {
        fn new() -> Slow {
            let (lately, asked) = (Rc::new(Lately::default()), Rc::default());
            Slow { lately, asked, gate: Rc::new(Semaphore::new(0)) }
        }

        /// Somebody comes; what he is told, and when he came.
        fn comes(
            &self,
            age: Duration,
            patience: u64,
            fails: bool,
        ) -> JoinHandle<(Result<(u32, Instant), Errno>, Instant)> {
            let all = self.clone();
            spawn_local(async move {
                let came = Instant::now();
                let ask = |_| async {
                    let began = Instant::now();
                    let number = all.asked.get() + 1;
                    all.asked.set(number);
                    all.gate.acquire().await.expect("nobody closes it").forget();
                    if fails { Err(Errno::ETIMEDOUT) } else { Ok((number, began)) }
                };
                (all.lately.get(age, Duration::from_secs(patience), ask).await, came)
            })
        }

        /// Everybody goes as far as he comes.
        async fn all_wait(&self) {
            for _ in 0..100 {
                yield_now().await;
            }
        }

        async fn answers(&self) {
            self.gate.add_permits(1);
            self.all_wait().await;
        }
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        LocalSet::new().block_on(&runtime, test);
    }

    #[derive(Clone, Debug)]
    enum Act {
        Come { forever: bool },
        Leave(prop::sample::Index),
        Answer,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => any::<bool>().prop_map(|forever| Act::Come { forever }),
            1 => any::<prop::sample::Index>().prop_map(Act::Leave),
            2 => Just(Act::Answer),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Many come, some go away: no answer is of a request that began too early, and everybody who stays is
        /// answered.
        #[test]
        fn an_answer_is_never_older_than_who_gets_it(
            acts in prop::collection::vec(act(), 1..40),
        ) {
            run(async move {
                let slow = Slow::new();
                let mut there = Vec::new();
                for act in acts {
                    match act {
                        Act::Come { forever } => {
                            let age = if forever { FOR_EVER } else { Duration::ZERO };
                            there.push((slow.comes(age, 1, false), forever));
                            slow.all_wait().await;
                        }
                        Act::Leave(who) if !there.is_empty() => {
                            let (who, _) = there.swap_remove(who.index(there.len()));
                            who.abort();
                            slow.all_wait().await;
                        }
                        Act::Leave(_) => {}
                        Act::Answer => slow.answers().await,
                    }
                }
                slow.gate.add_permits(1000);
                for (who, forever) in there {
                    let (answer, came) = who.await.expect("it ends");
                    let (_, began) = answer.expect("it is answered");
                    assert!(forever || began >= came);
                }
            });
        }
    }

    #[test]
    fn who_comes_meanwhile_waits_and_all_of_them_ask_once_more() {
        run(async {
            let slow = Slow::new();
            let first = slow.comes(Duration::ZERO, 1, false);
            slow.all_wait().await;
            let others: Vec<_> = (0..20).map(|_| slow.comes(Duration::ZERO, 1, false)).collect();
            slow.all_wait().await;
            assert_eq!(slow.asked.get(), 1);
            slow.answers().await;
            assert_eq!(first.await.expect("it ends").0.expect("an answer").0, 1);
            slow.answers().await;
            for other in others {
                assert_eq!(other.await.expect("it ends").0.expect("an answer").0, 2);
            }
            let later = slow.comes(FOR_EVER, 1, false).await.expect("it ends");
            assert_eq!((later.0.expect("an answer").0, slow.asked.get()), (2, 2));
        });
    }

    #[test]
    fn a_failure_is_shared_with_who_would_not_have_waited_longer() {
        run(async {
            let slow = Slow::new();
            let first = slow.comes(FOR_EVER, 1000, true);
            slow.all_wait().await;
            let others = [1000, 500, 3000].map(|patience| slow.comes(FOR_EVER, patience, true));
            slow.all_wait().await;
            for asked in 1..4 {
                assert_eq!(slow.asked.get(), asked);
                slow.answers().await;
            }
            // The second one asked for the third one, too, and the fourth waits longer.
            assert_eq!(slow.asked.get(), 3);
            for one in [first].into_iter().chain(others) {
                assert_eq!(one.await.expect("it ends").0, Err(Errno::ETIMEDOUT));
            }
        });
    }
}
