// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Threads that execute a plan.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_dataset::{Part, Plan};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::assemble::Copying;
use crate::batch::Batch;
use crate::block::{Block, Maker};
use crate::cache::Cache;
use crate::column::{Field, Selected};
use crate::dataset::{Dataset, Overstated};
use crate::decode::Recipe;
use crate::error::{Error, Result};
use crate::footer::last_words;
use crate::pages::Bench;
use crate::pool::Pool;
use crate::state::{Ahead, Bytes, Job, State};

/// Bytes of batches that are ready ahead of the consumer, at most.
const AHEAD_BYTES: u64 = 16 << 20;

/// Bytes of local blocks that are decoded before they are needed, at most, where those that are
/// needed at a time take less.
const EARLY_BYTES: u64 = 32 << 20;

/// Threads that wait for a store over the network. They sleep most of the time; the budget limits
/// what they fetch.
const FETCHERS: usize = 32;

/// Prefix of the names of such threads.
const FETCHER: &str = "fd-fetch-";

/// Longest time for which the end of an epoch waits for answers of a store.
const PATIENCE: Duration = Duration::from_secs(2);

/// The settings of an epoch.
pub(crate) struct Setup {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) selected: Arc<[Selected]>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) plan: Plan,
    pub(crate) budget: u64,
    pub(crate) threads: usize,
}

struct Shared {
    setup: Setup,
    fields: Arc<[Field]>,
    state: Mutex<State>,
    /// Decoding threads wait here for something to do.
    work: Condvar,
    /// Fetching threads wait here for room.
    room: Condvar,
    /// The consumer waits here for a batch, or for blocks to make one of.
    ready: Condvar,
}

/// The result of a wait for the next batch.
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
    pub(crate) fn start(setup: Setup) -> Result<Self> {
        let fields: Arc<[Field]> = setup
            .selected
            .iter()
            .map(|column| Field { element: column.out, ..column.field.clone() })
            .collect();
        let cost: Vec<(u64, u64)> =
            setup.plan.parts().iter().map(|part| setup.cost(part)).collect();
        let rows = setup.plan.step(0).rows;
        let batch =
            (Batch::bytes_of(&fields, rows) as u64).saturating_add(setup.texts_of(rows as u64));
        let (least, most) = setup.padded_of(rows);
        let share =
            Share::new(&setup, &cost, batch.saturating_add(least), most.saturating_sub(least))
                .map_err(|error| setup.refused(error))?;
        setup.pool.set_limit(usize::try_from(setup.budget).unwrap_or(usize::MAX));
        let apart = setup.dataset.store().is_remote();
        let state = Mutex::new(State::new(&setup.plan, cost, share.blocks, share.ahead, apart));
        let (fetchers, threads) = (if apart { FETCHERS } else { 0 }, setup.threads);
        let (work, room, ready) = (Condvar::new(), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { setup, fields, state, work, room, ready });
        let mut epoch = Self { shared, threads: Vec::new(), process: std::process::id() };
        for number in 0..threads {
            epoch.spawn(format!("fd-reader-{number}"), |shared| shared.serve())?;
        }
        for number in 0..fetchers {
            epoch.shared.state.lock().fetchers += 1;
            epoch.spawn(format!("{FETCHER}{number}"), |shared| shared.fetch())?;
        }
        Ok(epoch)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce(&Shared) + Send + 'static) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new().name(name).spawn(move || work(&shared));
        self.threads.push(spawned.map_err(|source| Error::Thread { source })?);
        Ok(())
    }

    /// Batches of the whole epoch.
    pub fn steps(&self) -> u64 {
        self.shared.setup.plan.steps()
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
            if let Some(job) = state.assembly(&shared.setup.plan) {
                drop(state);
                shared.run(job, &mut Bench::default());
                state = shared.state.lock();
            } else if shared.ready.wait_until(&mut state, deadline).timed_out() {
                return Ok(Next::Pending);
            }
        }
    }

    /// Ends the threads; what is being decoded is waited for. A request that a store does not
    /// answer is not: its thread ends with it.
    pub fn close(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.work.notify_all();
        self.shared.room.notify_all();
        self.shared.ready.notify_all();
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.shared.state.lock();
        while state.fetchers > 0 && !self.shared.ready.wait_until(&mut state, deadline).timed_out()
        {
        }
        drop(state);
        for thread in self.threads.drain(..) {
            let fetches = thread.thread().name().is_some_and(|name| name.starts_with(FETCHER));
            if !fetches || thread.is_finished() {
                // A panic was already handed to the consumer as an error.
                drop(thread.join());
            }
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

impl Setup {
    /// Explains why an epoch cannot start with this budget: the manifest may say more than is so.
    fn refused(&self, error: Error) -> Error {
        match (error, self.dataset.overstated()) {
            (
                Error::Budget { budget, .. },
                Ok(Some(Overstated { file, group, claimed, found })),
            ) => Error::Overstated { file, group, claimed, found, budget },
            (error, _) => error,
        }
    }

    /// Bytes of a part: decoded, and besides while it is loaded.
    fn cost(&self, part: &Part) -> (u64, u64) {
        let files = &self.dataset.manifest().files;
        let group = files.get(part.file).and_then(|file| file.groups.get(part.group));
        let rows = part.rows.end - part.rows.start;
        let fetched = group.map_or(0, |group| group.bytes.saturating_mul(rows) / group.rows.max(1));
        let widest =
            self.selected.iter().map(|column| column.field.width()).max().unwrap_or(0) as u64;
        let column = widest.saturating_mul(rows);
        // One column at a time goes through: its bytes as they are stored, and its values before
        // they are shuffled.
        let besides = if self.dataset.store().is_remote() {
            fetched
        } else {
            fetched.min(column.saturating_mul(2))
        };
        let besides = besides.saturating_add(column);
        let texts = self.text_bytes(part);
        (Block::bytes(part, &self.selected).saturating_add(texts), besides.saturating_add(texts))
    }

    /// Bytes of values without a fixed size in a part, as far as the data set tells: all that it
    /// says of the rows.
    fn text_bytes(&self, part: &Part) -> u64 {
        let files = &self.dataset.manifest().files;
        let group = files.get(part.file).and_then(|file| file.groups.get(part.group));
        group.map_or(0, |group| {
            self.texts((group.bytes, group.rows), part.rows.end - part.rows.start)
        })
    }

    /// The same of so many rows that may be any.
    fn texts_of(&self, rows: u64) -> u64 {
        let groups = || self.dataset.manifest().files.iter().flat_map(|file| &file.groups);
        let bytes = groups().map(|group| group.bytes).fold(0, u64::saturating_add);
        self.texts((bytes, self.dataset.manifest().rows), rows)
    }

    /// Bytes of so many padded rows: of any, and if the longest is among them.
    fn padded_of(&self, rows: usize) -> (u64, u64) {
        let padded = self.selected.iter().filter_map(|column| column.padding.as_ref());
        padded.map(|padding| padding.bytes_of(rows)).fold((0, 0), |(least, most), (short, long)| {
            (least.saturating_add(short as u64), most.saturating_add(long as u64))
        })
    }

    fn texts(&self, (bytes, of): (u64, u64), rows: u64) -> u64 {
        let texts = self.selected.iter().filter(|column| column.field.is_text()).count() as u64;
        if texts == 0 {
            return 0;
        }
        let share = u128::from(bytes) * u128::from(rows) / u128::from(of.max(1));
        u64::try_from(share)
            .unwrap_or(u64::MAX)
            .saturating_add((8 * texts).saturating_mul(rows.saturating_add(1)))
    }
}

/// The parts of the budget.
struct Share {
    blocks: u64,
    ahead: Ahead,
}

impl Share {
    /// Returns the share for batches that take `batch` bytes, and up to `padded` more if a row is
    /// long: that decides how many are ready at a time, not whether the budget is large enough,
    /// because most batches take less.
    fn new(setup: &Setup, cost: &[(u64, u64)], batch: u64, padded: u64) -> Result<Self> {
        let budget = setup.budget;
        let largest = cost.iter().map(|(_, besides)| *besides).max().unwrap_or(0);
        let open = setup.plan.least_bytes(|part| setup.cost(part).0);
        let blocks = open.saturating_add(largest);
        // One at the consumer, and the next one.
        let batches = batch.saturating_mul(2);
        let needed = blocks.saturating_add(batches);
        let Some(spare) = budget.checked_sub(needed) else {
            return Err(Error::Budget { budget, needed, blocks, batches });
        };
        let batch = batch.saturating_add(padded);
        let most = (spare / 4).min(AHEAD_BYTES);
        let more = (most / batch.max(1)).min(63);
        // Texts may take more than files state, so their bytes are limited, too.
        let bytes = most.saturating_add(batch);
        let (ahead, spare) = (Ahead { batches: 1 + more, bytes }, spare - more * batch);
        // Requests over a network do not wait for each other. Local files are there when they are
        // needed, and memory that has just been used is faster than what has not.
        let early = if setup.dataset.store().is_remote() {
            spare
        } else {
            (spare / 4).min(open.max(EARLY_BYTES))
        };
        Ok(Self { blocks: blocks + early, ahead })
    }
}

impl Shared {
    fn serve(&self) {
        let mut bench = Bench::default();
        let mut state = self.state.lock();
        while !state.ended {
            match state.job(&self.setup.plan) {
                Some(job) => MutexGuard::unlocked(&mut state, || self.run_guarded(job, &mut bench)),
                None => self.work.wait(&mut state),
            }
        }
    }

    fn fetch(&self) {
        let mut bench = Bench::default();
        let mut state = self.state.lock();
        while !state.ended {
            match state.fetch() {
                Some(job) => MutexGuard::unlocked(&mut state, || self.run_guarded(job, &mut bench)),
                None => self.room.wait(&mut state),
            }
        }
        state.fetchers -= 1;
        drop(state);
        self.ready.notify_all();
    }

    fn run_guarded(&self, job: Job, bench: &mut Bench) {
        let part = match &job {
            Job::Fetch(part) | Job::Load(part, _) => self.setup.plan.parts().get(*part),
            Job::Assemble(..) => None,
        };
        let place = part.map_or((String::from("a batch"), 0), |part| {
            let dataset = &self.setup.dataset;
            let file = dataset.manifest().files.get(part.file);
            (file.map(|file| dataset.store().name_of(&file.path)).unwrap_or_default(), part.group)
        });
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run(job, bench))) {
            self.fail(Error::Corrupt {
                file: place.0,
                group: place.1,
                message: last_words(panic.as_ref()),
            });
        }
    }

    fn run(&self, job: Job, bench: &mut Bench) {
        match job {
            Job::Fetch(number) => match self.fetched(number) {
                Ok(bytes) => {
                    self.state.lock().fetched(&self.setup.plan, number, bytes);
                    self.work.notify_one();
                }
                Err(error) => self.fail(error),
            },
            Job::Load(number, bytes) => match self.load(number, bytes, bench) {
                Ok(block) => {
                    let part = self.setup.plan.parts().get(number);
                    let expected = part.map_or(0, |part| self.setup.text_bytes(part));
                    let more = block.text_bytes().saturating_sub(expected);
                    self.state.lock().loaded(number, block, more);
                    self.work.notify_one();
                    self.room.notify_all();
                    self.ready.notify_one();
                }
                Err(error) => self.fail(error),
            },
            Job::Assemble(mut draft, copying) => {
                let columns = (&self.fields, &*self.setup.selected);
                let batch = match draft.copy(columns, &copying, &self.setup.pool) {
                    Ok(batch) => batch,
                    Err(error) => return self.fail(error),
                };
                let Copying { pieces, blocks, last } = copying;
                drop(blocks);
                let mut state = self.state.lock();
                match batch {
                    Some(batch) => state.assembled(draft.number, batch),
                    None => state.drafted(*draft),
                }
                let (done, wake) = state.copied(&pieces);
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

    fn fetched(&self, number: usize) -> Result<Bytes> {
        let setup = &self.setup;
        let part = setup.plan.parts().get(number).ok_or(Error::Ended)?;
        if setup.cache.as_ref().is_some_and(|cache| cache.has(part)) {
            return Ok(None);
        }
        let recipe = Recipe::new(&setup.dataset, &setup.selected, part, setup.pool.limit())?;
        let claim = setup.pool.claim(usize::try_from(recipe.size()).unwrap_or(usize::MAX));
        let bytes = recipe.fetch(&setup.dataset, part)?;
        Ok(Some(Box::new((recipe, bytes, claim))))
    }

    fn load(&self, number: usize, bytes: Bytes, bench: &mut Bench) -> Result<Block> {
        let setup = &self.setup;
        let part = setup.plan.parts().get(number).ok_or(Error::Ended)?;
        let (dataset, selected) = (&*setup.dataset, &*setup.selected);
        let maker = Maker { dataset, selected, pool: &setup.pool, cache: setup.cache.as_deref() };
        let (bytes, _claim) = bytes.map(|bytes| ((bytes.0, bytes.1), bytes.2)).unzip();
        maker.block(part, bytes, bench)
    }

    fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        state.ended = true;
        state.error.get_or_insert(error);
        drop(state);
        self.work.notify_all();
        self.room.notify_all();
        self.ready.notify_all();
    }
}
