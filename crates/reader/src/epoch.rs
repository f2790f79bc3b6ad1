// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Threads that carry out a plan.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_dataset::Plan;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::assemble::assemble;
use crate::batch::Batch;
use crate::block::Block;
use crate::dataset::{Dataset, Field};
use crate::decode::decode;
use crate::error::{Error, Result};
use crate::reader::Selected;
use crate::state::{Job, State};

/// Bytes of batches that are ready ahead of the consumer.
const AHEAD_BYTES: usize = 16 << 20;

struct Shared {
    dataset: Arc<Dataset>,
    selected: Arc<[Selected]>,
    fields: Arc<[Field]>,
    plan: Plan,
    state: Mutex<State>,
    /// Threads wait here for something to do.
    work: Condvar,
    /// The consumer waits here for a batch, or for blocks to make one of.
    ready: Condvar,
}

/// What came within the time that the consumer wanted to wait.
#[derive(Debug)]
pub enum Next {
    /// The next batch.
    Batch(Batch),
    /// Nothing yet.
    Pending,
    /// There are no more.
    End,
}

/// Batches of one epoch, in order.
pub struct Epoch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl Epoch {
    pub(crate) fn start(
        dataset: Arc<Dataset>,
        selected: Arc<[Selected]>,
        plan: Plan,
        budget: u64,
        threads: usize,
    ) -> Result<Self> {
        let cost: Vec<u64> = plan.parts().iter().map(|part| Block::bytes(part, &selected)).collect();
        let needed = plan.open_bytes(|part| Block::bytes(part, &selected));
        if needed > budget {
            return Err(Error::Budget { budget, needed });
        }
        let fields: Arc<[Field]> =
            selected.iter().map(|column| Field { element: column.out, ..column.field.clone() }).collect();
        let row: usize = fields.iter().map(Field::width).sum();
        let batch = plan.step(0).rows.saturating_mul(row).max(1);
        let ahead = (AHEAD_BYTES / batch).clamp(2, 64) as u64;
        let state = Mutex::new(State::new(&plan, cost, budget, ahead));
        let shared = Arc::new(Shared {
            dataset,
            selected,
            fields,
            plan,
            state,
            work: Condvar::new(),
            ready: Condvar::new(),
        });
        let mut epoch = Self { shared, threads: Vec::with_capacity(threads), process: std::process::id() };
        for number in 0..threads {
            let shared = Arc::clone(&epoch.shared);
            let thread = std::thread::Builder::new().name(format!("fd-reader-{number}"));
            epoch
                .threads
                .push(thread.spawn(move || shared.serve()).map_err(|source| Error::Thread { source })?);
        }
        Ok(epoch)
    }

    /// Batches of the whole epoch.
    pub fn steps(&self) -> u64 {
        self.shared.plan.steps()
    }

    /// Batches that are still to come.
    pub fn left(&self) -> u64 {
        self.steps().saturating_sub(self.shared.state.lock().taken())
    }

    /// The next batch, or [`Next::Pending`] after `patience`.
    ///
    /// # Errors
    /// What went wrong with the files; once, and [`Error::Ended`] from then on.
    pub fn next(&self, patience: Duration) -> Result<Next> {
        let shared = &self.shared;
        let deadline = Instant::now() + patience;
        let mut state = shared.state.lock();
        loop {
            if let Some(batch) = state.take() {
                let hungry = state.hungry();
                drop(state);
                if hungry {
                    shared.work.notify_one();
                }
                return Ok(Next::Batch(batch));
            }
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.finished() {
                return Ok(Next::End);
            }
            if state.ended {
                return Err(Error::Ended);
            }
            if let Some(job) = state.assembly(&shared.plan) {
                drop(state);
                shared.run(job);
                state = shared.state.lock();
            } else if shared.ready.wait_until(&mut state, deadline).timed_out() {
                return Ok(Next::Pending);
            }
        }
    }

    /// Ends the threads; what they are fetching is waited for.
    pub fn close(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.work.notify_all();
        self.shared.ready.notify_all();
        for thread in self.threads.drain(..) {
            // A panic was already handed to the consumer as an error.
            drop(thread.join());
        }
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        } else {
            // A forked child has the handles but not the threads: joining them would wait for ever.
            std::mem::forget(std::mem::take(&mut self.threads));
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock();
        while !state.ended {
            match state.job(&self.plan) {
                Some(job) => MutexGuard::unlocked(&mut state, || self.run_guarded(job)),
                None => self.work.wait(&mut state),
            }
        }
    }

    fn run_guarded(&self, job: Job) {
        let part = if let Job::Load(part) = &job { self.plan.parts().get(*part) } else { None };
        let place = part.map_or((String::from("a batch"), 0), |part| {
            let file = self.dataset.manifest().files.get(part.file);
            (file.map(|file| self.dataset.store().name_of(&file.path)).unwrap_or_default(), part.group)
        });
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run(job))) {
            self.fail(Error::Corrupt { file: place.0, group: place.1, message: last_words(panic.as_ref()) });
        }
    }

    fn run(&self, job: Job) {
        match job {
            Job::Load(number) => match self.load(number) {
                Ok(block) => {
                    self.state.lock().loaded(number, block);
                    self.work.notify_one();
                    self.ready.notify_one();
                }
                Err(error) => self.fail(error),
            },
            Job::Assemble(number, step, blocks) => {
                let batch = assemble(&self.fields, &step, &blocks);
                drop(blocks);
                let done = self.state.lock().assembled(number, &step, batch);
                self.ready.notify_one();
                if !done.is_empty() {
                    self.work.notify_one();
                }
            }
        }
    }

    fn load(&self, number: usize) -> Result<Block> {
        let part = self.plan.parts().get(number).ok_or(Error::Ended)?;
        let decoded = decode(&self.dataset, &self.selected, part)?;
        Ok(Block::new(part, &self.selected, decoded))
    }

    fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        state.ended = true;
        state.error.get_or_insert(error);
        drop(state);
        self.work.notify_all();
        self.ready.notify_all();
    }
}

fn last_words(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
