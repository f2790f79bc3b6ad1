// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator over NCCL that never blocks and never waits for ever.
//!
//! ```text
//!   Forming --all members came--> Ready --calls return late--> Calling --they are done--> Ready
//!      |                            |                             |
//!      +------ refusal, deadline, an error of the network, abandon: abort ------> Over
//! ```
//!
//! A group of calls is enqueued at a time; what it enqueued is done when the event behind it on the stream is reached.
//! `ncclCommAbort` ends kernels that wait for a dead peer: a GPU never spins on.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    Communicator, Error as CollectiveError, Event, Operation, Result, Room, Stream as Theirs, Token,
};

use super::calls::{Calls, carries};
use super::{Comm, IN_PROGRESS, Nccl, SUCCESS, Settings, Stream, UniqueId};
use crate::Error;

/// The device's side of a communicator.
pub trait Lane: Send {
    /// The device's number.
    fn ordinal(&self) -> u32;

    /// Where work is put.
    fn stream(&self) -> Stream;

    /// An event behind what was put there.
    ///
    /// # Errors
    /// `Device`.
    fn mark(&self) -> Result<Arc<dyn Event>>;

    /// Memory of the device, for what is put on the stream from now on.
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

/// An operation that was not started, and what it comes after.
type Queued = (Token, Operation, Vec<Arc<dyn Event>>);

/// Between two looks at what comes to its end.
const LOOK: Duration = Duration::from_micros(50);
/// The longest that kernels are waited for which were told to end. They take milliseconds, unless work of the framework
/// that they come after is not done yet.
const ENDING: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Forming,
    Ready,
    /// Calls for the token have not returned for good.
    Calling(Token),
    Over,
}

/// Collectives among devices.
pub struct NcclCommunicator<L: Lane> {
    nccl: Nccl,
    lane: L,
    comm: Comm,
    size: usize,
    member: usize,
    /// All members' devices have room for results whose size nobody knew before.
    roomy: bool,
    state: State,
    /// Since when it is formed, called or waited for.
    since: Instant,
    /// The longest that may take.
    patience: Duration,
    waiting: VecDeque<Queued>,
    running: VecDeque<(Token, Arc<dyn Event>, Operation)>,
    /// Put on the stream, and not told yet.
    launched: Vec<(Token, Arc<dyn Event>)>,
    /// Of the operation under way.
    calling: Option<Operation>,
    failure: Option<CollectiveError>,
    clock: fn() -> Instant,
}

// SAFETY: a communicator of NCCL may be used from any thread, by one at a time.
unsafe impl<L: Lane> Send for NcclCommunicator<L> {}

impl<L: Lane> NcclCommunicator<L> {
    /// Begins to form a communicator of `size` members, which all call this with the same id. `patience` is how long
    /// forming it, and each operation, may take.
    ///
    /// # Errors
    /// `Device`, `Lost`.
    pub fn form(
        nccl: Nccl,
        lane: L,
        id: UniqueId,
        (member, size): (usize, usize),
        patience: Duration,
    ) -> Result<Self> {
        Self::form_by(nccl, lane, id, (member, size), patience, Instant::now)
    }

    pub(super) fn form_by(
        nccl: Nccl,
        lane: L,
        id: UniqueId,
        (member, size): (usize, usize),
        patience: Duration,
        clock: fn() -> Instant,
    ) -> Result<Self> {
        let (mut comm, mut settings) = (null_mut(), Settings::non_blocking());
        let number = |value| i32::try_from(value).unwrap_or(i32::MAX);
        let (members, me) = (number(size), number(member));
        let mut status = SUCCESS;
        lane.with(&mut || {
            let init = nccl.table().init;
            // SAFETY: both places live across the call.
            status = unsafe { init(&raw mut comm, members, id, me, &raw mut settings) };
        })?;
        let mut communicator = Self {
            nccl,
            lane,
            comm,
            size,
            member,
            roomy: false,
            state: State::Forming,
            since: clock(),
            patience,
            waiting: VecDeque::new(),
            running: VecDeque::new(),
            launched: Vec::new(),
            calling: None,
            failure: None,
            clock,
        };
        let begun = communicator.nccl.check("ncclCommInitRankConfig", status);
        begun.map_err(|error| communicator.fail(&error.to_string()))?;
        Ok(communicator)
    }

    /// As one of which all members have a [`Lane::room`]: it carries gathers and exchanges, too.
    #[must_use]
    pub fn with_rooms(mut self) -> Self {
        self.roomy = true;
        self
    }

    /// Ends everything, also kernels under way, and remembers why.
    fn fail(&mut self, reason: &str) -> CollectiveError {
        self.end();
        let failure = CollectiveError::Lost { reason: format!("device {}: {reason}", self.lane.ordinal()) };
        self.failure.get_or_insert(failure).clone()
    }

    /// Afterwards nothing on the device touches a buffer.
    fn end(&mut self) {
        let comm = std::mem::replace(&mut self.comm, null_mut());
        if !comm.is_null() {
            let abort = self.nccl.table().abort;
            // To abort is the only end that waits for nobody. There is nothing to do about a failure.
            drop(self.lane.with(&mut || {
                // SAFETY: the communicator is ours and ends once.
                unsafe { abort(comm) };
            }));
            if self.calling.is_some() || !self.running.is_empty() {
                self.quieten();
            }
        }
        self.state = State::Over;
        self.waiting.clear();
        self.running.clear();
        self.launched.clear();
        self.calling = None;
    }

    /// Waits until what was put on the stream has ended: kernels go on for a while after they were told to, and where
    /// calls do not block, `ncclCommAbort` may return before they have.
    fn quieten(&self) {
        let Ok(last) = self.lane.mark() else { return };
        let began = Instant::now();
        // What failed touches nothing any more.
        while !last.is_ready().unwrap_or(true) && began.elapsed() < ENDING {
            std::thread::sleep(LOOK);
        }
    }

    /// What NCCL says of itself.
    fn status(&self) -> i32 {
        let mut status = SUCCESS;
        // SAFETY: the communicator is alive and the place, too.
        let asked = unsafe { (self.nccl.table().async_error)(self.comm, &raw mut status) };
        if asked == SUCCESS { status } else { asked }
    }

    /// Looks after what NCCL does; true when it has done something.
    fn settle(&mut self) -> Result<bool> {
        let what = match self.state {
            State::Over => return Err(self.over()),
            State::Forming => "forming it",
            State::Calling(_) => "starting an operation",
            State::Ready if self.running.is_empty() => return Ok(false),
            State::Ready => "an operation",
        };
        let status = self.status();
        if let Err(error) = self.nccl.check("a communicator of NCCL", status) {
            return Err(self.fail(&error.to_string()));
        }
        let elapsed = (self.clock)().saturating_duration_since(self.since);
        if elapsed > self.patience {
            return Err(self.fail(&format!("{what} took longer than {:?}", self.patience)));
        }
        match self.state {
            _ if status == IN_PROGRESS => Ok(false),
            State::Forming => {
                self.state = State::Ready;
                Ok(true)
            }
            State::Calling(token) => {
                self.called(token)?;
                Ok(true)
            }
            State::Ready | State::Over => Ok(false),
        }
    }

    /// The calls of an operation are on the stream.
    fn called(&mut self, token: Token) -> Result<()> {
        self.state = State::Ready;
        let event = self.lane.mark().map_err(|error| self.fail(&error.to_string()))?;
        if let Some(operation) = self.calling.take() {
            self.since = (self.clock)();
            self.launched.push((token, Arc::clone(&event)));
            self.running.push_back((token, event, operation));
        }
        Ok(())
    }

    /// Calls NCCL for what waits.
    fn start(&mut self) -> Result<bool> {
        let mut started = false;
        while self.state == State::Ready
            && let Some((token, operation, events)) = self.waiting.pop_front()
        {
            started = true;
            self.since = (self.clock)();
            // SAFETY: the lane's stream lives as long as the lane.
            let own = unsafe { Theirs::from_raw(self.lane.stream().expose_provenance()) };
            let held = events.iter().try_for_each(|event| event.hold(own));
            held.map_err(|error| self.fail(&error.to_string()))?;
            let mut late = Ok(false);
            let calls = Calls {
                nccl: &self.nccl,
                comm: self.comm,
                stream: self.lane.stream(),
                size: self.size,
                member: self.member,
            };
            let entered = self.lane.with(&mut || {
                // SAFETY: `submit` took buffers of this device, which their owners keep until the token completes.
                late = unsafe { calls.start(&operation) };
            });
            self.calling = Some(operation);
            let late =
                entered.map_err(|error| error.to_string()).and(late.map_err(|error| error.to_string()));
            match late {
                Err(reason) => return Err(self.fail(&reason)),
                Ok(true) => self.state = State::Calling(token),
                Ok(false) => self.called(token)?,
            }
        }
        Ok(started)
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
        carries(operation) && (self.roomy || !gathers)
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
        let (began, mut over) = (Instant::now(), Vec::new());
        while self.pending() > 0 && began.elapsed() < limit {
            match self.progress(&mut over) {
                Ok(true) => {}
                Ok(false) => std::thread::sleep(LOOK),
                Err(_) => return,
            }
        }
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
        if !carries(&operation) {
            let reason = "NCCL does not do this operation as it is defined".to_owned();
            return Err(CollectiveError::Shape { reason });
        }
        self.waiting.push_back((token, operation, events));
        Ok(())
    }

    fn progress(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        let mut moved = self.settle()?;
        moved |= self.start()?;
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
        self.waiting.len() + usize::from(self.calling.is_some()) + self.running.len()
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
