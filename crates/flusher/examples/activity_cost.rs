//! Measures what counting costs a foreground operation: `activity_cost [THREADS]`. Prints
//! nanoseconds per enter-and-leave, alone and with all threads at the same counter.

use ebb_flusher::Activity;
use std::sync::Arc;
use std::time::Instant;

const ROUNDS: u32 = 5_000_000;

fn main() {
    let threads = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(2);
    for threads in [1, threads] {
        let activity = Activity::new();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| (0..ROUNDS).for_each(|_| drop(activity.enter())));
            }
        });
        let each = began.elapsed() / ROUNDS;
        println!("{threads} threads, borrowed guard: {} ns", each.as_nanos());
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let activity = Arc::clone(&activity);
                scope.spawn(move || (0..ROUNDS).for_each(|_| drop(activity.enter_owned())));
            }
        });
        let each = began.elapsed() / ROUNDS;
        println!("{threads} threads, owned guard:    {} ns", each.as_nanos());
    }
}
