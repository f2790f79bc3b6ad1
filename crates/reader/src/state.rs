// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The state of an epoch: loaded blocks, ready batches, and the next action. It has no threads and
//! no clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use farandole_dataset::{Piece, Plan};

use crate::assemble::{Copying, Draft};
use crate::batch::Batch;
use crate::block::Block;
use crate::decode::Recipe;
use crate::error::Error;
use crate::footer::Fetched;
use crate::pool::Claim;

/// Bytes of a part, and how to decode them; none when the part is cached.
pub(crate) type Bytes = Option<Box<(Recipe, Fetched, Claim)>>;

/// Something to do.
pub(crate) enum Job {
    /// Fetch the bytes of this part.
    Fetch(usize),
    /// Decode this part; fetch its bytes when there are none.
    Load(usize, Bytes),
    /// Copy these rows into a batch; the last ones where it says so.
    Assemble(Box<Draft>, Copying),
}

/// Limits of the batches that are ready before the consumer asks for them. At least one batch is
/// allowed.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) batches: u64,
    pub(crate) bytes: u64,
}

/// The state of an epoch.
pub(crate) struct State {
    /// Parts by first step (RE-3).
    queue: Vec<usize>,
    queued: usize,
    /// Bytes of each part: decoded, and besides while it is loaded.
    cost: Vec<(u64, u64)>,
    /// Parts that were fetched, by first step.
    fetched: BTreeMap<(u64, usize), Bytes>,
    /// Whether threads of their own fetch.
    apart: bool,
    left: Vec<u64>,
    blocks: Vec<Option<Arc<Block>>>,
    held: u64,
    budget: u64,
    /// Parts that are on their way.
    loading: usize,
    /// Batches that rows are being copied into.
    copying: usize,
    /// The batch of `next_step`, if a caller has looked at it.
    pending: Option<Draft>,
    /// Whether rows are being copied into that batch although others are missing.
    begun: bool,
    next_step: u64,
    next_out: u64,
    steps: u64,
    ahead: Ahead,
    ready: BTreeMap<u64, Batch>,
    /// Bytes of the ready batches.
    ready_bytes: u64,
    /// Bytes of the largest batch lately.
    widest: u64,
    /// The error, for the consumer.
    pub(crate) error: Option<Error>,
    /// Whether threads shall end.
    pub(crate) ended: bool,
    /// Threads that fetch and have not ended.
    pub(crate) fetchers: usize,
}

impl State {
    /// The start of an epoch: `cost` in bytes of every part, decoded and besides while it is
    /// loaded; `apart` when threads of their own fetch.
    pub(crate) fn new(
        plan: &Plan,
        cost: Vec<(u64, u64)>,
        budget: u64,
        ahead: Ahead,
        apart: bool,
    ) -> Self {
        Self {
            queue: plan.queue(),
            queued: 0,
            left: plan.parts().iter().map(|part| part.taken).collect(),
            blocks: plan.parts().iter().map(|_| None).collect(),
            cost,
            fetched: BTreeMap::new(),
            apart,
            held: 0,
            budget,
            loading: 0,
            copying: 0,
            pending: None,
            begun: false,
            next_step: 0,
            next_out: 0,
            steps: plan.steps(),
            ahead: Ahead { batches: ahead.batches.max(1), ..ahead },
            ready: BTreeMap::new(),
            ready_bytes: 0,
            widest: 0,
            error: None,
            ended: false,
            fetchers: 0,
        }
    }

    /// The next thing to do for a decoding thread, if there is anything that can be done now.
    pub(crate) fn job(&mut self, plan: &Plan) -> Option<Job> {
        if let Some(job) = self.assembly(plan) {
            return Some(job);
        }
        let load = if self.apart {
            self.fetched.pop_first().map(|((_, part), bytes)| Job::Load(part, bytes))
        } else {
            self.admit().map(|part| Job::Load(part, None))
        };
        load.or_else(|| self.relief())
    }

    /// The next thing to do for a fetching thread.
    pub(crate) fn fetch(&mut self) -> Option<Job> {
        self.admit().map(Job::Fetch)
    }

    /// The next part to be loaded, and the bytes that it takes meanwhile.
    fn head(&self) -> Option<(usize, u64)> {
        let part = *self.queue.get(self.queued)?;
        let (block, besides) = self.cost.get(part).copied().unwrap_or_default();
        Some((part, block.saturating_add(besides)))
    }

    /// Returns whether so many bytes may be loaded now (RE-2). An empty house takes any guest: the
    /// plan was checked against the budget at its start.
    fn fits(&self, bytes: u64) -> bool {
        self.held == 0 || self.held.saturating_add(bytes) <= self.budget
    }

    /// The next part that may be loaded now.
    fn admit(&mut self) -> Option<usize> {
        let (part, bytes) = self.head().filter(|(_, bytes)| self.fits(*bytes))?;
        self.held = self.held.saturating_add(bytes);
        self.queued += 1;
        self.loading += 1;
        Some(part)
    }

    /// The next batch to put together, if its blocks are there and it may be made yet.
    pub(crate) fn assembly(&mut self, plan: &Plan) -> Option<Job> {
        if self.begun || self.next_step >= self.steps || self.is_far_ahead() {
            return None;
        }
        let mut draft = self
            .pending
            .take()
            .unwrap_or_else(|| Draft::new(self.next_step, plan.step(self.next_step)));
        let blocks: Option<Vec<Arc<Block>>> =
            draft.missing.iter().map(|piece| self.blocks.get(piece.part)?.clone()).collect();
        match blocks {
            Some(blocks) => {
                self.next_step += 1;
                self.copying += 1;
                let pieces = std::mem::take(&mut draft.missing);
                Some(Job::Assemble(Box::new(draft), Copying { pieces, blocks, last: true }))
            }
            None => {
                self.pending = Some(draft);
                None
            }
        }
    }

    /// Returns whether the batches that are ready, or are being put together, are as many as may
    /// be, or take as many bytes as they may. The consumer's next batch is always put together.
    fn is_far_ahead(&self) -> bool {
        let batches = self.next_step - self.next_out;
        let coming = self.widest.saturating_mul(self.copying as u64 + 1);
        batches >= self.ahead.batches
            || (batches > 0 && self.ready_bytes.saturating_add(coming) > self.ahead.bytes)
    }

    /// Returns whether nothing can be loaded before blocks are released, and the next batch waits
    /// for a part.
    fn is_tight(&self) -> bool {
        let stuck = self.loading == 0 && self.copying == 0 && self.pending.is_some();
        stuck && self.head().is_some_and(|(_, bytes)| !self.fits(bytes))
    }

    /// Rows of the next batch whose blocks are not needed after it: copied now, they make room for
    /// the blocks that it waits for.
    fn relief(&mut self) -> Option<Job> {
        if !self.is_tight() {
            return None;
        }
        let mut draft = self.pending.take()?;
        // Of one part there may be several pieces in a batch.
        let mut wanted: BTreeMap<usize, u64> = BTreeMap::new();
        for piece in &draft.missing {
            *wanted.entry(piece.part).or_default() += piece.count as u64;
        }
        let ends = |piece: &Piece| {
            let here = self.blocks.get(piece.part).is_some_and(Option::is_some);
            here && self.left.get(piece.part) == wanted.get(&piece.part)
        };
        let all = std::mem::take(&mut draft.missing);
        let (pieces, missing): (Vec<Piece>, Vec<Piece>) = all.into_iter().partition(ends);
        draft.missing = missing;
        if pieces.is_empty() {
            self.pending = Some(draft);
            return self.beyond();
        }
        let blocks =
            pieces.iter().filter_map(|piece| self.blocks.get(piece.part)?.clone()).collect();
        self.begun = true;
        self.copying += 1;
        Some(Job::Assemble(Box::new(draft), Copying { pieces, blocks, last: false }))
    }

    /// The next part although the budget is used up: blocks took more than the data set states, and
    /// otherwise no progress would be possible.
    fn beyond(&mut self) -> Option<Job> {
        let (_, bytes) = self.head()?;
        self.budget = self.budget.max(self.held.saturating_add(bytes));
        self.admit().map(|part| if self.apart { Job::Fetch(part) } else { Job::Load(part, None) })
    }

    /// The bytes of a part are here.
    pub(crate) fn fetched(&mut self, plan: &Plan, part: usize, bytes: Bytes) {
        let first = plan.parts().get(part).map_or(0, |part| part.first_step);
        self.fetched.insert((first, part), bytes);
    }

    /// A part is decoded; it takes `more` bytes than it was thought to.
    pub(crate) fn loaded(&mut self, part: usize, block: Block, more: u64) {
        if let Some((held, _)) = self.cost.get_mut(part) {
            *held += more;
            self.held += more;
        }
        self.loading = self.loading.saturating_sub(1);
        self.held =
            self.held.saturating_sub(self.cost.get(part).map_or(0, |(_, besides)| *besides));
        if let Some(slot) = self.blocks.get_mut(part) {
            *slot = Some(Arc::new(block));
        }
    }

    /// A batch is ready.
    pub(crate) fn assembled(&mut self, number: u64, batch: Batch) {
        // One batch with a very long text does not limit all that come after it.
        self.widest = batch.size().max(self.widest - self.widest / 8);
        self.ready_bytes = self.ready_bytes.saturating_add(batch.size());
        self.ready.insert(number, batch);
    }

    /// Some rows of a batch are copied, and others are still missing.
    pub(crate) fn drafted(&mut self, draft: Draft) {
        self.pending = Some(draft);
        self.begun = false;
    }

    /// Rows have been copied. Returns the blocks that are not needed any more, to be dropped
    /// without the lock, and whether idle threads have work.
    pub(crate) fn copied(&mut self, pieces: &[Piece]) -> (Vec<Arc<Block>>, bool) {
        self.copying = self.copying.saturating_sub(1);
        let mut done = Vec::new();
        for piece in pieces {
            let Some(left) = self.left.get_mut(piece.part) else { continue };
            *left = left.saturating_sub(piece.count as u64);
            if *left == 0 {
                done.extend(self.blocks.get_mut(piece.part).and_then(Option::take));
                let held = self.cost.get(piece.part).map_or(0, |(block, _)| *block);
                self.held = self.held.saturating_sub(held);
            }
        }
        let wake = !done.is_empty() || self.is_tight();
        (done, wake)
    }

    /// The consumer's next batch, if it is ready.
    pub(crate) fn take(&mut self) -> Option<Batch> {
        let batch = self.ready.remove(&self.next_out)?;
        self.next_out += 1;
        self.ready_bytes = self.ready_bytes.saturating_sub(batch.size());
        Some(batch)
    }

    /// Returns whether all batches were taken.
    pub(crate) fn finished(&self) -> bool {
        self.next_out >= self.steps
    }

    /// Returns whether so few batches are ahead of the consumer that a thread should wake up.
    pub(crate) fn hungry(&self) -> bool {
        let few = self.next_step - self.next_out <= self.ahead.batches / 2;
        self.next_step < self.steps && few && self.ready_bytes <= self.ahead.bytes / 2
    }

    /// Batches taken.
    pub(crate) fn taken(&self) -> u64 {
        self.next_out
    }
}
