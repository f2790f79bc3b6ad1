// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stall report: tensors that only some ranks have submitted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farandole_negotiation::rank_ranges_text;
use farandole_world::{ProcessSetId, Rank};
use parking_lot::Mutex;

/// Largest number of tensors of a rank that a report names.
pub(crate) const MAX_NAMED_TENSORS: usize = 6;
/// Longest time that a process may take to report the stacks of its threads.
pub(crate) const STACK_TIMEOUT: Duration = Duration::from_secs(2);

/// Receiver of the engine's events. Its methods are called with the progress lock held: they must
/// neither block nor call the engine.
pub trait EngineObserver: Send + Sync {
    /// Reports tensors that have waited too long for some ranks. Called on the coordinator of the
    /// process set.
    fn on_stall(&self, report: &StallReport);

    /// Passes a notice to the user that is no failure. Called on the first rank of a process set.
    fn on_notice(&self, _text: &str) {}

    /// Requests the stacks of this process's threads, because another rank waits for this one. Send
    /// the text with [`StackAnswer::send_stacks`] later, from any thread. If the answer is dropped,
    /// the stacks count as unknown.
    fn request_thread_stacks(&self, answer: StackAnswer) {
        drop(answer);
    }
}

/// Observer that ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentObserver;

impl EngineObserver for SilentObserver {
    fn on_stall(&self, _report: &StallReport) {}
}

/// The stacks of a missing rank's threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadStacks {
    /// The process has no means to report them.
    Unknown,
    /// The process does not answer: one of its threads holds the interpreter, or the process does
    /// not run.
    NoAnswer,
    /// The stacks as text.
    Text(String),
}

/// A pending answer, to be completed with the stacks of this process.
#[derive(Debug)]
pub struct StackAnswer(Arc<StackAnswerSlot>);

#[derive(Debug, Default)]
pub(crate) struct StackAnswerSlot(Mutex<Option<ThreadStacks>>);

impl StackAnswer {
    pub(crate) fn new() -> (Self, Arc<StackAnswerSlot>) {
        let slot = Arc::new(StackAnswerSlot::default());
        (Self(Arc::clone(&slot)), slot)
    }

    /// Sends the stacks.
    pub fn send_stacks(self, text: String) {
        *self.0.0.lock() = Some(ThreadStacks::Text(text));
    }
}

impl Drop for StackAnswer {
    fn drop(&mut self) {
        // Does nothing after `send_stacks`, whose answer is there already.
        self.0.0.lock().get_or_insert(ThreadStacks::Unknown);
    }
}

impl StackAnswerSlot {
    /// Returns the answer, if it is there.
    pub(crate) fn current_answer(&self) -> Option<ThreadStacks> {
        self.0.lock().clone()
    }
}

/// A tensor that some ranks submitted and others did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StalledTensor {
    /// The tensor.
    pub tensor: Arc<str>,
    /// The operation on it: `allreduce of gradient.3`, `an addition of process set [0, 1]`.
    pub operation: String,
    /// Whether the operation moves no data, so that its submitters only wait for it.
    pub moves_no_data: bool,
    /// Time since the earliest submission that the coordinator knows.
    pub waiting: Duration,
    /// Ranks that have submitted it.
    pub submitters: Vec<Rank>,
    /// Ranks that have not submitted it.
    pub missing: Vec<Rank>,
    /// Whether the engine stops because of this tensor.
    pub fatal: bool,
}

/// An operation that a missing rank waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankWait {
    /// The operation, and its process set unless it is the global one.
    pub operation: String,
    /// Whether the operation moves no data.
    pub moves_no_data: bool,
    /// Time since its submission.
    pub since: Duration,
}

/// A rank that has not submitted a stalled tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRank {
    /// The rank.
    pub rank: Rank,
    /// Its host.
    pub host: String,
    /// A few of the operations that it waits for; `None` if it did not answer.
    pub waits: Option<Vec<RankWait>>,
    /// The stacks of its threads.
    pub stack: ThreadStacks,
}

/// Report of the tensors that have waited too long in a process set, and of the missing ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallReport {
    /// The process set.
    pub set: ProcessSetId,
    /// The time after which a wait is too long.
    pub limit: Duration,
    /// The stalled tensors, the longest wait first.
    pub stalls: Vec<StalledTensor>,
    /// The missing ranks that were asked, ascending.
    pub absentees: Vec<MissingRank>,
    /// Time for which every rank has waited in a barrier, a join or a change of process sets that
    /// other ranks have not entered; `None` if this is not so.
    pub deadlocked_for: Option<Duration>,
    /// Time of such a wait after which the engine stops; `None`: never.
    pub deadlock_limit: Option<Duration>,
}

impl StallReport {
    /// Returns whether the engine stops because of this report.
    pub fn is_fatal(&self) -> bool {
        self.stalls.iter().any(|stall| stall.fatal)
    }

    /// Returns every missing rank with the tensors that it has not submitted, and whether one of
    /// them is fatal.
    fn missing_by_rank(&self) -> Vec<(Rank, Vec<&str>, bool)> {
        let mut ranks: Vec<Rank> =
            self.stalls.iter().flat_map(|stall| stall.missing.clone()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
            .into_iter()
            .map(|rank| {
                let missing = || self.stalls.iter().filter(|stall| stall.missing.contains(&rank));
                let names = missing().map(|stall| &*stall.tensor).collect();
                (rank, names, missing().any(|stall| stall.fatal))
            })
            .collect()
    }
}

impl StallReport {
    /// Returns the error text for a job whose ranks have waited in different barriers, joins or
    /// changes of process sets for too long.
    pub(crate) fn deadlock_text(&self, lasted: Duration) -> String {
        let mut text = format!(
            "the programs of the ranks have parted ways: for {lasted:.1?} every rank has waited in \
             a barrier, a join or a change of process sets that not all ranks came to"
        );
        let barriers = self.stalls.iter().filter(|stall| stall.moves_no_data);
        for (index, stall) in barriers.clone().take(MAX_NAMED_TENSORS).enumerate() {
            let mark = if index == 0 { ':' } else { ';' };
            text.push_str(&format!(
                "{mark} {} in {}",
                rank_ranges_text(&stall.submitters),
                stall.operation
            ));
            if self.set != ProcessSetId::GLOBAL {
                text.push_str(&format!(" (process set {})", self.set));
            }
        }
        for absentee in self.absentees.iter().take(MAX_NAMED_TENSORS) {
            if barriers.clone().any(|stall| stall.submitters.contains(&absentee.rank)) {
                continue;
            }
            let waits = absentee.waits.iter().flatten().find(|wait| wait.moves_no_data);
            text.push_str(&format!(
                "; rank {} in {}",
                absentee.rank,
                waits.map_or("none", |wait| &wait.operation)
            ));
        }
        text
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            // Horovod's words, which scripts may look for in logs.
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset \
             of ranks and are waiting for remainder of ranks for more than {} seconds.",
            self.limit.as_secs_f64()
        )?;
        if self.set != ProcessSetId::GLOBAL {
            write!(f, " This is process set {}.", self.set)?;
        }
        f.write_str("\nMissing ranks:")?;
        for (rank, names, fatal) in self.missing_by_rank() {
            let more = if names.len() > MAX_NAMED_TENSORS { " ..." } else { "" };
            let mark = if fatal { "!" } else { "" };
            write!(
                f,
                "\n{rank}{mark}: [{}{more}]",
                names[..names.len().min(MAX_NAMED_TENSORS)].join(", ")
            )?;
        }
        let is_named =
            |(index, stall): &(usize, &StalledTensor)| *index == 0 || stall.moves_no_data;
        for (_, stall) in self.stalls.iter().enumerate().filter(is_named).take(MAX_NAMED_TENSORS) {
            let submitters: Vec<String> =
                stall.submitters.iter().take(64).map(Rank::to_string).collect();
            let more = if stall.submitters.len() > submitters.len() { " ..." } else { "" };
            let (operation, waiting) = (&stall.operation, stall.waiting);
            write!(
                f,
                "\n{operation} has waited for {waiting:.1?}; submitted by ranks: {}{more}",
                submitters.join(", ")
            )?;
        }
        if self.deadlocked_for.is_some() {
            f.write_str(
                "\nEvery rank waits in a barrier, a join or a change of process sets that not all \
                 ranks came to: their programs have parted ways.",
            )?;
            if let Some(ends) = self.deadlock_limit {
                write!(
                    f,
                    " The job ends when that has lasted for {} seconds.",
                    ends.as_secs_f64()
                )?;
            }
        }
        // Stacks come last: a log that truncates long messages then loses only stacks.
        self.absentees.iter().try_for_each(|absentee| write!(f, "\n{absentee}"))
    }
}

impl fmt::Display for MissingRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank {} on {} ", self.rank, self.host)?;
        match self.waits.as_deref() {
            None => f.write_str("does not answer.")?,
            Some([]) => f.write_str("waits in no operation.")?,
            Some(waits) => {
                f.write_str("waits in ")?;
                for (index, wait) in waits.iter().enumerate() {
                    let comma = if index > 0 { ", " } else { "" };
                    write!(f, "{comma}{} (for {:.1?})", wait.operation, wait.since)?;
                }
                f.write_str(".")?;
            }
        }
        match &self.stack {
            ThreadStacks::Unknown => Ok(()),
            ThreadStacks::NoAnswer if self.waits.is_none() => Ok(()),
            ThreadStacks::NoAnswer => write!(
                f,
                " Its Python threads: no answer within {STACK_TIMEOUT:?}, so one of them holds the \
                 interpreter."
            ),
            ThreadStacks::Text(text) => {
                f.write_str(" Its Python threads:")?;
                text.trim_end().lines().try_for_each(|line| write!(f, "\n  {line}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stall(tensor: &str, missing: &[u32], fatal: bool) -> StalledTensor {
        StalledTensor {
            tensor: tensor.into(),
            operation: format!("allreduce of {tensor}"),
            moves_no_data: false,
            waiting: Duration::from_millis(61_200),
            submitters: vec![Rank(0), Rank(2)],
            missing: missing.iter().copied().map(Rank).collect(),
            fatal,
        }
    }

    #[test]
    fn a_report_reads_as_horovods_and_continues_with_what_the_missing_do() {
        let mut stalls: Vec<StalledTensor> =
            (0..8).map(|k| stall(&format!("t{k}"), &[1], false)).collect();
        stalls[1] = stall("t1", &[3], true);
        let absentee = |rank, waits, stack| MissingRank {
            rank: Rank(rank),
            host: "h".to_owned(),
            waits,
            stack,
        };
        let wait = RankWait {
            operation: "allreduce of other".to_owned(),
            moves_no_data: false,
            since: Duration::from_secs(2),
        };
        let report = StallReport {
            set: ProcessSetId::GLOBAL,
            limit: Duration::from_secs(60),
            stalls,
            absentees: vec![
                absentee(1, Some(vec![wait]), ThreadStacks::Text("MainThread\nin f\n".to_owned())),
                absentee(3, Some(vec![]), ThreadStacks::NoAnswer),
                absentee(4, None, ThreadStacks::NoAnswer),
            ],
            deadlocked_for: None,
            deadlock_limit: None,
        };
        assert!(report.is_fatal());
        assert_eq!(
            report.to_string(),
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset \
             of ranks and are waiting for remainder of ranks for more than 60 seconds.\nMissing \
             ranks:\n\
             1: [t0, t2, t3, t4, t5, t6 ...]\n3!: [t1]\n\
             allreduce of t0 has waited for 61.2s; submitted by ranks: 0, 2\n\
             Rank 1 on h waits in allreduce of other (for 2.0s). Its Python threads:\n  \
             MainThread\n  in f\n\
             Rank 3 on h waits in no operation. Its Python threads: no answer within 2s, so one of \
             them holds the interpreter.\nRank 4 on h does not answer."
        );
    }

    #[test]
    fn an_answer_that_is_dropped_says_so() {
        let (answer, slot) = StackAnswer::new();
        assert_eq!(slot.current_answer(), None);
        drop(answer);
        assert_eq!(slot.current_answer(), Some(ThreadStacks::Unknown));
        let (answer, slot) = StackAnswer::new();
        answer.send_stacks("x".to_owned());
        assert_eq!(slot.current_answer(), Some(ThreadStacks::Text("x".to_owned())));
    }
}
