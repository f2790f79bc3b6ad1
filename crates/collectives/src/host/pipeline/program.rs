// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of a pipeline as a program.

use super::super::program::{CollectiveProgram, ProgramBuilder, TransferLoad};
use super::LOOKAHEAD_CHUNKS;
pub(in super::super) use super::PipelineSchedule;

/// Returns the schedule; `None` if rings are too small.
pub(in super::super) fn plan_schedule(
    bytes: usize,
    members: usize,
    capacity: usize,
) -> Option<PipelineSchedule> {
    let cut = PipelineSchedule::new(bytes, members, capacity);
    (cut.chunk > 0).then_some(cut)
}

/// Returns the number of chunks of a part.
pub(in super::super) fn chunks_per_part(cut: &PipelineSchedule) -> usize {
    cut.steps
}

/// Returns the number of bytes that a reduction of `len` bytes of each member reads and writes. The
/// result is written to the output and to the windows of all other members.
fn reduction_bytes(cut: &PipelineSchedule, len: usize) -> usize {
    2 * cut.members * len
}

/// Returns the steps of a member.
pub(in super::super) fn member_program(cut: &PipelineSchedule, member: usize) -> CollectiveProgram {
    let mut builder = ProgramBuilder::new(cut.members);
    let mut reduced: Vec<Option<u32>> = vec![None; cut.steps];
    let others = || (1..cut.members).map(move |k| (member + k) % cut.members);
    for t in 0..cut.steps + LOOKAHEAD_CHUNKS {
        if t < cut.steps {
            for to in others() {
                add_nonempty_send(
                    &mut builder,
                    to,
                    TransferLoad::load_of_one_message(cut.chunk_extent(to, t).1, true),
                    &[],
                );
            }
            let own = cut.chunk_extent(member, t).1;
            if own > 0 {
                let arrived: Vec<u32> = others()
                    .map(|from| {
                        builder.add_receive(
                            from,
                            TransferLoad::load_of_one_message(own, false),
                            &[],
                        )
                    })
                    .collect();
                reduced[t] = Some(builder.add_reduction(reduction_bytes(cut, own), &arrived));
            }
        }
        let Some(t) = t.checked_sub(LOOKAHEAD_CHUNKS) else { continue };
        for to in others() {
            let after = reduced[t].map_or(Vec::new(), |step| vec![step]);
            add_nonempty_send(
                &mut builder,
                to,
                TransferLoad::load_of_one_message(cut.chunk_extent(member, t).1, false),
                &after,
            );
        }
        for from in others() {
            let load = TransferLoad::load_of_one_message(cut.chunk_extent(from, t).1, true);
            if !load.is_empty() {
                builder.add_receive(from, load, &[]);
            }
        }
    }
    builder.into_program()
}

/// Returns the steps of one member, which represents all members: see
/// `AllreducePlan::folded_program`.
pub(in super::super) fn folded_program(cut: &PipelineSchedule) -> CollectiveProgram {
    let mut builder = ProgramBuilder::new(1);
    let mut reduced: Vec<Option<u32>> = vec![None; cut.steps];
    // The first member's parts are the longest. It sends the inputs of the parts that the others
    // own, and its own part's result once to each other member.
    let theirs = |t, copied| {
        TransferLoad::all_messages(
            (1..cut.members).map(|other| cut.chunk_extent(other, t).1),
            copied,
        )
    };
    let own = |t, copied| {
        TransferLoad::all_messages((1..cut.members).map(|_| cut.chunk_extent(0, t).1), copied)
    };
    for t in 0..cut.steps + LOOKAHEAD_CHUNKS {
        if t < cut.steps && !own(t, false).is_empty() {
            add_nonempty_send(&mut builder, 0, theirs(t, true), &[]);
            let arrived = add_nonempty_receive(&mut builder, theirs(t, true), false);
            reduced[t] = Some(
                builder.add_reduction(reduction_bytes(cut, cut.chunk_extent(0, t).1), &arrived),
            );
        }
        let Some(t) = t.checked_sub(LOOKAHEAD_CHUNKS) else { continue };
        let after = reduced[t].map_or(Vec::new(), |step| vec![step]);
        add_nonempty_send(&mut builder, 0, own(t, false), &after);
        add_nonempty_receive(&mut builder, own(t, false), true);
    }
    builder.into_program()
}

fn add_nonempty_send(builder: &mut ProgramBuilder, to: usize, load: TransferLoad, after: &[u32]) {
    if !load.is_empty() {
        builder.add_send(to, load, after);
    }
}

fn add_nonempty_receive(
    builder: &mut ProgramBuilder,
    load: TransferLoad,
    copied: bool,
) -> Vec<u32> {
    if load.is_empty() {
        Vec::new()
    } else {
        vec![builder.add_receive(0, load.with_copied_flag(copied), &[])]
    }
}
