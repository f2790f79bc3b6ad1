// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Schedules in the GOAL format, which LogGOPSim and other public simulators read.
//!
//! ```text
//! num_ranks 2
//! rank 0 {
//! l0: send 64b to 1 tag 0
//! l1: recv 64b from 1 tag 0
//! l2: calc 11
//! l2 requires l1
//! }
//! ```
//!
//! `calc` is in nanoseconds of a core that copies at the cluster's rate. The tag of a message is
//! its number among those from one rank to another, as links keep their order. Every step requires
//! the one before: this is the order in which the rank takes them on the simulated cluster.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::Write;

use farandole_collectives::simulation::{MemberAction, MemberTransfer};

use crate::events::bytes_to_f64;
use crate::{AllreduceSimulator, Error, Result};

/// Messages up to which a schedule is written: about a gigabyte of text.
const MAX_WRITTEN_MESSAGES: u64 = 10_000_000;

/// Writes the schedule of an allreduce, all ranks of it.
///
/// # Errors
/// `Write`; `Messages` when it has too many.
pub fn write_goal_schedule(
    out: &mut dyn Write,
    collective: &AllreduceSimulator<'_>,
    bytes: u64,
) -> Result<()> {
    let plan = collective.allreduce_plan(bytes)?;
    let messages = plan.message_count();
    if messages > MAX_WRITTEN_MESSAGES {
        return Err(Error::Messages { bytes, messages, most: MAX_WRITTEN_MESSAGES });
    }
    writeln!(out, "num_ranks {}", plan.member_count())?;
    let ranks = collective.record_actions_of_every_rank(&plan)?;
    let mut messages: HashMap<(u32, u32), VecDeque<u64>> = HashMap::new();
    for (rank, actions) in (0..).zip(&ranks) {
        for action in actions {
            if let MemberAction::Send(transfer) = action {
                messages.entry((rank, transfer.member)).or_default().push_back(transfer.bytes);
            }
        }
    }
    for (rank, actions) in (0..).zip(&ranks) {
        writeln!(out, "\nrank {rank} {{")?;
        let mut steps = RankSteps { out: &mut *out, count: 0 };
        let (mut sent, mut received) = (HashMap::new(), HashMap::new());
        for action in actions {
            match action {
                MemberAction::Send(MemberTransfer { member, bytes, .. }) => {
                    let tag = take_next_number(sent.entry(*member).or_default());
                    steps.write(format_args!("send {bytes}b to {member} tag {tag}"))?;
                }
                MemberAction::Receive(MemberTransfer { member, bytes, .. }) => {
                    // A rank may take a message in pieces, or several messages at once.
                    let (count, ahead): &mut (u32, u64) = received.entry(*member).or_default();
                    while *ahead < *bytes
                        && let Some(message) =
                            messages.get_mut(&(*member, rank)).and_then(VecDeque::pop_front)
                    {
                        let tag = take_next_number(count);
                        steps.write(format_args!("recv {message}b from {member} tag {tag}"))?;
                        *ahead += message;
                    }
                    *ahead = ahead.saturating_sub(*bytes);
                }
                MemberAction::Reduce { bytes } => {
                    // Like `NetworkModel::reduce_cost`, so that both simulators use the same time.
                    let seconds = bytes_to_f64(*bytes) / 2.0 / collective.cluster().copy_rate;
                    steps.write(format_args!("calc {:.0}", seconds * 1e9))?;
                }
            }
        }
        writeln!(out, "}}")?;
    }
    Ok(())
}

/// Steps of a rank.
struct RankSteps<'a> {
    out: &'a mut dyn Write,
    count: u64,
}

impl RankSteps<'_> {
    /// Writes a step that requires the one before.
    fn write(&mut self, step: fmt::Arguments<'_>) -> Result<()> {
        writeln!(self.out, "l{}: {step}", self.count)?;
        if let Some(before) = self.count.checked_sub(1) {
            writeln!(self.out, "l{} requires l{before}", self.count)?;
        }
        self.count += 1;
        Ok(())
    }
}

fn take_next_number(count: &mut u32) -> u32 {
    *count += 1;
    *count - 1
}
