// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The plan: which rank reads which rows when.

mod lanes;
mod step;
#[cfg(test)]
mod tests;

pub use lanes::Lanes;
pub use step::{Piece, Step};

use std::ops::Range;

use farandole_world::Rank;

use crate::error::{Error, Result};
use crate::plan::lanes::Order;

/// The treatment of rows that do not fill a batch on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tail {
    /// A shorter last batch, which may be empty on some ranks.
    #[default]
    Keep,
    /// A last batch filled up with repeated rows of weight 0.
    Pad,
    /// They are left out.
    Drop,
    /// A shorter last batch, and none on ranks that have no rows left: those have one step less.
    Join,
}

/// One rank's request for an epoch.
#[derive(Clone, Debug)]
pub struct Request {
    /// Seed of the shuffle.
    pub seed: u64,
    /// Number of the epoch.
    pub epoch: u64,
    /// File order when false.
    pub shuffle: bool,
    /// This rank.
    pub rank: Rank,
    /// Ranks of the world.
    pub size: u32,
    /// Rows of a batch of this rank.
    pub batch_size: u64,
    /// The treatment of the last rows.
    pub tail: Tail,
    /// Rows of the epoch, of all ranks together, that are done already.
    pub start_row: u64,
}

/// Rows of one row group that belong together in a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of the file in the manifest.
    pub file: usize,
    /// Index of the row group in the file.
    pub group: usize,
    /// Rows within the group.
    pub rows: Range<u64>,
    /// Seed of the permutation of these rows; `None` leaves their order.
    pub shuffle: Option<u64>,
    /// The first step that takes rows of it.
    pub first_step: u64,
    /// The last step that takes rows of it.
    pub last_step: u64,
    /// Rows that this rank takes.
    pub taken: u64,
}

/// Rows of a rank that come from the same lanes, one of each slot in turn.
#[derive(Debug)]
struct Stage {
    /// Rows of the rank.
    rows: Range<u64>,
    slots: Vec<Slot>,
}

/// A lane as one rank sees it: of its rows `first, first + stride, ...`, counted from 0 on.
#[derive(Debug)]
struct Slot {
    /// Ascending.
    stretches: Vec<Weave>,
}

/// Rows of a slot that come in turn from the same parts, one of each.
#[derive(Debug)]
struct Weave {
    /// Rows of the slot.
    rows: Range<u64>,
    /// The open parts, in turn, and the first row of each.
    open: Vec<(usize, u64)>,
    /// From one row of a part to the next.
    stride: u64,
}

/// By lane and run, the part that it has become.
type Numbers = Vec<Vec<Option<usize>>>;

/// One rank's part of one epoch.
#[derive(Debug)]
pub struct Plan {
    parts: Vec<Part>,
    /// In the order of their rows.
    stages: Vec<Stage>,
    steps: u64,
    batch_size: u64,
    /// Rows of this rank, without padding.
    rows: u64,
    tail: Tail,
    padding: Option<usize>,
}

impl Request {
    /// Returns the rows of this rank, of an epoch over `rows` rows.
    fn own(&self, rows: u64) -> u64 {
        let left = rows.saturating_sub(self.start_row).saturating_sub(u64::from(self.rank.0));
        left.div_ceil(u64::from(self.size).max(1))
    }

    /// Steps of an epoch over `rows` rows, the same on every rank but with [`Tail::Join`].
    pub fn steps(&self, rows: u64) -> u64 {
        let global = (u64::from(self.size) * self.batch_size).max(1);
        let left = rows.saturating_sub(self.start_row);
        match self.tail {
            Tail::Keep | Tail::Pad => left.div_ceil(global),
            Tail::Drop => left / global,
            Tail::Join => self.own(rows).div_ceil(self.batch_size.max(1)),
        }
    }
}

impl Plan {
    /// Plans an epoch of the data set behind `lanes`.
    ///
    /// # Errors
    /// A rank past the size, or a size or batch size of 0.
    pub fn new(lanes: &Lanes, request: &Request) -> Result<Self> {
        check(request)?;
        let (rank, size) = (u64::from(request.rank.0), u64::from(request.size));
        let order = lanes.order(request.seed, request.epoch, request.shuffle);
        let total = lanes.rows();
        let steps = request.steps(total);
        let rows = request.own(total).min(steps * request.batch_size);
        let mut plan = Self {
            parts: Vec::new(),
            stages: Vec::new(),
            steps,
            batch_size: request.batch_size,
            rows,
            tail: request.tail,
            padding: None,
        };
        let mut numbers: Numbers =
            order.lanes.iter().map(|lane| vec![None; lane.runs.len()]).collect();
        for phase in 0..order.phases.len() {
            plan.add_stage(&order, phase, (request.start_row + rank, size), &mut numbers);
        }
        plan.add_padding(lanes);
        Ok(plan)
    }

    /// Adds the rows of a phase; those of this rank are at the positions `first, first + size,
    /// ...`.
    fn add_stage(
        &mut self,
        order: &Order,
        number: usize,
        (first, size): (u64, u64),
        numbers: &mut Numbers,
    ) {
        let Some(phase) = order.phases.get(number) else { return };
        let own = |position: u64| position.saturating_sub(first).div_ceil(size).min(self.rows);
        let rows = own(phase.start)..own(phase.end);
        // They walk over lanes / gcd lanes in turn, and in each lane by size / gcd rows.
        let gcd = gcd(size, phase.lanes);
        let (turn, stride) = (phase.lanes / gcd, size / gcd);
        let mut slots = Vec::new();
        for slot in 0..turn.min(rows.end.saturating_sub(rows.start)) {
            let position = first + (rows.start + slot) * size - phase.start;
            let (lane, row) = (position % phase.lanes, position / phase.lanes);
            let row = order.done(lane, number) + row;
            slots.push(self.slot(order, (lane, row, stride), (&rows, slot, turn), numbers));
        }
        self.stages.push(Stage { rows, slots });
    }

    /// Slot number `slot` of `turn` of the rank's rows `rows`: rows `first, first + stride, ...` of
    /// a lane.
    fn slot(
        &mut self,
        order: &Order,
        (lane, first, stride): (u64, u64, u64),
        (rows, slot, turn): (&Range<u64>, u64, u64),
        numbers: &mut Numbers,
    ) -> Slot {
        let mut stretches = Vec::new();
        let (Some(lane), Some(numbers)) =
            (order.lanes.get(index(lane)), numbers.get_mut(index(lane)))
        else {
            return Slot { stretches };
        };
        let taken = (rows.end - rows.start - slot).div_ceil(turn);
        let begin = lane.stretches.partition_point(|stretch| stretch.rows.end <= first);
        for stretch in lane.stretches.iter().skip(begin) {
            let low = stretch.rows.start.saturating_sub(first).div_ceil(stride);
            let high = stretch.rows.end.saturating_sub(first).div_ceil(stride).min(taken);
            if low >= taken {
                break;
            }
            if low >= high {
                continue;
            }
            // Of `many` runs in turn, every stride-th row sees many / gcd, again and again.
            let many = stretch.open.len() as u64;
            let common = gcd(stride, many);
            let start = first + low * stride - stretch.rows.start;
            let mut open = Vec::new();
            for turned in 0..(many / common).min(high - low) {
                let place = start + turned * stride;
                let Some((run, done)) = stretch.open.get(index(place % many)) else { continue };
                let count = (high - low - turned).div_ceil(many / common);
                let last = low + turned + (count - 1) * (many / common);
                let steps = |row: u64| (rows.start + slot + row * turn) / self.batch_size;
                let (first_step, last_step) = (steps(low + turned), steps(last));
                let known = numbers.get(*run).copied().flatten();
                let number = known.unwrap_or(self.parts.len());
                match (self.parts.get_mut(number), lane.runs.get(*run)) {
                    (Some(part), _) => {
                        part.first_step = part.first_step.min(first_step);
                        part.last_step = part.last_step.max(last_step);
                        part.taken += count;
                    }
                    (None, Some(run)) => self.parts.push(Part {
                        file: run.file,
                        group: run.group,
                        rows: run.rows.clone(),
                        shuffle: run.shuffle,
                        first_step,
                        last_step,
                        taken: count,
                    }),
                    (None, None) => continue,
                }
                if let Some(slot) = numbers.get_mut(*run) {
                    *slot = Some(number);
                }
                open.push((number, done + place / many));
            }
            stretches.push(Weave { rows: low..high, open, stride: stride / common });
        }
        Slot { stretches }
    }

    /// A last step without any row of this rank still needs a row to repeat: the very first of the
    /// data set.
    fn add_padding(&mut self, lanes: &Lanes) {
        let empty_end = self.tail == Tail::Pad
            && self.steps > 0
            && self.rows <= (self.steps - 1) * self.batch_size;
        if let (true, Some((file, group))) = (empty_end, lanes.first_group()) {
            self.padding = Some(self.parts.len());
            let step = self.steps - 1;
            self.parts.push(Part {
                file,
                group,
                rows: 0..1,
                shuffle: None,
                first_step: step,
                last_step: step,
                taken: 1,
            });
        }
    }

    /// Returns the parts to read, in no particular order; [`Piece::part`] is an index into them.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Batches of this rank, as many as of every other.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the rows of this rank in the whole epoch, without padding.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the least that has to be held at a time, when `bytes` tells what a part takes: the
    /// rows of a step may be copied part by part, in the order of [`Plan::queue`], and parts that
    /// are not needed any more make room for others.
    pub fn least_bytes(&self, bytes: impl Fn(&Part) -> u64) -> u64 {
        // By step: what ends in it, what it alone needs, what begins in it and continues.
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

    /// Parts in the order in which they are needed; of those that are needed at a time, those first
    /// that are done first.
    pub fn queue(&self) -> Vec<usize> {
        let mut queue: Vec<usize> = (0..self.parts.len()).collect();
        queue.sort_by_key(|part| {
            self.parts.get(*part).map(|part| (part.first_step, part.last_step))
        });
        queue
    }
}

fn check(request: &Request) -> Result<()> {
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

/// Returns a count as an index.
pub(crate) fn index(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
