// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The plan that assigns rows to ranks and steps.

mod index;
mod lanes;
mod step;
#[cfg(test)]
mod tests;

pub use lanes::LaneLayout;
pub use step::{BatchPlan, PartSlice};

use std::ops::Range;

use farandole_world::Rank;

use crate::error::{Error, Result};
use crate::plan::index::to_index;
use crate::plan::lanes::EpochOrder;

/// Policy for rows that do not fill a batch on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TailPolicy {
    /// A shorter last batch, which may be empty on some ranks.
    #[default]
    Keep,
    /// A last batch filled up with repeated rows of weight 0.
    Pad,
    /// The rows are left out.
    Drop,
    /// A shorter last batch; ranks without rows left have one step less.
    Join,
}

/// One rank's request for an epoch.
#[derive(Clone, Debug)]
pub struct EpochRequest {
    /// Seed of the shuffle.
    pub seed: u64,
    /// Number of the epoch.
    pub epoch: u64,
    /// Whether rows are shuffled; otherwise they come in file order.
    pub shuffle: bool,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Rows in a batch of this rank.
    pub batch_size: u64,
    /// Policy for the last rows.
    pub tail: TailPolicy,
    /// Rows of the epoch that all ranks together have already processed.
    pub start_row: u64,
    /// Most steps of this request; `None` is for all that the rows make.
    pub max_steps: Option<u64>,
}

/// Rows of a row group that belong together in a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanPart {
    /// Index of the file in the manifest.
    pub file: usize,
    /// Index of the row group in the file.
    pub group: usize,
    /// Rows within the group.
    pub rows: Range<u64>,
    /// Seed of the permutation of these rows; `None` leaves their order.
    pub shuffle: Option<u64>,
    /// First step that takes rows of the part.
    pub first_step: u64,
    /// Last step that takes rows of the part.
    pub last_step: u64,
    /// Number of rows that this rank takes.
    pub taken_rows: u64,
}

/// Rows of a rank that come from the same lanes, one row of each in turn.
#[derive(Debug)]
struct RankPhase {
    /// Range of rows, counted in the rank's rows.
    rows: Range<u64>,
    lanes: Vec<RankLane>,
}

/// One rank's rows of a lane: `first, first + stride, ...`, renumbered from 0.
#[derive(Debug)]
struct RankLane {
    /// Segments in ascending order of rows.
    segments: Vec<InterleavedRankRows>,
}

/// Rows of a rank's lane that come in turn from the same parts, one row of each.
#[derive(Debug)]
struct InterleavedRankRows {
    /// Range of rows, counted in the rank's rows of the lane.
    rows: Range<u64>,
    /// Open parts in turn, and the first row taken of each.
    open: Vec<(usize, u64)>,
    /// Distance between two rows taken of a part.
    stride: u64,
}

/// Number of the part of each block, by lane and block; `None` before the part exists.
type PartNumberByBlock = Vec<Vec<Option<usize>>>;

/// One rank's part of one epoch.
#[derive(Debug)]
pub struct EpochPlan {
    parts: Vec<PlanPart>,
    /// Phases in the order of their rows.
    phases: Vec<RankPhase>,
    steps: u64,
    batch_size: u64,
    /// Number of rows of this rank, without padding.
    rows: u64,
    tail: TailPolicy,
    padding: Option<usize>,
}

impl EpochRequest {
    /// Returns the number of rows of this rank in an epoch over `rows` rows.
    fn rank_row_count(&self, rows: u64) -> u64 {
        let left = rows.saturating_sub(self.start_row).saturating_sub(u64::from(self.rank.0));
        left.div_ceil(u64::from(self.size).max(1))
    }

    /// Returns the number of steps of an epoch over `rows` rows; it is the same on every rank,
    /// except with [`TailPolicy::Join`].
    pub fn step_count(&self, rows: u64) -> u64 {
        // This method is public: a request that `EpochPlan::new` has not checked may have size 0.
        let global = (u64::from(self.size) * self.batch_size).max(1);
        let left = rows.saturating_sub(self.start_row);
        let steps = match self.tail {
            TailPolicy::Keep | TailPolicy::Pad => left.div_ceil(global),
            TailPolicy::Drop => left / global,
            TailPolicy::Join => self.rank_row_count(rows).div_ceil(self.batch_size.max(1)),
        };
        self.max_steps.map_or(steps, |most| steps.min(most))
    }
}

impl EpochPlan {
    /// Plans an epoch of the data set with these lanes.
    ///
    /// # Errors
    /// A rank outside of the world, or a size or batch size of 0.
    pub fn new(lanes: &LaneLayout, request: &EpochRequest) -> Result<Self> {
        check_request(request)?;
        let (rank, size) = (u64::from(request.rank.0), u64::from(request.size));
        let order = lanes.epoch_order(request.seed, request.epoch, request.shuffle);
        let total = lanes.total_rows();
        let steps = request.step_count(total);
        // Only `Drop`, which leaves out the rows of an incomplete last step, and `max_steps` reach
        // the limit.
        let rows = request.rank_row_count(total).min(steps.saturating_mul(request.batch_size));
        let mut plan = Self {
            parts: Vec::new(),
            phases: Vec::new(),
            steps,
            batch_size: request.batch_size,
            rows,
            tail: request.tail,
            padding: None,
        };
        let mut numbers: PartNumberByBlock =
            order.lanes.iter().map(|lane| vec![None; lane.runs.len()]).collect();
        for phase in 0..order.phases.len() {
            plan.plan_rank_phase(&order, phase, (request.start_row + rank, size), &mut numbers);
        }
        plan.add_padding_part(lanes);
        Ok(plan)
    }

    /// Adds the rows of a phase. The rows of this rank have the positions `first, first + size,
    /// ...`.
    fn plan_rank_phase(
        &mut self,
        order: &EpochOrder,
        number: usize,
        (first, size): (u64, u64),
        numbers: &mut PartNumberByBlock,
    ) {
        let Some(phase) = order.phases.get(number) else { return };
        let own = |position: u64| position.saturating_sub(first).div_ceil(size).min(self.rows);
        let rows = own(phase.start)..own(phase.end);
        // The rank's rows visit lanes / gcd lanes in turn, and within each lane every (size /
        // gcd)-th row.
        let gcd = gcd(size, phase.lanes);
        let (turn, stride) = (phase.lanes / gcd, size / gcd);
        let mut slots = Vec::new();
        for slot in 0..turn.min(rows.end.saturating_sub(rows.start)) {
            let position = first + (rows.start + slot) * size - phase.start;
            let (lane, row) = (position % phase.lanes, position / phase.lanes);
            let row = order.rows_before_phase(lane, number) + row;
            slots.push(self.plan_rank_lane(
                order,
                (lane, row, stride),
                (&rows, slot, turn),
                numbers,
            ));
        }
        self.phases.push(RankPhase { rows, lanes: slots });
    }

    /// Plans the rows of a rank in one lane: rows `first, first + stride, ...` of the lane. They
    /// are every `turn`-th of the rank's rows `rows`, starting with number `slot`.
    fn plan_rank_lane(
        &mut self,
        order: &EpochOrder,
        (lane, first, stride): (u64, u64, u64),
        (rows, slot, turn): (&Range<u64>, u64, u64),
        numbers: &mut PartNumberByBlock,
    ) -> RankLane {
        let mut stretches = Vec::new();
        let (Some(lane), Some(numbers)) =
            (order.lanes.get(to_index(lane)), numbers.get_mut(to_index(lane)))
        else {
            return RankLane { segments: stretches };
        };
        let taken = (rows.end - rows.start - slot).div_ceil(turn);
        let begin = lane.segments.partition_point(|stretch| stretch.rows.end <= first);
        for stretch in lane.segments.iter().skip(begin) {
            let low = stretch.rows.start.saturating_sub(first).div_ceil(stride);
            let high = stretch.rows.end.saturating_sub(first).div_ceil(stride).min(taken);
            if low >= taken {
                break;
            }
            if low >= high {
                continue;
            }
            // The rows of `many` blocks alternate, so every stride-th row visits many / gcd of the
            // blocks in turn.
            let many = stretch.open.len() as u64;
            let common = gcd(stride, many);
            let start = first + low * stride - stretch.rows.start;
            let mut open = Vec::new();
            for turned in 0..(many / common).min(high - low) {
                let place = start + turned * stride;
                let Some((run, done)) = stretch.open.get(to_index(place % many)) else { continue };
                let count = (high - low - turned).div_ceil(many / common);
                let last = low + turned + (count - 1) * (many / common);
                let steps = |row: u64| (rows.start + slot + row * turn) / self.batch_size;
                let (first_step, last_step) = (steps(low + turned), steps(last));
                // Several segments take rows of one block. They share a part, so that it is decoded
                // once.
                let known = numbers.get(*run).copied().flatten();
                let number = known.unwrap_or(self.parts.len());
                match (self.parts.get_mut(number), lane.runs.get(*run)) {
                    (Some(part), _) => {
                        part.first_step = part.first_step.min(first_step);
                        part.last_step = part.last_step.max(last_step);
                        part.taken_rows += count;
                    }
                    (None, Some(run)) => self.parts.push(PlanPart {
                        file: run.file,
                        group: run.group,
                        rows: run.rows.clone(),
                        shuffle: run.shuffle,
                        first_step,
                        last_step,
                        taken_rows: count,
                    }),
                    (None, None) => continue,
                }
                if let Some(slot) = numbers.get_mut(*run) {
                    *slot = Some(number);
                }
                open.push((number, done + place / many));
            }
            stretches.push(InterleavedRankRows { rows: low..high, open, stride: stride / common });
        }
        RankLane { segments: stretches }
    }

    /// Adds the first row of the data set for a last step in which this rank has no row to repeat.
    fn add_padding_part(&mut self, lanes: &LaneLayout) {
        let empty_end = self.tail == TailPolicy::Pad
            && self.steps > 0
            && self.rows <= (self.steps - 1) * self.batch_size;
        if let (true, Some((file, group))) = (empty_end, lanes.first_row_group()) {
            self.padding = Some(self.parts.len());
            let step = self.steps - 1;
            self.parts.push(PlanPart {
                file,
                group,
                rows: 0..1,
                shuffle: None,
                first_step: step,
                last_step: step,
                taken_rows: 1,
            });
        }
    }

    /// Returns the parts to read, in no particular order; [`PartSlice::part`] is an index into this
    /// list.
    pub fn parts(&self) -> &[PlanPart] {
        &self.parts
    }

    /// Returns the number of batches of this rank.
    pub fn step_count(&self) -> u64 {
        self.steps
    }

    /// Returns the number of rows of this rank in the whole epoch, without padding.
    pub fn row_count(&self) -> u64 {
        self.rows
    }

    /// Returns the smallest number of bytes that must be held at a time, if `bytes` returns the
    /// bytes of a part. The rows of a step may be copied part by part, in the order of
    /// [`EpochPlan::load_order`], and parts that are no longer needed are released for others.
    pub fn min_resident_bytes(&self, bytes: impl Fn(&PlanPart) -> u64) -> u64 {
        // Kinds of parts in a step: last used in it, used only in it, first used in it and needed
        // later.
        let (ends, alone, begins) = (0_u8, 1, 2);
        let mut events: Vec<(u64, u8, u64)> = Vec::with_capacity(2 * self.parts.len());
        for part in &self.parts {
            let bytes = bytes(part);
            if part.first_step == part.last_step {
                events.push((part.first_step, alone, bytes));
            } else {
                events.extend([(part.first_step, begins, bytes), (part.last_step, ends, bytes)]);
            }
        }
        // Within a step, parts that end come first: their memory is free before others are loaded.
        events.sort_unstable();
        let (mut held, mut most) = (0_u64, 0);
        for (_, what, bytes) in events {
            if what == ends {
                held = held.saturating_sub(bytes);
                continue;
            }
            most = most.max(held.saturating_add(bytes));
            if what == begins {
                held = held.saturating_add(bytes);
            }
        }
        most
    }

    /// Returns the parts in the order in which they are needed. If several are needed at the same
    /// step, parts that end earlier come first.
    pub fn load_order(&self) -> Vec<usize> {
        let mut queue: Vec<usize> = (0..self.parts.len()).collect();
        queue.sort_by_key(|part| {
            self.parts.get(*part).map(|part| (part.first_step, part.last_step))
        });
        queue
    }
}

fn check_request(request: &EpochRequest) -> Result<()> {
    let (rank, size, batch_size) =
        (u64::from(request.rank.0), u64::from(request.size), request.batch_size);
    if rank < size && batch_size > 0 && batch_size < 1 << 31 {
        Ok(())
    } else {
        Err(Error::Request { rank, size, batch_size })
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
