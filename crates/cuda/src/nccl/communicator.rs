// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator over NCCL that never blocks and has a deadline for every wait.
//!
//! ```text
//!   Forming --all members came--> Ready --operations--> Caller --on the stream--> running --event reached--> completed
//!      |                            |
//!      +------ refusal, deadline, an error of the network, abandon: abort ------> Over
//! ```
//!
//! The thread of [`NcclCallerHandle`] makes the calls. An enqueued operation is done when the event
//! behind it on the stream is reached. `ncclCommAbort` ends kernels that wait for a dead peer, so
//! no GPU spins for ever.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceEvent, Error as CollectiveError, OperationToken,
    Result, ResultMemory,
};

use super::caller::{NcclCallerHandle, QueuedOperation, SubmittedOperation};
use super::calls::{float8_reduction_support, is_nccl_operation};
use super::communicator_stream::CommunicatorStream;
use super::{NcclLibrary, UniqueId};
use crate::Error;
use crate::shutdown::{SHUTDOWN_TIMEOUT, drain_communicator, poll_until};

/// Operations on the device at a time. The driver has room for some more; where it had none, calls
/// would wait for kernels.
const MAX_OPERATIONS_ON_DEVICE: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NcclCommunicatorState {
    Forming,
    Ready,
    Ended,
}

/// Collectives among devices.
pub struct NcclCommunicator<L: CommunicatorStream> {
    nccl: NcclLibrary,
    stream: Arc<L>,
    caller: NcclCallerHandle,
    size: usize,
    member: usize,
    /// All members' devices have room for results whose size was unknown before.
    has_result_memory: bool,
    /// All members' devices reduce floats of eight bits.
    float8: bool,
    state: NcclCommunicatorState,
    /// Since when it is formed, called or waited for.
    waiting_since: Instant,
    /// The longest that may take.
    timeout: Duration,
    queued: VecDeque<QueuedOperation>,
    /// Operations that the caller has.
    handed_over: usize,
    running: VecDeque<SubmittedOperation>,
    /// Operations that are on the stream and not reported yet.
    launched: Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    failure: Option<CollectiveError>,
    clock: fn() -> Instant,
}

impl<L: CommunicatorStream> NcclCommunicator<L> {
    /// Begins to form a communicator of `size` members, which all call this with the same id.
    /// `timeout` is how long forming it, and each operation, may take.
    ///
    /// # Errors
    /// `Lost`.
    pub fn begin_forming(
        nccl: NcclLibrary,
        stream: L,
        id: UniqueId,
        position: (usize, usize),
        timeout: Duration,
    ) -> Result<Self> {
        Self::begin_forming_with_clock(nccl, stream, id, position, timeout, Instant::now)
    }

    pub(super) fn begin_forming_with_clock(
        nccl: NcclLibrary,
        stream: L,
        id: UniqueId,
        (member, size): (usize, usize),
        timeout: Duration,
        clock: fn() -> Instant,
    ) -> Result<Self> {
        let stream = Arc::new(stream);
        let caller = NcclCallerHandle::new(nccl.clone(), Arc::clone(&stream), id, (member, size));
        let caller = caller.map_err(|error| {
            let reason =
                format!("device {}: there is no thread for NCCL: {error}", stream.device_ordinal());
            CollectiveError::Lost { reason }
        })?;
        Ok(Self {
            nccl,
            stream,
            caller,
            size,
            member,
            has_result_memory: false,
            float8: false,
            state: NcclCommunicatorState::Forming,
            waiting_since: clock(),
            timeout,
            queued: VecDeque::new(),
            handed_over: 0,
            running: VecDeque::new(),
            launched: Vec::new(),
            failure: None,
            clock,
        })
    }

    /// Enables allgather and alltoall. All members must have
    /// [`CommunicatorStream::allocate_result`].
    #[must_use]
    pub fn with_result_memory_enabled(mut self) -> Self {
        self.has_result_memory = true;
        self
    }

    /// Enables registration. All members must register their [`super::NcclMemory`].
    #[must_use]
    pub fn with_memory_registration_enabled(self) -> Self {
        self.caller.enable_registration();
        self
    }

    /// Enables reductions of 8-bit floats. NCCL and the GPUs of all members must support them.
    #[must_use]
    pub fn with_float8_enabled(mut self) -> Self {
        self.float8 = true;
        self
    }

    /// Returns whether NCCL supports an operation among these members, if there is memory for its
    /// result.
    fn supports_operation(&self, operation: &CollectiveOperation) -> bool {
        let among =
            float8_reduction_support(operation, self.size).is_none_or(|does| self.float8 && does);
        among && is_nccl_operation(operation)
    }

    /// Ends everything, also kernels in progress, and remembers why.
    fn fail_communicator(&mut self, reason: &str) -> CollectiveError {
        self.shut_down();
        let failure = CollectiveError::Lost {
            reason: format!("device {}: {reason}", self.stream.device_ordinal()),
        };
        self.failure.get_or_insert(failure).clone()
    }

    /// Afterwards nothing on the device touches a buffer.
    fn shut_down(&mut self) {
        if self.state == NcclCommunicatorState::Ended {
            return;
        }
        self.state = NcclCommunicatorState::Ended;
        if let Some(comm) = self.caller.stop_thread(SHUTDOWN_TIMEOUT) {
            let abort = self.nccl.function_table().abort;
            // An abort is the only end that waits for no other member. There is nothing to do about
            // a failure.
            drop(self.stream.with_current_device(&mut || {
                // SAFETY: the communicator is ours and ends once.
                unsafe { abort(comm) };
            }));
            if self.handed_over > 0 || !self.running.is_empty() {
                self.wait_for_stream();
            }
        }
        drop(self.caller.take_update());
        self.handed_over = 0;
        self.queued.clear();
        self.running.clear();
        self.launched.clear();
    }

    /// Waits until the work of the stream has ended: kernels continue for a while after the order
    /// to end, and `ncclCommAbort` may return before they have.
    fn wait_for_stream(&self) {
        let Ok(last) = self.stream.record_event() else { return };
        // What failed touches nothing any more.
        poll_until(|| last.is_ready().unwrap_or(true));
    }

    /// Looks after what NCCL does; true when it has done something.
    fn poll_nccl_caller(&mut self) -> Result<bool> {
        let called = self.state == NcclCommunicatorState::Forming || self.handed_over > 0;
        let what = match self.state {
            NcclCommunicatorState::Ended => return Err(self.ended_error()),
            NcclCommunicatorState::Forming => "forming it",
            NcclCommunicatorState::Ready if called => "starting an operation",
            NcclCommunicatorState::Ready if self.running.is_empty() => return Ok(false),
            NcclCommunicatorState::Ready => "an operation",
        };
        let moved = called && self.collect_update()?;
        // Two threads at a time may not ask.
        if self.state == NcclCommunicatorState::Ready && self.handed_over == 0 {
            let status = self.nccl.async_communicator_status(self.caller.raw_communicator());
            if let Err(error) = self.nccl.check_status("a communicator of NCCL", status) {
                return Err(self.fail_communicator(&error.to_string()));
            }
        }
        let elapsed = (self.clock)().saturating_duration_since(self.waiting_since);
        if elapsed > self.timeout {
            return Err(
                self.fail_communicator(&format!("{what} took longer than {:?}", self.timeout))
            );
        }
        Ok(moved)
    }

    /// Takes the finished work of the caller; returns true if there is any.
    fn collect_update(&mut self) -> Result<bool> {
        let update = self.caller.take_update();
        let formed = update.formed && self.state == NcclCommunicatorState::Forming;
        let moved = formed || !update.enqueued.is_empty();
        if formed {
            self.state = NcclCommunicatorState::Ready;
        }
        // If the device takes too long for one operation, later operations do not extend the
        // deadline.
        if formed || (moved && self.running.is_empty()) {
            self.waiting_since = (self.clock)();
        }
        for (token, event, operation) in update.enqueued {
            self.handed_over -= 1;
            self.launched.push((token, Arc::clone(&event)));
            self.running.push_back((token, event, operation));
        }
        match update.failure {
            Some(reason) => Err(self.fail_communicator(&reason)),
            None => Ok(moved),
        }
    }

    /// Hands over what waits.
    fn hand_over_queued_operations(&mut self) -> bool {
        let under_way = self.handed_over + self.running.len();
        let count = self.queued.len().min(MAX_OPERATIONS_ON_DEVICE.saturating_sub(under_way));
        if self.state != NcclCommunicatorState::Ready || count == 0 {
            return false;
        }
        if under_way == 0 {
            self.waiting_since = (self.clock)();
        }
        self.handed_over += count;
        self.caller.enqueue_operations(self.queued.drain(..count));
        true
    }

    /// Returns whether the caller has nothing to do.
    #[cfg(test)]
    pub(super) fn is_caller_idle(&self) -> bool {
        self.state != NcclCommunicatorState::Forming
            && self.handed_over == 0
            && self.queued.is_empty()
    }

    fn ended_error(&self) -> CollectiveError {
        let ended = || CollectiveError::Lost { reason: "the communicator was given up".to_owned() };
        self.failure.clone().unwrap_or_else(ended)
    }
}

impl<L: CommunicatorStream> Communicator for NcclCommunicator<L> {
    fn member_count(&self) -> usize {
        self.size
    }

    fn member_index(&self) -> usize {
        self.member
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> Result<()> {
        self.submit_after_events(token, operation, Vec::new())
    }

    fn can_execute(&self, operation: &CollectiveOperation) -> bool {
        let gathers = matches!(
            operation,
            CollectiveOperation::Allgather { .. } | CollectiveOperation::Alltoall { .. }
        );
        self.supports_operation(operation) && (self.has_result_memory || !gathers)
    }

    fn allocate_result(&mut self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        match self.state {
            NcclCommunicatorState::Ended => Err(self.ended_error()),
            _ => self.stream.allocate_result(bytes),
        }
    }

    fn take_launched_operations(
        &mut self,
        launched: &mut Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    ) {
        launched.append(&mut self.launched);
    }

    fn wait_for_launched_operations(&mut self, limit: Duration) {
        drain_communicator(self, limit);
    }

    fn submit_after_events(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
        events: Vec<Arc<dyn DeviceEvent>>,
    ) -> Result<()> {
        if self.state == NcclCommunicatorState::Ended {
            return Err(self.ended_error());
        }
        if !self.supports_operation(&operation) {
            let reason = "NCCL does not do this operation as it is defined".to_owned();
            return Err(CollectiveError::Shape { reason });
        }
        self.queued.push_back((token, operation, events));
        Ok(())
    }

    fn make_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        let mut moved = self.poll_nccl_caller()?;
        moved |= self.hand_over_queued_operations();
        while let Some((token, event, _)) = self.running.front() {
            let token = *token;
            match event.is_ready() {
                // Events of one stream are reached in order, so no later one is ready.
                Ok(false) => break,
                Ok(true) => {}
                Err(error) => return Err(self.fail_communicator(&error.to_string())),
            }
            self.running.pop_front();
            self.waiting_since = (self.clock)();
            completed.push(token);
            moved = true;
        }
        Ok(moved)
    }

    fn abandon_operations(&mut self) {
        if self.state != NcclCommunicatorState::Ended {
            self.fail_communicator("the operation was given up");
        }
    }

    fn pending_count(&self) -> usize {
        self.queued.len() + self.handed_over + self.running.len()
    }
}

impl<L: CommunicatorStream> Drop for NcclCommunicator<L> {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl From<Error> for CollectiveError {
    fn from(error: Error) -> Self {
        match error {
            Error::Driver { ordinal, .. } => Self::Device { ordinal, reason: error.to_string() },
            other => Self::Lost { reason: other.to_string() },
        }
    }
}
