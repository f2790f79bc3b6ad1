// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Effects of a decision: the journal records it, then waiting calls are answered, and the driver
//! gets events.

use std::sync::Arc;

use farandole_world::World;

use super::board::{Change, Published};
use super::core::Core;
use super::members::{Due, Members};
use crate::event::Event;
use crate::exit::Verdict;
use crate::journal::Record;
use crate::membership::Decision;

impl Core {
    /// Lets `act` take a step, and returns when the effects of it, and of the steps before it, may
    /// be seen.
    pub(super) fn act<T>(&self, act: impl FnOnce(&mut Members) -> T) -> T {
        let done = act(&mut self.membership.lock());
        self.carry_out();
        done
    }

    /// Carries out due actions. Membership is not locked while the journal is written, so signs of
    /// life are still taken.
    pub(super) fn carry_out(&self) {
        self.apart(|| {
            let _turn = self.turn.lock();
            let due = self.membership.lock().take_due();
            self.carry_out_these(due);
        });
    }

    /// Called with the turn locked, so that decisions take effect in their order.
    pub(super) fn carry_out_these(&self, due: Vec<Due>) {
        for one in due {
            match one {
                Due::Note(step) => {
                    if let Some(journal) = &self.journal {
                        journal.note(&Record::Step(step));
                    }
                }
                Due::Ended { task, generation, exit } => self.tell_end(task, generation, exit),
                Due::Decided(decisions) => self.apply(decisions),
            }
        }
    }

    /// Carries out actions that may wait for the disk if there is a journal. Meanwhile other
    /// threads serve the calls that this one would.
    pub(super) fn apart<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.journal.is_some() { tokio::task::block_in_place(work) } else { work() }
    }

    fn apply(&self, decisions: Vec<Decision>) {
        for decision in decisions {
            tracing::debug!(job = %self.job_id, ?decision, "the registrar decides");
            match decision {
                Decision::Registered { task, session, replaces } => {
                    self.events.push(Event::Registered { task });
                    self.board.send_if_modified(|board| {
                        board.holders.insert(task, session);
                        // A task without a waiter has no listener.
                        replaces
                    });
                }
                Decision::Withdrawn { task, reason } => {
                    self.events.push(Event::Lost { task, rank: None, reason })
                }
                Decision::Lost { task, reason } => {
                    let rank = self.board.borrow().rank(task);
                    self.events.push(Event::Lost { task, rank, reason });
                }
                Decision::Assigned { world } => {
                    // The board first: receivers of the event ask it at once.
                    self.publish(world.clone());
                    self.events.push(Event::Assigned { world });
                }
                Decision::Stop { generation, verdict } => {
                    let rank = verdict.cause.and_then(|task| self.board.borrow().rank(task));
                    self.events.push(Event::Aborted { verdict: verdict.clone(), rank });
                    self.board
                        .send_modify(|board| board.over = Some((generation, Arc::new(verdict))));
                }
                Decision::Aborted { reason } => {
                    let verdict = Verdict { reason, cause: None, retry: false };
                    let told = self
                        .board
                        .borrow()
                        .over
                        .as_ref()
                        .is_some_and(|(_, over)| **over == verdict);
                    if !told {
                        self.events.push(Event::Aborted { verdict: verdict.clone(), rank: None });
                    }
                    self.board.send_modify(|board| board.aborted = Some(Arc::new(verdict)));
                }
                Decision::Start { task, host } => self.events.push(Event::Start { task, host }),
                Decision::End { task, reason } => {
                    self.events.push(Event::Stop { task, reason: reason.clone() });
                    let verdict = Arc::new(Verdict { reason, cause: None, retry: false });
                    self.board.send_modify(|board| drop(board.ends.insert(task, verdict)));
                }
                Decision::Dismissed { task, reason } => {
                    self.events.push(Event::Dismissed { task, reason: reason.clone() });
                    self.board
                        .send_modify(|board| drop(board.dismissed.insert(task, reason.into())));
                }
                Decision::Changed { generation, removed, added } => {
                    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                    let at = since.unwrap_or_default().as_secs_f64();
                    let change = Change { generation, removed, added, at };
                    self.board.send_modify(|board| board.change = Some(change));
                }
                Decision::Broken { generation, verdict } => {
                    self.board
                        .send_modify(|board| board.over = Some((generation, Arc::new(verdict))));
                }
                Decision::Finished { generation } => {
                    if self.is_elastic {
                        self.events.push(Event::Finished { generation });
                    }
                    self.board.send_modify(|board| board.finished = Some(generation));
                }
            }
        }
    }

    /// Publishes a world.
    pub(super) fn publish(&self, world: World) {
        let published = Arc::new(Published::new(world));
        if self.is_elastic {
            self.last_ranks
                .lock()
                .extend(published.ranks.iter().map(|(task, rank)| (*task, *rank)));
        }
        self.board.send_modify(|board| board.world = Some(published));
    }
}
