// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Effects of a decision: the journal records it, then waiting calls are answered and the driver
//! gets events.

use std::sync::Arc;

use farandole_membership::{GenerationVerdict, MembershipDecision};
use farandole_world::World;

use super::announcements::{AnnouncedHostChange, PublishedWorld};
use super::membership_machine::{MembershipMachine, PendingEffect};
use super::registrar_core::RegistrarCore;
use crate::event::JobEvent;
use crate::journal::JournalRecord;

impl RegistrarCore {
    /// Takes a step of the membership with `act`, and returns after the effects of this step and of
    /// all earlier steps.
    pub(super) fn step_membership<T>(&self, act: impl FnOnce(&mut MembershipMachine) -> T) -> T {
        let done = act(&mut self.membership.lock());
        self.carry_out_pending_effects();
        done
    }

    /// Carries out the pending effects. Membership is not locked while the journal is written, so
    /// heartbeats are still recorded.
    pub(super) fn carry_out_pending_effects(&self) {
        self.run_blocking(|| {
            let _turn = self.effects_turn.lock();
            // After `effects_turn`: taken before it, two threads could carry out their effects in
            // reverse.
            let due = self.membership.lock().take_pending_effects();
            self.carry_out_effects(due);
        });
    }

    /// Carries out these effects. The caller holds `effects_turn`, so that decisions take effect in
    /// their order.
    pub(super) fn carry_out_effects(&self, due: Vec<PendingEffect>) {
        for one in due {
            match one {
                PendingEffect::AppendStep(step) => {
                    if let Some(journal) = &self.journal {
                        journal.append_record(&JournalRecord::Step(step));
                    }
                }
                PendingEffect::ReportExit { task, generation, exit } => {
                    self.queue_exit_event(task, generation, exit)
                }
                PendingEffect::ApplyDecisions(decisions) => self.apply_decisions(decisions),
            }
        }
    }

    /// Runs `work`, which may wait for the disk if there is a journal. Meanwhile other threads
    /// serve the calls of this thread.
    pub(super) fn run_blocking<T>(&self, work: impl FnOnce() -> T) -> T {
        // Without a journal nothing waits, and a hand-over of the thread would cost more than the
        // work.
        if self.journal.is_some() { tokio::task::block_in_place(work) } else { work() }
    }

    fn apply_decisions(&self, decisions: Vec<MembershipDecision>) {
        for decision in decisions {
            tracing::debug!(job = %self.job_id, ?decision, "the registrar decides");
            match decision {
                MembershipDecision::Registered { task, session, replaces } => {
                    self.events.push(JobEvent::Registered { task });
                    self.board.send_if_modified(|board| {
                        board.holders.insert(task, session);
                        // Wake waiting calls only if an earlier start of the task was waiting: no
                        // other call waits for this change.
                        replaces
                    });
                }
                MembershipDecision::Withdrawn { task, reason } => {
                    self.events.push(JobEvent::Lost { task, rank: None, reason })
                }
                MembershipDecision::Lost { task, reason } => {
                    let rank = self.board.borrow().task_rank(task);
                    self.events.push(JobEvent::Lost { task, rank, reason });
                }
                MembershipDecision::Assigned { world } => {
                    // Update the board first, because receivers of the event read it at once.
                    self.publish_world(world.clone());
                    self.events.push(JobEvent::Assigned { world });
                }
                MembershipDecision::Stop { generation, verdict } => {
                    let rank = verdict.cause.and_then(|task| self.board.borrow().task_rank(task));
                    self.events.push(JobEvent::Aborted { verdict: verdict.clone(), rank });
                    self.board.send_modify(|board| {
                        board.ended_generation = Some((generation, Arc::new(verdict)))
                    });
                }
                MembershipDecision::Aborted { reason } => {
                    let verdict = GenerationVerdict { reason, cause: None, retry: false };
                    let has_new_events = self
                        .board
                        .borrow()
                        .ended_generation
                        .as_ref()
                        .is_some_and(|(_, over)| **over == verdict);
                    if !has_new_events {
                        self.events
                            .push(JobEvent::Aborted { verdict: verdict.clone(), rank: None });
                    }
                    self.board.send_modify(|board| board.aborted = Some(Arc::new(verdict)));
                }
                MembershipDecision::Start { task, host } => {
                    self.events.push(JobEvent::Start { task, host })
                }
                MembershipDecision::End { task, reason } => {
                    self.events.push(JobEvent::Stop { task, reason: reason.clone() });
                    let verdict = Arc::new(GenerationVerdict { reason, cause: None, retry: false });
                    self.board.send_modify(|board| drop(board.ends.insert(task, verdict)));
                }
                MembershipDecision::Dismissed { task, reason } => {
                    self.events.push(JobEvent::Dismissed { task, reason: reason.clone() });
                    self.board
                        .send_modify(|board| drop(board.dismissed.insert(task, reason.into())));
                }
                MembershipDecision::Changed { generation, removed, added } => {
                    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                    let at = since.unwrap_or_default().as_secs_f64();
                    let change = AnnouncedHostChange { generation, removed, added, at };
                    self.board.send_modify(|board| board.change = Some(change));
                }
                MembershipDecision::Broken { generation, verdict } => {
                    self.board.send_modify(|board| {
                        board.ended_generation = Some((generation, Arc::new(verdict)))
                    });
                }
                MembershipDecision::Finished { generation } => {
                    if self.is_elastic {
                        self.events.push(JobEvent::Finished { generation });
                    }
                    self.board.send_modify(|board| board.finished = Some(generation));
                }
            }
        }
    }

    /// Publishes a world.
    pub(super) fn publish_world(&self, world: World) {
        let published = Arc::new(PublishedWorld::new(world));
        if self.is_elastic {
            self.last_ranks
                .lock()
                .extend(published.ranks.iter().map(|(task, rank)| (*task, *rank)));
        }
        self.board.send_modify(|board| board.world = Some(published));
    }
}
