//! The formulas against the published numbers, against each other and against their bounds; the
//! advice against a search through every stripe count.

use super::*;
use proptest::prelude::*;

fn two_decimals(x: f64) -> String {
    format!("{x:.2}")
}

#[test]
fn every_published_number_comes_out_to_two_decimals() {
    // Targets, stripes, jobs, in use, load.
    for (d, r, n, in_use, load) in [
        (480, 160, 2, "266.67", "1.20"),
        (480, 160, 10, "471.68", "3.39"),
        (480, 64, 4, "209.20", "1.22"),
    ] {
        let closed = equal(d, r, n).unwrap();
        assert_eq!(
            (two_decimals(closed.in_use).as_str(), two_decimals(closed.load()).as_str()),
            (in_use, load)
        );
        let steps = unequal(d, &vec![r; n as usize]).unwrap();
        let last = steps.last().unwrap();
        assert_eq!(
            (two_decimals(last.in_use).as_str(), two_decimals(last.load()).as_str()),
            (in_use, load)
        );
    }
    // Printed with fewer decimals: 385 and 115 targets of four jobs, 2.4 for 512 ranks. The
    // numbers 115 and 17.06 are cut off, not rounded: the formula gives 115.76 and 17.0667.
    assert_eq!(equal(480, 160, 4).unwrap().in_use.floor(), 385.0);
    assert_eq!(equal(480, 32, 4).unwrap().in_use.floor(), 115.0);
    let plfs = |ranks| log_structured(480, ranks).unwrap().load();
    assert_eq!(format!("{:.1}", plfs(512)), "2.4");
    assert_eq!(two_decimals(plfs(2048)), "8.53");
    assert_eq!((plfs(4096) * 100.0).floor(), 1706.0);
    assert_eq!(two_decimals(plfs(4096)), "17.07");
}

/// Targets, and stripes that are possible on them.
fn targets_and_stripes() -> impl Strategy<Value = (u32, u32)> {
    (1u32..3000).prop_flat_map(|d| (Just(d), 1..=d))
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

proptest! {
    #[test]
    fn recurrence_and_closed_form_agree((d, r) in targets_and_stripes(), n in 1u32..400) {
        let steps = unequal(d, &vec![r; n as usize]).unwrap();
        prop_assert_eq!(steps.len(), n as usize);
        for (i, step) in steps.iter().enumerate() {
            let closed = equal(d, r, i as u32 + 1).unwrap();
            prop_assert!(near(step.in_use, closed.in_use), "{:?} {:?}", step, closed);
            prop_assert_eq!((step.jobs, step.required), (closed.jobs, closed.required));
        }
    }

    #[test]
    fn the_order_of_unequal_jobs_does_not_matter(
        mut stripes in proptest::collection::vec(1u32..480, 1..40),
    ) {
        let there = *unequal(480, &stripes).unwrap().last().unwrap();
        stripes.reverse();
        let back = *unequal(480, &stripes).unwrap().last().unwrap();
        prop_assert!(near(there.in_use, back.in_use));
        // And both are D minus what nobody touches.
        let untouched: f64 = stripes.iter().map(|r| 1.0 - f64::from(*r) / 480.0).product();
        prop_assert!(near(there.in_use, 480.0 - 480.0 * untouched));
    }

    #[test]
    fn a_further_job_uses_more_targets_and_loads_them_more(
        d in 1u32..2000,
        shares in proptest::collection::vec(0.0f64..=1.0, 1..60),
    ) {
        let stripes: Vec<u32> =
            shares.iter().map(|s| ((f64::from(d) * s) as u32).clamp(1, d)).collect();
        let mut before = Load { jobs: 0, in_use: 0.0, required: 0 };
        for now in unequal(d, &stripes).unwrap() {
            prop_assert!(now.in_use >= before.in_use - 1e-9);
            prop_assert!(now.in_use <= f64::from(d) + 1e-9);
            prop_assert!(now.in_use <= now.required as f64 + 1e-9);
            prop_assert!(now.load() >= 1.0 - 1e-9 && now.load() <= f64::from(now.jobs) + 1e-9);
            // Not so for the load of unequal jobs: one with few stripes can lower the mean.
            prop_assert!(now.required > before.required);
            before = now;
        }
    }

    #[test]
    fn the_load_of_equal_jobs_grows_with_jobs_and_with_stripes(
        (d, r) in targets_and_stripes(),
        n in 1u32..3000,
    ) {
        let here = equal(d, r, n).unwrap().load();
        prop_assert!(equal(d, r, n + 1).unwrap().load() >= here - 1e-9);
        if r < d {
            prop_assert!(equal(d, r + 1, n).unwrap().load() >= here - 1e-9);
        }
    }

    #[test]
    fn the_advice_is_the_most_that_no_limit_forbids(
        targets in 1u32..600, jobs in 1u32..12, files in 1u32..40, nodes in 1u32..200,
        file_size in 0u64..1 << 42, stripe_shift in 16u32..28,
    ) {
        let q = Question { targets, jobs, files, nodes, file_size, stripe_size: 1 << stripe_shift };
        let advice = advise(&q).unwrap();
        let fits = |stripes: u32| {
            let load = equal(targets, stripes, jobs * files).unwrap().load();
            let bytes = file_size / u64::from(stripes);
            stripes == 1
                || (load <= LOAD_LIMIT
                    && stripes <= nodes * TARGETS_PER_NODE
                    && bytes >= BYTES_PER_STRIPE_MIN.max(q.stripe_size))
        };
        let best = (1..=targets).filter(|s| fits(*s)).max().unwrap();
        prop_assert_eq!(advice.stripes, best, "{:?}", advice);
        prop_assert!(near(advice.load, equal(targets, best, jobs * files).unwrap().load()));
        prop_assert_eq!(advice.reasons.len(), 5);
        prop_assert_eq!(advice.reasons[4].contains("above 3"), advice.load > LOAD_LIMIT);
    }

    #[test]
    fn larger_files_more_writers_and_fewer_jobs_never_get_fewer_stripes(
        targets in 1u32..600, jobs in 1u32..30, nodes in 1u32..200, file_size in 0u64..1 << 42,
    ) {
        let q = Question { targets, jobs, files: 1, nodes, file_size, stripe_size: 1 << 20 };
        let here = advise(&q).unwrap().stripes;
        let stripes = |q: Question| advise(&q).unwrap().stripes;
        let larger = stripes(Question { file_size: file_size * 2, ..q });
        let wider = stripes(Question { nodes: nodes + 1, ..q });
        let busier = stripes(Question { jobs: jobs + 1, ..q });
        prop_assert!(larger >= here && wider >= here && busier <= here);
    }
}

const PAPER: Question = Question {
    targets: 480,
    jobs: 4,
    files: 1,
    nodes: 64,
    file_size: 1 << 40,
    stripe_size: 1 << 20,
};

#[test]
fn the_advice_names_what_decided_it() {
    let of = |q: Question| {
        let a = advise(&q).unwrap();
        (a.stripes, a.limit)
    };
    assert_eq!(of(Question { file_size: 1000, ..PAPER }), (1, Limit::Size));
    assert_eq!(of(Question { file_size: 1 << 30, ..PAPER }), (16, Limit::Size));
    assert_eq!(of(Question { nodes: 1, ..PAPER }), (4, Limit::Writers));
    assert_eq!(of(Question { targets: 100, ..PAPER }), (74, Limit::Load));
    assert_eq!(of(Question { targets: 100, jobs: 2, ..PAPER }), (100, Limit::Targets));
    // Ten jobs at the largest count of the paper were above the limit: 3.39.
    let ten = advise(&Question { jobs: 10, ..PAPER }).unwrap();
    assert!(ten.stripes < 160 && ten.load <= LOAD_LIMIT && ten.limit == Limit::Load, "{ten:?}");
    // A file for each of 4096 ranks: one stripe is all that the load leaves, and too much.
    let many = advise(&Question { files: 4096, jobs: 1, ..PAPER }).unwrap();
    assert_eq!((many.stripes, many.limit), (1, Limit::Load));
    assert!(many.load > 8.0 && many.reasons[4].contains("fewer files"), "{many:?}");
}

#[test]
fn the_reasons_are_sentences_with_the_numbers() {
    assert_eq!(
        advise(&PAPER).unwrap().reasons,
        [
            "size: 1TiB in stripes of 1MiB is worth 16384 stripes, at 64MiB or more to each",
            "writers: 64 nodes can keep 256 targets busy (4 each)",
            "targets: there are 480",
            "load: 4 files of this kind on 480 targets stay within a load of 3 with up to 358 \
             stripes",
            "with 256 stripes, 4 jobs give a load of 2.24",
        ]
    );
}

#[test]
fn what_cannot_be_is_refused() {
    assert_eq!(equal(0, 1, 1), Err(LoadError::Targets { targets: 0 }));
    assert_eq!(equal(10, 0, 1), Err(LoadError::Stripes { stripes: 0, targets: 10 }));
    assert_eq!(unequal(10, &[1, 11]), Err(LoadError::Stripes { stripes: 11, targets: 10 }));
    assert_eq!(unequal(10, &[]), Err(LoadError::Jobs { jobs: 0 }));
    assert_eq!(equal(10, 1, 0), Err(LoadError::Jobs { jobs: 0 }));
    assert_eq!(log_structured(u32::MAX, 1), Err(LoadError::Targets { targets: u32::MAX }));
    assert_eq!(log_structured(1, 5).map(|l| l.load()), Ok(5.0));
    assert_eq!(advise(&Question { nodes: 0, ..PAPER }), Err(LoadError::Nodes));
    assert_eq!(advise(&Question { stripe_size: 0, ..PAPER }), Err(LoadError::StripeSize));
    let too_many = Question { jobs: u32::MAX, files: u32::MAX, ..PAPER };
    assert_eq!(advise(&too_many), Err(LoadError::Jobs { jobs: u32::MAX }));
}
