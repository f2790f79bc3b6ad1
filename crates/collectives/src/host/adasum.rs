// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce by Adasum: vector halving, distance doubling.
//!
//! Members are the leaves of a binary tree of neighbours with `log2 P` levels. At each level each
//! of the two sides, of `d` members, holds one vector, which is spread over its members. A member
//! swaps one half of its piece with the member `d` away and then has the same half of both vectors.
//! It computes the three products of these halves, adds them up with the `2 d` members that have
//! the rest of the two vectors, and combines the halves. Afterwards the halves are sent back in
//! reverse order. Each member sends `2 * (P - 1) / P * N` bytes and takes part in
//! `log2 P * (log2 P + 5) / 2` swaps. Every tensor is halved and summed separately, so fusion
//! changes no bits. Each element of the result is computed by one member, so all members have the
//! same bits.
//!
//! **Any number of members.** Let `p` be the largest power of two up to `P`. The first
//! `2 * (P - p)` members form pairs. The odd member of a pair sends its whole vector to the even
//! member before it, which combines both vectors and takes part for both members. At the end the
//! even member sends the result back. A pair exchanges two more messages of `N` bytes.
//!
//! `float16` and `bfloat16` are converted to `float32` from the first input to the last scaling,
//! also on links.
//!
//! **No deadlock.** Both ends of every link have the same sequence of steps. A member reads from
//! its partner while it writes to it. Both ends of the earliest unfinished step have reached this
//! step.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use farandole_kernels::{AdasumPrecision, AdasumProducts, BlockReducer, DataType, GatherList};

use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;

/// Bytes of elements that are converted at a time.
const CONVERSION_BLOCK_BYTES: usize = 16 << 10;

/// Ranges of a vector, one for each tensor.
type VectorRangePerTensor = Vec<Range<usize>>;

#[derive(Debug, PartialEq)]
enum AdasumStep {
    /// Sends `gives` to a member, and receives `takes` either as the other vector or, if `results`
    /// is true, as results.
    Swap { with: usize, gives: VectorRangePerTensor, takes: VectorRangePerTensor, results: bool },
    /// Computes the products of the two vectors over this piece. `first`: whether the own vector is
    /// the first one.
    ComputeProducts { piece: VectorRangePerTensor, first: bool },
    /// Adds the products of another member.
    SumProducts { with: usize },
    /// Writes the Adasum of the two vectors to this piece of the own vector.
    CombineVectors { piece: VectorRangePerTensor, first: bool },
}

pub(super) struct AdasumJob {
    reducer: BlockReducer,
    outputs: GatherList,
    carrier: AdasumPrecision,
    own: Vec<u8>,
    other: Vec<u8>,
    /// Products of each tensor, encoded.
    measures: Vec<u8>,
    theirs: Vec<u8>,
    steps: VecDeque<AdasumStep>,
    /// Messages of the current step, sent and received.
    swap: Option<(MessageProgress, MessageProgress)>,
}

impl AdasumJob {
    /// Creates the job. The reducer only converts and scales.
    pub(super) fn new(
        peers: &PeerLinks,
        reducer: BlockReducer,
        tensors: &[usize],
        inputs: &GatherList,
        outputs: GatherList,
    ) -> Self {
        let expansion = reducer.partial_expansion();
        let mut own = vec![0; inputs.len() * expansion];
        let mut block = vec![0; CONVERSION_BLOCK_BYTES.min(inputs.len())];
        for at in (0..inputs.len()).step_by(CONVERSION_BLOCK_BYTES) {
            let block = &mut block[..CONVERSION_BLOCK_BYTES.min(inputs.len() - at)];
            inputs.read_at(at, block);
            reducer.reduce_to_partial(
                &[block],
                &mut own[at * expansion..(at + block.len()) * expansion],
            );
        }
        let carrier = if reducer.reduction_spec().dtype == DataType::F64 {
            AdasumPrecision::Double
        } else {
            AdasumPrecision::Single
        };
        let element = reducer.reduction_spec().dtype.element_size();
        let tensors: Vec<usize> = tensors.iter().map(|bytes| bytes / element).collect();
        let steps = AdasumPlan { element: element * expansion }.plan_steps(
            peers.member,
            peers.member_count(),
            &tensors,
        );
        let other = vec![0; own.len()];
        // Products of all tensors go in one message, so fused tensors need no more swaps than one.
        let measures = vec![0; tensors.len() * AdasumProducts::ENCODED_BYTES];
        let theirs = measures.clone();
        Self {
            reducer,
            outputs,
            carrier,
            own,
            other,
            measures,
            theirs,
            steps: steps.into(),
            swap: None,
        }
    }

    /// Advances the current step. Returns true when the step is finished.
    fn advance_step(&mut self, peers: &mut PeerLinks, any: &mut bool) -> Result<bool> {
        let Some(step) = self.steps.front() else { return Ok(true) };
        match step {
            AdasumStep::Swap { with, gives, takes, results } => {
                let (out, incoming) = self.swap.get_or_insert_with(|| {
                    (
                        MessageProgress::new(piece_bytes(gives)),
                        MessageProgress::new(piece_bytes(takes)),
                    )
                });
                let link = peers.link_to(*with);
                let link = &mut peers.links[link];
                let own = &mut self.own;
                *any |=
                    out.send_window(&mut *link.sender, |at, to| gather_piece(own, gives, at, to))?;
                let into = if *results { own } else { &mut self.other };
                *any |= incoming.receive_window(&mut *link.receiver, |at, from| {
                    scatter_piece(into, takes, at, from)
                })?;
                Ok(out.is_finished() && incoming.is_finished())
            }
            AdasumStep::SumProducts { with } => {
                let whole = || MessageProgress::new(self.measures.len());
                let (out, incoming) = self.swap.get_or_insert_with(|| (whole(), whole()));
                let link = peers.link_to(*with);
                let link = &mut peers.links[link];
                let (ours, theirs) = (&self.measures, &mut self.theirs);
                *any |= out.send_window(&mut *link.sender, |at, to| {
                    to.copy_from_slice(&ours[at..at + to.len()])
                })?;
                *any |= incoming.receive_window(&mut *link.receiver, |at, from| {
                    theirs[at..at + from.len()].copy_from_slice(from);
                })?;
                let over = out.is_finished() && incoming.is_finished();
                if over {
                    let theirs = self.theirs.chunks_exact(AdasumProducts::ENCODED_BYTES);
                    for (ours, theirs) in
                        self.measures.chunks_exact_mut(AdasumProducts::ENCODED_BYTES).zip(theirs)
                    {
                        let sum = AdasumProducts::from_bytes(ours)
                            .add_parts(AdasumProducts::from_bytes(theirs));
                        ours.copy_from_slice(&sum.to_bytes());
                    }
                }
                Ok(over)
            }
            AdasumStep::ComputeProducts { piece, first } => {
                for (range, into) in
                    piece.iter().zip(self.measures.chunks_exact_mut(AdasumProducts::ENCODED_BYTES))
                {
                    let (own, other) = (&self.own[range.clone()], &self.other[range.clone()]);
                    // Both sides take the vectors in the same order, so that their products can be
                    // added.
                    let (a, b) = if *first { (own, other) } else { (other, own) };
                    into.copy_from_slice(
                        &AdasumProducts::from_vectors(self.carrier, a, b).to_bytes(),
                    );
                }
                Ok(true)
            }
            AdasumStep::CombineVectors { piece, first } => {
                for (range, measures) in
                    piece.iter().zip(self.measures.chunks_exact(AdasumProducts::ENCODED_BYTES))
                {
                    let (own, other) = (&mut self.own[range.clone()], &self.other[range.clone()]);
                    AdasumProducts::from_bytes(measures).combine_vectors(
                        self.carrier,
                        own,
                        other,
                        *first,
                    );
                }
                Ok(true)
            }
        }
    }

    fn store_result(&self) {
        let (bytes, expansion) = (self.outputs.len(), self.reducer.partial_expansion());
        let mut block = vec![0; CONVERSION_BLOCK_BYTES.min(bytes)];
        for at in (0..bytes).step_by(CONVERSION_BLOCK_BYTES) {
            let block = &mut block[..CONVERSION_BLOCK_BYTES.min(bytes - at)];
            self.reducer.finish_partials(
                &[&self.own[at * expansion..(at + block.len()) * expansion]],
                block,
            );
            self.outputs.write_at(at, block);
        }
    }
}

impl CollectiveJob for AdasumJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        while !self.steps.is_empty() {
            if !self.advance_step(peers, &mut any)? {
                return Ok(PollProgress { any, done: false });
            }
            any = true;
            self.swap = None;
            self.steps.pop_front();
        }
        self.store_result();
        Ok(PollProgress { any: true, done: true })
    }

    fn used_links(&self, peers: &PeerLinks) -> Vec<usize> {
        let links = self.steps.iter().filter_map(|step| match step {
            AdasumStep::Swap { with, .. } | AdasumStep::SumProducts { with } => {
                Some(peers.link_to(*with))
            }
            AdasumStep::ComputeProducts { .. } | AdasumStep::CombineVectors { .. } => None,
        });
        links.collect::<BTreeSet<usize>>().into_iter().collect()
    }
}

fn piece_bytes(piece: &[Range<usize>]) -> usize {
    piece.iter().map(Range::len).sum()
}

/// Calls `each` with the ranges of `piece` that hold `len` of its bytes, starting at position `at`;
/// each range with its offset from `at`.
fn visit_piece_ranges(
    piece: &[Range<usize>],
    at: usize,
    len: usize,
    mut each: impl FnMut(usize, Range<usize>),
) {
    let (mut start, end) = (0, at + len);
    for range in piece {
        let (from, to) = (start.max(at), (start + range.len()).min(end));
        if from < to {
            each(from - at, range.start + (from - start)..range.start + (to - start));
        }
        start += range.len();
    }
}

fn gather_piece(vector: &[u8], piece: &[Range<usize>], at: usize, into: &mut [u8]) {
    let len = into.len();
    visit_piece_ranges(piece, at, len, |place, range| {
        into[place..place + range.len()].copy_from_slice(&vector[range])
    });
}

fn scatter_piece(vector: &mut [u8], piece: &[Range<usize>], at: usize, from: &[u8]) {
    visit_piece_ranges(piece, at, from.len(), |place, range| {
        let bytes = &from[place..place + range.len()];
        vector[range].copy_from_slice(bytes);
    });
}

/// Planner of the steps of an Adasum.
struct AdasumPlan {
    /// Number of bytes of an element in the vectors.
    element: usize,
}

impl AdasumPlan {
    /// Returns the steps of a member. `tensors` holds the number of elements of each tensor.
    fn plan_steps(&self, member: usize, size: usize, tensors: &[usize]) -> Vec<AdasumStep> {
        let full = 1 << size.checked_ilog2().unwrap_or(0);
        let folded = 2 * (size - full);
        let whole: VectorRangePerTensor = tensors
            .iter()
            .scan(0, |end, elements| {
                let start = *end;
                *end += elements * self.element;
                Some(start..*end)
            })
            .collect();
        let nothing = VectorRangePerTensor::new;
        let mut steps = Vec::new();
        if member < folded && member % 2 == 1 {
            let with = member - 1;
            steps.push(AdasumStep::Swap {
                with,
                gives: whole.clone(),
                takes: nothing(),
                results: true,
            });
            steps.push(AdasumStep::Swap { with, gives: nothing(), takes: whole, results: true });
            return steps;
        }
        if member < folded {
            let with = member + 1;
            steps.push(AdasumStep::Swap {
                with,
                gives: nothing(),
                takes: whole.clone(),
                results: false,
            });
            steps.push(AdasumStep::ComputeProducts { piece: whole.clone(), first: true });
            steps.push(AdasumStep::CombineVectors { piece: whole.clone(), first: true });
        }
        let place = if member < folded { member / 2 } else { member - folded / 2 };
        let at = |place: usize| if place < folded / 2 { 2 * place } else { place + folded / 2 };
        let distances = || std::iter::successors(Some(1), |d| Some(d * 2));
        let mut piece = whole.clone();
        let mut back = Vec::new();
        for distance in distances().take_while(|d| *d < full) {
            let (with, first) = (at(place ^ distance), place & distance == 0);
            let (low, high) = self.split_halves(&piece);
            let (keeps, gives) = if first { (low, high) } else { (high, low) };
            steps.push(AdasumStep::Swap {
                with,
                gives: gives.clone(),
                takes: keeps.clone(),
                results: false,
            });
            steps.push(AdasumStep::ComputeProducts { piece: keeps.clone(), first });
            let group = distances().take_while(|d| *d <= distance);
            steps.extend(group.map(|d| AdasumStep::SumProducts { with: at(place ^ d) }));
            steps.push(AdasumStep::CombineVectors { piece: keeps.clone(), first });
            back.push(AdasumStep::Swap { with, gives: keeps.clone(), takes: gives, results: true });
            piece = keeps;
        }
        steps.extend(back.into_iter().rev());
        if member < folded {
            steps.push(AdasumStep::Swap {
                with: member + 1,
                gives: whole,
                takes: nothing(),
                results: true,
            });
        }
        steps
    }

    fn split_halves(&self, piece: &[Range<usize>]) -> (VectorRangePerTensor, VectorRangePerTensor) {
        let half = |range: &Range<usize>| {
            // Between elements, so that no element is cut.
            let middle = range.start + range.len() / self.element / 2 * self.element;
            (range.start..middle, middle..range.end)
        };
        piece.iter().map(half).unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_every_link_plan_the_same_swaps() {
        let plan = AdasumPlan { element: 4 };
        for size in 1..20 {
            let steps: Vec<Vec<AdasumStep>> =
                (0..size).map(|member| plan.plan_steps(member, size, &[7, 0, 1, 64])).collect();
            let swaps =
                |from: usize, to: usize| -> Vec<(VectorRangePerTensor, VectorRangePerTensor)> {
                    let swap = |step: &AdasumStep| match step {
                        AdasumStep::Swap { with, gives, takes, .. } if *with == to => {
                            Some((gives.clone(), takes.clone()))
                        }
                        AdasumStep::SumProducts { with } if *with == to => {
                            Some((VectorRangePerTensor::new(), VectorRangePerTensor::new()))
                        }
                        _ => None,
                    };
                    steps[from].iter().filter_map(swap).collect()
                };
            for a in 0..size {
                for b in 0..size {
                    let mirrored: Vec<_> =
                        swaps(b, a).into_iter().map(|(gives, takes)| (takes, gives)).collect();
                    assert_eq!(swaps(a, b), mirrored, "{a} and {b} of {size}");
                }
            }
        }
    }

    #[test]
    fn ranges_are_walked_from_anywhere() {
        let mut vector: Vec<u8> = (0..10).collect();
        let piece = vec![1..3, 5..5, 6..9];
        let mut into = [0; 3];
        gather_piece(&vector, &piece, 1, &mut into);
        assert_eq!(into, [2, 6, 7]);
        scatter_piece(&mut vector, &piece, 0, &[20, 21, 22]);
        assert_eq!(vector, [0, 20, 21, 3, 4, 5, 22, 7, 8, 9]);
    }
}
