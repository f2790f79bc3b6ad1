// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Blocks and lanes, the basis of the order of rows. They depend on the manifest alone.

use std::ops::Range;

use crate::manifest::Manifest;
use crate::plan::index::to_index;
use crate::rng::{fold_hash, random_permutation};

/// Most decoded bytes of a block; larger row groups are cut.
const MAX_BLOCK_BYTES: u64 = 32 << 20;

/// Most blocks of a data set, unless it has more row groups: the sizes that a manifest claims must
/// not exhaust memory.
const MAX_BLOCKS: u64 = 1 << 20;

/// Smallest number of rows of a block from which cuts are at powers of two.
const POWER_OF_TWO_CUT_ROWS: u64 = 1 << 16;

/// Most bytes of the open blocks of all lanes together.
const MAX_OPEN_BYTES: u64 = 256 << 20;

/// Most bytes of all open blocks if lanes have more than one block open.
// A batch then has rows of 64 blocks of 0.5 MiB, or of 16 blocks of 4 MiB, the size of prepared row
// groups: enough places of sorted data (`bench/JOURNAL.md`).
const MULTI_BLOCK_BYTE_LIMIT: u64 = 64 << 20;

/// Most open blocks of all lanes if lanes have more than one open: a batch takes rows from each of
/// them.
const MULTI_BLOCK_COUNT_LIMIT: u64 = 64;

/// Most lanes that may have a single block. With more lanes, each has at least ten blocks. A block
/// on the border of two lanes may be read twice, and so at most a tenth of the blocks is.
const SINGLE_BLOCK_LANE_LIMIT: u64 = 8;

/// Number of lanes that start an epoch, so that its first batch needs no more blocks. If there are
/// more lanes, each has at least [`MIN_BLOCKS_PER_LANE`] blocks, because more ranks than this share
/// the first blocks, and read them twice, too.
// Of 10,000 files, 48 are opened before the first batch, which takes about 13 ms.
const FIRST_PHASE_LANES: u64 = 48;

/// Fewest blocks of a lane if there are more lanes than [`FIRST_PHASE_LANES`].
const MIN_BLOCKS_PER_LANE: u64 = 25;

/// Allowed numbers of lanes, chosen so that common world sizes divide them.
const LANE_COUNTS: [u64; 11] = [768, 384, 192, 96, 48, 24, 16, 8, 4, 2, 1];

/// Neighbouring rows of a row group; a block, or the part of a block in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShuffleBlock {
    pub(crate) file: usize,
    pub(crate) group: usize,
    pub(crate) rows: Range<u64>,
    pub(crate) shuffle: Option<u64>,
}

/// Rows of a lane that come in turn from the same blocks, one row of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterleavedLaneRows {
    /// Range of rows, counted in the lane.
    pub(crate) rows: Range<u64>,
    /// Open blocks, and the first row taken of each.
    pub(crate) open: Vec<(usize, u64)>,
}

/// Blocks of a lane, and the order of their rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShuffleLane {
    pub(crate) runs: Vec<ShuffleBlock>,
    pub(crate) segments: Vec<InterleavedLaneRows>,
}

impl ShuffleLane {
    /// Opens `beside` blocks at a time; when one ends, the next one opens.
    fn new(runs: Vec<ShuffleBlock>, beside: u64) -> Self {
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
            // Rows alternate evenly only while all blocks are open, so a segment ends with the
            // shortest block.
            let Some(shortest) = open.iter().map(left).min() else { break };
            let end = start + shortest * open.len() as u64;
            stretches.push(InterleavedLaneRows { rows: start..end, open: open.clone() });
            open.iter_mut().for_each(|(_, done)| *done += shortest);
            open.retain(|one| left(one) > 0);
            start = end;
        }
        Self { runs, segments: stretches }
    }
}

/// Positions whose rows come from the same lanes, one row of each in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LanePhase {
    /// First position, a multiple of the number of all lanes of the epoch.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Number of lanes, counted from the first.
    pub(crate) lanes: u64,
}

/// The order of one epoch.
#[derive(Debug)]
pub(crate) struct EpochOrder {
    pub(crate) lanes: Vec<ShuffleLane>,
    /// Phases in order; each has more lanes than the one before.
    pub(crate) phases: Vec<LanePhase>,
}

impl EpochOrder {
    /// Returns the number of rows of lane number `lane` before phase number `phase`.
    pub(crate) fn rows_before_phase(&self, lane: u64, phase: usize) -> u64 {
        let before = self.phases.iter().take(phase).filter(|phase| lane < phase.lanes);
        before.map(|phase| (phase.end - phase.start) / phase.lanes).sum()
    }
}

/// Blocks of a data set and the number of its lanes. Built once per data set.
#[derive(Debug)]
pub struct LaneLayout {
    blocks: Vec<ShuffleBlock>,
    count: u64,
    /// Blocks that a lane has open at a time.
    open_blocks_per_lane: u64,
    /// Rows that each of the first lanes yields before the other lanes join.
    first_phase_lane_rows: u64,
    rows: u64,
}

impl LaneLayout {
    /// Cuts the row groups of `manifest` into blocks and chooses the number of lanes.
    pub fn new(manifest: &Manifest) -> Self {
        // `largest` is at least 1, because limits are divided by it.
        let (mut blocks, mut rows, mut largest) = (Vec::new(), 0, 1);
        for (file, data) in manifest.files.iter().enumerate() {
            for (group, row_group) in data.groups.iter().enumerate() {
                // Above the limit, a row group still has one block: no row may be left out.
                let room = MAX_BLOCKS.saturating_sub(blocks.len() as u64).max(1);
                let edges = block_edges(row_group.rows, row_group.bytes, room);
                largest =
                    largest.max(row_group.bytes / edges.len().saturating_sub(1).max(1) as u64);
                blocks.extend(
                    edges
                        .iter()
                        .zip(edges.iter().skip(1))
                        .map(|(from, to)| ShuffleBlock {
                            file,
                            group,
                            rows: *from..*to,
                            shuffle: None,
                        })
                        // An empty block would open a segment without rows.
                        .filter(|run| !run.rows.is_empty()),
                );
                rows += row_group.rows;
            }
        }
        let many = blocks.len() as u64;
        let fits = |count: &u64| {
            let each = if *count > FIRST_PHASE_LANES {
                MIN_BLOCKS_PER_LANE
            } else if *count > SINGLE_BLOCK_LANE_LIMIT {
                10
            } else {
                1
            };
            // Every lane has a block open at the same time, so memory limits their number, too.
            count * each <= many && largest.saturating_mul(*count) <= MAX_OPEN_BYTES
        };
        // A block above the limit of memory still needs a lane to be read.
        let count = LANE_COUNTS.into_iter().find(fits).unwrap_or(1);
        // Rounded so that a lane's last group of open blocks is not smaller than the others.
        let deep = many.div_ceil(count).max(1);
        let room = (MULTI_BLOCK_BYTE_LIMIT / largest.saturating_mul(count))
            .min(MULTI_BLOCK_COUNT_LIMIT / count)
            .clamp(1, deep);
        let beside = deep.div_ceil(deep.div_ceil(room));
        // About a quarter of a block, rounded so that the second phase begins with the first lane
        // at every size that divides the lanes.
        let round = count / FIRST_PHASE_LANES;
        let early = if round > 1 { (rows / many / 4 / round).max(1) * round } else { 0 };
        Self { blocks, count, open_blocks_per_lane: beside, first_phase_lane_rows: early, rows }
    }

    /// Returns the number of lanes of a shuffled epoch.
    pub fn lane_count(&self) -> u64 {
        self.count
    }

    /// Returns the number of blocks from which a large batch takes rows, except at the start of an
    /// epoch.
    pub fn blocks_per_batch(&self) -> u64 {
        self.count * self.open_blocks_per_lane
    }

    /// Returns the blocks, which are decoded as a whole, in the order of the files: file, row group
    /// and rows of each.
    pub fn block_ranges(&self) -> impl Iterator<Item = (usize, usize, Range<u64>)> {
        self.blocks.iter().map(|run| (run.file, run.group, run.rows.clone()))
    }

    /// Returns the number of rows of the data set.
    pub fn total_rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn first_row_group(&self) -> Option<(usize, usize)> {
        self.blocks.first().map(|run| (run.file, run.group))
    }

    pub(crate) fn epoch_order(&self, seed: u64, epoch: u64, shuffle: bool) -> EpochOrder {
        if !shuffle {
            let lanes = vec![ShuffleLane::new(self.blocks.clone(), 1)];
            return EpochOrder {
                lanes,
                phases: vec![LanePhase { start: 0, end: self.rows, lanes: 1 }],
            };
        }
        let start = FIRST_PHASE_LANES * self.first_phase_lane_rows;
        let mut phases = vec![LanePhase { start, end: self.rows, lanes: self.count }];
        if start > 0 {
            phases.insert(0, LanePhase { start: 0, end: start, lanes: FIRST_PHASE_LANES });
        }
        // A hash, because a sum would give seed 1 in epoch 2 the order of seed 2 in epoch 1.
        let state = fold_hash(fold_hash(0, seed), epoch);
        let many = u32::try_from(self.blocks.len()).unwrap_or(u32::MAX);
        let mut line = random_permutation(state, many)
            .into_iter()
            .filter_map(|block| self.blocks.get(block as usize));
        let mut lanes = Vec::with_capacity(to_index(self.count));
        let mut rest: Option<ShuffleBlock> = None;
        for lane in 0..self.count {
            let mut missing = self.rows.saturating_sub(start + lane).div_ceil(self.count);
            missing += if lane < FIRST_PHASE_LANES { self.first_phase_lane_rows } else { 0 };
            let mut runs = Vec::new();
            while missing > 0 {
                let Some(block) = rest.take().or_else(|| line.next().cloned()) else { break };
                let cut = block.rows.end.min(block.rows.start + missing);
                missing -= cut - block.rows.start;
                // Lanes have equal lengths up to one row, so a block at the border of two lanes is
                // cut.
                if cut < block.rows.end {
                    rest = Some(ShuffleBlock { rows: cut..block.rows.end, ..block.clone() });
                }
                runs.push(with_shuffle_seed(
                    ShuffleBlock { rows: block.rows.start..cut, ..block },
                    state,
                ));
            }
            lanes.push(ShuffleLane::new(runs, self.open_blocks_per_lane));
        }
        EpochOrder { lanes, phases }
    }
}

/// Returns the edges of the blocks of a row group, which has at most about `most` blocks. Numeric
/// pages often have a power of two of rows. If edges are multiples of one, few pages cross an edge;
/// such pages would be read twice.
fn block_edges(rows: u64, bytes: u64, most: u64) -> Vec<u64> {
    let pieces = bytes.div_ceil(MAX_BLOCK_BYTES).clamp(1, rows.clamp(1, most));
    let round = 1_u64.checked_shl((rows / pieces).checked_ilog2().unwrap_or(0)).unwrap_or(1);
    if pieces > 1 && round >= POWER_OF_TWO_CUT_ROWS {
        return (0..rows.div_ceil(round)).map(|piece| piece * round).chain([rows]).collect();
    }
    (0..=pieces).map(|piece| rows / pieces * piece + (rows % pieces).min(piece)).collect()
}

/// Sets the seed of the block's permutation.
fn with_shuffle_seed(run: ShuffleBlock, state: u64) -> ShuffleBlock {
    // The first row is included, so that the two parts of a cut block have different permutations.
    let seed =
        [run.file as u64, run.group as u64, run.rows.start].into_iter().fold(state, fold_hash);
    ShuffleBlock { shuffle: Some(seed), ..run }
}
