// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator over windows that never blocks and has a deadline for every wait.
//!
//! ```text
//!   Making --own window--> Offering --all are open--> Ready --deadline, a member that ended, abandon--> Over
//!      |                      |
//!      +-- a member refuses --+--> Refused: it carries nothing, for any member
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceEvent, Error as CollectiveError, OperationToken,
    Result, ResultMemory, TensorSegment,
};
use farandole_kernels::{DataType, ReduceOp};

use super::mailbox::{IpcFormationOutcome, IpcMailbox, MemberPhase};
use super::member_device::{IpcDevice, PieceReduction, SLOTS_PER_WINDOW};
use super::pieces::{PieceSpan, split_into_pieces};
use crate::shutdown::{drain_communicator, poll_until};

/// An operation that was not started, and the events that must complete before it.
type QueuedOperation = (OperationToken, CollectiveOperation, Vec<Arc<dyn DeviceEvent>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpcCommunicatorState {
    PreparingWindow,
    WindowOffered,
    /// As offering, and this member has opened all windows.
    WindowsOpened,
    Ready,
    Refused,
    Ended,
}

/// The operation in progress.
struct IpcOperation {
    token: OperationToken,
    reduction: PieceReduction,
    segments: Vec<TensorSegment>,
    pieces: Vec<Vec<PieceSpan>>,
    /// Number of its first piece.
    first_piece: u64,
}

impl IpcOperation {
    fn end_piece_number(&self) -> u64 {
        self.first_piece + self.pieces.len() as u64
    }

    fn piece_spans(&self, number: u64) -> &[PieceSpan] {
        let index = usize::try_from(number - self.first_piece).unwrap_or(usize::MAX);
        self.pieces.get(index).map_or(&[], Vec::as_slice)
    }
}

/// Collectives among processes that share a device.
pub(crate) struct IpcCommunicator<S: IpcDevice> {
    device: S,
    mailbox: IpcMailbox,
    state: IpcCommunicatorState,
    /// Since when it is formed or something is waited for.
    waiting_since: Instant,
    /// The longest that may take.
    timeout: Duration,
    queued: VecDeque<QueuedOperation>,
    current: Option<IpcOperation>,
    /// The number of pieces queued so far: copies into the window, and reductions from all windows.
    pieces_filled: u64,
    pieces_reduced: u64,
    /// Events of the last of those.
    fill_events: VecDeque<Arc<dyn DeviceEvent>>,
    reduce_events: VecDeque<Arc<dyn DeviceEvent>>,
    /// Operations whose work is on the stream.
    running: VecDeque<(OperationToken, Arc<dyn DeviceEvent>, Vec<TensorSegment>)>,
    /// Operations that are on the stream and not reported yet.
    launched: Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    /// The reason why nothing is carried, until it is reported.
    remark: Option<String>,
    failure: Option<CollectiveError>,
    /// Others may have opened this member's window.
    window_offered: bool,
    /// Whether the work on the stream is done.
    stream_idle: bool,
}

/// Returns the reduction of an operation, if a kernel does it; the same on all members.
fn kernel_reduction(operation: &CollectiveOperation) -> Option<PieceReduction> {
    let CollectiveOperation::Allreduce { dtype, op, prescale, postscale, .. } = *operation else {
        return None;
    };
    // Nothing goes from host to host here.
    let op = op.with_unrounded_partials();
    let scaled = prescale != 1.0 || postscale != 1.0;
    let truths = dtype == DataType::Bool && (op == ReduceOp::Average || scaled);
    let complex = matches!(dtype, DataType::C64 | DataType::C128);
    let done = op != ReduceOp::Adasum && !truths && !complex;
    done.then_some(PieceReduction { dtype, op, prescale, postscale })
}

impl<S: IpcDevice> IpcCommunicator<S> {
    /// Begins to form a communicator of the mailbox's members. Every member calls this function
    /// with its own device. `timeout` limits the formation and each step of an operation.
    pub(crate) fn begin_forming(device: S, mailbox: IpcMailbox, timeout: Duration) -> Self {
        Self {
            device,
            mailbox,
            state: IpcCommunicatorState::PreparingWindow,
            waiting_since: Instant::now(),
            timeout,
            queued: VecDeque::new(),
            current: None,
            pieces_filled: 0,
            pieces_reduced: 0,
            fill_events: VecDeque::new(),
            reduce_events: VecDeque::new(),
            running: VecDeque::new(),
            launched: Vec::new(),
            remark: None,
            failure: None,
            window_offered: false,
            stream_idle: true,
        }
    }

    /// Ends everything and remembers why.
    fn fail_communicator(&mut self, reason: &str) -> CollectiveError {
        self.shut_down();
        let reason = format!("device {}: {reason}", self.device.device_ordinal());
        self.failure.get_or_insert(CollectiveError::Lost { reason }).clone()
    }

    /// Afterwards nothing here touches a buffer or another's window.
    fn shut_down(&mut self) {
        if self.state == IpcCommunicatorState::Ended {
            return;
        }
        self.state = IpcCommunicatorState::Ended;
        self.stream_idle = self.pieces_filled == 0 || self.wait_for_stream();
        if self.stream_idle {
            self.device.close_windows();
            self.mailbox.mark_windows_closed();
        }
        self.mailbox.mark_member_ended();
        self.queued.clear();
        self.current = None;
        self.fill_events.clear();
        self.reduce_events.clear();
        self.running.clear();
        self.launched.clear();
    }

    /// Waits for the work of the stream. This waits for no peer, only for work of the framework.
    /// False when it took too long.
    fn wait_for_stream(&self) -> bool {
        let Ok(last) = self.device.record_event() else { return false };
        poll_until(|| last.is_ready().unwrap_or(true))
    }

    fn ended_error(&self) -> CollectiveError {
        let ended = || CollectiveError::Lost { reason: "the communicator was given up".to_owned() };
        self.failure.clone().unwrap_or_else(ended)
    }

    /// Takes the next step to a communicator, if there is one to take.
    fn advance_formation(&mut self) -> Result<bool> {
        if matches!(self.state, IpcCommunicatorState::Ready | IpcCommunicatorState::Refused) {
            return Ok(false);
        }
        match (self.state, self.mailbox.formation_outcome()) {
            (IpcCommunicatorState::Ready | IpcCommunicatorState::Refused, _) => return Ok(false),
            (IpcCommunicatorState::Ended, _) => return Err(self.ended_error()),
            (_, IpcFormationOutcome::Refused(member)) => {
                let reason = self.mailbox.refusal_reason(member);
                self.refuse_formation(member, &reason);
            }
            (_, IpcFormationOutcome::Ended(member)) => {
                return Err(self.fail_communicator(&format!("member {member} has ended")));
            }
            (IpcCommunicatorState::PreparingWindow, _) => match self.device.poll_window_handle() {
                None => return self.check_deadline_and_peers("forming it").map(|()| false),
                Some(Ok(handle)) => {
                    self.mailbox.publish_window_handle(&handle);
                    self.window_offered = true;
                    self.state = IpcCommunicatorState::WindowOffered;
                }
                Some(Err(reason)) => {
                    self.mailbox.publish_refusal(&reason);
                    self.refuse_formation(self.mailbox.own_member(), &reason);
                }
            },
            (IpcCommunicatorState::WindowOffered, IpcFormationOutcome::AllOffered) => {
                self.open_windows()
            }
            (IpcCommunicatorState::WindowsOpened, IpcFormationOutcome::Formed) => {
                self.state = IpcCommunicatorState::Ready
            }
            (IpcCommunicatorState::WindowOffered | IpcCommunicatorState::WindowsOpened, _) => {
                return self.check_deadline_and_peers("forming it").map(|()| false);
            }
        }
        self.waiting_since = Instant::now();
        Ok(true)
    }

    fn open_windows(&mut self) {
        let handles: Vec<_> = (0..self.mailbox.member_count())
            .map(|member| self.mailbox.member_window_handle(member))
            .collect();
        match self.device.open_windows(&handles, self.mailbox.own_member()) {
            Ok(()) => {
                self.mailbox.mark_windows_opened();
                self.state = IpcCommunicatorState::WindowsOpened;
            }
            Err(reason) => {
                self.mailbox.publish_refusal(&reason);
                self.refuse_formation(self.mailbox.own_member(), &reason);
            }
        }
    }

    fn refuse_formation(&mut self, member: usize, reason: &str) {
        self.state = IpcCommunicatorState::Refused;
        self.device.close_windows();
        self.mailbox.mark_windows_closed();
        self.remark = Some(format!("member {member} cannot use CUDA IPC: {reason}"));
    }

    /// Fails when something takes too long, or will never come.
    fn check_deadline_and_peers(&mut self, what: &str) -> Result<()> {
        if let Some(member) = self
            .awaited_member()
            .filter(|member| self.mailbox.member_phase(*member) == MemberPhase::Ended)
        {
            return Err(self.fail_communicator(&format!("member {member} has ended")));
        }
        if self.waiting_since.elapsed() > self.timeout {
            let whom =
                self.awaited_member().map(|member| format!(", which waits for member {member}"));
            let whom = whom.unwrap_or_default();
            return Err(self
                .fail_communicator(&format!("{what} took longer than {:?}{whom}", self.timeout)));
        }
        Ok(())
    }

    /// Returns the member that the operation in progress waits for.
    fn awaited_member(&self) -> Option<usize> {
        let current = self.current.as_ref()?;
        let mut others =
            (0..self.mailbox.member_count()).filter(|member| *member != self.mailbox.own_member());
        others.find(|member| {
            let unread =
                self.pieces_filled < current.end_piece_number() && !self.has_read_slot(*member);
            unread
                || (self.pieces_reduced < self.pieces_filled
                    && self.mailbox.pieces_filled(*member) <= self.pieces_reduced)
        })
    }

    /// Returns whether a member has read the slot of the next piece.
    fn has_read_slot(&self, member: usize) -> bool {
        // The number comes from another process, so the sum must not overflow.
        self.mailbox.pieces_read(member).saturating_add(SLOTS_PER_WINDOW) > self.pieces_filled
    }

    /// Publishes the progress to the others.
    ///
    /// Asks for the last events of the stream first. The device works on meanwhile: in the order of
    /// the stream, an operation could be found complete after its pieces were found incomplete.
    /// They would never be published, because nothing asks once all operations are complete.
    fn publish_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        let over = count_leading_ready_events(self.running.iter().map(|(_, event, _)| event));
        let (takes, fills) = (
            count_first_ready_events(&self.reduce_events),
            count_first_ready_events(&self.fill_events),
        );
        let (fills, takes, over) = over
            .and_then(|over| Ok((fills?, takes?, over)))
            .map_err(|error| self.fail_communicator(&error.to_string()))?;
        drop(self.fill_events.drain(..fills));
        drop(self.reduce_events.drain(..takes));
        completed.extend(self.running.drain(..over).map(|(token, ..)| token));
        if fills > 0 {
            self.mailbox.publish_pieces_filled(self.pieces_filled - self.fill_events.len() as u64);
        }
        if takes > 0 {
            self.mailbox.publish_pieces_read(self.pieces_reduced - self.reduce_events.len() as u64);
        }
        Ok(fills + takes + over > 0)
    }

    /// Puts all possible work on the stream.
    fn enqueue_possible_work(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.begin_next_operation()? {
            moved = true;
        }
        let Some(current) = self.current.take() else { return Ok(moved) };
        let advanced = self.advance_pieces(&current);
        moved |= advanced.map_err(|error| self.fail_communicator(&error.to_string()))?;
        if self.pieces_reduced < current.end_piece_number() {
            self.current = Some(current);
            return Ok(moved);
        }
        let last = self.reduce_events.back().map(Arc::clone);
        self.mark_operation_launched(current.token, last, current.segments)?;
        Ok(true)
    }

    /// Takes up the next operation, if none is in progress; true when it was nothing, and another
    /// may follow.
    fn begin_next_operation(&mut self) -> Result<bool> {
        if self.current.is_some() {
            return Ok(false);
        }
        let Some((token, operation, events)) = self.queued.pop_front() else { return Ok(false) };
        let (Some(reduction), CollectiveOperation::Allreduce { segments, .. }) =
            (kernel_reduction(&operation), operation)
        else {
            return Ok(false);
        };
        self.device
            .wait_for_events(&events)
            .map_err(|error| self.fail_communicator(&error.to_string()))?;
        let lengths: Vec<usize> = segments.iter().map(|segment| segment.input.len()).collect();
        let pieces = split_into_pieces(&lengths, self.device.piece_bytes());
        if pieces.is_empty() {
            self.mark_operation_launched(token, None, segments)?;
            return Ok(true);
        }
        self.current = Some(IpcOperation {
            token,
            reduction,
            segments,
            pieces,
            first_piece: self.pieces_filled,
        });
        Ok(false)
    }

    /// Moves the operation in progress. Pieces of the next one wait until all of this is on the
    /// stream: they may come after work of the framework that waits for it.
    fn advance_pieces(&mut self, current: &IpcOperation) -> Result<bool> {
        let mut moved = false;
        let members = self.mailbox.member_count();
        while self.pieces_filled < current.end_piece_number()
            && (0..members).all(|member| self.has_read_slot(member))
        {
            let piece = current.piece_spans(self.pieces_filled);
            self.device.fill_slot(
                self.pieces_filled % SLOTS_PER_WINDOW,
                piece,
                &current.segments,
                current.reduction.dtype,
            )?;
            self.fill_events.push_back(self.device.record_event()?);
            self.pieces_filled += 1;
            moved = true;
        }
        // The own part is there in the order of the stream.
        let there = |this: &Self, member| {
            member == this.mailbox.own_member()
                || this.mailbox.pieces_filled(member) > this.pieces_reduced
        };
        while self.pieces_reduced < self.pieces_filled
            && (0..members).all(|member| there(self, member))
        {
            let piece = current.piece_spans(self.pieces_reduced);
            self.device.reduce_slot(
                self.pieces_reduced % SLOTS_PER_WINDOW,
                piece,
                &current.segments,
                current.reduction,
            )?;
            self.reduce_events.push_back(self.device.record_event()?);
            self.pieces_reduced += 1;
            moved = true;
        }
        Ok(moved)
    }

    /// Marks an operation as launched: all its work is on the stream. The work is done at the event
    /// `last` or, without one, at an event recorded now.
    fn mark_operation_launched(
        &mut self,
        token: OperationToken,
        last: Option<Arc<dyn DeviceEvent>>,
        segments: Vec<TensorSegment>,
    ) -> Result<()> {
        let last = last
            .map_or_else(|| self.device.record_event(), Ok)
            .map_err(|error| self.fail_communicator(&error.to_string()))?;
        self.launched.push((token, Arc::clone(&last)));
        self.running.push_back((token, last, segments));
        Ok(())
    }
}

/// Returns the number of leading events that are ready.
fn count_leading_ready_events<'a>(
    events: impl Iterator<Item = &'a Arc<dyn DeviceEvent>>,
) -> Result<usize> {
    let mut count = 0;
    for event in events {
        if !event.is_ready()? {
            break;
        }
        count += 1;
    }
    Ok(count)
}

fn count_first_ready_events(events: &VecDeque<Arc<dyn DeviceEvent>>) -> Result<usize> {
    count_leading_ready_events(events.iter())
}

impl<S: IpcDevice> Communicator for IpcCommunicator<S> {
    fn member_count(&self) -> usize {
        self.mailbox.member_count()
    }

    fn member_index(&self) -> usize {
        self.mailbox.own_member()
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> Result<()> {
        self.submit_after_events(token, operation, Vec::new())
    }

    fn submit_after_events(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
        events: Vec<Arc<dyn DeviceEvent>>,
    ) -> Result<()> {
        if self.state == IpcCommunicatorState::Ended {
            return Err(self.ended_error());
        }
        if !self.can_execute(&operation) {
            let reason = "CUDA IPC does not do this operation, or nothing at all".to_owned();
            return Err(CollectiveError::Shape { reason });
        }
        if self.pending_count() == 0 {
            self.waiting_since = Instant::now();
        }
        self.queued.push_back((token, operation, events));
        Ok(())
    }

    fn is_forming(&self) -> bool {
        matches!(
            self.state,
            IpcCommunicatorState::PreparingWindow
                | IpcCommunicatorState::WindowOffered
                | IpcCommunicatorState::WindowsOpened
        )
    }

    fn can_execute(&self, operation: &CollectiveOperation) -> bool {
        self.state == IpcCommunicatorState::Ready && kernel_reduction(operation).is_some()
    }

    fn take_user_notice(&mut self) -> Option<String> {
        self.remark.take()
    }

    fn allocate_result(&mut self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        match self.state {
            IpcCommunicatorState::Ended => Err(self.ended_error()),
            _ => self.device.allocate_result(bytes),
        }
    }

    fn take_launched_operations(
        &mut self,
        launched: &mut Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    ) {
        launched.append(&mut self.launched);
    }

    fn has_waiting_peers(&self) -> bool {
        // Each event stands for progress that is not published yet.
        !(self.fill_events.is_empty() && self.reduce_events.is_empty())
    }

    fn wait_for_launched_operations(&mut self, limit: Duration) {
        drain_communicator(self, limit);
    }

    fn make_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        let mut moved = self.advance_formation()?;
        if self.state != IpcCommunicatorState::Ready {
            return Ok(moved);
        }
        moved |= self.publish_progress(completed)?;
        moved |= self.enqueue_possible_work()?;
        if moved {
            self.waiting_since = Instant::now();
        } else if self.pending_count() > 0 {
            self.check_deadline_and_peers("an operation")?;
        }
        Ok(moved)
    }

    fn abandon_operations(&mut self) {
        if self.state != IpcCommunicatorState::Ended {
            self.fail_communicator("the operation was given up");
        }
    }

    fn pending_count(&self) -> usize {
        let under_way =
            self.queued.len() + usize::from(self.current.is_some()) + self.running.len();
        under_way + usize::from(self.is_forming())
    }
}

impl<S: IpcDevice> Drop for IpcCommunicator<S> {
    fn drop(&mut self) {
        let orderly = self.failure.is_none() && self.pending_count() == 0;
        self.shut_down();
        // Others may still read this window; in good order they end at the same time. After a
        // failure no member is waited for: its operations complete with the error first. Memory
        // that a member may still read is kept, because a kernel may be using it.
        let alone = || self.mailbox.all_peers_closed_windows();
        let unread = !self.window_offered || alone() || (orderly && poll_until(alone));
        if !(self.stream_idle && unread) {
            self.device.leak_resources();
        }
    }
}
