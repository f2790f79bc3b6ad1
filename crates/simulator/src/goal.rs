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

use farandole_collectives::program::{Action, Program};

use crate::events::float;
use crate::{Collective, Error, Result};

/// Messages up to which a schedule is written: about a gigabyte of text.
const MOST: u64 = 10_000_000;

/// Writes the schedule of an allreduce, all ranks of it.
///
/// # Errors
/// `Write`; `Messages` when it has too many.
pub fn write(out: &mut dyn Write, collective: &Collective<'_>, bytes: u64) -> Result<()> {
    let plan = collective.plan(bytes)?;
    let messages = plan.messages();
    if messages > MOST {
        return Err(Error::Messages { bytes, messages, most: MOST });
    }
    writeln!(out, "num_ranks {}", plan.members())?;
    for rank in 0..plan.members() {
        writeln!(out, "\nrank {rank} {{")?;
        steps(out, &plan.program(rank), collective.cluster().copy_rate)?;
        writeln!(out, "}}")?;
    }
    Ok(())
}

fn steps(out: &mut dyn Write, program: &Program, copy_rate: f64) -> Result<()> {
    let (mut sent, mut received) = (HashMap::new(), HashMap::new());
    let next = |numbers: &mut HashMap<u32, u32>, member: u32| {
        let number = numbers.entry(member).or_default();
        *number += 1;
        *number - 1
    };
    for (step, action) in program.actions().enumerate() {
        match action {
            Action::Send(transfer) => {
                let tag = next(&mut sent, transfer.member);
                writeln!(
                    out,
                    "l{step}: send {}b to {} tag {tag}",
                    transfer.bytes, transfer.member
                )?;
            }
            Action::Receive(transfer) => {
                let tag = next(&mut received, transfer.member);
                writeln!(
                    out,
                    "l{step}: recv {}b from {} tag {tag}",
                    transfer.bytes, transfer.member
                )?;
            }
            Action::Reduce { bytes } => {
                writeln!(out, "l{step}: calc {:.0}", float(bytes) / 2.0 / copy_rate * 1e9)?;
            }
        }
        for before in program.after(step) {
            writeln!(out, "l{step} requires l{before}")?;
        }
    }
    Ok(())
}
