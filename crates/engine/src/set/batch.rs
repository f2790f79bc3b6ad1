// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A fused batch: tensors that a communicator handles as one operation, and the copies from and to
//! device memory before and after it.
//!
//! Data on a device goes through the host in one block of staging memory, split into pieces: while
//! one piece is reduced, the next one is copied in and the previous one is copied out. A result is
//! completed when its copy to the device is queued: the framework's stream waits for the copy, the
//! host does not.

use std::sync::Arc;

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceEvent, Error as CollectiveError, ResultMemory,
    TensorSegment,
};
use farandole_kernels::{Buffer, HostMemory, MemoryKind, ReduceOp};
use farandole_negotiation::{CachedResponse, CollectiveCall, MemorySite, RequestSignature};
use farandole_world::Rank;

use super::local_requests::{FinishedRequest, NO_HANDLE, PendingEntry};
use super::operation_trace::BatchSpan;
use super::set_scope::SetScope;
use crate::error::StepResult;
use crate::{Error, RequestCompletion, StopCause};

/// Size in bytes of a piece of device memory in staging memory: large enough for the link to the
/// device, and small enough to stay in the processor cache.
pub(super) const STAGING_PIECE_BYTES: usize = 4 << 20;

/// A tensor in a batch, or a part of one.
pub(super) struct BatchPart {
    /// The request, in the last part of its tensor only.
    entry: Option<PendingEntry>,
    agreed: Arc<CachedResponse>,
    input: Buffer,
    output: Option<Buffer>,
    /// Work on the device that must end before the input is read.
    ready: Option<Arc<dyn DeviceEvent>>,
    /// The memory that the communicator reads and writes.
    segment: Option<TensorSegment>,
    /// Memory that the engine allocated and the communicator writes.
    allocated: Option<HostMemory>,
    /// Device memory that the engine allocated and the communicator writes.
    room: Option<Arc<dyn ResultMemory>>,
    /// Error if the output of the request does not have the size that the ranks agreed on.
    misfit: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchState {
    /// Inputs are not ready or not copied yet.
    Loading,
    /// The communicator executes it.
    Running,
    Done,
}

/// The communicator of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchRoute {
    /// Not decided yet: earlier batches have not started.
    Undecided,
    /// The communicator of hosts.
    Host,
    /// The communicator among devices.
    Device,
}

pub(super) struct FusedBatch {
    pub(super) list: u64,
    parts: Vec<BatchPart>,
    pub(super) state: BatchState,
    pub(super) route: BatchRoute,
    /// Whether this is a further piece of the operation of the previous batch.
    pub(super) follows: bool,
    /// Whether the copies of inputs have begun.
    loading: bool,
    copies: Vec<Arc<dyn DeviceEvent>>,
    /// Staging memory that holds all parts.
    block: Option<HostMemory>,
    /// Span on the timeline; only while tracing is on.
    pub(super) span: Option<BatchSpan>,
}

impl FusedBatch {
    pub(super) fn new(
        list: u64,
        entries: Vec<(PendingEntry, Arc<CachedResponse>)>,
        span: Option<BatchSpan>,
    ) -> Self {
        let part = |(mut entry, agreed): (PendingEntry, Arc<CachedResponse>)| BatchPart {
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
        Self::from_parts(list, entries.into_iter().map(part).collect(), span)
    }

    fn from_parts(list: u64, parts: Vec<BatchPart>, span: Option<BatchSpan>) -> Self {
        Self {
            list,
            parts,
            state: BatchState::Loading,
            route: BatchRoute::Undecided,
            follows: false,
            loading: false,
            copies: Vec::new(),
            block: None,
            span,
        }
    }

    /// Returns the requests that are not complete.
    pub(super) fn pending_entries(&self) -> impl Iterator<Item = &PendingEntry> {
        self.parts.iter().filter_map(|part| part.entry.as_ref())
    }

    fn first_signature(&self) -> Option<&RequestSignature> {
        self.parts.first().map(|part| &part.agreed.signature)
    }

    /// Returns an alltoall whose rows are not known, and the rows that this member sends.
    pub(super) fn missing_splits(&self) -> Option<(&Arc<CachedResponse>, &[u64])> {
        // An alltoall is never fused, so it is the only part.
        let part = self.parts.first().filter(|part| part.agreed.lacks_splits())?;
        Some((&part.agreed, &part.entry.as_ref()?.rows))
    }

    /// Returns whether any rank's tensors are on a device.
    pub(super) fn needs_staging(&self) -> bool {
        self.first_signature().is_some_and(|signature| signature.site != MemorySite::Host)
    }

    /// Returns whether the inputs and outputs of all ranks are on devices.
    fn is_all_on_devices(&self) -> bool {
        self.first_signature().is_some_and(|signature| signature.site == MemorySite::Device)
    }

    /// Returns whether a communicator among devices could execute the batch.
    pub(super) fn suits_device_communicator(&self) -> bool {
        self.first_signature()
            .is_some_and(|signature| !signature.call.moves_no_data() && self.is_all_on_devices())
    }

    /// Returns whether the batch waits for a device.
    pub(super) fn waits_for_device(&self) -> bool {
        let under_way = self.state == BatchState::Loading || self.route == BatchRoute::Device;
        under_way && self.state != BatchState::Done && self.needs_staging()
    }

    /// Returns whether the batch holds staging memory.
    pub(super) fn holds_staging_memory(&self) -> bool {
        self.block.is_some() && self.state != BatchState::Done
    }

    /// Returns whether the operation works element by element, so that the batch may be split
    /// anywhere.
    fn is_elementwise(&self) -> bool {
        self.first_signature().is_some_and(|signature| match signature.call {
            CollectiveCall::Allreduce { op, .. } => op != ReduceOp::Adasum,
            CollectiveCall::Broadcast { .. } => true,
            _ => false,
        })
    }

    /// Splits the batch into pieces of about this many bytes. Returns the batch itself if it is
    /// small or cannot be split. All members split alike.
    pub(super) fn split_into_pieces(mut self, bytes: usize) -> Vec<Self> {
        let total: usize = self.parts.iter().map(|part| part.input.len()).sum();
        if !self.is_all_on_devices() || !self.is_elementwise() || total <= bytes {
            return vec![self];
        }
        let (list, span) = (self.list, self.span.take());
        let mut pieces: Vec<Self> = Vec::with_capacity(total.div_ceil(bytes));
        let mut room = 0;
        for part in std::mem::take(&mut self.parts) {
            for part in part.split_into_pieces(&mut room, bytes) {
                let (starts, part) = part;
                if starts || pieces.is_empty() {
                    let mut piece = Self::from_parts(list, Vec::new(), None);
                    piece.follows = !pieces.is_empty();
                    pieces.push(piece);
                }
                if let Some(piece) = pieces.last_mut() {
                    piece.parts.push(part);
                }
            }
        }
        if let Some(last) = pieces.last_mut() {
            // Pieces complete in order, so the span ends with the last one.
            last.span = span;
        }
        pieces
    }

    /// Starts missing copies of inputs. Returns whether the communicator can read all inputs.
    pub(super) fn poll_input_copies(&mut self, scope: &SetScope) -> StepResult<bool> {
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
            self.begin_input_copies(scope)?;
        }
        while let Some(copy) = self.copies.last() {
            if !copy.is_ready()? {
                return Ok(false);
            }
            self.copies.pop();
        }
        Ok(true)
    }

    /// Returns whether copies of inputs have begun; before that, the batch waits for the
    /// framework's work.
    pub(super) fn has_begun_input_copies(&self) -> bool {
        self.loading
    }

    fn begin_input_copies(&mut self, scope: &SetScope) -> Result<(), CollectiveError> {
        if !self.is_all_on_devices() || !self.is_elementwise() {
            for part in &mut self.parts {
                self.copies.extend(part.load_input(scope)?);
            }
            return Ok(());
        }
        let total: usize = self.parts.iter().map(|part| part.input.len()).sum();
        let Some(device) = self
            .parts
            .first()
            .map(|part| scope.context.devices.device_of_buffer(&part.input))
            .transpose()?
            .flatten()
        else {
            return Err(CollectiveError::Shape {
                reason: "a tensor on a device is on the host".to_owned(),
            });
        };
        let block = device.allocate_staging(total)?;
        // In a broadcast only the root's input is read.
        if total > 0 && self.broadcast_root().is_none_or(|root| root == scope.context.world.rank) {
            let pairs = self.staging_pairs(&block, |part| Some(part.input.clone()));
            let pairs: Vec<_> =
                pairs.into_iter().map(|(memory, tensor)| (tensor, memory)).collect();
            self.copies.push(device.copy_all_async(&pairs)?);
        }
        let segment = block.as_buffer().slice(0, total);
        if let Some(part) = self.parts.first_mut() {
            part.segment = Some(TensorSegment { input: segment.clone(), output: segment });
        }
        self.block = Some(block);
        Ok(())
    }

    /// Returns slices of the block, each with the tensor that belongs there.
    fn staging_pairs(
        &self,
        block: &HostMemory,
        tensor: impl Fn(&BatchPart) -> Option<Buffer>,
    ) -> Vec<(Buffer, Buffer)> {
        let (all, mut at) = (block.as_buffer(), 0);
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

    /// Starts the copies of results to their outputs. Returns the event of the last copy, if there
    /// are any.
    pub(super) fn begin_result_copies(
        &mut self,
        scope: &SetScope,
    ) -> Result<Option<Arc<dyn DeviceEvent>>, CollectiveError> {
        let devices = &scope.context.devices;
        let Some(block) = self.block.take() else {
            let pairs: Vec<_> = self.parts.iter().filter_map(BatchPart::copy_back_pair).collect();
            let mut last = None;
            // All copies to a device at once, with one event: several events would each need a
            // caller that waits for it.
            for pairs in
                pairs.chunk_by(|(_, one), (_, other)| one.memory_kind() == other.memory_kind())
            {
                if let Some((_, tensor)) = pairs.first()
                    && let Some(device) = devices.device_of_buffer(tensor)?
                {
                    last = Some(device.copy_all_async(pairs)?);
                }
            }
            return Ok(last);
        };
        let own = self.broadcast_root() == Some(scope.context.world.rank);
        // If the root sent from its own output, the output already holds the result.
        let sent =
            |part: &BatchPart, output: &Buffer| own && output.address() == part.input.address();
        let pairs = self
            .staging_pairs(&block, |part| part.output.clone().filter(|output| !sent(part, output)));
        let Some((_, tensor)) = pairs.first() else { return Ok(None) };
        let Some(device) = devices.device_of_buffer(tensor)? else { return Ok(None) };
        device.copy_all_async(&pairs).map(Some)
    }

    /// Returns the device operation on the tensors and the events that must complete first.
    ///
    /// # Errors
    /// `Device` if memory for a result without an output cannot be allocated.
    pub(super) fn prepare_device_operation(
        &mut self,
        scope: &SetScope,
        communicator: &mut dyn Communicator,
    ) -> Result<(CollectiveOperation, Vec<Arc<dyn DeviceEvent>>), CollectiveError> {
        let mut events: Vec<Arc<dyn DeviceEvent>> = Vec::new();
        for part in &mut self.parts {
            if let Some(event) = part.ready.take()
                // One event may belong to several tensors, and one wait for it is enough.
                && !events.iter().any(|other| Arc::ptr_eq(other, &event))
            {
                events.push(event);
            }
            let output = part.prepare_device_output(scope, communicator)?;
            part.segment = Some(TensorSegment { input: part.input.clone(), output });
        }
        Ok((self.take_segments_as_operation(scope), events))
    }

    /// Returns the operation without tensors.
    pub(super) fn operation_without_tensors(&self, scope: &SetScope) -> CollectiveOperation {
        self.operation_on_segments(Vec::new(), scope)
    }

    pub(super) fn take_segments_as_operation(&mut self, scope: &SetScope) -> CollectiveOperation {
        let segments = self.parts.iter_mut().filter_map(|part| part.segment.take()).collect();
        self.operation_on_segments(segments, scope)
    }

    fn operation_on_segments(
        &self,
        mut segments: Vec<TensorSegment>,
        scope: &SetScope,
    ) -> CollectiveOperation {
        let Some(first) = self.parts.first() else { return CollectiveOperation::Barrier };
        let signature = &first.agreed.signature;
        match signature.call {
            CollectiveCall::Allreduce { op, prescale, postscale } => {
                CollectiveOperation::Allreduce {
                    dtype: signature.dtype,
                    op,
                    prescale: f64::from_bits(prescale),
                    postscale: f64::from_bits(postscale),
                    segments,
                }
            }
            CollectiveCall::Broadcast { root } => {
                let root = scope.members.iter().position(|rank| rank.0 == root).unwrap_or_default();
                CollectiveOperation::Broadcast { root, segments }
            }
            CollectiveCall::Allgather => {
                let bytes = self.parts.iter().map(|part| bytes_by_member(&part.agreed)).collect();
                CollectiveOperation::Allgather { segments, bytes }
            }
            CollectiveCall::Alltoall { .. } => {
                let nothing = || HostMemory::new(0).as_buffer();
                let outline = || TensorSegment { input: nothing(), output: nothing() };
                let segment = segments.pop().unwrap_or_else(outline);
                let agreed = &first.agreed;
                let blocks =
                    |rows: &[u64]| rows.iter().map(|rows| rows_to_bytes(agreed, *rows)).collect();
                let (sends, receives) = (
                    blocks(agreed.alltoall_send_row_counts()),
                    blocks(agreed.alltoall_receive_row_counts()),
                );
                CollectiveOperation::Alltoall { segment, sends, receives }
            }
            CollectiveCall::Reducescatter { op, prescale, postscale } => {
                let parts = |part: &BatchPart| {
                    let rows = (0..scope.members.len())
                        .map(|member| member_rows(&part.agreed, member, scope));
                    let unit = part.agreed.signature.row_bytes();
                    rows.map(|rows| to_usize(rows.saturating_mul(unit))).collect()
                };
                CollectiveOperation::Reducescatter {
                    dtype: signature.dtype,
                    op,
                    prescale: f64::from_bits(prescale),
                    postscale: f64::from_bits(postscale),
                    bytes: self.parts.iter().map(parts).collect(),
                    segments,
                }
            }
            CollectiveCall::Barrier | CollectiveCall::Change(_) | CollectiveCall::Join { .. } => {
                CollectiveOperation::Barrier
            }
        }
    }

    /// Returns the root of a broadcast.
    fn broadcast_root(&self) -> Option<Rank> {
        match self.first_signature().map(|signature| signature.call) {
            Some(CollectiveCall::Broadcast { root }) => Some(Rank(root)),
            _ => None,
        }
    }

    /// Marks the batch as executed by a communicator.
    pub(super) fn mark_running(&mut self) {
        self.state = BatchState::Running;
        if let Some(span) = &mut self.span {
            span.enter_transfer();
        }
    }

    pub(super) fn enter_timeline_activity(&mut self, activity: &'static str) {
        if let Some(span) = &mut self.span {
            span.enter_timeline_activity(activity);
        }
    }

    /// Completes the requests; their results are valid after the event `reached`.
    pub(super) fn complete_requests(
        &mut self,
        reached: Option<&Arc<dyn DeviceEvent>>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        self.state = BatchState::Done;
        self.block = None;
        let completed = self.parts.drain(..).filter_map(|part| part.into_finished_request(reached));
        // Substitutes of a joined rank have no caller.
        finished.extend(completed.filter(|done| done.handle != NO_HANDLE));
        if let Some(span) = self.span.take() {
            span.mark_successful();
        }
    }

    pub(super) fn refuse_unsupported_requests(
        &mut self,
        cause: &Arc<CollectiveError>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        self.state = BatchState::Done;
        self.block = None;
        for entry in self.parts.drain(..).filter_map(|part| part.entry) {
            let error = Error::Unsupported {
                operation: entry.operation,
                tensor: Arc::clone(&entry.name),
                cause: Arc::clone(cause),
            };
            finished.push(entry.into_finished(Err(error)));
        }
    }

    pub(super) fn fail_requests(self, cause: &Arc<StopCause>, finished: &mut Vec<FinishedRequest>) {
        let entries = self.parts.into_iter().filter_map(|part| part.entry);
        finished.extend(entries.map(|entry| entry.into_failed(cause)));
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn rows_to_bytes(agreed: &CachedResponse, rows: u64) -> usize {
    to_usize(rows.saturating_mul(agreed.signature.row_or_tensor_bytes()))
}

fn bytes_by_member(agreed: &CachedResponse) -> Vec<usize> {
    agreed.rows.iter().map(|rows| rows_to_bytes(agreed, *rows)).collect()
}

/// Returns the number of rows of a reducescatter's result for `member`.
fn member_rows(agreed: &CachedResponse, member: usize, scope: &SetScope) -> u64 {
    let rows = agreed.signature.shape.first().copied().unwrap_or_default();
    row_share(rows, member, scope.members.len())
}

/// Returns the number of rows of a member: an equal share, and one more for the first members if
/// rows are left over.
pub(crate) fn row_share(rows: u64, member: usize, members: usize) -> u64 {
    let (member, members) = (member as u64, members.max(1) as u64);
    rows / members + u64::from(member < rows % members)
}

impl BatchPart {
    /// Splits the part. The first piece fills the `room` left in the current batch; every further
    /// one starts a new batch. Returns the pieces, each with whether it starts a new batch.
    fn split_into_pieces(self, room: &mut usize, bytes: usize) -> Vec<(bool, Self)> {
        let size = self.agreed.signature.dtype.element_size().max(1);
        // Pieces end between elements.
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
                    // Every piece has the event, because pieces are copied in ahead of their turn.
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

    /// Prepares the segment and starts the copy of an input on a device. Returns the event of the
    /// copy.
    fn load_input(
        &mut self,
        scope: &SetScope,
    ) -> Result<Option<Arc<dyn DeviceEvent>>, CollectiveError> {
        let call = self.agreed.signature.call;
        if call.moves_no_data() {
            return Ok(None);
        }
        let (input, copy) = match scope.context.devices.device_of_buffer(&self.input)? {
            None => (self.input.clone(), None),
            Some(device) => {
                let staging = device
                    // The device may give more bytes than were asked for.
                    .allocate_staging(self.input.len())?
                    .as_buffer()
                    .slice(0, self.input.len());
                let copy = match self.input.is_empty() {
                    true => None,
                    false => Some(device.copy_async(&self.input, &staging)?),
                };
                (staging, copy)
            }
        };
        let output = self.prepare_host_output(scope)?;
        self.segment = Some(TensorSegment { input, output });
        Ok(copy)
    }

    fn result_bytes(&self, scope: &SetScope) -> usize {
        match self.agreed.signature.call {
            CollectiveCall::Allgather => bytes_by_member(&self.agreed).iter().sum(),
            CollectiveCall::Alltoall { .. } => rows_to_bytes(
                &self.agreed,
                self.agreed
                    .alltoall_receive_row_counts()
                    .iter()
                    .fold(0, |sum, rows| rows.saturating_add(sum)),
            ),
            CollectiveCall::Reducescatter { .. } => {
                let rows = member_rows(&self.agreed, scope.own_index(), scope);
                to_usize(rows.saturating_mul(self.agreed.signature.row_bytes()))
            }
            _ => self.input.len(),
        }
    }

    /// Stores an error if the output of the request does not fit the result. Other requests of the
    /// batch still complete.
    fn note_output_misfit(&mut self, bytes: usize) {
        if let Some(output) = self.output.as_ref().filter(|output| output.len() != bytes) {
            self.misfit = Some(Error::BufferSize {
                which: "output",
                tensor: Arc::clone(&self.agreed.name),
                expected: bytes as u64,
                actual: output.len() as u64,
            });
        }
    }

    /// Returns the memory that a communicator among devices writes: the request's output if there
    /// is one and it fits.
    fn prepare_device_output(
        &mut self,
        scope: &SetScope,
        communicator: &mut dyn Communicator,
    ) -> Result<Buffer, CollectiveError> {
        let bytes = self.result_bytes(scope);
        self.note_output_misfit(bytes);
        match &self.output {
            Some(output) if self.misfit.is_none() => Ok(output.clone()),
            // `allocate_result` cannot allocate 0 bytes.
            _ if bytes == 0 => Ok(self.allocated.insert(HostMemory::new(0)).as_buffer()),
            _ => {
                let room = communicator.allocate_result(bytes)?;
                Ok(self.room.insert(room).as_buffer())
            }
        }
    }

    /// Returns the memory that the communicator of hosts writes: the request's output if it is on
    /// the host and fits.
    fn prepare_host_output(&mut self, scope: &SetScope) -> Result<Buffer, CollectiveError> {
        let bytes = self.result_bytes(scope);
        self.note_output_misfit(bytes);
        let memory = match &self.output {
            Some(_) if self.misfit.is_some() => HostMemory::new(bytes),
            Some(output) => match scope.context.devices.device_of_buffer(output)? {
                None => return Ok(output.clone()),
                Some(device) => device.allocate_staging(bytes)?,
            },
            None => HostMemory::new(bytes),
        };
        let buffer = memory.as_buffer().slice(0, bytes);
        self.allocated = Some(memory);
        Ok(buffer)
    }

    /// Returns the memory to copy back to a device and the target of the copy.
    fn copy_back_pair(&self) -> Option<(Buffer, Buffer)> {
        let (Some(output), Some(memory), None) = (&self.output, &self.allocated, &self.misfit)
        else {
            return None;
        };
        let there = output.memory_kind() != MemoryKind::Host && !output.is_empty();
        there.then(|| (memory.as_buffer().slice(0, output.len()), output.clone()))
    }

    fn into_finished_request(
        self,
        reached: Option<&Arc<dyn DeviceEvent>>,
    ) -> Option<FinishedRequest> {
        let PendingEntry { handle, name, .. } = self.entry?;
        let rows = match self.agreed.signature.call {
            CollectiveCall::Allgather => self.agreed.rows.clone(),
            CollectiveCall::Alltoall { .. } => self.agreed.alltoall_receive_row_counts().to_vec(),
            _ => Vec::new(),
        };
        let result = match self.misfit {
            Some(error) => Err(error),
            None => {
                let written = self
                    .output
                    .as_ref()
                    .is_some_and(|output| output.memory_kind() != MemoryKind::Host);
                let on_device = written || self.room.is_some();
                Ok(RequestCompletion {
                    // If the request has an output, this is staging memory, which the device gets
                    // back.
                    output: self.allocated.filter(|_| self.output.is_none()),
                    room: self.room.filter(|_| self.output.is_none()),
                    rows,
                    last: None,
                    reached: reached.filter(|_| on_device).map(Arc::clone),
                })
            }
        };
        Some(FinishedRequest { handle, name, result })
    }
}
