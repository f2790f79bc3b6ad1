// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Blocks and lanes, from which the order is built. They depend on the manifest alone.

use std::ops::Range;

use crate::manifest::Manifest;
use crate::plan::index;
use crate::rng::{fold, permutation};

/// A block is cut where it would take more than this decoded.
const BLOCK_BYTES: u64 = 32 << 20;

/// Blocks of a data set are no more than this, or one for each row group: what a manifest claims
/// must not cost memory.
const MOST: u64 = 1 << 20;

/// Blocks of this many rows on are cut at powers of two.
const ROUND_ROWS: u64 = 1 << 16;

/// Blocks of all lanes that are open at once take this much together, at most.
const OPEN_BYTES: u64 = 256 << 20;

/// Lanes open more than one block where all of them together take no more than this.
const SIDE_BYTES: u64 = 64 << 20;

/// Lanes open more than one block where all of them together are no more than this: a batch is put
/// together from as many.
const SIDE_BLOCKS: u64 = 64;

/// Lanes up to this many may hold a single block; more lanes than that hold ten blocks each, so
/// that lanes that meet within a block make no more than a tenth of the blocks be read twice.
const FEW: u64 = 8;

/// So many lanes begin an epoch, so that its first batch needs no more blocks than that. More lanes
/// than these hold [`EACH`] blocks each: where there are more ranks, some of them share the first
/// blocks, and those are read twice, too.
const FIRST: u64 = 48;

/// Blocks in a lane where more lanes follow the first.
const EACH: u64 = 25;

/// Counts of lanes, chosen so that common sizes of worlds divide them.
const COUNTS: [u64; 11] = [768, 384, 192, 96, 48, 24, 16, 8, 4, 2, 1];

/// Neighbouring rows of one row group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) file: usize,
    pub(crate) group: usize,
    pub(crate) rows: Range<u64>,
    pub(crate) shuffle: Option<u64>,
}

/// Rows of a lane that come in turn from the same runs, one of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Its rows, counted in the lane.
    pub(crate) rows: Range<u64>,
    /// The open runs, and the first row taken of each.
    pub(crate) open: Vec<(usize, u64)>,
}

/// Runs, and how their rows follow each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) runs: Vec<Run>,
    pub(crate) stretches: Vec<Stretch>,
}

impl Lane {
    /// Opens `beside` runs at once; where one ends the next one begins.
    fn new(runs: Vec<Run>, beside: u64) -> Self {
        let (mut open, mut stretches) = (Vec::<(usize, u64)>::new(), Vec::new());
        let (mut next, mut start) = (0..runs.len(), 0);
        let left = |(run, done): &(usize, u64)| {
            runs.get(*run).map_or(0, |run| run.rows.end - run.rows.start).saturating_sub(*done)
        };
        loop {
            while (open.len() as u64) < beside.max(1)
                && let Some(run) = next.next()
            {
                open.push((run, 0));
            }
            let Some(shortest) = open.iter().map(left).min() else { break };
            let end = start + shortest * open.len() as u64;
            stretches.push(Stretch { rows: start..end, open: open.clone() });
            open.iter_mut().for_each(|(_, done)| *done += shortest);
            open.retain(|one| left(one) > 0);
            start = end;
        }
        Self { runs, stretches }
    }
}

/// Positions whose rows come from the same lanes, one of each in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Phase {
    /// The first position, a multiple of the number of all lanes.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// From the first lane on, so many.
    pub(crate) lanes: u64,
}

/// The order of one epoch.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) lanes: Vec<Lane>,
    /// One after the other, each with more lanes than the one before.
    pub(crate) phases: Vec<Phase>,
}

impl Order {
    /// Returns the rows of lane number `lane` that come before phase number `phase`.
    pub(crate) fn done(&self, lane: u64, phase: usize) -> u64 {
        let before = self.phases.iter().take(phase).filter(|phase| lane < phase.lanes);
        before.map(|phase| (phase.end - phase.start) / phase.lanes).sum()
    }
}

/// Blocks of a data set and the number of its lanes; made once per data set.
#[derive(Debug)]
pub struct Lanes {
    blocks: Vec<Run>,
    count: u64,
    /// Blocks that a lane opens at once.
    beside: u64,
    /// Rows of each of the first lanes that come before those of the others.
    early: u64,
    rows: u64,
}

impl Lanes {
    /// Cuts the row groups of `manifest` into blocks and chooses the number of lanes.
    pub fn new(manifest: &Manifest) -> Self {
        let (mut blocks, mut rows, mut largest) = (Vec::new(), 0, 1);
        for (file, data) in manifest.files.iter().enumerate() {
            for (group, row_group) in data.groups.iter().enumerate() {
                let room = MOST.saturating_sub(blocks.len() as u64).max(1);
                let edges = edges(row_group.rows, row_group.bytes, room);
                largest =
                    largest.max(row_group.bytes / edges.len().saturating_sub(1).max(1) as u64);
                blocks.extend(
                    edges
                        .iter()
                        .zip(edges.iter().skip(1))
                        .map(|(from, to)| Run { file, group, rows: *from..*to, shuffle: None })
                        .filter(|run| !run.rows.is_empty()),
                );
                rows += row_group.rows;
            }
        }
        let many = blocks.len() as u64;
        let fits = |count: &u64| {
            let each = if *count > FIRST {
                EACH
            } else if *count > FEW {
                10
            } else {
                1
            };
            count * each <= many && largest.saturating_mul(*count) <= OPEN_BYTES
        };
        let count = COUNTS.into_iter().find(fits).unwrap_or(1);
        // As many blocks at a time that the last ones of a lane are no fewer.
        let deep = many.div_ceil(count).max(1);
        let room =
            (SIDE_BYTES / largest.saturating_mul(count)).min(SIDE_BLOCKS / count).clamp(1, deep);
        let beside = deep.div_ceil(deep.div_ceil(room));
        // About a quarter of a block, and the other phase begins with the first lane at every size
        // that divides the lanes.
        let round = count / FIRST;
        let early = if round > 1 { (rows / many / 4 / round).max(1) * round } else { 0 };
        Self { blocks, count, beside, early, rows }
    }

    /// Returns the number of lanes of a shuffled epoch.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of blocks of a batch's rows, if it is large enough and not at the start
    /// of an epoch.
    pub fn mixed(&self) -> u64 {
        self.count * self.beside
    }

    /// Returns the blocks, which are decoded as a whole: file, row group and rows of each, in the
    /// order of the files.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize, Range<u64>)> {
        self.blocks.iter().map(|run| (run.file, run.group, run.rows.clone()))
    }

    /// Returns the rows of the data set.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn first_group(&self) -> Option<(usize, usize)> {
        self.blocks.first().map(|run| (run.file, run.group))
    }

    pub(crate) fn order(&self, seed: u64, epoch: u64, shuffle: bool) -> Order {
        if !shuffle {
            let lanes = vec![Lane::new(self.blocks.clone(), 1)];
            return Order { lanes, phases: vec![Phase { start: 0, end: self.rows, lanes: 1 }] };
        }
        let start = FIRST * self.early;
        let mut phases = vec![Phase { start, end: self.rows, lanes: self.count }];
        if start > 0 {
            phases.insert(0, Phase { start: 0, end: start, lanes: FIRST });
        }
        let state = fold(fold(0, seed), epoch);
        let many = u32::try_from(self.blocks.len()).unwrap_or(u32::MAX);
        let mut line = permutation(state, many)
            .into_iter()
            .filter_map(|block| self.blocks.get(block as usize));
        let mut lanes = Vec::with_capacity(index(self.count));
        let mut rest: Option<Run> = None;
        for lane in 0..self.count {
            let mut missing = self.rows.saturating_sub(start + lane).div_ceil(self.count);
            missing += if lane < FIRST { self.early } else { 0 };
            let mut runs = Vec::new();
            while missing > 0 {
                let Some(block) = rest.take().or_else(|| line.next().cloned()) else { break };
                let cut = block.rows.end.min(block.rows.start + missing);
                missing -= cut - block.rows.start;
                if cut < block.rows.end {
                    rest = Some(Run { rows: cut..block.rows.end, ..block.clone() });
                }
                runs.push(shuffled(Run { rows: block.rows.start..cut, ..block }, state));
            }
            lanes.push(Lane::new(runs, self.beside));
        }
        Order { lanes, phases }
    }
}

/// Returns the rows at which a row group is cut into about `most` pieces at most. Pages of numbers
/// often hold a power of two of rows: edges at multiples of one have few pages on both sides, which
/// would be read twice.
fn edges(rows: u64, bytes: u64, most: u64) -> Vec<u64> {
    let pieces = bytes.div_ceil(BLOCK_BYTES).clamp(1, rows.clamp(1, most));
    let round = 1_u64.checked_shl((rows / pieces).checked_ilog2().unwrap_or(0)).unwrap_or(1);
    if pieces > 1 && round >= ROUND_ROWS {
        return (0..rows.div_ceil(round)).map(|piece| piece * round).chain([rows]).collect();
    }
    (0..=pieces).map(|piece| rows / pieces * piece + (rows % pieces).min(piece)).collect()
}

/// Gives a run the seed of its own permutation.
fn shuffled(run: Run, state: u64) -> Run {
    let seed = [run.file as u64, run.group as u64, run.rows.start].into_iter().fold(state, fold);
    Run { shuffle: Some(seed), ..run }
}
