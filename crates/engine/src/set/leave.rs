// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Ranks that left or failed.
//!
//! A rank that leaves says how many lists it has executed. All ranks complete those, fail the rest,
//! and keep their links until all are done, because a transfer may still use them: `DONE` goes up
//! the tree, then `CLEAR` goes down. A rank that fails just says so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_transport::LinkKind;
use farandole_world::Rank;

use super::{Finished, ProcessSet, Step, Stop, kind};
use crate::Cause;
use crate::wire::{Malformed, Reader, Writer};

/// Longest time between the loss of a process elsewhere and its farewell.
const GRACE: Duration = Duration::from_millis(20);

/// The reason why the set takes no new requests, and the last list that it still executes.
pub(super) struct Leaving {
    pub(super) cause: Arc<Cause>,
    departed: Vec<Rank>,
    pub(super) executed: u64,
    /// Children whose subtrees are done.
    done: usize,
    told: bool,
    /// All ranks are done: links may end.
    cleared: bool,
}

impl ProcessSet {
    pub(super) fn on_departure(
        &mut self,
        from: usize,
        frame: &[u8],
        finished: &mut Vec<Finished>,
    ) -> Result<(), Stop> {
        let mut reader = Reader(frame);
        let member = reader.small()?;
        let executed = reader.number()?;
        let rank = *self.members.get(member as usize).ok_or(Malformed::Member(member.into()))?;
        let removed = reader.byte()? != 0;
        let cause = || match removed {
            true => Cause::Removed { set: self.watch.set },
            false => Cause::Departed { rank, host: self.options.host(rank) },
        };
        let cause = self.leaving.is_none().then(|| Arc::new(cause()));
        if self.departed(cause, rank, executed, finished) {
            self.flood(Some(from), kind::DEPARTURE, frame)?;
        }
        Ok(())
    }

    /// Notes a departure; whether the neighbours need to know.
    fn departed(
        &mut self,
        cause: Option<Arc<Cause>>,
        rank: Rank,
        executed: u64,
        finished: &mut Vec<Finished>,
    ) -> bool {
        if let Some(cause) = &cause {
            self.coordinator.clear();
            self.pending.clear();
            self.fail_local(cause, finished);
        }
        match (&mut self.leaving, cause) {
            (Some(leaving), _) => {
                leaving.departed.push(rank);
                let news = executed < leaving.executed;
                leaving.executed = leaving.executed.min(executed);
                news
            }
            (none, Some(cause)) => {
                let departed = vec![rank];
                *none = Some(Leaving {
                    cause,
                    departed,
                    executed,
                    done: 0,
                    told: false,
                    cleared: false,
                });
                true
            }
            (None, None) => false,
        }
    }

    /// Leaves in good order, failing what is in progress. Poll with [`ProcessSet::farewell`]
    /// afterwards.
    pub(crate) fn depart(&mut self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        let executed = self.execution.oldest_list().map_or(self.lists, |list| list - 1);
        let rank = self.options.world.rank;
        let first = self.leaving.is_none().then(|| Arc::clone(cause));
        if self.departed(first, rank, executed, finished) {
            let mut frame = Vec::new();
            let mut writer = Writer(&mut frame);
            writer.number(self.tree.me.into());
            writer.number(executed);
            writer.byte(matches!(**cause, Cause::Removed { .. }).into());
            drop(self.flood(None, kind::DEPARTURE, &frame));
        }
        self.execution.fail(cause, finished);
    }

    /// Leaves for good: the set ends with [`ProcessSet::is_over`], at `deadline` at the latest.
    pub(crate) fn retire(
        &mut self,
        cause: Arc<Cause>,
        deadline: Instant,
        finished: &mut Vec<Finished>,
    ) {
        self.retired = Some(deadline);
        self.depart(&cause, finished);
    }

    /// Returns whether this set was left for good and its links may end.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        self.retired.is_some_and(|deadline| now >= deadline || self.farewell(now))
    }

    pub(super) fn on_done(&mut self) {
        if let Some(leaving) = &mut self.leaving {
            leaving.done += 1;
        }
    }

    pub(super) fn on_clear(&mut self) -> Step {
        if let Some(leaving) = &mut self.leaving {
            leaving.cleared = true;
        }
        self.send_down(kind::CLEAR, &[])
    }

    /// One step towards the end of all links; true when they may end.
    pub(crate) fn farewell(&mut self, now: Instant) -> bool {
        let mut finished = Vec::new();
        let over =
            self.receive(now, &mut finished).and_then(|_| self.settle(now, &mut finished)).is_err();
        let flushed = self
            .neighbours
            .iter_mut()
            .all(|neighbour| neighbour.closed || neighbour.sender.flush().unwrap_or(true));
        over || (flushed && self.leaving.as_ref().is_none_or(|leaving| leaving.cleared))
    }

    /// Returns whether a known departure has not been handled by all ranks yet.
    pub(super) fn is_unsettled(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| !leaving.cleared)
    }

    pub(super) fn on_abort(&mut self, frame: &[u8]) -> Result<(), Stop> {
        let mut reader = Reader(frame);
        let rank = Rank(reader.small()?);
        let text = reader.text()?.to_owned();
        Err(Cause::Reported { rank, host: self.options.host(rank), text }.into())
    }

    /// Tells the neighbours that this rank failed, or that it heard of one that did; also those
    /// that are counted as lost: of a connection that fell silent, the other end may know nothing
    /// yet.
    pub(crate) fn abort(&mut self, cause: &Cause) {
        let mut frame = Vec::new();
        let mut writer = Writer(&mut frame);
        let mut kind = kind::ABORT;
        match cause {
            Cause::Disagreement { text } => {
                kind = kind::DISAGREEMENT;
                writer.text(text);
            }
            Cause::Reported { rank, text, .. } => {
                writer.number(rank.0.into());
                writer.text(text);
            }
            other => {
                writer.number(self.options.world.rank.0.into());
                writer.text(&other.to_string());
            }
        }
        for neighbour in &mut self.neighbours {
            neighbour.sender.last_words(kind, &frame);
        }
    }

    /// Ends every request of this rank in this set. The communicator goes first.
    pub(crate) fn fail(&mut self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        self.execution.end();
        self.execution.fail(cause, finished);
        self.fail_local(cause, finished);
        self.pending.clear();
        self.coordinator.clear();
        self.suspect = None;
    }

    fn fail_local(&mut self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        let joined = std::mem::take(&mut self.joins).into_own();
        for entry in self.local.drain().map(|(_, entry)| entry).chain(joined) {
            let result = Err(entry.failed(cause));
            finished.push(Finished { handle: entry.handle, name: entry.name, result });
        }
    }

    fn flood(&mut self, except: Option<usize>, kind: u8, frame: &[u8]) -> Step {
        for index in (0..self.neighbours.len()).filter(|index| Some(*index) != except) {
            self.send(index, kind, frame)?;
        }
        Ok(())
    }

    /// Settles what a departure or a lost link leaves open.
    pub(super) fn settle(&mut self, now: Instant, finished: &mut Vec<Finished>) -> Step {
        if self.leaving.is_none() && self.suspect.is_none() {
            return Ok(());
        }
        if let Some((at, cause)) = self.suspect.take()
            && !self.has_left(&cause)
        {
            if now.saturating_duration_since(at) >= self.options.settings.hearsay {
                return Err(cause);
            }
            self.suspect = Some((at, cause));
        }
        let children = self.tree.children.len();
        let Some(leaving) = &mut self.leaving else { return Ok(()) };
        let useful = self.execution.oldest_list().is_some_and(|list| list <= leaving.executed);
        if useful && !self.execution.broken {
            return Ok(());
        }
        self.execution.fail(&leaving.cause, finished);
        // A rank that closed its links did not wait, or waited long enough.
        leaving.cleared |= self.neighbours.iter().any(|neighbour| neighbour.closed);
        if leaving.done < children || leaving.told {
            return Ok(());
        }
        leaving.told = true;
        if self.is_coordinator() { self.on_clear() } else { self.send(0, kind::DONE, &[]) }
    }

    /// A process is gone: that is first-hand, and weighs more than a lost link. If the news that it
    /// left in order does not come soon, it is a failure.
    pub(crate) fn suspect(&mut self, error: farandole_transport::Error, now: Instant) {
        let cause = Cause::Transport(error);
        let concerns = lost(&cause).is_none_or(|rank| self.members.contains(&rank));
        if concerns && !self.has_left(&cause) {
            // What a process has said through shared memory lies here: one more look at the links
            // is enough. By a connection its last words may still be on their way.
            let near = lost(&cause).is_some_and(|rank| self.is_near(rank));
            let hearsay = self.options.settings.hearsay;
            let waited = if near { hearsay } else { hearsay.saturating_sub(GRACE) };
            let since = now.checked_sub(waited).unwrap_or(now);
            if self.suspect.as_ref().is_none_or(|(at, _)| since < *at) {
                self.suspect = Some((since, cause));
            }
        }
    }

    /// Returns whether the words of a rank come through shared memory. Containers of one machine,
    /// and processes of one host, may or may not map the same segments: the link towards the rank
    /// tells.
    fn is_near(&self, rank: Rank) -> bool {
        let world = &self.options.world;
        let own = world.seat().host.machine();
        let together = world.seats.get(rank.index()).is_some_and(|seat| seat.host.machine() == own);
        let member =
            self.members.binary_search(&rank).ok().and_then(|member| u32::try_from(member).ok());
        let child = self
            .tree
            .below
            .iter()
            .position(|below| member.is_some_and(|member| below.contains(&member)));
        // The parent is the first neighbour, where there is one.
        let toward = child.map_or(0, |child| child + usize::from(self.tree.parent.is_some()));
        together
            && self.neighbours.get(toward).is_some_and(|neighbour| neighbour.kind != LinkKind::Tcp)
    }

    /// Returns whether a loss is that of a rank that left in order, or comes when there is nothing
    /// left to lose.
    fn has_left(&self, cause: &Cause) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| {
            self.execution.is_idle()
                || lost(cause).is_some_and(|rank| leaving.departed.contains(&rank))
        })
    }

    /// Returns whether a lost peer waits for judgement.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.suspect.is_some()
    }

    /// Returns the reason why this set takes no more requests.
    pub(crate) fn left(&self) -> Option<&Arc<Cause>> {
        self.leaving.as_ref().map(|leaving| &leaving.cause)
    }
}

/// The rank whose loss this is.
fn lost(cause: &Cause) -> Option<Rank> {
    let (Cause::Transport(error)
    | Cause::Collective(farandole_collectives::Error::Transport(error))) = cause
    else {
        return None;
    };
    match error {
        farandole_transport::Error::PeerLost { rank, .. } => Some(*rank),
        _ => None,
    }
}
