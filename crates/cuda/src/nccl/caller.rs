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

use farandole_collectives::{CollectiveOperation, DeviceEvent, OperationToken, Result};
use farandole_kernels::DeviceStream as FrameworkStream;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::calls::NcclCallGroup;
use super::memory::RegisteredBlocks;
use super::{
    Comm, CommunicatorStream, NCCL_IN_PROGRESS, NCCL_SUCCESS, NcclConfig, NcclLibrary, UniqueId,
};

/// An operation that was not started, and the events that must complete before it.
pub(super) type QueuedOperation = (OperationToken, CollectiveOperation, Vec<Arc<dyn DeviceEvent>>);
/// An operation that is on the stream, and the event behind it.
pub(super) type SubmittedOperation = (OperationToken, Arc<dyn DeviceEvent>, CollectiveOperation);

/// Between two looks at calls that return before they are done, as with `NCCL_COMM_BLOCKING=0`.
const CALL_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time for which the thread polls before it sleeps, if cores are free: a wake-up takes longer than
/// a call.
const SPIN_BEFORE_SLEEP: Duration = Duration::from_micros(50);
/// So many leave some.
const MIN_CORES_TO_SPIN: usize = 4;

/// The thread's messages.
#[derive(Default)]
pub(super) struct CallerUpdate {
    /// All members came.
    pub(super) formed: bool,
    pub(super) enqueued: Vec<SubmittedOperation>,
    pub(super) failure: Option<String>,
}

#[derive(Default)]
struct PendingCalls {
    queue: VecDeque<QueuedOperation>,
    update: CallerUpdate,
    /// The thread is in a call.
    in_call: bool,
    /// Whether the thread shall end.
    stopping: bool,
}

struct NcclCallQueue {
    pending: Mutex<PendingCalls>,
    changed: Condvar,
    /// Something was handed over since the thread has found nothing.
    has_new_calls: AtomicBool,
    /// The communicator, as soon as NCCL has it: before its members have met.
    comm: AtomicPtr<c_void>,
    /// All members register memory.
    registers_memory: AtomicBool,
}

/// The owner's end.
pub(super) struct NcclCallerHandle {
    calls: Arc<NcclCallQueue>,
    thread: Option<JoinHandle<()>>,
}

impl NcclCallerHandle {
    /// Begins the thread, and with it to form a communicator.
    ///
    /// # Errors
    /// The system's when it has no thread left.
    pub(super) fn new<L: CommunicatorStream>(
        nccl: NcclLibrary,
        stream: Arc<L>,
        id: UniqueId,
        position: (usize, usize),
    ) -> std::io::Result<Self> {
        // Forming the communicator is the first call, and it may block.
        let pending = Mutex::new(PendingCalls { in_call: true, ..PendingCalls::default() });
        let calls = Arc::new(NcclCallQueue {
            pending,
            changed: Condvar::new(),
            has_new_calls: AtomicBool::new(false),
            comm: AtomicPtr::new(null_mut()),
            registers_memory: AtomicBool::new(false),
        });
        let registry = RegisteredBlocks::default();
        let work =
            NcclCallerThread { calls: Arc::clone(&calls), nccl, stream, id, position, registry };
        let thread = std::thread::Builder::new().name("farandole-nccl".to_owned());
        Ok(Self { calls, thread: Some(thread.spawn(move || work.run())?) })
    }

    /// Registers NCCL's memory that operations use.
    pub(super) fn enable_registration(&self) {
        self.calls.registers_memory.store(true, Ordering::Release);
    }

    /// Hands operations over, to be called in this order.
    pub(super) fn enqueue_operations(&self, operations: impl Iterator<Item = QueuedOperation>) {
        self.calls.pending.lock().queue.extend(operations);
        self.calls.has_new_calls.store(true, Ordering::Release);
        self.calls.changed.notify_all();
    }

    /// Returns the messages since the last call.
    pub(super) fn take_update(&self) -> CallerUpdate {
        let mut pending = self.calls.pending.lock();
        let formed = pending.update.formed;
        std::mem::replace(&mut pending.update, CallerUpdate { formed, ..CallerUpdate::default() })
    }

    /// Returns the communicator, once it is formed.
    pub(super) fn raw_communicator(&self) -> Comm {
        self.calls.comm.load(Ordering::Acquire)
    }

    /// Ends the thread, which makes no more calls. Returns the communicator, to be aborted, if NCCL
    /// has it. A call under way is waited for so long; if it is not over then, only to abort the
    /// communicator ends it.
    pub(super) fn stop_thread(&mut self, limit: Duration) -> Option<Comm> {
        let deadline = Instant::now() + limit;
        let mut pending = self.calls.pending.lock();
        pending.stopping = true;
        pending.queue.clear();
        self.calls.changed.notify_all();
        while pending.in_call && !self.calls.changed.wait_until(&mut pending, deadline).timed_out()
        {
        }
        let (inside, comm) = (pending.in_call, self.calls.take_communicator());
        drop(pending);
        // Outside of NCCL it has nothing left to wait for.
        if let Some(thread) = self.thread.take().filter(|_| !inside) {
            drop(thread.join());
        }
        comm
    }
}

impl NcclCallQueue {
    /// Waits until there is a call to make, or until the owner stops the thread, at the latest when
    /// it is dropped. Spins for `looks` before it sleeps.
    fn wait_for_calls(&self, pending: &mut MutexGuard<'_, PendingCalls>, looks: Duration) {
        // Cleared under the lock: operations that are handed over later set it again.
        self.has_new_calls.store(false, Ordering::Release);
        // Without the lock, which the owner needs to hand over an operation.
        MutexGuard::unlocked(pending, || {
            let began = Instant::now();
            while !self.has_new_calls.load(Ordering::Acquire) && began.elapsed() < looks {
                std::hint::spin_loop();
            }
        });
        // Checked again under the lock, because operations may have come during the spin.
        if pending.queue.is_empty() && !pending.stopping {
            self.changed.wait(pending);
        }
    }

    fn take_communicator(&self) -> Option<Comm> {
        let comm = self.comm.swap(null_mut(), Ordering::AcqRel);
        (!comm.is_null()).then_some(comm)
    }
}

/// The thread's end.
struct NcclCallerThread<L: CommunicatorStream> {
    calls: Arc<NcclCallQueue>,
    nccl: NcclLibrary,
    stream: Arc<L>,
    id: UniqueId,
    position: (usize, usize),
    registry: RegisteredBlocks,
}

impl<L: CommunicatorStream> NcclCallerThread<L> {
    fn run(mut self) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let looks = if cores < MIN_CORES_TO_SPIN { Duration::ZERO } else { SPIN_BEFORE_SLEEP };
        let formed = self.init_communicator();
        let mut pending = self.calls.pending.lock();
        pending.update.formed = formed.is_ok();
        pending.update.failure = formed.err();
        pending.in_call = false;
        // `stop_thread` waits for the end of a call.
        self.calls.changed.notify_all();
        while !pending.stopping && pending.update.failure.is_none() {
            let Some(queued) = pending.queue.pop_front() else {
                self.calls.wait_for_calls(&mut pending, looks);
                continue;
            };
            pending.in_call = true;
            // Without the lock, because a call may block.
            drop(pending);
            let made = self.enqueue_on_stream(queued);
            pending = self.calls.pending.lock();
            pending.in_call = false;
            match made {
                Ok(made) => pending.update.enqueued.push(made),
                Err(reason) => pending.update.failure = Some(reason),
            }
            self.calls.changed.notify_all();
        }
        // Its owner gave it up before NCCL had it.
        if pending.stopping
            && let Some(comm) = self.calls.take_communicator()
        {
            drop(pending);
            let abort = self.nccl.function_table().abort;
            // There is nothing to do about a failure.
            drop(self.stream.with_current_device(&mut || {
                // SAFETY: the communicator is ours and ends once.
                unsafe { abort(comm) };
            }));
        }
    }

    fn init_communicator(&self) -> Result<(), String> {
        if self.calls.pending.lock().stopping {
            return Err("it was given up".to_owned());
        }
        let number = |value| i32::try_from(value).unwrap_or(i32::MAX);
        let (me, members) = (number(self.position.0), number(self.position.1));
        let (mut settings, mut status) = (NcclConfig::with_blocking_calls(), NCCL_SUCCESS);
        self.with_current_device(&mut || {
            let init = self.nccl.function_table().init;
            // SAFETY: both places live across the call.
            status =
                unsafe { init(self.calls.comm.as_ptr(), members, self.id, me, &raw mut settings) };
        })?;
        self.await_nccl_call("ncclCommInitRankConfig", status)
    }

    /// Puts an operation on the stream.
    fn enqueue_on_stream(
        &mut self,
        (token, operation, events): QueuedOperation,
    ) -> Result<SubmittedOperation, String> {
        let stream = self.stream.raw_stream();
        // SAFETY: `self.stream` owns the CUDA stream and outlives this call.
        let own = unsafe { FrameworkStream::from_raw(stream.expose_provenance()) };
        events
            .iter()
            .try_for_each(|event| event.make_stream_wait(own))
            .map_err(|error| error.to_string())?;
        let mut late = Ok(false);
        let (member, size) = self.position;
        let comm = self.calls.comm.load(Ordering::Acquire);
        self.register_buffers(comm, &operation)?;
        let calls = NcclCallGroup { nccl: &self.nccl, comm, stream, size, member };
        self.with_current_device(&mut || {
            // SAFETY: `submit` took buffers of this device, which their owners keep until the token
            // completes.
            late = unsafe { calls.issue_group(&operation) };
        })?;
        if late.map_err(|error| error.to_string())? {
            self.await_nccl_call("ncclGroupEnd", NCCL_IN_PROGRESS)?;
        }
        let event = self.stream.record_event().map_err(|error| error.to_string())?;
        Ok((token, event, operation))
    }

    /// Registers the buffers of the operation, if all members register theirs.
    fn register_buffers(
        &mut self,
        comm: Comm,
        operation: &CollectiveOperation,
    ) -> Result<(), String> {
        if !self.calls.registers_memory.load(Ordering::Acquire) {
            return Ok(());
        }
        let (calls, registry, mut done) = (&self.calls, &mut self.registry, Ok(true));
        let goes_on = || !calls.pending.lock().stopping;
        let within = self.stream.with_current_device(&mut || {
            done = registry.register_operation_buffers(&self.nccl, comm, operation, goes_on)
        });
        within.map_err(|error| error.to_string())?;
        match done.map_err(|error| error.to_string())? {
            true => Ok(()),
            false => Err("it was given up".to_owned()),
        }
    }

    fn with_current_device(&self, work: &mut dyn FnMut()) -> Result<(), String> {
        self.stream.with_current_device(work).map_err(|error| error.to_string())
    }

    /// Waits for a call that returned before it was done, until a limit is over.
    fn await_nccl_call(&self, function: &'static str, mut status: i32) -> Result<(), String> {
        while status == NCCL_IN_PROGRESS {
            if self.calls.pending.lock().stopping {
                return Err("it was given up".to_owned());
            }
            std::thread::sleep(CALL_POLL_INTERVAL);
            status = self.nccl.async_communicator_status(self.calls.comm.load(Ordering::Acquire));
        }
        self.nccl.check_status(function, status).map_err(|error| error.to_string())
    }
}
