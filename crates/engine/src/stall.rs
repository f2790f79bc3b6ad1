// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stall report: tensors that only some ranks have submitted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farandole_world::{ProcessSetId, Rank};
use parking_lot::Mutex;

use crate::tally::spans;

/// Tensors of a rank that are named in a report.
pub(crate) const NAMED: usize = 6;
/// Longest time in which a process must report what its threads do.
pub(crate) const STACK_LIMIT: Duration = Duration::from_secs(2);

/// Hears what happens inside. Called with the progress lock held: it must not block nor call the
/// engine.
pub trait Observer: Send + Sync {
    /// Tensors have waited too long for some ranks. Called on the coordinator of the process set.
    fn stalled(&self, report: &StallReport);

    /// Something that a user should know and that is no failure. Called on the first rank of a
    /// process set.
    fn note(&self, _text: &str) {}

    /// Another rank waits for this one and wants to know what its threads do. The text is given to
    /// `answer` later, from any thread; dropping it says that the text is unknown.
    fn describe(&self, answer: Answer) {
        drop(answer);
    }
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn stalled(&self, _report: &StallReport) {}
}

/// The stacks of a missing rank's threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stack {
    /// No thread of that process can report them.
    Unknown,
    /// They do not answer: one of them holds the interpreter, or the process does not run.
    Silent,
    /// Their stacks.
    Text(String),
}

/// A pending answer with the stacks of this process.
#[derive(Debug)]
pub struct Answer(Arc<Slot>);

#[derive(Debug, Default)]
pub(crate) struct Slot(Mutex<Option<Stack>>);

impl Answer {
    pub(crate) fn new() -> (Self, Arc<Slot>) {
        let slot = Arc::new(Slot::default());
        (Self(Arc::clone(&slot)), slot)
    }

    /// Answers.
    pub fn give(self, text: String) {
        *self.0.0.lock() = Some(Stack::Text(text));
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.0.0.lock().get_or_insert(Stack::Unknown);
    }
}

impl Slot {
    /// The answer, if it is there.
    pub(crate) fn answer(&self) -> Option<Stack> {
        self.0.lock().clone()
    }
}

/// A tensor that some ranks submitted and others did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The tensor.
    pub tensor: Arc<str>,
    /// The operation on it: `allreduce of gradient.3`, `an addition of process set [0, 1]`.
    pub what: String,
    /// Whether it moves no data, so that its submitters wait for it and do nothing else.
    pub meeting: bool,
    /// Since the first rank submitted it, as far as the coordinator knows.
    pub waiting: Duration,
    /// Ranks that submitted it.
    pub came: Vec<Rank>,
    /// Ranks that did not.
    pub missing: Vec<Rank>,
    /// Whether the engine stops because of it.
    pub fatal: bool,
}

/// The wait of a rank that is missing elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The operation, and its process set if that is not the global one.
    pub what: String,
    /// Whether it moves no data.
    pub meeting: bool,
    /// Since it was submitted.
    pub since: Duration,
}

/// A rank that is missing somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absentee {
    /// The rank.
    pub rank: Rank,
    /// Its host.
    pub host: String,
    /// Its waits, a few of them; `None` if it did not answer.
    pub waits: Option<Vec<Wait>>,
    /// The stacks of its threads.
    pub stack: Stack,
}

/// Everything that has waited too long in a process set, and the known facts about the missing
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallReport {
    /// The process set.
    pub set: ProcessSetId,
    /// The time after which a wait is too long.
    pub limit: Duration,
    /// The tensors, the one that has waited longest first.
    pub stalls: Vec<Stall>,
    /// The ranks that were asked, ascending.
    pub absentees: Vec<Absentee>,
    /// For how long each rank has waited in a barrier, a join or a change of process sets that not
    /// all came to, if so.
    pub parted: Option<Duration>,
    /// Longest time for which that may last.
    pub ends: Option<Duration>,
}

impl StallReport {
    /// Returns whether the engine stops because of it.
    pub fn is_fatal(&self) -> bool {
        self.stalls.iter().any(|stall| stall.fatal)
    }

    /// Every missing rank with the tensors it is missing in, and whether one of them is fatal.
    fn by_rank(&self) -> Vec<(Rank, Vec<&str>, bool)> {
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
    /// The error that ends the job if its ranks have waited in different meetings for too long.
    pub(crate) fn parting(&self, lasted: Duration) -> String {
        let mut text = format!(
            "the programs of the ranks have parted ways: for {lasted:.1?} every rank has waited in \
             a barrier, a join or a change of process sets that not all ranks came to"
        );
        let meetings = self.stalls.iter().filter(|stall| stall.meeting);
        for (index, stall) in meetings.clone().take(NAMED).enumerate() {
            let mark = if index == 0 { ':' } else { ';' };
            text.push_str(&format!("{mark} {} in {}", spans(&stall.came), stall.what));
            if self.set != ProcessSetId::GLOBAL {
                text.push_str(&format!(" (process set {})", self.set));
            }
        }
        for absentee in self.absentees.iter().take(NAMED) {
            if meetings.clone().any(|stall| stall.came.contains(&absentee.rank)) {
                continue;
            }
            let waits = absentee.waits.iter().flatten().find(|wait| wait.meeting);
            text.push_str(&format!(
                "; rank {} in {}",
                absentee.rank,
                waits.map_or("none", |wait| &wait.what)
            ));
        }
        text
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset \
             of ranks and are waiting for remainder of ranks for more than {} seconds.",
            self.limit.as_secs_f64()
        )?;
        if self.set != ProcessSetId::GLOBAL {
            write!(f, " This is process set {}.", self.set)?;
        }
        f.write_str("\nMissing ranks:")?;
        for (rank, names, fatal) in self.by_rank() {
            let more = if names.len() > NAMED { " ..." } else { "" };
            let mark = if fatal { "!" } else { "" };
            write!(f, "\n{rank}{mark}: [{}{more}]", names[..names.len().min(NAMED)].join(", "))?;
        }
        let told = |(index, stall): &(usize, &Stall)| *index == 0 || stall.meeting;
        for (_, stall) in self.stalls.iter().enumerate().filter(told).take(NAMED) {
            let came: Vec<String> = stall.came.iter().take(64).map(Rank::to_string).collect();
            let more = if stall.came.len() > came.len() { " ..." } else { "" };
            let (what, waiting) = (&stall.what, stall.waiting);
            write!(
                f,
                "\n{what} has waited for {waiting:.1?}; submitted by ranks: {}{more}",
                came.join(", ")
            )?;
        }
        if self.parted.is_some() {
            f.write_str(
                "\nEvery rank waits in a barrier, a join or a change of process sets that not all \
                 ranks came to: their programs have parted ways.",
            )?;
            if let Some(ends) = self.ends {
                write!(
                    f,
                    " The job ends when that has lasted for {} seconds.",
                    ends.as_secs_f64()
                )?;
            }
        }
        // The stacks of absent ranks come last: a log that cuts long lines cuts these.
        self.absentees.iter().try_for_each(|absentee| write!(f, "\n{absentee}"))
    }
}

impl fmt::Display for Absentee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank {} on {} ", self.rank, self.host)?;
        match self.waits.as_deref() {
            None => f.write_str("does not answer.")?,
            Some([]) => f.write_str("waits in no operation.")?,
            Some(waits) => {
                f.write_str("waits in ")?;
                for (index, wait) in waits.iter().enumerate() {
                    let comma = if index > 0 { ", " } else { "" };
                    write!(f, "{comma}{} (for {:.1?})", wait.what, wait.since)?;
                }
                f.write_str(".")?;
            }
        }
        match &self.stack {
            Stack::Unknown => Ok(()),
            Stack::Silent if self.waits.is_none() => Ok(()),
            Stack::Silent => write!(
                f,
                " Its Python threads: no answer within {STACK_LIMIT:?}, so one of them holds the \
                 interpreter."
            ),
            Stack::Text(text) => {
                f.write_str(" Its Python threads:")?;
                text.trim_end().lines().try_for_each(|line| write!(f, "\n  {line}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stall(tensor: &str, missing: &[u32], fatal: bool) -> Stall {
        Stall {
            tensor: tensor.into(),
            what: format!("allreduce of {tensor}"),
            meeting: false,
            waiting: Duration::from_millis(61_200),
            came: vec![Rank(0), Rank(2)],
            missing: missing.iter().copied().map(Rank).collect(),
            fatal,
        }
    }

    #[test]
    fn a_report_reads_as_horovods_and_continues_with_what_the_missing_do() {
        let mut stalls: Vec<Stall> = (0..8).map(|k| stall(&format!("t{k}"), &[1], false)).collect();
        stalls[1] = stall("t1", &[3], true);
        let absentee =
            |rank, waits, stack| Absentee { rank: Rank(rank), host: "h".to_owned(), waits, stack };
        let wait = Wait {
            what: "allreduce of other".to_owned(),
            meeting: false,
            since: Duration::from_secs(2),
        };
        let report = StallReport {
            set: ProcessSetId::GLOBAL,
            limit: Duration::from_secs(60),
            stalls,
            absentees: vec![
                absentee(1, Some(vec![wait]), Stack::Text("MainThread\nin f\n".to_owned())),
                absentee(3, Some(vec![]), Stack::Silent),
                absentee(4, None, Stack::Silent),
            ],
            parted: None,
            ends: None,
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
        let (answer, slot) = Answer::new();
        assert_eq!(slot.answer(), None);
        drop(answer);
        assert_eq!(slot.answer(), Some(Stack::Unknown));
        let (answer, slot) = Answer::new();
        answer.give("x".to_owned());
        assert_eq!(slot.answer(), Some(Stack::Text("x".to_owned())));
    }
}
