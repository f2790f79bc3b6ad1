// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! State of an epoch: loaded blocks, ready batches, and the next job. It has no threads and no
//! clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use farandole_dataset::{EpochPlan, PartSlice};

use crate::assemble::{BatchDraft, RowCopy};
use crate::batch::Batch;
use crate::block::DecodedBlock;
use crate::decode::DecodePlan;
use crate::error::Error;
use crate::footer::FetchedRanges;
use crate::pool::PoolReservation;

/// Fetched bytes of a part and the plan to decode them; `None` if the part is cached or not fetched
/// yet.
pub(crate) type FetchedPart = Option<Box<(DecodePlan, FetchedRanges, PoolReservation)>>;

/// A job for a thread.
pub(crate) enum EpochJob {
    /// Fetch the bytes of this part.
    Fetch(usize),
    /// Decode this part. Fetch its bytes if there are none.
    Load(usize, FetchedPart),
    /// Copy these rows into a batch.
    Assemble(Box<BatchDraft>, RowCopy),
}

/// Limits for batches that are ready before the consumer asks for them. At least one batch is
/// always allowed.
#[derive(Clone, Copy)]
pub(crate) struct ReadyLimits {
    pub(crate) batches: u64,
    pub(crate) bytes: u64,
}

/// State of an epoch.
pub(crate) struct EpochState {
    /// Parts to load, by first step (RE-3).
    queue: Vec<usize>,
    queued: usize,
    /// Bytes of each part: decoded, and in addition while it is loaded.
    part_bytes: Vec<(u64, u64)>,
    /// Fetched parts, by first step.
    fetched: BTreeMap<(u64, usize), FetchedPart>,
    /// Whether separate threads fetch.
    has_fetch_threads: bool,
    rows_left: Vec<u64>,
    blocks: Vec<Option<Arc<DecodedBlock>>>,
    held_bytes: u64,
    budget: u64,
    /// Number of parts that are being loaded.
    loading: usize,
    /// Number of batches into which rows are being copied.
    copying: usize,
    /// Draft of the batch of `next_step`, if it was started.
    pending: Option<BatchDraft>,
    /// Whether rows are being copied into that draft while blocks of other rows are missing.
    is_partially_copying: bool,
    next_step: u64,
    next_out: u64,
    steps: u64,
    ready_limits: ReadyLimits,
    ready: BTreeMap<u64, Batch>,
    /// Bytes of the ready batches.
    ready_bytes: u64,
    /// Bytes of the largest recent batch; decays with every batch.
    recent_largest_bytes: u64,
    /// Error for the consumer.
    pub(crate) error: Option<Error>,
    /// Whether the threads must end.
    pub(crate) ended: bool,
    /// Number of fetching threads that have not ended.
    pub(crate) fetchers: usize,
}

impl EpochState {
    /// Returns the state at the start of an epoch. `part_bytes` has the bytes of every part:
    /// decoded, and in addition while it is loaded. If `has_fetch_threads` is true, separate
    /// threads fetch.
    pub(crate) fn new(
        plan: &EpochPlan,
        part_bytes: Vec<(u64, u64)>,
        budget: u64,
        ready_limits: ReadyLimits,
        has_fetch_threads: bool,
    ) -> Self {
        Self {
            queue: plan.load_order(),
            queued: 0,
            rows_left: plan.parts().iter().map(|part| part.taken_rows).collect(),
            blocks: plan.parts().iter().map(|_| None).collect(),
            part_bytes,
            fetched: BTreeMap::new(),
            has_fetch_threads,
            held_bytes: 0,
            budget,
            loading: 0,
            copying: 0,
            pending: None,
            is_partially_copying: false,
            next_step: 0,
            next_out: 0,
            steps: plan.step_count(),
            ready_limits: ReadyLimits { batches: ready_limits.batches.max(1), ..ready_limits },
            ready: BTreeMap::new(),
            ready_bytes: 0,
            recent_largest_bytes: 0,
            error: None,
            ended: false,
            fetchers: 0,
        }
    }

    /// Returns the next job of a decoding thread, if there is one.
    pub(crate) fn next_decode_job(&mut self, plan: &EpochPlan) -> Option<EpochJob> {
        if let Some(job) = self.next_assembly(plan) {
            return Some(job);
        }
        let load = if self.has_fetch_threads {
            self.fetched.pop_first().map(|((_, part), bytes)| EpochJob::Load(part, bytes))
        } else {
            self.admit_part().map(|part| EpochJob::Load(part, None))
        };
        load.or_else(|| self.partial_copy_job())
    }

    /// Returns the next job of a fetching thread, if there is one.
    pub(crate) fn next_fetch_job(&mut self) -> Option<EpochJob> {
        self.admit_part().map(EpochJob::Fetch)
    }

    /// Returns the next part to load, and the bytes that it takes during loading.
    fn next_queued_part(&self) -> Option<(usize, u64)> {
        let part = *self.queue.get(self.queued)?;
        let (block, besides) = self.part_bytes.get(part).copied().unwrap_or_default();
        Some((part, block.saturating_add(besides)))
    }

    /// Returns whether `bytes` more may be loaded now (RE-2). If nothing is loaded, any size is
    /// allowed: the plan was checked against the budget at the start.
    fn fits_budget(&self, bytes: u64) -> bool {
        self.held_bytes == 0 || self.held_bytes.saturating_add(bytes) <= self.budget
    }

    /// Reserves and returns the next part, if it may be loaded now.
    fn admit_part(&mut self) -> Option<usize> {
        let (part, bytes) =
            self.next_queued_part().filter(|(_, bytes)| self.fits_budget(*bytes))?;
        self.held_bytes = self.held_bytes.saturating_add(bytes);
        self.queued += 1;
        self.loading += 1;
        Some(part)
    }

    /// Returns the job for the next batch, if its blocks are loaded and the limits allow another
    /// batch.
    pub(crate) fn next_assembly(&mut self, plan: &EpochPlan) -> Option<EpochJob> {
        if self.is_partially_copying
            || self.next_step >= self.steps
            || self.is_ready_limit_reached()
        {
            return None;
        }
        let mut draft = self
            .pending
            .take()
            .unwrap_or_else(|| BatchDraft::new(self.next_step, plan.plan_batch(self.next_step)));
        let blocks: Option<Vec<Arc<DecodedBlock>>> =
            draft.missing.iter().map(|piece| self.blocks.get(piece.part)?.clone()).collect();
        match blocks {
            Some(blocks) => {
                self.next_step += 1;
                self.copying += 1;
                let pieces = std::mem::take(&mut draft.missing);
                Some(EpochJob::Assemble(Box::new(draft), RowCopy { pieces, blocks, last: true }))
            }
            None => {
                self.pending = Some(draft);
                None
            }
        }
    }

    /// Returns whether the batches that are ready or being put together reach the limit of their
    /// number or of their bytes. The consumer's next batch is always put together.
    fn is_ready_limit_reached(&self) -> bool {
        let batches = self.next_step - self.next_out;
        let coming = self.recent_largest_bytes.saturating_mul(self.copying as u64 + 1);
        batches >= self.ready_limits.batches
            || (batches > 0 && self.ready_bytes.saturating_add(coming) > self.ready_limits.bytes)
    }

    /// Returns whether no part can be loaded before blocks are released while the next batch waits
    /// for a part.
    fn is_budget_stuck(&self) -> bool {
        let stuck = self.loading == 0 && self.copying == 0 && self.pending.is_some();
        stuck && self.next_queued_part().is_some_and(|(_, bytes)| !self.fits_budget(bytes))
    }

    /// Returns the job that copies rows of the next batch whose blocks are not needed after it.
    /// Copying them now releases memory for the blocks that the batch waits for.
    fn partial_copy_job(&mut self) -> Option<EpochJob> {
        if !self.is_budget_stuck() {
            return None;
        }
        let mut draft = self.pending.take()?;
        // A batch may have several pieces of one part.
        let mut wanted: BTreeMap<usize, u64> = BTreeMap::new();
        for piece in &draft.missing {
            *wanted.entry(piece.part).or_default() += piece.count as u64;
        }
        let ends = |piece: &PartSlice| {
            let here = self.blocks.get(piece.part).is_some_and(Option::is_some);
            here && self.rows_left.get(piece.part) == wanted.get(&piece.part)
        };
        let all = std::mem::take(&mut draft.missing);
        let (pieces, missing): (Vec<PartSlice>, Vec<PartSlice>) = all.into_iter().partition(ends);
        draft.missing = missing;
        if pieces.is_empty() {
            self.pending = Some(draft);
            return self.over_budget_job();
        }
        let blocks =
            pieces.iter().filter_map(|piece| self.blocks.get(piece.part)?.clone()).collect();
        self.is_partially_copying = true;
        self.copying += 1;
        Some(EpochJob::Assemble(Box::new(draft), RowCopy { pieces, blocks, last: false }))
    }

    /// Admits the next part although the budget is used up. Blocks took more than the data set
    /// states, and the epoch could not continue otherwise.
    fn over_budget_job(&mut self) -> Option<EpochJob> {
        let (_, bytes) = self.next_queued_part()?;
        self.budget = self.budget.max(self.held_bytes.saturating_add(bytes));
        self.admit_part().map(|part| {
            if self.has_fetch_threads { EpochJob::Fetch(part) } else { EpochJob::Load(part, None) }
        })
    }

    /// Stores the fetched bytes of a part.
    pub(crate) fn add_fetched(&mut self, plan: &EpochPlan, part: usize, bytes: FetchedPart) {
        let first = plan.parts().get(part).map_or(0, |part| part.first_step);
        self.fetched.insert((first, part), bytes);
    }

    /// Stores a decoded part, which takes `more` bytes than expected.
    pub(crate) fn add_block(&mut self, part: usize, block: DecodedBlock, more: u64) {
        if let Some((held, _)) = self.part_bytes.get_mut(part) {
            *held += more;
            self.held_bytes += more;
        }
        self.loading = self.loading.saturating_sub(1);
        self.held_bytes = self
            .held_bytes
            .saturating_sub(self.part_bytes.get(part).map_or(0, |(_, besides)| *besides));
        if let Some(slot) = self.blocks.get_mut(part) {
            *slot = Some(Arc::new(block));
        }
    }

    /// Stores a batch that is ready.
    pub(crate) fn add_ready_batch(&mut self, number: u64, batch: Batch) {
        // The estimate decays, so that one batch with a very long string does not limit all later
        // ones.
        self.recent_largest_bytes =
            batch.memory_bytes().max(self.recent_largest_bytes - self.recent_largest_bytes / 8);
        self.ready_bytes = self.ready_bytes.saturating_add(batch.memory_bytes());
        self.ready.insert(number, batch);
    }

    /// Takes back a draft with missing rows.
    pub(crate) fn return_draft(&mut self, draft: BatchDraft) {
        self.pending = Some(draft);
        self.is_partially_copying = false;
    }

    /// Counts copied rows. Returns the blocks that are no longer needed, so that the caller drops
    /// them without the lock, and whether idle threads have work.
    pub(crate) fn release_copied_blocks(
        &mut self,
        pieces: &[PartSlice],
    ) -> (Vec<Arc<DecodedBlock>>, bool) {
        self.copying = self.copying.saturating_sub(1);
        let mut done = Vec::new();
        for piece in pieces {
            let Some(left) = self.rows_left.get_mut(piece.part) else { continue };
            *left = left.saturating_sub(piece.count as u64);
            if *left == 0 {
                done.extend(self.blocks.get_mut(piece.part).and_then(Option::take));
                let held = self.part_bytes.get(piece.part).map_or(0, |(block, _)| *block);
                self.held_bytes = self.held_bytes.saturating_sub(held);
            }
        }
        let wake = !done.is_empty() || self.is_budget_stuck();
        (done, wake)
    }

    /// Returns the consumer's next batch, if it is ready.
    pub(crate) fn take_batch(&mut self) -> Option<Batch> {
        let batch = self.ready.remove(&self.next_out)?;
        self.next_out += 1;
        self.ready_bytes = self.ready_bytes.saturating_sub(batch.memory_bytes());
        Some(batch)
    }

    /// Returns whether the consumer has taken all batches.
    pub(crate) fn is_finished(&self) -> bool {
        self.next_out >= self.steps
    }

    /// Returns whether so few batches are ready that a thread should wake up.
    pub(crate) fn needs_more_batches(&self) -> bool {
        let few = self.next_step - self.next_out <= self.ready_limits.batches / 2;
        self.next_step < self.steps && few && self.ready_bytes <= self.ready_limits.bytes / 2
    }
}
