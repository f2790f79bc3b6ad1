// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Execution of batches by the communicator of hosts or the communicator among the members'
//! devices. Batches start strictly in list order.

use std::collections::VecDeque;
use std::sync::Arc;

use farandole_collectives::{Communicator, DeviceEvent, Error as CollectiveError, OperationToken};
use farandole_negotiation::CachedResponse;

use super::batch::{BatchRoute, BatchState, FusedBatch, STAGING_PIECE_BYTES};
use super::device_communicator::{DeviceCommunicator, NEGOTIATION_TOKEN};
use super::local_requests::{FinishedRequest, LocalRequests, PendingEntry};
use super::operation_trace::BatchSpan;
use super::set_scope::SetScope;
use super::splits_exchange::{SPLITS_TOKEN, SplitsExchange};
use crate::StopCause;
use crate::error::StepResult;
use crate::timeline::{MEMCPY_IN_HOST_BUFFER, MEMCPY_OUT_HOST_BUFFER, WAIT_FOR_DATA};

/// Largest number of pieces that are copied in ahead of their turn.
const MAX_PRELOADED_PIECES: usize = 2;
/// Largest number of pieces that are in staging memory at a time.
const MAX_STAGED_PIECES: usize = 8;

/// The batches of a set.
pub(super) struct BatchExecution {
    communicator: Option<Box<dyn Communicator>>,
    device_communicator: DeviceCommunicator,
    /// Exchange of alltoall rows in progress; later batches wait for it.
    splits_exchange: Option<SplitsExchange>,
    batches: VecDeque<FusedBatch>,
    /// Number of batches at the front that were submitted to a communicator.
    started: usize,
    /// Token of the first batch.
    first_token: u64,
    tokens: Vec<OperationToken>,
    launched: Vec<(OperationToken, Arc<dyn DeviceEvent>)>,
    /// Whether a communicator failed or is not used any more.
    broken: bool,
    /// Number of operations and tensors that were queued.
    pub(super) operations: u64,
    pub(super) tensors: u64,
}

impl BatchExecution {
    pub(super) fn new(communicator: Box<dyn Communicator>) -> Self {
        Self {
            communicator: Some(communicator),
            device_communicator: DeviceCommunicator::NotNegotiated,
            splits_exchange: None,
            batches: VecDeque::new(),
            started: 0,
            first_token: 0,
            tokens: Vec::new(),
            launched: Vec::new(),
            broken: false,
            operations: 0,
            tensors: 0,
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Returns whether there are no batches.
    pub(super) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns whether a device has work in progress. Its requests may be complete already.
    pub(super) fn has_device_work(&self) -> bool {
        !self.broken && self.device_communicator.has_pending_work()
    }

    /// Returns whether this rank or a peer waits for the device, whose end of work wakes no thread.
    pub(super) fn waits_for_device(&self) -> bool {
        !self.broken
            && (self.device_communicator.is_forming()
                // Otherwise a rank that calls nothing would publish only with the next heartbeat,
                // up to 250 ms later, and its peers would wait for that.
                || self.device_communicator.has_waiting_peers()
                || self.batches.iter().any(FusedBatch::waits_for_device))
    }

    /// Returns the number of lists that are not complete.
    pub(super) fn unfinished_list_count(&self) -> u64 {
        match (self.batches.front(), self.batches.back()) {
            (Some(front), Some(back)) => back.list - front.list + 1,
            _ => 0,
        }
    }

    /// Returns the oldest list that is not complete.
    pub(super) fn oldest_list(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.list)
    }

    /// Queues an operation of a list, with this rank's request for each tensor.
    ///
    /// # Errors
    /// `Protocol` if this rank has not announced a tensor.
    pub(super) fn queue_operation(
        &mut self,
        scope: &SetScope,
        list: u64,
        tensors: Vec<Arc<CachedResponse>>,
        requests: &mut LocalRequests,
    ) -> StepResult {
        let mut entries = Vec::with_capacity(tensors.len());
        let mut unknown = None;
        for agreed in tensors {
            match requests.take_entry(&agreed.name) {
                Some(entry) => entries.push((entry, agreed)),
                None if requests.has_joined() => {
                    entries.push((PendingEntry::substitute(&agreed), agreed));
                }
                None => unknown = Some(agreed),
            }
        }
        self.operations += 1;
        self.tensors += entries.len() as u64;
        let span = if scope.context.tracer.is_enabled() {
            let agreed: Vec<_> = entries.iter().map(|(_, agreed)| &**agreed).collect();
            BatchSpan::begin(scope, list, &agreed)
        } else {
            None
        };
        // Queued even if a tensor is unknown: its entries then fail with the engine, and none is
        // lost.
        self.batches.push_back(FusedBatch::new(list, entries, span));
        match unknown {
            None => Ok(()),
            Some(agreed) => Err(StopCause::Protocol {
                rank: scope.members[0],
                reason: format!(
                    "a tensor that this rank did not announce is to be executed: {}",
                    agreed.name
                ),
            }),
        }
    }

    /// Returns the requests that are not complete.
    pub(super) fn pending_entries(&self) -> impl Iterator<Item = &PendingEntry> {
        self.batches.iter().flat_map(FusedBatch::pending_entries)
    }

    /// Closes the communicators' links.
    pub(super) fn close_communicators(&mut self) {
        self.communicator = None;
        self.device_communicator = DeviceCommunicator::Unavailable;
    }

    /// Fails the batches. The communicators abandon them, so that their buffers are not accessed
    /// any more.
    pub(super) fn fail_batches(
        &mut self,
        cause: &Arc<StopCause>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        // Before the batches fail: afterwards their callers may reuse the buffers.
        self.device_communicator.drain_or_abandon_device_work(cause.is_orderly_stop(), self.broken);
        self.broken = true;
        self.started = 0;
        if let Some(communicator) = &mut self.communicator {
            communicator.abandon_operations();
        }
        self.splits_exchange = None;
        for batch in self.batches.drain(..) {
            batch.fail_requests(cause, finished);
        }
    }

    /// Starts batches whose turn it is, and completes batches that the communicators have finished.
    /// Returns whether anything moved, and the loss of a link, which may have a better explanation.
    ///
    /// # Errors
    /// The cause for which the engine must stop.
    pub(super) fn advance_batches(
        &mut self,
        scope: &SetScope,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<(bool, Option<StopCause>)> {
        if self.broken || (self.batches.is_empty() && !self.has_device_work()) {
            return Ok((false, None));
        }
        let (mut moved, mut loss) = (self.start_batches(scope, finished)?, None);
        match self.progress_batches(scope, finished) {
            Ok(progressed) => moved |= progressed,
            // Wait for reports of other ranks, which may name the rank that failed.
            Err(
                cause @ (StopCause::Transport(_)
                | StopCause::Collective(
                    CollectiveError::Transport(_) | CollectiveError::Lost { .. },
                )),
            ) => {
                self.broken = true;
                loss = Some(cause);
            }
            Err(cause) => return Err(cause),
        }
        self.drop_finished_batches();
        Ok((moved, loss))
    }

    /// Submits batches to the communicators in order, up to the first whose inputs are not ready.
    fn start_batches(
        &mut self,
        scope: &SetScope,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let before = self.started;
        while self.started < self.batches.len() {
            if !self.check_or_exchange_splits()? {
                break;
            }
            let started = match self.choose_route(scope)? {
                BatchRoute::Undecided => false,
                BatchRoute::Host => self.start_batch_on_hosts(scope, finished)?,
                BatchRoute::Device => self.start_batch_on_devices(scope)?,
            };
            if !started {
                break;
            }
            self.started += 1;
        }
        Ok(self.started > before)
    }

    /// Returns whether the rows of the next batch are known. If not, starts their exchange.
    fn check_or_exchange_splits(&mut self) -> StepResult<bool> {
        if self.splits_exchange.is_some() {
            return Ok(false);
        }
        let undealt = self.batches.get(self.started).and_then(FusedBatch::missing_splits);
        let (Some((agreed, sends)), Some(communicator)) = (undealt, &mut self.communicator) else {
            return Ok(true);
        };
        self.splits_exchange = Some(SplitsExchange::begin_exchange(
            Arc::clone(agreed),
            sends.to_vec(),
            &mut **communicator,
        )?);
        Ok(false)
    }

    /// Chooses the route of the next batch, the same on every member. Returns `Undecided` while the
    /// communicator among devices is being negotiated.
    fn choose_route(&mut self, scope: &SetScope) -> StepResult<BatchRoute> {
        let Some(batch) = self.batches.get(self.started) else { return Ok(BatchRoute::Undecided) };
        if batch.route != BatchRoute::Undecided || self.communicator.is_none() {
            return Ok(batch.route);
        }
        let mut route = BatchRoute::Host;
        if batch.suits_device_communicator() {
            match &mut self.device_communicator {
                DeviceCommunicator::Draining(_) | DeviceCommunicator::Unavailable => {}
                DeviceCommunicator::ExchangingCapabilities(_)
                | DeviceCommunicator::ExchangingId(_) => {
                    // Later batches wait, too, because batches start in list order on every member.
                    return Ok(BatchRoute::Undecided);
                }
                DeviceCommunicator::Ready(communicator) if communicator.is_forming() => {
                    return Ok(BatchRoute::Undecided);
                }
                DeviceCommunicator::Ready(communicator) => {
                    if communicator.can_execute(&batch.operation_without_tensors(scope)) {
                        route = BatchRoute::Device;
                    }
                }
                DeviceCommunicator::NotNegotiated => {
                    let negotiation = self.device_communicator.begin_negotiation(scope);
                    if let Some(communicator) = &mut self.communicator {
                        communicator.submit_operation(NEGOTIATION_TOKEN, negotiation)?;
                    }
                    return Ok(BatchRoute::Undecided);
                }
            }
        }
        if route == BatchRoute::Host && batch.needs_staging() {
            self.split_next_batch();
        }
        if let Some(batch) = self.batches.get_mut(self.started) {
            batch.route = route;
        }
        Ok(route)
    }

    /// Replaces the next batch by its pieces.
    fn split_next_batch(&mut self) {
        let mut later = self.batches.split_off(self.started);
        if let Some(batch) = later.pop_front() {
            for mut piece in batch.split_into_pieces(STAGING_PIECE_BYTES) {
                piece.route = BatchRoute::Host;
                self.batches.push_back(piece);
            }
        }
        self.batches.append(&mut later);
    }

    fn start_batch_on_hosts(
        &mut self,
        scope: &SetScope,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let held = self.batches.iter().filter(|batch| batch.holds_staging_memory()).count();
        let Some(batch) = self.batches.get_mut(self.started) else { return Ok(false) };
        // Earlier pieces release their staging memory without this one.
        if batch.follows && held >= MAX_STAGED_PIECES && !batch.holds_staging_memory() {
            return Ok(false);
        }
        let loaded = batch.poll_input_copies(scope)?;
        if !loaded {
            batch.enter_timeline_activity(if batch.has_begun_input_copies() {
                MEMCPY_IN_HOST_BUFFER
            } else {
                WAIT_FOR_DATA
            });
        }
        let room = MAX_STAGED_PIECES.saturating_sub(held + 1).min(MAX_PRELOADED_PIECES);
        for next in self.batches.iter_mut().skip(self.started + 1).take(room) {
            if !next.follows {
                break;
            }
            next.poll_input_copies(scope)?;
        }
        let (Some(batch), Some(communicator)) =
            (self.batches.get_mut(self.started), &mut self.communicator)
        else {
            return Ok(false);
        };
        if !loaded {
            return Ok(false);
        }
        let token = OperationToken(self.first_token + self.started as u64);
        match communicator.submit_operation(token, batch.take_segments_as_operation(scope)) {
            Ok(()) => batch.mark_running(),
            // Every rank refuses it in the same way, so the engine can continue.
            Err(cause @ CollectiveError::Unsupported { .. }) => {
                batch.refuse_unsupported_requests(&Arc::new(cause), finished)
            }
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    fn start_batch_on_devices(&mut self, scope: &SetScope) -> StepResult<bool> {
        let token = OperationToken(self.first_token + self.started as u64);
        let (Some(batch), Some(communicator)) =
            (self.batches.get_mut(self.started), self.device_communicator.ready_communicator())
        else {
            return Ok(false);
        };
        let (operation, events) = batch.prepare_device_operation(scope, &mut **communicator)?;
        communicator.submit_after_events(token, operation, events)?;
        batch.mark_running();
        Ok(true)
    }

    /// Makes progress in the communicators, and completes the batches that they have finished.
    fn progress_batches(
        &mut self,
        scope: &SetScope,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let mut moved = false;
        if let Some(communicator) = self.communicator.as_mut().filter(|all| all.pending_count() > 0)
        {
            moved |= communicator.make_progress(&mut self.tokens)?;
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        for token in tokens.drain(..) {
            if token == NEGOTIATION_TOKEN {
                let next = self.device_communicator.advance_negotiation(scope)?;
                if let (Some(negotiation), Some(communicator)) = (next, &mut self.communicator) {
                    communicator.submit_operation(NEGOTIATION_TOKEN, negotiation)?;
                }
                moved = true;
            } else if token == SPLITS_TOKEN {
                if let Some(dealing) = self.splits_exchange.take() {
                    dealing.finish_exchange();
                }
                moved = true;
            } else if let Some(batch) = self.running_batch(token) {
                if batch.needs_staging() {
                    batch.enter_timeline_activity(MEMCPY_OUT_HOST_BUFFER);
                }
                // The copy is only queued: the stream of the caller waits for it, so this thread
                // can start the next batch.
                let reached = batch.begin_result_copies(scope)?;
                batch.complete_requests(reached.as_ref(), finished);
            }
        }
        self.tokens = tokens;
        let Some(communicator) =
            self.device_communicator.ready_communicator().filter(|all| all.pending_count() > 0)
        else {
            return Ok(moved);
        };
        let mut over = Vec::new();
        moved |= communicator.make_progress(&mut over)?;
        if let Some(remark) = communicator.take_user_notice().filter(|_| scope.is_coordinator()) {
            scope.context.observer.on_notice(&remark);
        }
        let mut launched = std::mem::take(&mut self.launched);
        communicator.take_launched_operations(&mut launched);
        for (token, event) in launched.drain(..) {
            if let Some(batch) = self.running_batch(token) {
                batch.complete_requests(Some(&event), finished);
            }
        }
        self.launched = launched;
        // Operations that completed right after the launch, or in a communicator that reports no
        // launches.
        for token in over {
            if let Some(batch) = self.running_batch(token) {
                batch.complete_requests(None, finished);
            }
        }
        Ok(moved)
    }

    /// Returns the running batch of a token.
    fn running_batch(&mut self, token: OperationToken) -> Option<&mut FusedBatch> {
        let index = usize::try_from(token.0.checked_sub(self.first_token)?).ok()?;
        self.batches.get_mut(index).filter(|batch| batch.state == BatchState::Running)
    }

    /// Drops finished batches at the front.
    fn drop_finished_batches(&mut self) {
        while self.batches.front().is_some_and(|batch| batch.state == BatchState::Done) {
            self.batches.pop_front();
            self.started -= 1;
            self.first_token += 1;
        }
    }
}
