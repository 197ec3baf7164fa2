//! What there is to run, in order, and what must have run before.

use std::str::FromStr;

/// A phase of the job; all nodes take part in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Nodes join, one after the other.
    JoinInTurn,
    /// Nodes join, all at once. The phases from here on are of these nodes.
    Join,
    /// Each opens the shared file, which is empty.
    OpenEmpty,
    /// Each publishes its records.
    Attach,
    /// Each opens the file again and learns how long it is, and who has the first bytes.
    Open,
    /// Each asks who has the bytes that it reads, 16 MiB in the middle of the file.
    Look,
    /// Each closes it.
    Close,
    /// Each asks whether it may write its records to the backing.
    FlushBegin,
    /// Each says that it has.
    FlushEnd,
    /// Nothing but heartbeats.
    Idle,
    /// The service is killed and started again, and all come back.
    Restart,
    /// Each leaves the job.
    Goodbye,
}

impl Phase {
    /// All; those of one service are run in this order.
    pub const ALL: [Phase; 12] = [
        Phase::JoinInTurn,
        Phase::Join,
        Phase::OpenEmpty,
        Phase::Attach,
        Phase::Open,
        Phase::Look,
        Phase::Close,
        Phase::FlushBegin,
        Phase::FlushEnd,
        Phase::Idle,
        Phase::Restart,
        Phase::Goodbye,
    ];

    /// As it is written.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Phase::JoinInTurn => "join-in-turn",
            Phase::Join => "join",
            Phase::OpenEmpty => "open-empty",
            Phase::Attach => "attach",
            Phase::Open => "open",
            Phase::Look => "look",
            Phase::Close => "close",
            Phase::FlushBegin => "flush-begin",
            Phase::FlushEnd => "flush-end",
            Phase::Idle => "idle",
            Phase::Restart => "restart",
            Phase::Goodbye => "goodbye",
        }
    }

    /// For the head of its table.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Phase::JoinInTurn => "Joins, one after the other",
            Phase::Join => "Joins, all at once",
            Phase::OpenEmpty => "Opens of the new, empty file by all",
            Phase::Attach => "Attach: each node publishes its records of the shared file",
            Phase::Open => "Opens of the written file by all",
            Phase::Look => "Questions by all about 16 MiB in the middle of the written file",
            Phase::Close => "Closes by all",
            Phase::FlushBegin => "Begin of the flush by all",
            Phase::FlushEnd => "End of the flush by all",
            Phase::Idle => "Idle, with heartbeats; per node and second",
            Phase::Restart => "The service is killed and started again, all nodes come back",
            Phase::Goodbye => "Goodbyes of all",
        }
    }

    fn needs(self) -> Option<Phase> {
        match self {
            Phase::JoinInTurn | Phase::Join => None,
            Phase::OpenEmpty | Phase::Idle | Phase::Restart | Phase::Goodbye => Some(Phase::Join),
            Phase::Attach | Phase::Close => Some(Phase::OpenEmpty),
            Phase::Open | Phase::FlushBegin => Some(Phase::Attach),
            Phase::Look => Some(Phase::Open),
            Phase::FlushEnd => Some(Phase::FlushBegin),
        }
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(word: &str) -> Result<Phase, String> {
        let words = || Phase::ALL.map(Phase::word).join(", ");
        let found = Phase::ALL.into_iter().find(|p| p.word() == word);
        found.ok_or_else(|| format!("'{word}' is none of {}", words()))
    }
}

/// Which phases have one service together. The first has one without the others, because its nodes are not those
/// of what follows; so have the opens, so that a flush is not of a file that all have just heard of.
#[must_use]
pub fn by_service(wanted: &[Phase]) -> Vec<Vec<Phase>> {
    let (joins, opens) = ([Phase::JoinInTurn], [Phase::Open, Phase::Look]);
    let only = |which: &[Phase]| wanted.iter().copied().filter(|p| which.contains(p)).collect();
    let apart = |p: &Phase| joins.contains(p) || opens.contains(p);
    let together = wanted.iter().copied().filter(|p| !apart(p)).collect();
    let all: [Vec<Phase>; 3] = [only(&joins), together, only(&opens)];
    all.into_iter().filter(|phases| !phases.is_empty()).collect()
}

/// These, and those that they need, in order.
#[must_use]
pub fn with_needed(wanted: &[Phase]) -> Vec<Phase> {
    let chain = |phase: &Phase| std::iter::successors(Some(*phase), |p| p.needs());
    let all: std::collections::BTreeSet<Phase> = wanted.iter().flat_map(chain).collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_phase_needs_is_run_before_it() {
        assert_eq!(
            with_needed(&[Phase::FlushEnd, Phase::Open]),
            [
                Phase::Join,
                Phase::OpenEmpty,
                Phase::Attach,
                Phase::Open,
                Phase::FlushBegin,
                Phase::FlushEnd
            ]
        );
        assert_eq!(with_needed(&Phase::ALL), Phase::ALL);
        let mut run: Vec<Phase> = by_service(&Phase::ALL).into_iter().flatten().collect();
        run.sort();
        assert_eq!(run, Phase::ALL);
        assert_eq!(by_service(&[Phase::Open]), [[Phase::Open]]);
        assert!(Phase::ALL.iter().all(|p| p.needs().is_none_or(|needed| needed < *p)));
        assert!(Phase::ALL.iter().all(|p| p.word().parse() == Ok(*p)));
    }
}
