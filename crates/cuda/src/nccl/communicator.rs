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
//! A thread of its own, [`Caller`], makes the calls. What they enqueued is done when the event
//! behind it on the stream is reached. `ncclCommAbort` ends kernels that wait for a dead peer: a
//! GPU never spins on.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    Communicator, Error as CollectiveError, Event, Operation, Result, Room, Token,
};

use super::caller::{Caller, Made, Queued};
use super::calls::{carries, does_float8};
use super::{Nccl, Stream, UniqueId};
use crate::Error;
use crate::ending::{ENDING, drain, wait_for};

/// The device's side of a communicator.
pub trait Lane: Send + Sync + 'static {
    /// Returns the device's number.
    fn ordinal(&self) -> u32;

    /// Returns the stream that gets the work.
    fn stream(&self) -> Stream;

    /// Returns an event after the work that was put there.
    ///
    /// # Errors
    /// `Device`.
    fn mark(&self) -> Result<Arc<dyn Event>>;

    /// Returns memory of the device, for later work of the stream.
    ///
    /// # Errors
    /// `Device`.
    fn room(&self, bytes: usize) -> Result<Arc<dyn Room>>;

    /// Does something while the device is the thread's current one.
    ///
    /// # Errors
    /// `Device`.
    fn with(&self, work: &mut dyn FnMut()) -> Result<()>;
}

/// Operations on the device at a time. The driver has room for some more; where it had none, calls
/// would wait for kernels.
const MOST: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Forming,
    Ready,
    Over,
}

/// Collectives among devices.
pub struct NcclCommunicator<L: Lane> {
    nccl: Nccl,
    lane: Arc<L>,
    caller: Caller,
    size: usize,
    member: usize,
    /// All members' devices have room for results whose size was unknown before.
    roomy: bool,
    /// All members' devices reduce floats of eight bits.
    float8: bool,
    state: State,
    /// Since when it is formed, called or waited for.
    since: Instant,
    /// The longest that may take.
    patience: Duration,
    waiting: VecDeque<Queued>,
    /// Operations that the caller has.
    handed: usize,
    running: VecDeque<Made>,
    /// Put on the stream, and not told yet.
    launched: Vec<(Token, Arc<dyn Event>)>,
    failure: Option<CollectiveError>,
    clock: fn() -> Instant,
}

impl<L: Lane> NcclCommunicator<L> {
    /// Begins to form a communicator of `size` members, which all call this with the same id.
    /// `patience` is how long forming it, and each operation, may take.
    ///
    /// # Errors
    /// `Lost`.
    pub fn form(
        nccl: Nccl,
        lane: L,
        id: UniqueId,
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Self> {
        Self::form_by(nccl, lane, id, place, patience, Instant::now)
    }

    pub(super) fn form_by(
        nccl: Nccl,
        lane: L,
        id: UniqueId,
        (member, size): (usize, usize),
        patience: Duration,
        clock: fn() -> Instant,
    ) -> Result<Self> {
        let lane = Arc::new(lane);
        let caller = Caller::new(nccl.clone(), Arc::clone(&lane), id, (member, size));
        let caller = caller.map_err(|error| {
            let reason = format!("device {}: there is no thread for NCCL: {error}", lane.ordinal());
            CollectiveError::Lost { reason }
        })?;
        Ok(Self {
            nccl,
            lane,
            caller,
            size,
            member,
            roomy: false,
            float8: false,
            state: State::Forming,
            since: clock(),
            patience,
            waiting: VecDeque::new(),
            handed: 0,
            running: VecDeque::new(),
            launched: Vec::new(),
            failure: None,
            clock,
        })
    }

    /// As one of which all members have a [`Lane::room`]: it carries gathers and exchanges, too.
    #[must_use]
    pub fn with_rooms(mut self) -> Self {
        self.roomy = true;
        self
    }

    /// As one of which all members register their [`super::NcclMemory`].
    #[must_use]
    pub fn with_registration(self) -> Self {
        self.caller.register();
        self
    }

    /// As one all of whose members' NCCL and GPUs reduce floats of eight bits.
    #[must_use]
    pub fn with_float8(mut self) -> Self {
        self.float8 = true;
        self
    }

    /// Returns whether NCCL does an operation among these members, if there is room for what it
    /// brings.
    fn does(&self, operation: &Operation) -> bool {
        let among = does_float8(operation, self.size).is_none_or(|does| self.float8 && does);
        among && carries(operation)
    }

    /// Ends everything, also kernels in progress, and remembers why.
    fn fail(&mut self, reason: &str) -> CollectiveError {
        self.end();
        let failure =
            CollectiveError::Lost { reason: format!("device {}: {reason}", self.lane.ordinal()) };
        self.failure.get_or_insert(failure).clone()
    }

    /// Afterwards nothing on the device touches a buffer.
    fn end(&mut self) {
        if self.state == State::Over {
            return;
        }
        self.state = State::Over;
        if let Some(comm) = self.caller.end(ENDING) {
            let abort = self.nccl.table().abort;
            // An abort is the only end that waits for no other member. There is nothing to do about
            // a failure.
            drop(self.lane.with(&mut || {
                // SAFETY: the communicator is ours and ends once.
                unsafe { abort(comm) };
            }));
            if self.handed > 0 || !self.running.is_empty() {
                self.quieten();
            }
        }
        drop(self.caller.news());
        self.handed = 0;
        self.waiting.clear();
        self.running.clear();
        self.launched.clear();
    }

    /// Waits until the work of the stream has ended: kernels continue for a while after the order
    /// to end, and `ncclCommAbort` may return before they have.
    fn quieten(&self) {
        let Ok(last) = self.lane.mark() else { return };
        // What failed touches nothing any more.
        wait_for(|| last.is_ready().unwrap_or(true));
    }

    /// Looks after what NCCL does; true when it has done something.
    fn settle(&mut self) -> Result<bool> {
        let called = self.state == State::Forming || self.handed > 0;
        let what = match self.state {
            State::Over => return Err(self.over()),
            State::Forming => "forming it",
            State::Ready if called => "starting an operation",
            State::Ready if self.running.is_empty() => return Ok(false),
            State::Ready => "an operation",
        };
        let moved = called && self.hear()?;
        // Two threads at a time may not ask.
        if self.state == State::Ready && self.handed == 0 {
            let status = self.nccl.status(self.caller.comm());
            if let Err(error) = self.nccl.check("a communicator of NCCL", status) {
                return Err(self.fail(&error.to_string()));
            }
        }
        let elapsed = (self.clock)().saturating_duration_since(self.since);
        if elapsed > self.patience {
            return Err(self.fail(&format!("{what} took longer than {:?}", self.patience)));
        }
        Ok(moved)
    }

    /// Takes what the caller has done; true when that is anything.
    fn hear(&mut self) -> Result<bool> {
        let news = self.caller.news();
        let formed = news.formed && self.state == State::Forming;
        let moved = formed || !news.made.is_empty();
        if formed {
            self.state = State::Ready;
        }
        // What the device has to do longer is late, however much comes after it.
        if formed || (moved && self.running.is_empty()) {
            self.since = (self.clock)();
        }
        for (token, event, operation) in news.made {
            self.handed -= 1;
            self.launched.push((token, Arc::clone(&event)));
            self.running.push_back((token, event, operation));
        }
        match news.failure {
            Some(reason) => Err(self.fail(&reason)),
            None => Ok(moved),
        }
    }

    /// Hands over what waits.
    fn start(&mut self) -> bool {
        let under_way = self.handed + self.running.len();
        let count = self.waiting.len().min(MOST.saturating_sub(under_way));
        if self.state != State::Ready || count == 0 {
            return false;
        }
        if under_way == 0 {
            self.since = (self.clock)();
        }
        self.handed += count;
        self.caller.hand(self.waiting.drain(..count));
        true
    }

    /// Returns whether the caller has nothing to do.
    #[cfg(test)]
    pub(super) fn is_called(&self) -> bool {
        self.state != State::Forming && self.handed == 0 && self.waiting.is_empty()
    }

    fn over(&self) -> CollectiveError {
        let ended = || CollectiveError::Lost { reason: "the communicator was given up".to_owned() };
        self.failure.clone().unwrap_or_else(ended)
    }
}

impl<L: Lane> Communicator for NcclCommunicator<L> {
    fn size(&self) -> usize {
        self.size
    }

    fn member(&self) -> usize {
        self.member
    }

    fn submit(&mut self, token: Token, operation: Operation) -> Result<()> {
        self.submit_after(token, operation, Vec::new())
    }

    fn carries(&self, operation: &Operation) -> bool {
        let gathers = matches!(operation, Operation::Allgather { .. } | Operation::Alltoall { .. });
        self.does(operation) && (self.roomy || !gathers)
    }

    fn room(&mut self, bytes: usize) -> Result<Arc<dyn Room>> {
        match self.state {
            State::Over => Err(self.over()),
            _ => self.lane.room(bytes),
        }
    }

    fn launched(&mut self, launched: &mut Vec<(Token, Arc<dyn Event>)>) {
        launched.append(&mut self.launched);
    }

    fn drain(&mut self, limit: Duration) {
        drain(self, limit);
    }

    fn submit_after(
        &mut self,
        token: Token,
        operation: Operation,
        events: Vec<Arc<dyn Event>>,
    ) -> Result<()> {
        if self.state == State::Over {
            return Err(self.over());
        }
        if !self.does(&operation) {
            let reason = "NCCL does not do this operation as it is defined".to_owned();
            return Err(CollectiveError::Shape { reason });
        }
        self.waiting.push_back((token, operation, events));
        Ok(())
    }

    fn progress(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        let mut moved = self.settle()?;
        moved |= self.start();
        while let Some((token, event, _)) = self.running.front() {
            let token = *token;
            match event.is_ready() {
                Ok(false) => break,
                Ok(true) => {}
                Err(error) => return Err(self.fail(&error.to_string())),
            }
            self.running.pop_front();
            self.since = (self.clock)();
            completed.push(token);
            moved = true;
        }
        Ok(moved)
    }

    fn abandon(&mut self) {
        if self.state != State::Over {
            self.fail("the operation was given up");
        }
    }

    fn pending(&self) -> usize {
        self.waiting.len() + self.handed + self.running.len()
    }
}

impl<L: Lane> Drop for NcclCommunicator<L> {
    fn drop(&mut self) {
        self.end();
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
