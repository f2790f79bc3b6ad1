// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Batches on their way through the communicator. Device memory is staged through the host around it:
//! wait for the inputs' events, copy in, run, copy out. Batches start strictly in list order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::{
    Buffer, Communicator, Device, Error as CollectiveError, Event, Memory, Operation, Place, Segment, Token,
};
use farandole_world::Rank;

use super::join::NOBODY;
use super::trace::Span;
use super::{Entry, Finished, ProcessSet, Shared, Step};
use crate::cache::Agreed;
use crate::signature::Call;
use crate::timeline::{MEMCPY_IN_HOST_BUFFER, MEMCPY_OUT_HOST_BUFFER, WAIT_FOR_DATA};
use crate::{Cause, Completion, Error};

/// A tensor in a batch.
struct Part {
    entry: Entry,
    agreed: Arc<Agreed>,
    /// What the communicator reads and writes.
    segment: Option<Segment>,
    /// Memory the engine allocated because the request brought no output.
    allocated: Option<Memory>,
    /// The output the request brought does not fit what the ranks agreed on.
    misfit: Option<Error>,
}

enum State {
    /// Inputs are not ready, or not copied.
    Loading(Vec<Box<dyn Event>>),
    Running,
    /// Outputs are not copied back.
    Storing(Vec<Box<dyn Event>>),
    Done,
}

struct Batch {
    list: u64,
    parts: Vec<Part>,
    state: State,
    loaded: bool,
    /// While somebody listens.
    span: Option<Span>,
}

/// The batches of a set.
pub(super) struct Execution {
    communicator: Option<Box<dyn Communicator>>,
    batches: VecDeque<Batch>,
    /// Batches at the front that the communicator has, or had.
    started: usize,
    /// Token of the first batch.
    first: u64,
    tokens: Vec<Token>,
    /// The communicator failed, or is not used any more.
    pub(super) broken: bool,
}

impl Execution {
    pub(super) fn new(communicator: Box<dyn Communicator>) -> Self {
        Self {
            communicator: Some(communicator),
            batches: VecDeque::new(),
            started: 0,
            first: 0,
            tokens: Vec::new(),
            broken: false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// Lists of which something is left.
    pub(super) fn lists(&self) -> u64 {
        match (self.batches.front(), self.batches.back()) {
            (Some(front), Some(back)) => back.list - front.list + 1,
            _ => 0,
        }
    }

    /// The oldest list of which something is left.
    pub(super) fn oldest_list(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.list)
    }

    pub(super) fn push(&mut self, list: u64, entries: Vec<(Entry, Arc<Agreed>)>, span: Option<Span>) {
        let part = |(entry, agreed)| Part { entry, agreed, segment: None, allocated: None, misfit: None };
        let parts = entries.into_iter().map(part).collect();
        self.batches.push_back(Batch { list, parts, state: State::Loading(Vec::new()), loaded: false, span });
    }

    /// Requests of which something is left.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.batches.iter().flat_map(|batch| &batch.parts).map(|part| &part.entry)
    }

    /// The request that has waited longest.
    pub(super) fn oldest(&self) -> Option<&Entry> {
        self.entries().min_by_key(|entry| entry.since)
    }

    /// Closes the communicator's links.
    pub(super) fn end(&mut self) {
        self.communicator = None;
    }

    /// Fails the batches. The communicator gives them up, so nobody touches their buffers any more.
    pub(super) fn fail(&mut self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        self.broken = true;
        self.started = 0;
        if let Some(communicator) = &mut self.communicator {
            communicator.abandon();
        }
        for part in self.batches.drain(..).flat_map(|batch| batch.parts) {
            let result = Err(part.entry.failed(cause));
            finished.push(Finished { handle: part.entry.handle, name: part.entry.name, result });
        }
    }
}

impl ProcessSet {
    pub(super) fn execute(&mut self, now: Instant, finished: &mut Vec<Finished>) -> Step<bool> {
        if self.execution.batches.is_empty() || self.execution.broken {
            return Ok(false);
        }
        let mut moved = self.execution.start(&self.options, &self.members, finished)?;
        match self.execution.progress() {
            Ok(progressed) => moved |= progressed,
            Err(error @ CollectiveError::Transport(_)) => {
                self.execution.broken = true;
                self.suspect.get_or_insert((now, error.into()));
            }
            Err(error) => return Err(error.into()),
        }
        moved |= self.execution.finish(&self.options, finished)?;
        Ok(moved)
    }
}

impl Execution {
    /// Hands batches to the communicator, in order, as far as their inputs are there.
    fn start(&mut self, shared: &Shared, members: &[Rank], finished: &mut Vec<Finished>) -> Step<bool> {
        let before = self.started;
        let place = self.communicator.as_ref().map_or((0, 1), |all| (all.member(), all.size()));
        while let Some(batch) = self.batches.get_mut(self.started) {
            if !batch.load(shared, place)? {
                let copies = batch.loaded;
                batch.enter(if copies { MEMCPY_IN_HOST_BUFFER } else { WAIT_FOR_DATA });
                break;
            }
            let token = Token(self.first + self.started as u64);
            self.started += 1;
            let Some(communicator) = &mut self.communicator else { break };
            let operation = batch.operation(members, communicator.member());
            match communicator.submit(token, operation) {
                Ok(()) => {
                    batch.state = State::Running;
                    if let Some(span) = &mut batch.span {
                        span.transfer();
                    }
                }
                Err(cause @ CollectiveError::Unsupported { .. }) => batch.refuse(&Arc::new(cause), finished),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.started > before)
    }

    fn progress(&mut self) -> Result<bool, CollectiveError> {
        let Some(communicator) = &mut self.communicator else { return Ok(false) };
        if communicator.pending() == 0 {
            return Ok(false);
        }
        let moved = communicator.progress(&mut self.tokens)?;
        for token in self.tokens.drain(..) {
            let batch = token.0.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
            if let Some(batch) = batch.and_then(|index| self.batches.get_mut(index)) {
                batch.state = State::Storing(Vec::new());
                batch.loaded = false;
            }
        }
        Ok(moved)
    }

    /// Completes what the communicator is done with.
    fn finish(&mut self, shared: &Shared, finished: &mut Vec<Finished>) -> Step<bool> {
        let mut moved = false;
        let me = self.communicator.as_ref().map_or(0, |all| all.member());
        for batch in self.batches.iter_mut().take(self.started) {
            if batch.store(shared)? {
                moved = true;
                batch.state = State::Done;
                let completed = batch.parts.drain(..).map(|part| part.completed(me));
                finished.extend(completed.filter(|done| done.handle != NOBODY));
                if let Some(span) = batch.span.take() {
                    span.complete();
                }
            } else if matches!(batch.state, State::Storing(_)) {
                batch.enter(MEMCPY_OUT_HOST_BUFFER);
            }
        }
        while self.batches.front().is_some_and(|batch| matches!(batch.state, State::Done)) {
            self.batches.pop_front();
            self.started -= 1;
            self.first += 1;
        }
        Ok(moved)
    }
}

fn all_ready(events: &mut Vec<Box<dyn Event>>) -> Result<bool, CollectiveError> {
    while let Some(event) = events.last() {
        if !event.is_ready()? {
            return Ok(false);
        }
        events.pop();
    }
    Ok(true)
}

impl Batch {
    /// Whether all inputs are where the communicator can read them; starts the copies that are missing.
    fn load(&mut self, shared: &Shared, (me, members): (usize, usize)) -> Step<bool> {
        for part in &mut self.parts {
            if let Some(event) = &part.entry.ready {
                if !event.is_ready()? {
                    return Ok(false);
                }
                part.entry.ready = None;
            }
        }
        let State::Loading(events) = &mut self.state else { return Ok(true) };
        if !self.loaded {
            self.loaded = true;
            for part in &mut self.parts {
                events.extend(part.load(shared, me, members)?);
            }
        }
        Ok(all_ready(events)?)
    }

    fn enter(&mut self, activity: &'static str) {
        if let Some(span) = &mut self.span {
            span.enter(activity);
        }
    }

    /// Whether all outputs are where they belong; starts the copies that are missing.
    fn store(&mut self, shared: &Shared) -> Step<bool> {
        let State::Storing(events) = &mut self.state else { return Ok(false) };
        if !self.loaded {
            self.loaded = true;
            for part in &self.parts {
                events.extend(part.store(shared)?);
            }
        }
        Ok(all_ready(events)?)
    }

    fn operation(&mut self, members: &[Rank], me: usize) -> Operation {
        let mut segments: Vec<Segment> =
            self.parts.iter_mut().filter_map(|part| part.segment.take()).collect();
        let Some(first) = self.parts.first() else { return Operation::Barrier };
        let signature = &first.agreed.signature;
        match signature.call {
            Call::Allreduce { op, prescale, postscale } => Operation::Allreduce {
                dtype: signature.dtype,
                op,
                prescale: f64::from_bits(prescale),
                postscale: f64::from_bits(postscale),
                segments,
            },
            Call::Broadcast { root } => {
                let root = members.iter().position(|rank| rank.0 == root).unwrap_or_default();
                Operation::Broadcast { root, segments }
            }
            Call::Allgather => {
                let bytes = self.parts.iter().map(|part| bytes_by_member(&part.agreed)).collect();
                Operation::Allgather { segments, bytes }
            }
            Call::Alltoall { .. } => {
                let Some(segment) = segments.pop() else { return Operation::Barrier };
                let agreed = &first.agreed;
                let sends = sent(agreed, me).map(|rows| bytes_of(agreed, rows)).collect();
                let receives = received(agreed, me).map(|rows| bytes_of(agreed, rows)).collect();
                Operation::Alltoall { segment, sends, receives }
            }
            Call::Reducescatter { op, prescale, postscale } => {
                let parts = |part: &Part| {
                    let rows = (0..members.len()).map(|member| own_rows(&part.agreed, member, members.len()));
                    let unit = part.agreed.signature.row_bytes();
                    rows.map(|rows| to_usize(rows.saturating_mul(unit))).collect()
                };
                Operation::Reducescatter {
                    dtype: signature.dtype,
                    op,
                    prescale: f64::from_bits(prescale),
                    postscale: f64::from_bits(postscale),
                    bytes: self.parts.iter().map(parts).collect(),
                    segments,
                }
            }
            Call::Barrier | Call::Change(_) | Call::Join { .. } => Operation::Barrier,
        }
    }

    fn refuse(&mut self, cause: &Arc<CollectiveError>, finished: &mut Vec<Finished>) {
        self.state = State::Done;
        for part in self.parts.drain(..) {
            let Entry { handle, name, operation, .. } = part.entry;
            let error = Error::Unsupported { operation, tensor: Arc::clone(&name), cause: Arc::clone(cause) };
            finished.push(Finished { handle, name, result: Err(error) });
        }
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn bytes_of(agreed: &Agreed, rows: u64) -> usize {
    to_usize(rows.saturating_mul(agreed.signature.unit_bytes()))
}

fn bytes_by_member(agreed: &Agreed) -> Vec<usize> {
    agreed.rows.iter().map(|rows| bytes_of(agreed, *rows)).collect()
}

/// Rows that `me` sends to each member in an alltoall.
fn sent(agreed: &Agreed, me: usize) -> impl Iterator<Item = u64> + '_ {
    let members = agreed.signature.call.counts();
    agreed.rows.iter().skip(me * members).take(members).copied()
}

/// Rows that `me` receives from each member in an alltoall.
fn received(agreed: &Agreed, me: usize) -> impl Iterator<Item = u64> + '_ {
    agreed.rows.iter().skip(me).step_by(agreed.signature.call.counts().max(1)).copied()
}

/// Rows of a reducescatter's result that `member` of so many gets.
fn own_rows(agreed: &Agreed, member: usize, members: usize) -> u64 {
    let rows = agreed.signature.shape.first().copied().unwrap_or_default();
    share_of(rows, member, members)
}

/// Rows dealt out evenly, what is left over to the first.
pub(crate) fn share_of(rows: u64, member: usize, members: usize) -> u64 {
    let (member, members) = (member as u64, members.max(1) as u64);
    rows / members + u64::from(member < rows % members)
}

/// The device a buffer is on.
fn device(shared: &Shared, buffer: &Buffer) -> Result<Option<Arc<dyn Device>>, CollectiveError> {
    let Place::Device(ordinal) = buffer.place() else { return Ok(None) };
    let device = shared.devices.iter().find(|device| device.ordinal() == ordinal);
    let unknown = || CollectiveError::Device { ordinal, reason: "the engine was not given it".to_owned() };
    device.cloned().map(Some).ok_or_else(unknown)
}

impl Part {
    /// Prepares the segment; the copy of a device's input is under way afterwards.
    fn load(
        &mut self,
        shared: &Shared,
        me: usize,
        members: usize,
    ) -> Result<Option<Box<dyn Event>>, CollectiveError> {
        let call = self.agreed.signature.call;
        if call.is_meeting() {
            return Ok(None);
        }
        let (input, copy) = match device(shared, &self.entry.input)? {
            None => (self.entry.input.clone(), None),
            Some(device) => {
                let staging = device.staging(self.entry.input.len())?.buffer();
                let copy = device.copy(&self.entry.input, &staging)?;
                (staging, Some(copy))
            }
        };
        let bytes = match call {
            Call::Allgather => bytes_by_member(&self.agreed).iter().sum(),
            Call::Alltoall { .. } => bytes_of(&self.agreed, received(&self.agreed, me).sum()),
            Call::Reducescatter { .. } => {
                let rows = own_rows(&self.agreed, me, members);
                to_usize(rows.saturating_mul(self.agreed.signature.row_bytes()))
            }
            _ => input.len(),
        };
        let output = self.output(shared, bytes)?;
        self.segment = Some(Segment { input, output });
        Ok(copy)
    }

    /// Where the communicator writes: the request's own memory if it is on the host and fits.
    fn output(&mut self, shared: &Shared, bytes: usize) -> Result<Buffer, CollectiveError> {
        let memory = match &self.entry.output {
            Some(output) if output.len() != bytes => {
                self.misfit = Some(Error::BufferSize {
                    which: "output",
                    tensor: Arc::clone(&self.entry.name),
                    expected: bytes as u64,
                    actual: output.len() as u64,
                });
                Memory::new(bytes)
            }
            Some(output) => match device(shared, output)? {
                None => return Ok(output.clone()),
                Some(device) => device.staging(bytes)?,
            },
            None => Memory::new(bytes),
        };
        let buffer = memory.buffer();
        self.allocated = Some(memory);
        Ok(buffer)
    }

    /// Starts the copy back to a device.
    fn store(&self, shared: &Shared) -> Result<Option<Box<dyn Event>>, CollectiveError> {
        let (Some(output), Some(memory), None) = (&self.entry.output, &self.allocated, &self.misfit) else {
            return Ok(None);
        };
        match device(shared, output)? {
            Some(device) => device.copy(&memory.buffer(), output).map(Some),
            None => Ok(None),
        }
    }

    fn completed(self, me: usize) -> Finished {
        let Entry { handle, name, output, .. } = self.entry;
        let rows = match self.agreed.signature.call {
            Call::Allgather => self.agreed.rows.clone(),
            Call::Alltoall { .. } => received(&self.agreed, me).collect(),
            _ => Vec::new(),
        };
        let result = match self.misfit {
            Some(error) => Err(error),
            None => Ok(Completion { output: self.allocated.filter(|_| output.is_none()), rows, last: None }),
        };
        Finished { handle, name, result }
    }
}
