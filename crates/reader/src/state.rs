// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What is loaded, what is ready, and what to do next: no threads, no clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use farandole_dataset::{Plan, Step};

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
    /// Put this step's batch together from these blocks.
    Assemble(u64, Step, Vec<Arc<Block>>),
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
    pending: Option<Step>,
    next_step: u64,
    next_out: u64,
    steps: u64,
    ahead: u64,
    ready: BTreeMap<u64, Batch>,
    /// What went wrong, for the consumer.
    pub(crate) error: Option<Error>,
    /// Whether threads shall end.
    pub(crate) ended: bool,
    /// Threads that fetch and have not ended.
    pub(crate) fetchers: usize,
}

impl State {
    /// The start of an epoch: `cost` in bytes of every part, decoded and besides while it is loaded; at most `ahead`
    /// batches before the consumer; `apart` when threads of their own fetch.
    pub(crate) fn new(plan: &Plan, cost: Vec<(u64, u64)>, budget: u64, ahead: u64, apart: bool) -> Self {
        let mut queue: Vec<usize> = (0..plan.parts().len()).collect();
        queue.sort_by_key(|part| plan.parts().get(*part).map(|part| part.first_step));
        Self {
            queue,
            queued: 0,
            left: plan.parts().iter().map(|part| part.taken).collect(),
            blocks: plan.parts().iter().map(|_| None).collect(),
            cost,
            fetched: BTreeMap::new(),
            apart,
            held: 0,
            budget,
            pending: None,
            next_step: 0,
            next_out: 0,
            steps: plan.steps(),
            ahead: ahead.max(1),
            ready: BTreeMap::new(),
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
        if self.apart {
            return self.fetched.pop_first().map(|((_, part), bytes)| Job::Load(part, bytes));
        }
        self.admit().map(|part| Job::Load(part, None))
    }

    /// The next thing to do for a fetching thread.
    pub(crate) fn fetch(&mut self) -> Option<Job> {
        self.admit().map(Job::Fetch)
    }

    /// The next part that may be loaded now.
    fn admit(&mut self) -> Option<usize> {
        let part = *self.queue.get(self.queued)?;
        let (block, besides) = self.cost.get(part).copied().unwrap_or_default();
        let whole = block.saturating_add(besides);
        // RE-2. An empty house takes any guest: the plan was checked against the budget at its start.
        (self.held == 0 || self.held.saturating_add(whole) <= self.budget).then(|| {
            self.held = self.held.saturating_add(whole);
            self.queued += 1;
            part
        })
    }

    /// The next batch to put together, if its blocks are there and it may be made yet.
    pub(crate) fn assembly(&mut self, plan: &Plan) -> Option<Job> {
        if self.next_step >= self.steps || self.next_step >= self.next_out + self.ahead {
            return None;
        }
        let step = self.pending.take().unwrap_or_else(|| plan.step(self.next_step));
        let parts = step.pieces.iter().map(|piece| piece.part).chain(step.padding);
        let blocks: Option<Vec<Arc<Block>>> = parts.map(|part| self.blocks.get(part)?.clone()).collect();
        match blocks {
            Some(blocks) => {
                self.next_step += 1;
                Some(Job::Assemble(self.next_step - 1, step, blocks))
            }
            None => {
                self.pending = Some(step);
                None
            }
        }
    }

    /// The bytes of a part are here.
    pub(crate) fn fetched(&mut self, plan: &Plan, part: usize, bytes: Bytes) {
        let first = plan.parts().get(part).map_or(0, |part| part.first_step);
        self.fetched.insert((first, part), bytes);
    }

    /// A part is decoded.
    pub(crate) fn loaded(&mut self, part: usize, block: Block) {
        self.held = self.held.saturating_sub(self.cost.get(part).map_or(0, |(_, besides)| *besides));
        if let Some(slot) = self.blocks.get_mut(part) {
            *slot = Some(Arc::new(block));
        }
    }

    /// A batch is ready. Returns the blocks that nobody needs any more, to be dropped without the lock.
    pub(crate) fn assembled(&mut self, number: u64, step: &Step, batch: Batch) -> Vec<Arc<Block>> {
        self.ready.insert(number, batch);
        let mut done = Vec::new();
        let taken = step.pieces.iter().map(|piece| (piece.part, piece.count as u64));
        for (part, count) in taken.chain(step.padding.map(|part| (part, 1))) {
            let Some(left) = self.left.get_mut(part) else { continue };
            *left = left.saturating_sub(count);
            if *left == 0 {
                done.extend(self.blocks.get_mut(part).and_then(Option::take));
                self.held = self.held.saturating_sub(self.cost.get(part).map_or(0, |(block, _)| *block));
            }
        }
        done
    }

    /// The consumer's next batch, if it is ready.
    pub(crate) fn take(&mut self) -> Option<Batch> {
        let batch = self.ready.remove(&self.next_out)?;
        self.next_out += 1;
        Some(batch)
    }

    /// Whether all batches were taken.
    pub(crate) fn finished(&self) -> bool {
        self.next_out >= self.steps
    }

    /// Whether so few batches are ahead of the consumer that a thread should wake up.
    pub(crate) fn hungry(&self) -> bool {
        self.next_step < self.steps && self.next_step - self.next_out <= self.ahead / 2
    }

    /// Batches taken.
    pub(crate) fn taken(&self) -> u64 {
        self.next_out
    }
}
