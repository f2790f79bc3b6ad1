// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of a pipeline, written down.

use super::super::program::{Builder, Load, Program};
pub(in super::super) use super::Cut;
use super::LOOKAHEAD;

/// Cuts the elements; `None` if rings are too small.
pub(in super::super) fn cut(bytes: usize, members: usize, capacity: usize) -> Option<Cut> {
    let cut = Cut::new(bytes, members, capacity);
    (cut.chunk > 0).then_some(cut)
}

/// Chunks of a part.
pub(in super::super) fn steps(cut: &Cut) -> usize {
    cut.steps
}

/// Returns the bytes that a reduction of `len` bytes of each member reads and writes: the result
/// goes to the output and to all others.
fn touched(cut: &Cut, len: usize) -> usize {
    2 * cut.members * len
}

/// Returns the steps of a member.
pub(in super::super) fn program(cut: &Cut, member: usize) -> Program {
    let mut builder = Builder::new(cut.members);
    let mut reduced: Vec<Option<u32>> = vec![None; cut.steps];
    let others = || (1..cut.members).map(move |k| (member + k) % cut.members);
    for t in 0..cut.steps + LOOKAHEAD {
        if t < cut.steps {
            for to in others() {
                send(&mut builder, to, Load::one(cut.chunk_of(to, t).1, true), &[]);
            }
            let own = cut.chunk_of(member, t).1;
            if own > 0 {
                let arrived: Vec<u32> = others()
                    .map(|from| builder.receive(from, Load::one(own, false), &[]))
                    .collect();
                reduced[t] = Some(builder.reduce(touched(cut, own), &arrived));
            }
        }
        let Some(t) = t.checked_sub(LOOKAHEAD) else { continue };
        for to in others() {
            let after = reduced[t].map_or(Vec::new(), |step| vec![step]);
            send(&mut builder, to, Load::one(cut.chunk_of(member, t).1, false), &after);
        }
        for from in others() {
            let load = Load::one(cut.chunk_of(from, t).1, true);
            if !load.is_empty() {
                builder.receive(from, load, &[]);
            }
        }
    }
    builder.finish()
}

/// Returns the steps of one member for all: see `Plan::folded`.
pub(in super::super) fn folded(cut: &Cut) -> Program {
    let mut builder = Builder::new(1);
    let mut reduced: Vec<Option<u32>> = vec![None; cut.steps];
    // The first member's parts are the longest; it sends what the others own, and as often what it
    // owns itself.
    let theirs =
        |t, copied| Load::all((1..cut.members).map(|other| cut.chunk_of(other, t).1), copied);
    let own = |t, copied| Load::all((1..cut.members).map(|_| cut.chunk_of(0, t).1), copied);
    for t in 0..cut.steps + LOOKAHEAD {
        if t < cut.steps && !own(t, false).is_empty() {
            send(&mut builder, 0, theirs(t, true), &[]);
            let arrived = receive(&mut builder, theirs(t, true), false);
            reduced[t] = Some(builder.reduce(touched(cut, cut.chunk_of(0, t).1), &arrived));
        }
        let Some(t) = t.checked_sub(LOOKAHEAD) else { continue };
        let after = reduced[t].map_or(Vec::new(), |step| vec![step]);
        send(&mut builder, 0, own(t, false), &after);
        receive(&mut builder, own(t, false), true);
    }
    builder.finish()
}

fn send(builder: &mut Builder, to: usize, load: Load, after: &[u32]) {
    if !load.is_empty() {
        builder.send(to, load, after);
    }
}

fn receive(builder: &mut Builder, load: Load, copied: bool) -> Vec<u32> {
    if load.is_empty() { Vec::new() } else { vec![builder.receive(0, load.copied(copied), &[])] }
}
