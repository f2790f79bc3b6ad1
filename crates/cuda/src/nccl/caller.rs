// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread that makes a communicator's calls. They may block: NCCL meets the other members in
//! the first, and connects to them in others, so threads that must not block leave these calls to
//! this thread. Calls of communicators that do not block would have NCCL begin a thread for each of
//! them.
//!
//! All calls of a communicator come from this one thread. Only to abort it comes from another, when
//! this one is outside of NCCL, or does not come back from there.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farandole_collectives::{Event, Operation, Result, Stream as Theirs, Token};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::calls::Calls;
use super::memory::Registry;
use super::{Comm, IN_PROGRESS, Lane, Nccl, SUCCESS, Settings, UniqueId};

/// An operation that was not started, and what it comes after.
pub(super) type Queued = (Token, Operation, Vec<Arc<dyn Event>>);
/// An operation that is on the stream, and the event behind it.
pub(super) type Made = (Token, Arc<dyn Event>, Operation);

/// Between two looks at calls that return before they are done, as with `NCCL_COMM_BLOCKING=0`.
const LOOK: Duration = Duration::from_micros(50);
/// Time for which the thread polls before it sleeps, if cores are free: a wake-up takes longer than
/// a call.
const REST: Duration = Duration::from_micros(50);
/// So many leave some.
const CORES: usize = 4;

/// The thread's messages.
#[derive(Default)]
pub(super) struct News {
    /// All members came.
    pub(super) formed: bool,
    pub(super) made: Vec<Made>,
    pub(super) failure: Option<String>,
}

#[derive(Default)]
struct Papers {
    queue: VecDeque<Queued>,
    news: News,
    /// The thread is in a call.
    inside: bool,
    /// Whether the thread shall end.
    over: bool,
}

struct Desk {
    papers: Mutex<Papers>,
    changed: Condvar,
    /// Something was handed over since the thread has found nothing.
    wanted: AtomicBool,
    /// The communicator, as soon as NCCL has it: before its members have met.
    comm: AtomicPtr<c_void>,
    /// All members register memory.
    registers: AtomicBool,
}

/// The owner's end.
pub(super) struct Caller {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

impl Caller {
    /// Begins the thread, and with it to form a communicator.
    ///
    /// # Errors
    /// The system's when it has no thread left.
    pub(super) fn new<L: Lane>(
        nccl: Nccl,
        lane: Arc<L>,
        id: UniqueId,
        place: (usize, usize),
    ) -> std::io::Result<Self> {
        let papers = Mutex::new(Papers { inside: true, ..Papers::default() });
        let desk = Arc::new(Desk {
            papers,
            changed: Condvar::new(),
            wanted: AtomicBool::new(false),
            comm: AtomicPtr::new(null_mut()),
            registers: AtomicBool::new(false),
        });
        let registry = Registry::default();
        let work = Work { desk: Arc::clone(&desk), nccl, lane, id, place, registry };
        let thread = std::thread::Builder::new().name("farandole-nccl".to_owned());
        Ok(Self { desk, thread: Some(thread.spawn(move || work.run())?) })
    }

    /// Registers NCCL's memory that operations use.
    pub(super) fn register(&self) {
        self.desk.registers.store(true, Ordering::Release);
    }

    /// Hands operations over, to be called in this order.
    pub(super) fn hand(&self, operations: impl Iterator<Item = Queued>) {
        self.desk.papers.lock().queue.extend(operations);
        self.desk.wanted.store(true, Ordering::Release);
        self.desk.changed.notify_all();
    }

    /// Returns the messages since the last call.
    pub(super) fn news(&self) -> News {
        let mut papers = self.desk.papers.lock();
        let formed = papers.news.formed;
        std::mem::replace(&mut papers.news, News { formed, ..News::default() })
    }

    /// Returns the communicator, once it is formed.
    pub(super) fn comm(&self) -> Comm {
        self.desk.comm.load(Ordering::Acquire)
    }

    /// Ends the thread, which makes no more calls. Returns the communicator, to be aborted, if NCCL
    /// has it. A call under way is waited for so long; if it is not over then, only to abort the
    /// communicator ends it.
    pub(super) fn end(&mut self, limit: Duration) -> Option<Comm> {
        let deadline = Instant::now() + limit;
        let mut papers = self.desk.papers.lock();
        papers.over = true;
        papers.queue.clear();
        self.desk.changed.notify_all();
        while papers.inside && !self.desk.changed.wait_until(&mut papers, deadline).timed_out() {}
        let (inside, comm) = (papers.inside, self.desk.take());
        drop(papers);
        // Outside of NCCL it has nothing left to wait for.
        if let Some(thread) = self.thread.take().filter(|_| !inside) {
            drop(thread.join());
        }
        comm
    }
}

impl Desk {
    /// Until there is more to do. The owner says when it is over, at the latest when it is dropped.
    fn rest(&self, papers: &mut MutexGuard<'_, Papers>, looks: Duration) {
        self.wanted.store(false, Ordering::Release);
        MutexGuard::unlocked(papers, || {
            let began = Instant::now();
            while !self.wanted.load(Ordering::Acquire) && began.elapsed() < looks {
                std::hint::spin_loop();
            }
        });
        if papers.queue.is_empty() && !papers.over {
            self.changed.wait(papers);
        }
    }

    fn take(&self) -> Option<Comm> {
        let comm = self.comm.swap(null_mut(), Ordering::AcqRel);
        (!comm.is_null()).then_some(comm)
    }
}

/// The thread's end.
struct Work<L: Lane> {
    desk: Arc<Desk>,
    nccl: Nccl,
    lane: Arc<L>,
    id: UniqueId,
    place: (usize, usize),
    registry: Registry,
}

impl<L: Lane> Work<L> {
    fn run(mut self) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let looks = if cores < CORES { Duration::ZERO } else { REST };
        let formed = self.form();
        let mut papers = self.desk.papers.lock();
        papers.news.formed = formed.is_ok();
        papers.news.failure = formed.err();
        papers.inside = false;
        self.desk.changed.notify_all();
        while !papers.over && papers.news.failure.is_none() {
            let Some(queued) = papers.queue.pop_front() else {
                self.desk.rest(&mut papers, looks);
                continue;
            };
            papers.inside = true;
            drop(papers);
            let made = self.call(queued);
            papers = self.desk.papers.lock();
            papers.inside = false;
            match made {
                Ok(made) => papers.news.made.push(made),
                Err(reason) => papers.news.failure = Some(reason),
            }
            self.desk.changed.notify_all();
        }
        // Its owner gave it up before NCCL had it.
        if papers.over
            && let Some(comm) = self.desk.take()
        {
            drop(papers);
            let abort = self.nccl.table().abort;
            // There is nothing to do about a failure.
            drop(self.lane.with(&mut || {
                // SAFETY: the communicator is ours and ends once.
                unsafe { abort(comm) };
            }));
        }
    }

    fn form(&self) -> Result<(), String> {
        if self.desk.papers.lock().over {
            return Err("it was given up".to_owned());
        }
        let number = |value| i32::try_from(value).unwrap_or(i32::MAX);
        let (me, members) = (number(self.place.0), number(self.place.1));
        let (mut settings, mut status) = (Settings::blocking(), SUCCESS);
        self.within(&mut || {
            let init = self.nccl.table().init;
            // SAFETY: both places live across the call.
            status =
                unsafe { init(self.desk.comm.as_ptr(), members, self.id, me, &raw mut settings) };
        })?;
        self.wait("ncclCommInitRankConfig", status)
    }

    /// Puts an operation on the stream.
    fn call(&mut self, (token, operation, events): Queued) -> Result<Made, String> {
        let stream = self.lane.stream();
        // SAFETY: the lane's stream lives as long as the lane.
        let own = unsafe { Theirs::from_raw(stream.expose_provenance()) };
        events.iter().try_for_each(|event| event.hold(own)).map_err(|error| error.to_string())?;
        let mut late = Ok(false);
        let (member, size) = self.place;
        let comm = self.desk.comm.load(Ordering::Acquire);
        self.register(comm, &operation)?;
        let calls = Calls { nccl: &self.nccl, comm, stream, size, member };
        self.within(&mut || {
            // SAFETY: `submit` took buffers of this device, which their owners keep until the token
            // completes.
            late = unsafe { calls.start(&operation) };
        })?;
        if late.map_err(|error| error.to_string())? {
            self.wait("ncclGroupEnd", IN_PROGRESS)?;
        }
        let event = self.lane.mark().map_err(|error| error.to_string())?;
        Ok((token, event, operation))
    }

    /// Registers what the operation is about, if all members do.
    fn register(&mut self, comm: Comm, operation: &Operation) -> Result<(), String> {
        if !self.desk.registers.load(Ordering::Acquire) {
            return Ok(());
        }
        let (desk, registry, mut done) = (&self.desk, &mut self.registry, Ok(true));
        let goes_on = || !desk.papers.lock().over;
        let within =
            self.lane.with(&mut || done = registry.take_up(&self.nccl, comm, operation, goes_on));
        within.map_err(|error| error.to_string())?;
        match done.map_err(|error| error.to_string())? {
            true => Ok(()),
            false => Err("it was given up".to_owned()),
        }
    }

    fn within(&self, work: &mut dyn FnMut()) -> Result<(), String> {
        self.lane.with(work).map_err(|error| error.to_string())
    }

    /// Waits for a call that returned before it was done, until a limit is over.
    fn wait(&self, function: &'static str, mut status: i32) -> Result<(), String> {
        while status == IN_PROGRESS {
            if self.desk.papers.lock().over {
                return Err("it was given up".to_owned());
            }
            std::thread::sleep(LOOK);
            status = self.nccl.status(self.desk.comm.load(Ordering::Acquire));
        }
        self.nccl.check(function, status).map_err(|error| error.to_string())
    }
}
