// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Threads that execute an epoch's plan.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_dataset::{EpochPlan, EpochRequest, PlanPart};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::assemble::RowCopy;
use crate::batch::Batch;
use crate::block::{BlockDecoder, DecodedBlock};
use crate::cache::BlockCache;
use crate::column::{BatchField, SelectedColumn};
use crate::dataset::{OverstatedRowGroup, ParquetDataset};
use crate::decode::DecodePlan;
use crate::epoch_state::{EpochJob, EpochState, FetchedPart, ReadyLimits};
use crate::error::{Error, Result};
use crate::footer::panic_message;
use crate::pages::DecodeScratch;
use crate::pool::BufferPool;

/// Most bytes of batches that are ready before the consumer asks for them.
const MAX_READY_BYTES: u64 = 16 << 20;

/// Most bytes of local blocks that are decoded before they are needed, unless the blocks of one
/// step take more.
const MAX_PREFETCH_BYTES: u64 = 32 << 20;

/// Threads that wait for answers of a store over the network. They sleep most of the time; the byte
/// budget limits the fetched data.
const REMOTE_FETCH_THREADS: usize = 32;

/// Prefix of the names of fetching threads.
const FETCH_THREAD_PREFIX: &str = "fd-fetch-";

/// Longest wait for a store's answers when an epoch ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings that all epochs of a reader share.
#[derive(Clone, Debug)]
pub(crate) struct EpochSetup {
    pub(crate) dataset: Arc<ParquetDataset>,
    pub(crate) selected: Arc<[SelectedColumn]>,
    /// The fields of batches.
    pub(crate) fields: Arc<[BatchField]>,
    pub(crate) pool: Arc<BufferPool>,
    pub(crate) cache: Option<Arc<BlockCache>>,
    pub(crate) budget: u64,
    pub(crate) threads: usize,
}

struct SharedEpoch {
    setup: EpochSetup,
    plan: EpochPlan,
    state: Mutex<EpochState>,
    /// Wakes decoding threads when there is work.
    work: Condvar,
    /// Wakes fetching threads when there is room in the budget.
    room: Condvar,
    /// Wakes the consumer when a batch is ready, or when it can put one together itself.
    ready: Condvar,
}

/// Result of a wait for the next batch.
#[derive(Debug)]
pub enum NextBatch {
    /// The next batch.
    Batch(Batch),
    /// No batch is ready yet.
    Pending,
    /// The epoch has no more batches.
    End,
}

/// Batches of one epoch, in order.
pub struct EpochReader {
    shared: Arc<SharedEpoch>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
}

impl EpochReader {
    /// Starts the threads of the epoch that `request` asks for.
    ///
    /// # Errors
    /// A budget that is too small, or a thread that cannot be started.
    pub(crate) fn start_threads(setup: EpochSetup, request: &EpochRequest) -> Result<Self> {
        let plan = EpochPlan::new(setup.dataset.lane_layout(), request)?;
        let part_bytes: Vec<(u64, u64)> =
            plan.parts().iter().map(|part| setup.part_memory_cost(part)).collect();
        let rows = plan.plan_batch(0).rows;
        let batch = (Batch::bytes_for_rows(&setup.fields, rows) as u64)
            .saturating_add(setup.variable_bytes_for_rows(rows as u64));
        let (least, max_page_bytes) = setup.padded_bytes_for_rows(rows);
        let share = BudgetSplit::new(
            &setup,
            &plan,
            &part_bytes,
            batch.saturating_add(least),
            max_page_bytes.saturating_sub(least),
        )
        .map_err(|error| setup.explain_budget_refusal(error))?;
        setup.pool.set_byte_limit(usize::try_from(setup.budget).unwrap_or(usize::MAX));
        let has_fetch_threads = setup.dataset.store().is_remote();
        let state = Mutex::new(EpochState::new(
            &plan,
            part_bytes,
            share.blocks,
            share.ready_limits,
            has_fetch_threads,
        ));
        let fetchers =
            if has_fetch_threads { REMOTE_FETCH_THREADS.min(plan.parts().len()) } else { 0 };
        let threads = setup.threads;
        let (work, room, ready) = (Condvar::new(), Condvar::new(), Condvar::new());
        let shared = Arc::new(SharedEpoch { setup, plan, state, work, room, ready });
        let mut epoch = Self { shared, threads: Vec::new(), process: std::process::id() };
        for number in 0..threads {
            epoch.spawn_thread(format!("fd-reader-{number}"), |shared| {
                drop(shared.run_jobs(&shared.work, EpochState::next_decode_job));
            })?;
        }
        for number in 0..fetchers {
            // Counted before the thread starts, because `close` waits for this number.
            epoch.shared.state.lock().fetchers += 1;
            epoch.spawn_thread(format!("{FETCH_THREAD_PREFIX}{number}"), |shared| {
                let next_job = |state: &mut EpochState, _: &EpochPlan| state.next_fetch_job();
                shared.run_jobs(&shared.room, next_job).fetchers -= 1;
                shared.ready.notify_all();
            })?;
        }
        Ok(epoch)
    }

    fn spawn_thread(
        &mut self,
        name: String,
        work: impl FnOnce(&SharedEpoch) + Send + 'static,
    ) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new().name(name).spawn(move || work(&shared));
        self.threads.push(spawned.map_err(|source| Error::Thread { source })?);
        Ok(())
    }

    /// Returns the number of batches of the whole epoch.
    pub fn step_count(&self) -> u64 {
        self.shared.plan.step_count()
    }

    /// Returns the next batch, or [`NextBatch::Pending`] after `timeout`.
    ///
    /// # Errors
    /// The first error of reading or decoding, once; after that, [`Error::Ended`].
    pub fn next_batch(&self, timeout: Duration) -> Result<NextBatch> {
        let shared = &self.shared;
        let deadline = Instant::now() + timeout;
        let mut state = shared.state.lock();
        loop {
            if let Some(batch) = state.take_batch() {
                let hungry = state.needs_more_batches();
                drop(state);
                if hungry {
                    shared.work.notify_one();
                }
                return Ok(NextBatch::Batch(batch));
            }
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.is_finished() {
                return Ok(NextBatch::End);
            }
            if state.ended {
                return Err(Error::Ended);
            }
            if let Some(job) = state.next_assembly(&shared.plan) {
                drop(state);
                shared.run_job(job, &mut DecodeScratch::default());
                state = shared.state.lock();
            } else if shared.ready.wait_until(&mut state, deadline).timed_out() {
                return Ok(NextBatch::Pending);
            }
        }
    }

    /// Ends the threads and waits for running decoding. A request that a store does not answer is
    /// not waited for; its thread ends with the request.
    pub fn close(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.work.notify_all();
        self.shared.room.notify_all();
        self.shared.ready.notify_all();
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let mut state = self.shared.state.lock();
        while state.fetchers > 0 && !self.shared.ready.wait_until(&mut state, deadline).timed_out()
        {
        }
        drop(state);
        for thread in self.threads.drain(..) {
            let fetches =
                thread.thread().name().is_some_and(|name| name.starts_with(FETCH_THREAD_PREFIX));
            if !fetches || thread.is_finished() {
                // The consumer already got a panic as an error.
                drop(thread.join());
            }
        }
    }
}

impl Drop for EpochReader {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        } else {
            // A forked child has the handles but not the threads, so a join would never return.
            std::mem::forget(std::mem::take(&mut self.threads));
        }
    }
}

impl EpochSetup {
    /// Replaces a budget error if the manifest overstates a row group, which is then the cause.
    fn explain_budget_refusal(&self, error: Error) -> Error {
        match (error, self.dataset.find_overstated_group()) {
            (
                Error::Budget { budget, .. },
                Ok(Some(OverstatedRowGroup { file, group, claimed, found })),
            ) => Error::Overstated { file, group, claimed, found, budget },
            (error, _) => error,
        }
    }

    /// Returns a part's bytes: decoded, and in addition while it is loaded.
    fn part_memory_cost(&self, part: &PlanPart) -> (u64, u64) {
        let files = &self.dataset.manifest().files;
        let group = files.get(part.file).and_then(|file| file.groups.get(part.group));
        let rows = part.rows.end - part.rows.start;
        let fetched = group.map_or(0, |group| group.bytes.saturating_mul(rows) / group.rows.max(1));
        let widest =
            self.selected.iter().map(|column| column.field.row_width()).max().unwrap_or(0) as u64;
        // Deleted rows between the rows of the part are decoded, too.
        let column = widest.saturating_mul(self.dataset.stored_row_span(part));
        // One column at a time is loaded: its stored bytes, and its values before they are
        // shuffled.
        let besides = if self.dataset.store().is_remote() {
            fetched
        } else {
            fetched.min(column.saturating_mul(2))
        };
        let besides = besides.saturating_add(column);
        let texts = self.part_variable_bytes(part);
        (
            DecodedBlock::estimate_bytes(part, &self.selected).saturating_add(texts),
            besides.saturating_add(texts),
        )
    }

    /// Estimates the bytes of a part's values without a fixed size. The data set only states the
    /// bytes of all columns of a row group, so all of them count.
    fn part_variable_bytes(&self, part: &PlanPart) -> u64 {
        let files = &self.dataset.manifest().files;
        let group = files.get(part.file).and_then(|file| file.groups.get(part.group));
        group.map_or(0, |group| {
            self.estimate_variable_bytes((group.bytes, group.rows), part.rows.end - part.rows.start)
        })
    }

    /// Estimates the bytes of values without a fixed size in `rows` rows from anywhere in the data
    /// set.
    fn variable_bytes_for_rows(&self, rows: u64) -> u64 {
        let groups = || self.dataset.manifest().files.iter().flat_map(|file| &file.groups);
        let bytes = groups().map(|group| group.bytes).fold(0, u64::saturating_add);
        self.estimate_variable_bytes((bytes, self.dataset.manifest().rows), rows)
    }

    /// Returns the least and the most bytes of `rows` padded rows.
    fn padded_bytes_for_rows(&self, rows: usize) -> (u64, u64) {
        let padded = self.selected.iter().filter_map(|column| column.padding.as_ref());
        padded.map(|padding| padding.min_and_max_padded_bytes(rows)).fold(
            (0, 0),
            |(least, max_page_bytes), (short, long)| {
                (least.saturating_add(short as u64), max_page_bytes.saturating_add(long as u64))
            },
        )
    }

    fn estimate_variable_bytes(&self, (bytes, of): (u64, u64), rows: u64) -> u64 {
        let texts =
            self.selected.iter().filter(|column| column.field.is_variable_length()).count() as u64;
        if texts == 0 {
            return 0;
        }
        let share = u128::from(bytes) * u128::from(rows) / u128::from(of.max(1));
        u64::try_from(share)
            .unwrap_or(u64::MAX)
            .saturating_add((8 * texts).saturating_mul(rows.saturating_add(1)))
    }
}

/// Shares of the byte budget.
struct BudgetSplit {
    blocks: u64,
    ready_limits: ReadyLimits,
}

impl BudgetSplit {
    /// Splits the budget for batches that take `batch` bytes, and up to `padded` more if a row is
    /// long. Most batches take less, so `padded` limits only the number of ready batches; it does
    /// not make a budget too small.
    fn new(
        setup: &EpochSetup,
        plan: &EpochPlan,
        part_bytes: &[(u64, u64)],
        batch: u64,
        padded: u64,
    ) -> Result<Self> {
        let budget = setup.budget;
        let largest = part_bytes.iter().map(|(_, besides)| *besides).max().unwrap_or(0);
        let open = plan.min_resident_bytes(|part| setup.part_memory_cost(part).0);
        let blocks = open.saturating_add(largest);
        // One batch at the consumer, and the next one.
        let batches = batch.saturating_mul(2);
        let needed = blocks.saturating_add(batches);
        let Some(spare) = budget.checked_sub(needed) else {
            return Err(Error::Budget { budget, needed, blocks, batches });
        };
        let batch = batch.saturating_add(padded);
        let max_page_bytes = (spare / 4).min(MAX_READY_BYTES);
        let more = (max_page_bytes / batch.max(1)).min(63);
        // Strings may take more than files state, so the bytes of ready batches are limited, too.
        let bytes = max_page_bytes.saturating_add(batch);
        let (ready_limits, spare) =
            (ReadyLimits { batches: 1 + more, bytes }, spare - more * batch);
        // Requests over a network run in parallel, so they may use all spare memory. Local reads
        // are fast, and reusing warm memory is faster than touching new memory.
        let early = if setup.dataset.store().is_remote() {
            spare
        } else {
            (spare / 4).min(open.max(MAX_PREFETCH_BYTES))
        };
        Ok(Self { blocks: blocks + early, ready_limits })
    }
}

impl SharedEpoch {
    /// Carries out jobs until the epoch ends, and waits at `idle` if there are none. Returns the
    /// locked state.
    fn run_jobs(
        &self,
        idle: &Condvar,
        next_job: impl Fn(&mut EpochState, &EpochPlan) -> Option<EpochJob>,
    ) -> MutexGuard<'_, EpochState> {
        let mut bench = DecodeScratch::default();
        let mut state = self.state.lock();
        while !state.ended {
            match next_job(&mut state, &self.plan) {
                Some(job) => MutexGuard::unlocked(&mut state, || {
                    self.run_job_catching_panics(job, &mut bench)
                }),
                None => idle.wait(&mut state),
            }
        }
        state
    }

    fn run_job_catching_panics(&self, job: EpochJob, bench: &mut DecodeScratch) {
        let part = match &job {
            EpochJob::Fetch(part) | EpochJob::Load(part, _) => self.plan.parts().get(*part),
            EpochJob::Assemble(..) => None,
        };
        let place = part.map_or((String::from("a batch"), 0), |part| {
            let dataset = &self.setup.dataset;
            let file = dataset.manifest().files.get(part.file);
            (
                file.map(|file| dataset.store().display_path(&file.path)).unwrap_or_default(),
                part.group,
            )
        });
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_job(job, bench))) {
            self.fail_epoch(Error::Corrupt {
                file: place.0,
                group: place.1,
                message: panic_message(panic.as_ref()),
            });
        }
    }

    fn run_job(&self, job: EpochJob, bench: &mut DecodeScratch) {
        match job {
            EpochJob::Fetch(number) => match self.fetch_part(number) {
                Ok(bytes) => {
                    self.state.lock().add_fetched(&self.plan, number, bytes);
                    self.work.notify_one();
                }
                Err(error) => self.fail_epoch(error),
            },
            EpochJob::Load(number, bytes) => match self.decode_part(number, bytes, bench) {
                Ok(block) => {
                    let part = self.plan.parts().get(number);
                    let expected = part.map_or(0, |part| self.setup.part_variable_bytes(part));
                    let more = block.variable_length_bytes().saturating_sub(expected);
                    self.state.lock().add_block(number, block, more);
                    self.work.notify_one();
                    self.room.notify_all();
                    self.ready.notify_one();
                }
                Err(error) => self.fail_epoch(error),
            },
            EpochJob::Assemble(mut draft, copying) => {
                let columns = (&self.setup.fields, &*self.setup.selected);
                let batch = match draft.copy_rows(columns, &copying, &self.setup.pool) {
                    Ok(batch) => batch,
                    Err(error) => return self.fail_epoch(error),
                };
                let RowCopy { pieces, blocks, last } = copying;
                drop(blocks);
                let mut state = self.state.lock();
                match batch {
                    Some(batch) => state.add_ready_batch(draft.number, batch),
                    None => state.return_draft(*draft),
                }
                let (done, wake) = state.release_copied_blocks(&pieces);
                drop(state);
                if last {
                    self.ready.notify_one();
                }
                if wake {
                    self.work.notify_one();
                    self.room.notify_all();
                }
                drop(done);
            }
        }
    }

    fn fetch_part(&self, number: usize) -> Result<FetchedPart> {
        let setup = &self.setup;
        let part = self.plan.parts().get(number).ok_or(Error::Ended)?;
        if setup.cache.as_ref().is_some_and(|cache| cache.contains_part(part)) {
            return Ok(None);
        }
        let plan = DecodePlan::new(&setup.dataset, &setup.selected, part, setup.pool.byte_limit())?;
        let claim =
            setup.pool.reserve_bytes(usize::try_from(plan.stored_bytes()).unwrap_or(usize::MAX));
        let bytes = plan.fetch_all_columns(&setup.dataset, part)?;
        Ok(Some(Box::new((plan, bytes, claim))))
    }

    fn decode_part(
        &self,
        number: usize,
        bytes: FetchedPart,
        bench: &mut DecodeScratch,
    ) -> Result<DecodedBlock> {
        let setup = &self.setup;
        let part = self.plan.parts().get(number).ok_or(Error::Ended)?;
        let (dataset, selected) = (&*setup.dataset, &*setup.selected);
        let maker =
            BlockDecoder { dataset, selected, pool: &setup.pool, cache: setup.cache.as_deref() };
        let (bytes, _claim) = bytes.map(|bytes| ((bytes.0, bytes.1), bytes.2)).unzip();
        maker.decode_block(part, bytes, bench)
    }

    fn fail_epoch(&self, error: Error) {
        let mut state = self.state.lock();
        state.ended = true;
        // The first error is the cause; later ones follow from the end of the epoch.
        state.error.get_or_insert(error);
        drop(state);
        self.work.notify_all();
        self.room.notify_all();
        self.ready.notify_all();
    }
}
