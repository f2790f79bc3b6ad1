// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One process set: negotiation, queue, cache and communicator, driven by polling. It uses no
//! threads and no locks, and gets the time from its caller.

mod announce;
mod batch;
mod batch_execution;
mod coordinator_decisions;
mod departure;
mod device_communicator;
mod join;
mod operation_trace;
mod response_list;
#[cfg(any(test, feature = "_test-harness"))]
pub(crate) mod simulation;
mod splits_exchange;
mod stall_inquiry;
mod stall_watch;

#[cfg(test)]
mod tests;

pub(crate) use batch_execution::row_share;
pub(crate) use coordinator_decisions::{max_executing_lists, plan_fused_operations};

use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::DeviceEvent;
use farandole_kernels::Buffer;
use farandole_negotiation::{
    AnnouncementTally, CollectiveCall, ControlTree, FastHashMap, FrameReader, MalformedFrame,
    RequestSignature, ResponseCache, operation_text,
};
use farandole_transport::{FrameReceiver, FrameSender, LinkKind, into_frame_halves};
use farandole_world::{ProcessSetId, Rank, World};

use crate::devices::EngineDevices;
use crate::timeline::OperationTracer;
use crate::tune::Autotuner;
use crate::{
    EngineObserver, EngineSettings, EngineStatistics, Error, ProcessSetOptions, RequestCompletion,
    RequestHandle, Result, StopCause,
};

pub(crate) use stall_inquiry::answer_stall_queries;

/// Kinds of control frames.
mod frame_kinds {
    /// Upward: tensors that a whole subtree has announced.
    pub(super) const TENSOR_ANNOUNCEMENT: u8 = 1;
    /// Downward: the operations to execute next.
    pub(super) const RESPONSE_LIST: u8 = 2;
    /// To all: a rank departs in order.
    pub(super) const RANK_DEPARTURE: u8 = 3;
    /// To all: a rank failed.
    pub(super) const RANK_ABORT: u8 = 4;
    /// Upward: the ranks that have submitted a tensor that has waited too long.
    pub(super) const STALL_SUBMITTERS: u8 = 5;
    /// Downward: the combined submitters of such a tensor.
    pub(super) const STALL_STATUS: u8 = 6;
    /// Upward: no member of the subtree executes an operation of a departed rank any more.
    pub(super) const SUBTREE_DONE: u8 = 7;
    /// Downward: no member of the set does, so links may close.
    pub(super) const LINKS_CLEAR: u8 = 8;
    /// Downward: asks missing members for their stacks and waits.
    pub(super) const STALL_QUERY: u8 = 9;
    /// Upward: the answer of one member.
    pub(super) const STALL_ANSWER: u8 = 10;
    /// To all: ranks put a tensor into different groups, so the engine must stop.
    pub(super) const GROUP_DISAGREEMENT: u8 = 11;
}

/// A request of this rank, from its submission to its batch.
pub(crate) struct PendingEntry {
    pub(crate) handle: RequestHandle,
    pub(crate) name: Arc<str>,
    pub(crate) operation: &'static str,
    /// Full text of a change of process sets; `None` for operations whose kind says enough.
    pub(crate) change_text: Option<Box<str>>,
    pub(crate) group: u64,
    /// Row counts of this member: of its input, or of each block of the input.
    pub(crate) rows: Vec<u64>,
    pub(crate) input: Buffer,
    pub(crate) output: Option<Buffer>,
    pub(crate) ready: Option<Arc<dyn DeviceEvent>>,
    pub(crate) since: Instant,
    /// Missing ranks, once the coordinator has reported them.
    pub(crate) missing: Option<Vec<Rank>>,
}

impl PendingEntry {
    fn operation_text(&self) -> String {
        operation_text(self.operation, self.change_text.as_deref(), &self.name)
    }

    fn moves_no_data(&self) -> bool {
        DATALESS_OPERATIONS.contains(&self.operation)
    }

    fn failure_error(&self, cause: &Arc<StopCause>) -> Error {
        Error::Failed {
            operation: self.operation,
            tensor: Arc::clone(&self.name),
            cause: Arc::clone(cause),
        }
    }
}

/// Names of the operations that move no data, so that their submitters only wait.
const DATALESS_OPERATIONS: [&str; 3] = ["barrier", "process set change", "join"];

/// A request with its result.
pub(crate) struct FinishedRequest {
    pub(crate) handle: RequestHandle,
    pub(crate) name: Arc<str>,
    pub(crate) result: Result<RequestCompletion>,
}

fn create_autotuner(settings: &EngineSettings) -> Option<Autotuner> {
    let tune = settings.tune.clone()?;
    Some(Autotuner::new(tune, settings.fusion_threshold, settings.cache_capacity > 0))
}

/// The control link to a neighbour in the tree.
struct TreeNeighbour {
    sender: FrameSender,
    receiver: FrameReceiver,
    kind: LinkKind,
    /// Whether the link is closed in both directions.
    closed: bool,
    /// For a child: number of lists that it had seen at its last announcement.
    seen: u64,
}

/// State of one process set on one rank.
pub(crate) struct ProcessSet {
    /// Identifies the set inside the engine.
    pub(crate) key: usize,
    pub(crate) members: Vec<Rank>,
    options: ProcessSetContext,
    tree: ControlTree,
    /// The parent first, if there is one; then the children in the tree's order.
    neighbours: Vec<TreeNeighbour>,
    cache: ResponseCache,
    /// Requests of this rank that are announced and not yet in a list.
    local: FastHashMap<Arc<str>, PendingEntry>,
    /// Tensors that a part of the subtree has announced.
    pending: FastHashMap<Arc<str>, AnnouncementTally>,
    /// The announcement under construction.
    upward: Vec<u8>,
    /// Number of lists applied.
    lists: u64,
    coordinator: coordinator_decisions::SetCoordinator,
    execution: batch_execution::BatchExecution,
    watch: stall_watch::StallWatch,
    inquiries: stall_inquiry::StallInquiries,
    /// Only at the coordinator of the global set, while autotune is on.
    tuner: Option<Autotuner>,
    joins: join::JoinState,
    departure: Option<departure::Departure>,
    /// Latest end of a removed set.
    retired: Option<Instant>,
    /// Loss of a peer that may have departed in order, and the time of the loss.
    suspect: Option<(Instant, StopCause)>,
    scratch: Vec<u8>,
    pub(crate) statistics: EngineStatistics,
}

/// The state that all sets of an engine share.
#[derive(Clone)]
pub(crate) struct ProcessSetContext {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<EngineSettings>,
    pub(crate) devices: Arc<EngineDevices>,
    pub(crate) observer: Arc<dyn EngineObserver>,
    pub(crate) tracer: Arc<OperationTracer>,
}

impl ProcessSetContext {
    fn host_name(&self, rank: Rank) -> String {
        self.world.seats.get(rank.index()).map_or_else(String::new, |seat| seat.host.0.clone())
    }
}

impl ProcessSet {
    pub(crate) fn new(
        key: usize,
        options: ProcessSetOptions,
        shared: ProcessSetContext,
    ) -> Result<Self> {
        let refuse = |reason: String| Error::Start { reason };
        let ProcessSetOptions { id, members, control, communicator } = options;
        let me = shared.world.rank;
        // The positions are the member numbers on all ranks, and ranks are looked up by binary
        // search.
        if !members.is_sorted_by(|low, high| low < high) {
            return Err(refuse(format!(
                "members of process set {id} are not ascending: {members:?}"
            )));
        }
        let tree = ControlTree::new(&shared.world, &members, me)
            .ok_or_else(|| refuse(format!("rank {me} is not in process set {id}")))?;
        if communicator.member_count() != members.len()
            || communicator.member_index() != tree.me as usize
        {
            let (size, member) = (communicator.member_count(), communicator.member_index());
            return Err(refuse(format!(
                "process set {id} has another communicator: member {member} of {size}"
            )));
        }
        let mut links: FastHashMap<u64, _> = control
            .into_iter()
            .map(|link| (u64::from(link.peer.0), (link.kind, into_frame_halves(link))))
            .collect();
        let mut neighbours = Vec::new();
        for member in tree.parent.iter().chain(&tree.children) {
            let peer = members[*member as usize];
            let (kind, (sender, receiver)) = links.remove(&peer.0.into()).ok_or_else(|| {
                refuse(format!("process set {id} has no control link to rank {peer}"))
            })?;
            neighbours.push(TreeNeighbour { sender, receiver, kind, closed: false, seen: 0 });
        }
        Ok(Self {
            watch: stall_watch::StallWatch::new(id, &shared.settings),
            inquiries: stall_inquiry::StallInquiries::default(),
            tuner: create_autotuner(&shared.settings)
                .filter(|_| id == ProcessSetId::GLOBAL && tree.parent.is_none()),
            joins: join::JoinState::default(),
            coordinator: coordinator_decisions::SetCoordinator::default(),
            execution: batch_execution::BatchExecution::new(communicator),
            cache: ResponseCache::new(shared.settings.cache_capacity),
            key,
            members,
            options: shared,
            tree,
            neighbours,
            local: FastHashMap::default(),
            pending: FastHashMap::default(),
            upward: Vec::new(),
            lists: 0,
            departure: None,
            retired: None,
            suspect: None,
            scratch: Vec::new(),
            statistics: EngineStatistics::default(),
        })
    }

    /// Queues a request and announces it; the frame is sent in the next poll.
    pub(crate) fn enqueue_entry(
        &mut self,
        entry: PendingEntry,
        signature: RequestSignature,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        if let Some(leaving) = &self.departure {
            let result = Err(entry.failure_error(&leaving.cause));
            finished.push(FinishedRequest { handle: entry.handle, name: entry.name, result });
            return Ok(());
        }
        if let CollectiveCall::Join { gather } = signature.call {
            return self.join_own_member(entry, gather);
        }
        let (name, since) = (Arc::clone(&entry.name), entry.since);
        let announcement = self.own_announcement(&entry, signature);
        self.local.insert(Arc::clone(&name), entry);
        let me = [self.tree.me];
        self.record_announcement(0, &name, announcement, &me, since)
    }

    /// Makes all progress that is possible without waiting. Returns whether anything moved.
    ///
    /// # Errors
    /// The cause for which the engine must stop.
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let mut moved = self.receive_frames(now, finished)?;
        // The second round executes the decisions of the first.
        for _ in 0..2 {
            moved |= self.emit_next_response_list(finished)?;
            moved |= self.send_complete_announcements()?;
            let ran = self.execute_batches(now, finished)?;
            moved |= ran;
            if !ran || self.coordinator.is_empty() {
                break;
            }
        }
        for neighbour in &mut self.neighbours {
            if neighbour.sender.queued_bytes() > 0 && !neighbour.closed {
                neighbour.flush_frames(&mut self.suspect, now);
            }
        }
        self.settle_suspects_and_departure(now, finished)?;
        Ok(moved)
    }

    /// Returns whether work is in progress that a poll could advance.
    pub(crate) fn is_busy(&self) -> bool {
        !self.local.is_empty()
            || self.joins.own_join().is_some()
            || !self.execution.is_idle()
            || self.execution.has_device_work()
            // Only polls decide a suspicion, also if nothing else is in progress.
            || self.suspect.is_some()
            || self.has_unsettled_departure()
            || self
                .neighbours
                .iter()
                .any(|neighbour| !neighbour.closed && neighbour.sender.queued_bytes() > 0)
    }

    /// Returns whether this set waits for a device, whose end of work wakes no thread.
    pub(crate) fn waits_for_device(&self) -> bool {
        self.execution.waits_for_device()
    }

    fn receive_frames(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let mut frame = std::mem::take(&mut self.scratch);
        let mut moved = false;
        for index in 0..self.neighbours.len() {
            while let Some(kind) =
                self.neighbours[index].receive_frame(&mut frame, &mut self.suspect, now)
            {
                moved = true;
                self.statistics.frames_received += 1;
                let read = self.dispatch_frame(index, kind, &frame, now, finished);
                let rank = self.neighbours[index].receiver.peer_rank();
                read.map_err(|stop| match stop {
                    FrameFailure::Cause(cause) => cause,
                    FrameFailure::Malformed(malformed) => {
                        StopCause::Protocol { rank, reason: malformed.to_string() }
                    }
                })?;
            }
        }
        self.scratch = frame;
        Ok(moved)
    }

    fn dispatch_frame(
        &mut self,
        from: usize,
        kind: u8,
        frame: &[u8],
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> Result<(), FrameFailure> {
        match kind {
            frame_kinds::TENSOR_ANNOUNCEMENT => self.on_announcement(from, frame, now),
            frame_kinds::RESPONSE_LIST => self.on_response_list(frame, finished),
            frame_kinds::RANK_DEPARTURE => self.on_departure(from, frame, finished),
            frame_kinds::RANK_ABORT => self.on_abort(frame),
            frame_kinds::GROUP_DISAGREEMENT => {
                Err(StopCause::Disagreement { text: FrameReader(frame).read_text()?.to_owned() }
                    .into())
            }
            frame_kinds::STALL_SUBMITTERS => self.on_stall_submitters(frame, now),
            frame_kinds::STALL_STATUS => self.on_stall_status(frame),
            frame_kinds::STALL_QUERY => self.on_stall_query(frame, now),
            frame_kinds::STALL_ANSWER => self.on_stall_answer(frame),
            frame_kinds::SUBTREE_DONE => {
                self.on_subtree_done_frame();
                Ok(())
            }
            frame_kinds::LINKS_CLEAR => Ok(self.on_links_clear_frame()?),
            other => Err(MalformedFrame::Tag(other).into()),
        }
    }

    fn is_coordinator(&self) -> bool {
        self.tree.parent.is_none()
    }

    /// Returns the index of the first child among the neighbours.
    fn first_child_index(&self) -> usize {
        usize::from(self.tree.parent.is_some())
    }

    fn send_frame(&mut self, to: usize, kind: u8, frame: &[u8]) -> StepResult {
        let neighbour = &mut self.neighbours[to];
        if neighbour.closed {
            return Ok(());
        }
        self.statistics.frames_sent += 1;
        match neighbour.sender.queue_frame(kind, frame) {
            Ok(()) => Ok(()),
            Err(error @ farandole_transport::Error::Frame { .. }) => Err(error.into()),
            // The peer is gone: the next receive shows whether it departed in order.
            Err(_) => Ok(()),
        }
    }

    fn send_to_children(&mut self, kind: u8, frame: &[u8]) -> StepResult {
        (self.first_child_index()..self.neighbours.len())
            .try_for_each(|child| self.send_frame(child, kind, frame))
    }
}

impl TreeNeighbour {
    /// Receives the next frame and returns its kind. A lost link is closed, and its peer becomes a
    /// suspect.
    fn receive_frame(
        &mut self,
        frame: &mut Vec<u8>,
        suspect: &mut Option<(Instant, StopCause)>,
        now: Instant,
    ) -> Option<u8> {
        if self.closed {
            return None;
        }
        self.receiver.try_receive_frame_into(frame).unwrap_or_else(|error| {
            self.closed = true;
            suspect.get_or_insert((now, error.into()));
            None
        })
    }

    fn flush_frames(&mut self, suspect: &mut Option<(Instant, StopCause)>, now: Instant) {
        if let Err(error) = self.sender.flush() {
            suspect.get_or_insert((now, error.into()));
        }
    }
}

/// Result of a step of a set; an error stops the engine.
pub(crate) type StepResult<T = ()> = Result<T, StopCause>;

/// The reason why a frame could not be handled.
enum FrameFailure {
    Cause(StopCause),
    Malformed(MalformedFrame),
}

impl From<StopCause> for FrameFailure {
    fn from(cause: StopCause) -> Self {
        Self::Cause(cause)
    }
}

impl From<MalformedFrame> for FrameFailure {
    fn from(malformed: MalformedFrame) -> Self {
        Self::Malformed(malformed)
    }
}
