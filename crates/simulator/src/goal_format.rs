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
//! its number among those from one rank to another, as links keep their order.

use std::collections::HashMap;
use std::io::Write;

use farandole_collectives::program::{CollectiveProgram, ProgramAction};

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
    for rank in 0..plan.member_count() {
        writeln!(out, "\nrank {rank} {{")?;
        write_rank_steps(out, &plan.member_program(rank), collective.cluster().copy_rate)?;
        writeln!(out, "}}")?;
    }
    Ok(())
}

fn write_rank_steps(
    out: &mut dyn Write,
    program: &CollectiveProgram,
    copy_rate: f64,
) -> Result<()> {
    let (mut sent, mut received) = (HashMap::new(), HashMap::new());
    let next = |numbers: &mut HashMap<u32, u32>, member: u32| {
        let number = numbers.entry(member).or_default();
        *number += 1;
        *number - 1
    };
    for (step, action) in program.actions().enumerate() {
        match action {
            ProgramAction::Send(transfer) => {
                let tag = next(&mut sent, transfer.member);
                writeln!(
                    out,
                    "l{step}: send {}b to {} tag {tag}",
                    transfer.bytes, transfer.member
                )?;
            }
            ProgramAction::Receive(transfer) => {
                let tag = next(&mut received, transfer.member);
                writeln!(
                    out,
                    "l{step}: recv {}b from {} tag {tag}",
                    transfer.bytes, transfer.member
                )?;
            }
            ProgramAction::Reduce { bytes } => {
                // Like `NetworkModel::reduce_cost`, so that both simulators use the same time.
                writeln!(out, "l{step}: calc {:.0}", bytes_to_f64(bytes) / 2.0 / copy_rate * 1e9)?;
            }
        }
        for before in program.dependencies_of(step) {
            writeln!(out, "l{step} requires l{before}")?;
        }
    }
    Ok(())
}
