// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A batch: tensors that go through a communicator as one operation, and what is done to device
//! memory before and after.
//!
//! Data on a device goes through the host as one block of staging memory, in pieces: while one is
//! reduced, the next is copied in and the last one out. A result is handed over when its way back
//! is queued: the framework's stream waits for that, not the host.

use std::sync::Arc;

use farandole_collectives::{
    Buffer, Communicator, Error as CollectiveError, Event, Memory, Operation, Place, ReduceOp,
    Room, Segment,
};
use farandole_world::Rank;

use super::join::NOBODY;
use super::share_of;
use super::trace::Span;
use super::{Entry, Finished, Shared, Step};
use crate::cache::Agreed;
use crate::signature::{Call, Signature, Site};
use crate::{Cause, Completion, Error};

/// Bytes of device memory that go through the host at a time: long enough for a link to the device,
/// and short enough to stay in the cache.
pub(super) const PIECE: usize = 4 << 20;

/// A tensor in a batch, or a part of one.
pub(super) struct Part {
    /// With the last part of a tensor.
    entry: Option<Entry>,
    agreed: Arc<Agreed>,
    input: Buffer,
    output: Option<Buffer>,
    /// Work on the device that comes before.
    ready: Option<Arc<dyn Event>>,
    /// The memory that the communicator reads and writes.
    segment: Option<Segment>,
    /// Memory of the engine's that the communicator writes.
    allocated: Option<Memory>,
    /// Memory of a device that the communicator writes.
    room: Option<Arc<dyn Room>>,
    /// The output the request brought does not fit what the ranks agreed on.
    misfit: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Inputs are not ready, or not copied.
    Loading,
    /// The communicator has it.
    Running,
    Done,
}

/// The communicator of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Not decided: its turn has not come.
    Open,
    /// The communicator of hosts.
    Host,
    /// The communicator among devices.
    Device,
}

pub(super) struct Batch {
    pub(super) list: u64,
    parts: Vec<Part>,
    pub(super) state: State,
    pub(super) route: Route,
    /// It continues where the one before has ended: both are pieces of one operation.
    pub(super) follows: bool,
    /// Copies of inputs were begun.
    loading: bool,
    copies: Vec<Arc<dyn Event>>,
    /// Staging memory that all parts are in.
    block: Option<Memory>,
    /// While there is a listener.
    pub(super) span: Option<Span>,
}

impl Batch {
    pub(super) fn new(list: u64, entries: Vec<(Entry, Arc<Agreed>)>, span: Option<Span>) -> Self {
        let part = |(mut entry, agreed): (Entry, Arc<Agreed>)| Part {
            input: entry.input.clone(),
            output: entry.output.clone(),
            ready: entry.ready.take(),
            entry: Some(entry),
            agreed,
            segment: None,
            allocated: None,
            room: None,
            misfit: None,
        };
        Self::of(list, entries.into_iter().map(part).collect(), span)
    }

    fn of(list: u64, parts: Vec<Part>, span: Option<Span>) -> Self {
        Self {
            list,
            parts,
            state: State::Loading,
            route: Route::Open,
            follows: false,
            loading: false,
            copies: Vec::new(),
            block: None,
            span,
        }
    }

    /// Requests of which something is left.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.parts.iter().filter_map(|part| part.entry.as_ref())
    }

    /// Takes the requests out.
    pub(super) fn into_entries(self) -> impl Iterator<Item = Entry> {
        self.parts.into_iter().filter_map(|part| part.entry)
    }

    fn signature(&self) -> Option<&Signature> {
        self.parts.first().map(|part| &part.agreed.signature)
    }

    /// An alltoall whose rows are not known, and the rows that this member sends.
    pub(super) fn undealt(&self) -> Option<(&Arc<Agreed>, &[u64])> {
        let part = self.parts.first().filter(|part| part.agreed.is_undealt())?;
        Some((&part.agreed, &part.entry.as_ref()?.rows))
    }

    /// Returns whether some rank's tensors are on a device.
    pub(super) fn is_staged(&self) -> bool {
        self.signature().is_some_and(|signature| signature.site != Site::Host)
    }

    /// Returns whether all ranks' tensors are on devices, what they read and what they write.
    fn is_on_devices(&self) -> bool {
        self.signature().is_some_and(|signature| signature.site == Site::Device)
    }

    /// Returns whether a communicator among devices could run it.
    pub(super) fn is_for_devices(&self) -> bool {
        self.signature()
            .is_some_and(|signature| !signature.call.is_meeting() && self.is_on_devices())
    }

    /// Returns whether it is a device that it waits for.
    pub(super) fn waits_for_device(&self) -> bool {
        let under_way = self.state == State::Loading || self.route == Route::Device;
        under_way && self.state != State::Done && self.is_staged()
    }

    /// Returns whether it holds staging memory.
    pub(super) fn holds_memory(&self) -> bool {
        self.block.is_some() && self.state != State::Done
    }

    /// Returns whether its tensors are reduced or spread element by element, so that it may be cut
    /// anywhere.
    fn is_elementwise(&self) -> bool {
        self.signature().is_some_and(|signature| match signature.call {
            Call::Allreduce { op, .. } => op != ReduceOp::Adasum,
            Call::Broadcast { .. } => true,
            _ => false,
        })
    }

    /// The same in pieces of about so many bytes; itself where it is small, or whole. All members
    /// cut alike.
    pub(super) fn cut(mut self, bytes: usize) -> Vec<Self> {
        let total: usize = self.parts.iter().map(|part| part.input.len()).sum();
        if !self.is_on_devices() || !self.is_elementwise() || total <= bytes {
            return vec![self];
        }
        let (list, span) = (self.list, self.span.take());
        let mut pieces: Vec<Self> = Vec::with_capacity(total.div_ceil(bytes));
        let mut room = 0;
        for part in std::mem::take(&mut self.parts) {
            for part in part.cut(&mut room, bytes) {
                let (starts, part) = part;
                if starts || pieces.is_empty() {
                    let mut piece = Self::of(list, Vec::new(), None);
                    piece.follows = !pieces.is_empty();
                    pieces.push(piece);
                }
                if let Some(piece) = pieces.last_mut() {
                    piece.parts.push(part);
                }
            }
        }
        if let Some(last) = pieces.last_mut() {
            last.span = span;
        }
        pieces
    }

    /// Returns whether all inputs are where the communicator can read them; starts the copies that
    /// are missing.
    pub(super) fn load(&mut self, shared: &Shared, place: (usize, usize)) -> Step<bool> {
        for part in &mut self.parts {
            if let Some(event) = &part.ready {
                if !event.is_ready()? {
                    return Ok(false);
                }
                part.ready = None;
            }
        }
        if !self.loading {
            self.loading = true;
            self.begin(shared, place)?;
        }
        while let Some(copy) = self.copies.last() {
            if !copy.is_ready()? {
                return Ok(false);
            }
            self.copies.pop();
        }
        Ok(true)
    }

    /// Returns whether copies are in progress, and not the framework's own work.
    pub(super) fn is_copying(&self) -> bool {
        self.loading
    }

    fn begin(
        &mut self,
        shared: &Shared,
        (me, members): (usize, usize),
    ) -> Result<(), CollectiveError> {
        if !self.is_on_devices() || !self.is_elementwise() {
            for part in &mut self.parts {
                self.copies.extend(part.load(shared, me, members)?);
            }
            return Ok(());
        }
        let total: usize = self.parts.iter().map(|part| part.input.len()).sum();
        let Some(device) =
            self.parts.first().map(|part| shared.devices.of(&part.input)).transpose()?.flatten()
        else {
            return Err(CollectiveError::Shape {
                reason: "a tensor on a device is on the host".to_owned(),
            });
        };
        let block = device.staging(total)?;
        if total > 0 && self.sender().is_none_or(|root| root == shared.world.rank) {
            let pairs = self.pairs(&block, |part| Some(part.input.clone()));
            let pairs: Vec<_> =
                pairs.into_iter().map(|(memory, tensor)| (tensor, memory)).collect();
            self.copies.push(device.copy_all(&pairs)?);
        }
        let segment = block.buffer().slice(0, total);
        if let Some(part) = self.parts.first_mut() {
            part.segment = Some(Segment { input: segment.clone(), output: segment });
        }
        self.block = Some(block);
        Ok(())
    }

    /// Places in the block, and the tensors that belong there.
    fn pairs(
        &self,
        block: &Memory,
        tensor: impl Fn(&Part) -> Option<Buffer>,
    ) -> Vec<(Buffer, Buffer)> {
        let (all, mut at) = (block.buffer(), 0);
        let mut pairs = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let place = all.slice(at, part.input.len());
            at += part.input.len();
            if let Some(tensor) = tensor(part).filter(|tensor| !tensor.is_empty()) {
                pairs.push((place, tensor));
            }
        }
        pairs
    }

    /// Starts the copies of results to where they belong: what comes after them, if there are any.
    pub(super) fn store(
        &mut self,
        shared: &Shared,
    ) -> Result<Option<Arc<dyn Event>>, CollectiveError> {
        let Some(block) = self.block.take() else {
            let pairs: Vec<_> = self.parts.iter().filter_map(Part::stored).collect();
            let mut last = None;
            // All to a device at once: with several events, those without a receiver would have to
            // be waited for.
            for pairs in pairs.chunk_by(|(_, one), (_, other)| one.place() == other.place()) {
                if let Some((_, tensor)) = pairs.first()
                    && let Some(device) = shared.devices.of(tensor)?
                {
                    last = Some(device.copy_all(pairs)?);
                }
            }
            return Ok(last);
        };
        let own = self.sender() == Some(shared.world.rank);
        // What a root has sent from its output is there.
        let sent = |part: &Part, output: &Buffer| own && output.address() == part.input.address();
        let pairs =
            self.pairs(&block, |part| part.output.clone().filter(|output| !sent(part, output)));
        let Some((_, tensor)) = pairs.first() else { return Ok(None) };
        let Some(device) = shared.devices.of(tensor)? else { return Ok(None) };
        device.copy_all(&pairs).map(Some)
    }

    /// For a communicator among devices: the operation on the tensors themselves, and what it comes
    /// after.
    ///
    /// # Errors
    /// `Device` if there is no room for a result without memory of the caller.
    pub(super) fn launch(
        &mut self,
        members: &[Rank],
        me: usize,
        communicator: &mut dyn Communicator,
    ) -> Result<(Operation, Vec<Arc<dyn Event>>), CollectiveError> {
        let mut events: Vec<Arc<dyn Event>> = Vec::new();
        for part in &mut self.parts {
            if let Some(event) = part.ready.take()
                && !events.iter().any(|other| Arc::ptr_eq(other, &event))
            {
                events.push(event);
            }
            let output = part.prepare_room(me, members.len(), communicator)?;
            part.segment = Some(Segment { input: part.input.clone(), output });
        }
        Ok((self.operation(members), events))
    }

    /// The operation, without tensors.
    pub(super) fn outline(&self, members: &[Rank]) -> Operation {
        self.operation_on(Vec::new(), members)
    }

    pub(super) fn operation(&mut self, members: &[Rank]) -> Operation {
        let segments = self.parts.iter_mut().filter_map(|part| part.segment.take()).collect();
        self.operation_on(segments, members)
    }

    fn operation_on(&self, mut segments: Vec<Segment>, members: &[Rank]) -> Operation {
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
                let nothing = || Memory::new(0).buffer();
                let outline = || Segment { input: nothing(), output: nothing() };
                let segment = segments.pop().unwrap_or_else(outline);
                let agreed = &first.agreed;
                let blocks =
                    |rows: &[u64]| rows.iter().map(|rows| bytes_of(agreed, *rows)).collect();
                let (sends, receives) = (blocks(agreed.sends()), blocks(agreed.receives()));
                Operation::Alltoall { segment, sends, receives }
            }
            Call::Reducescatter { op, prescale, postscale } => {
                let parts = |part: &Part| {
                    let rows = (0..members.len())
                        .map(|member| own_rows(&part.agreed, member, members.len()));
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

    /// The sender, in a broadcast.
    fn sender(&self) -> Option<Rank> {
        match self.signature().map(|signature| signature.call) {
            Some(Call::Broadcast { root }) => Some(Rank(root)),
            _ => None,
        }
    }

    /// A communicator has it.
    pub(super) fn run(&mut self) {
        self.state = State::Running;
        if let Some(span) = &mut self.span {
            span.transfer();
        }
    }

    pub(super) fn enter(&mut self, activity: &'static str) {
        if let Some(span) = &mut self.span {
            span.enter(activity);
        }
    }

    /// Hands the results over, which are there when `reached` is.
    pub(super) fn complete(
        &mut self,
        reached: Option<&Arc<dyn Event>>,
        finished: &mut Vec<Finished>,
    ) {
        self.state = State::Done;
        self.block = None;
        let completed = self.parts.drain(..).filter_map(|part| part.completed(reached));
        finished.extend(completed.filter(|done| done.handle != NOBODY));
        if let Some(span) = self.span.take() {
            span.complete();
        }
    }

    pub(super) fn refuse(&mut self, cause: &Arc<CollectiveError>, finished: &mut Vec<Finished>) {
        self.state = State::Done;
        self.block = None;
        for Entry { handle, name, operation, .. } in
            self.parts.drain(..).filter_map(|part| part.entry)
        {
            let error = Error::Unsupported {
                operation,
                tensor: Arc::clone(&name),
                cause: Arc::clone(cause),
            };
            finished.push(Finished { handle, name, result: Err(error) });
        }
    }

    pub(super) fn fail(self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        for entry in self.into_entries() {
            let result = Err(entry.failed(cause));
            finished.push(Finished { handle: entry.handle, name: entry.name, result });
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

/// Rows of a reducescatter's result that `member` of so many gets.
fn own_rows(agreed: &Agreed, member: usize, members: usize) -> u64 {
    let rows = agreed.signature.shape.first().copied().unwrap_or_default();
    share_of(rows, member, members)
}

impl Part {
    /// The parts that go into what has `room` left and into new pieces, and whether each begins
    /// one.
    fn cut(self, room: &mut usize, bytes: usize) -> Vec<(bool, Self)> {
        let size = self.agreed.signature.dtype.size().max(1);
        let whole = (bytes / size).max(1) * size;
        let (total, mut at) = (self.input.len(), 0);
        let mut all = Vec::new();
        let Self { mut entry, agreed, input, output, ready, .. } = self;
        loop {
            let starts = *room == 0;
            if starts {
                *room = whole;
            }
            let taken = (*room).min(total - at);
            *room -= taken;
            let last = at + taken == total;
            all.push((
                starts,
                Self {
                    entry: if last { entry.take() } else { None },
                    agreed: Arc::clone(&agreed),
                    input: input.slice(at, taken),
                    output: output.as_ref().map(|output| output.slice(at, taken)),
                    // Pieces are copied in ahead of their turn: each must know when it may be.
                    ready: ready.clone(),
                    segment: None,
                    allocated: None,
                    room: None,
                    misfit: None,
                },
            ));
            at += taken;
            if last {
                return all;
            }
        }
    }

    /// Prepares the segment; the copy of a device's input is in progress afterwards.
    fn load(
        &mut self,
        shared: &Shared,
        me: usize,
        members: usize,
    ) -> Result<Option<Arc<dyn Event>>, CollectiveError> {
        let call = self.agreed.signature.call;
        if call.is_meeting() {
            return Ok(None);
        }
        let (input, copy) = match shared.devices.of(&self.input)? {
            None => (self.input.clone(), None),
            Some(device) => {
                let staging = device.staging(self.input.len())?.buffer().slice(0, self.input.len());
                let copy = match self.input.is_empty() {
                    true => None,
                    false => Some(device.copy(&self.input, &staging)?),
                };
                (staging, copy)
            }
        };
        let output = self.prepare(shared, self.result_bytes(me, members))?;
        self.segment = Some(Segment { input, output });
        Ok(copy)
    }

    fn result_bytes(&self, me: usize, members: usize) -> usize {
        match self.agreed.signature.call {
            Call::Allgather => bytes_by_member(&self.agreed).iter().sum(),
            Call::Alltoall { .. } => bytes_of(
                &self.agreed,
                self.agreed.receives().iter().fold(0, |sum, rows| rows.saturating_add(sum)),
            ),
            Call::Reducescatter { .. } => {
                let rows = own_rows(&self.agreed, me, members);
                to_usize(rows.saturating_mul(self.agreed.signature.row_bytes()))
            }
            _ => self.input.len(),
        }
    }

    /// Notes an output of the request's that does not fit the result; others get theirs all the
    /// same.
    fn note_misfit(&mut self, bytes: usize) {
        if let Some(output) = self.output.as_ref().filter(|output| output.len() != bytes) {
            self.misfit = Some(Error::BufferSize {
                which: "output",
                tensor: Arc::clone(&self.agreed.name),
                expected: bytes as u64,
                actual: output.len() as u64,
            });
        }
    }

    /// Returns the memory that a communicator among devices writes: the request's own memory if it
    /// brought some that fits.
    fn prepare_room(
        &mut self,
        me: usize,
        members: usize,
        communicator: &mut dyn Communicator,
    ) -> Result<Buffer, CollectiveError> {
        let bytes = self.result_bytes(me, members);
        self.note_misfit(bytes);
        match &self.output {
            Some(output) if self.misfit.is_none() => Ok(output.clone()),
            _ if bytes == 0 => Ok(self.allocated.insert(Memory::new(0)).buffer()),
            _ => {
                let room = communicator.room(bytes)?;
                Ok(self.room.insert(room).buffer())
            }
        }
    }

    /// Returns the memory that the communicator of hosts writes: the request's own memory if it is
    /// on the host and fits.
    fn prepare(&mut self, shared: &Shared, bytes: usize) -> Result<Buffer, CollectiveError> {
        self.note_misfit(bytes);
        let memory = match &self.output {
            Some(_) if self.misfit.is_some() => Memory::new(bytes),
            Some(output) => match shared.devices.of(output)? {
                None => return Ok(output.clone()),
                Some(device) => device.staging(bytes)?,
            },
            None => Memory::new(bytes),
        };
        let buffer = memory.buffer().slice(0, bytes);
        self.allocated = Some(memory);
        Ok(buffer)
    }

    /// The memory to copy back to a device, and its target.
    fn stored(&self) -> Option<(Buffer, Buffer)> {
        let (Some(output), Some(memory), None) = (&self.output, &self.allocated, &self.misfit)
        else {
            return None;
        };
        let there = output.place() != Place::Host && !output.is_empty();
        there.then(|| (memory.buffer().slice(0, output.len()), output.clone()))
    }

    fn completed(self, reached: Option<&Arc<dyn Event>>) -> Option<Finished> {
        let Entry { handle, name, .. } = self.entry?;
        let rows = match self.agreed.signature.call {
            Call::Allgather => self.agreed.rows.clone(),
            Call::Alltoall { .. } => self.agreed.receives().to_vec(),
            _ => Vec::new(),
        };
        let result = match self.misfit {
            Some(error) => Err(error),
            None => {
                let written =
                    self.output.as_ref().is_some_and(|output| output.place() != Place::Host);
                let on_device = written || self.room.is_some();
                Ok(Completion {
                    output: self.allocated.filter(|_| self.output.is_none()),
                    room: self.room.filter(|_| self.output.is_none()),
                    rows,
                    last: None,
                    reached: reached.filter(|_| on_device).map(Arc::clone),
                })
            }
        };
        Some(Finished { handle, name, result })
    }
}
