// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The submission table, where callers submit requests and get results. It holds the names in
//! flight, the handles, and the queue to the driving thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farandole_negotiation::{CollectiveCall, FastHashMap, FastHashSet, RequestSignature};
use farandole_world::ProcessSetId;

use crate::callbacks::{CompletionCallback, DueCallback};
use crate::set::{FinishedRequest, PendingEntry};
use crate::{Error, RequestCompletion, RequestHandle, Result, StopCause};

/// A request that passed the local checks.
pub(crate) struct CheckedSubmission {
    pub(crate) set: usize,
    pub(crate) entry: PendingEntry,
    pub(crate) signature: RequestSignature,
}

enum HandleState {
    Pending,
    WithCallback(CompletionCallback),
    Done(Result<RequestCompletion>),
}

#[derive(Default)]
struct SetSubmissionState {
    in_flight: FastHashSet<Arc<str>>,
    close_cause: Option<Arc<StopCause>>,
    /// Handle of this rank's join in flight: the rank may submit nothing else meanwhile.
    join_handle: Option<RequestHandle>,
}

/// Number of the next handle, over all engines of a process: a handle of a previous world is
/// invalid in the next one.
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);

/// Requests between submission and result. One lock guards the table; it is held for a few dozen
/// instructions at a time, and no other lock is taken meanwhile.
#[derive(Default)]
pub(crate) struct SubmissionTable {
    handles: FastHashMap<u64, HandleState>,
    /// Submissions by the key of the set.
    sets: FastHashMap<usize, SetSubmissionState>,
    queue: VecDeque<CheckedSubmission>,
    stopped: Option<Arc<StopCause>>,
}

impl SubmissionTable {
    /// Checks that the set accepts requests; the error has the reason.
    pub(crate) fn check_set_open(&self, set: usize) -> Result<()> {
        let left = || self.sets.get(&set).and_then(|names| names.close_cause.as_ref());
        match self.stopped.as_ref().or_else(left) {
            Some(cause) => Err(Error::Stopped { cause: Arc::clone(cause) }),
            None => Ok(()),
        }
    }

    /// Checks that the set accepts this request.
    ///
    /// # Errors
    /// `Stopped`, `Joined`, `DuplicateName`.
    pub(crate) fn check_admission(
        &self,
        set: ProcessSetId,
        submission: &CheckedSubmission,
    ) -> Result<()> {
        self.check_set_open(submission.set)?;
        let Some(state) = self.sets.get(&submission.set) else { return Ok(()) };
        let name = &submission.entry.name;
        if state.join_handle.is_some() {
            return Err(Error::Joined { set, tensor: Arc::clone(name) });
        }
        if state.in_flight.contains(name) {
            return Err(Error::DuplicateName { set, tensor: Arc::clone(name) });
        }
        Ok(())
    }

    /// Admits a request that passed [`Self::check_admission`].
    pub(crate) fn admit_submission(
        &mut self,
        mut submission: CheckedSubmission,
        callback: Option<CompletionCallback>,
    ) -> RequestHandle {
        // Relaxed: the number must be unique, and it orders nothing else.
        let handle = RequestHandle(NEXT_HANDLE.fetch_add(1, Ordering::Relaxed));
        submission.entry.handle = handle;
        let names = self.sets.entry(submission.set).or_default();
        names.in_flight.insert(Arc::clone(&submission.entry.name));
        if matches!(submission.signature.call, CollectiveCall::Join { .. }) {
            names.join_handle = Some(handle);
        }
        self.handles
            .insert(handle.0, callback.map_or(HandleState::Pending, HandleState::WithCallback));
        self.queue.push_back(submission);
        handle
    }

    /// Moves the queued requests to the end of `into`.
    pub(crate) fn drain_queue(&mut self, into: &mut VecDeque<CheckedSubmission>) {
        // The usual case: the driver has taken everything before, and no element is moved.
        if into.is_empty() {
            std::mem::swap(&mut self.queue, into);
        } else {
            into.append(&mut self.queue);
        }
    }

    /// Returns whether the result is there.
    pub(crate) fn is_done(&self, handle: RequestHandle) -> Result<bool> {
        match self.handles.get(&handle.0) {
            Some(HandleState::Done(_)) => Ok(true),
            Some(HandleState::Pending) => Ok(false),
            // The callback gets the result, so no caller may wait for it, too.
            Some(HandleState::WithCallback(_)) | None => Err(Error::UnknownHandle { handle }),
        }
    }

    /// Returns whether the result of this handle is still to come.
    pub(crate) fn is_pending(&self, handle: RequestHandle) -> bool {
        matches!(self.is_done(handle), Ok(false))
    }

    /// Takes the result if it is there; the handle is invalid afterwards.
    pub(crate) fn take_result(
        &mut self,
        handle: RequestHandle,
    ) -> Result<Option<RequestCompletion>> {
        if !self.is_done(handle)? {
            return Ok(None);
        }
        match self.handles.remove(&handle.0) {
            Some(HandleState::Done(result)) => result.map(Some),
            _ => Ok(None),
        }
    }

    /// Attaches a callback to a handle, which becomes invalid. If the result exists already, the
    /// callback goes into `calls`.
    pub(crate) fn attach_callback(
        &mut self,
        handle: RequestHandle,
        callback: CompletionCallback,
        calls: &mut Vec<DueCallback>,
    ) {
        match self.handles.remove(&handle.0) {
            Some(HandleState::Done(result)) => calls.push((callback, result)),
            Some(HandleState::Pending) => {
                drop(self.handles.insert(handle.0, HandleState::WithCallback(callback)))
            }
            Some(HandleState::WithCallback(_)) | None => {
                calls.push((callback, Err(Error::UnknownHandle { handle })))
            }
        }
    }

    /// Stores results. If a request has a callback, moves the callback and the result into `calls`.
    pub(crate) fn post_results(
        &mut self,
        set: usize,
        finished: &mut Vec<FinishedRequest>,
        calls: &mut Vec<DueCallback>,
    ) {
        for FinishedRequest { handle, name, result } in finished.drain(..) {
            self.release_name(set, handle, &name);
            self.finish_handle(handle, result, calls);
        }
    }

    fn finish_handle(
        &mut self,
        handle: RequestHandle,
        result: Result<RequestCompletion>,
        calls: &mut Vec<DueCallback>,
    ) {
        match self.handles.get_mut(&handle.0) {
            Some(HandleState::WithCallback(_)) => {
                if let Some(HandleState::WithCallback(callback)) = self.handles.remove(&handle.0) {
                    calls.push((callback, result));
                }
            }
            Some(state) => *state = HandleState::Done(result),
            None => {}
        }
    }

    /// Closes a set: from now on it refuses requests, also from callers that looked it up before.
    /// It is never opened again, because keys are not reused.
    pub(crate) fn close_set(&mut self, set: usize, cause: &Arc<StopCause>) {
        let names = self.sets.entry(set).or_default();
        names.close_cause.get_or_insert_with(|| Arc::clone(cause));
    }

    fn release_name(&mut self, set: usize, handle: RequestHandle, name: &Arc<str>) {
        if let Some(names) = self.sets.get_mut(&set) {
            names.in_flight.remove(name);
            names.join_handle.take_if(|joined| *joined == handle);
        }
    }

    /// Refuses all requests from now on, and fails the queued ones, whether drained or not. The
    /// first cause is kept.
    pub(crate) fn refuse_all_requests(
        &mut self,
        cause: Arc<StopCause>,
        intake: &mut VecDeque<CheckedSubmission>,
        calls: &mut Vec<DueCallback>,
    ) {
        let cause = Arc::clone(self.stopped.get_or_insert(cause));
        for CheckedSubmission { set, entry, .. } in
            intake.drain(..).chain(std::mem::take(&mut self.queue))
        {
            let FinishedRequest { handle, name, result } = entry.into_failed(&cause);
            self.release_name(set, handle, &name);
            self.finish_handle(handle, result, calls);
        }
    }

    /// Fails all handles without a result. After a panic in a set, its requests may be lost.
    pub(crate) fn fail_unfinished_requests(
        &mut self,
        cause: &Arc<StopCause>,
        calls: &mut Vec<DueCallback>,
    ) {
        let open = |(number, state): (&u64, &HandleState)| {
            (!matches!(state, HandleState::Done(_))).then_some(*number)
        };
        let lost: Vec<u64> = self.handles.iter().filter_map(open).collect();
        for number in lost {
            self.finish_handle(
                RequestHandle(number),
                Err(Error::Stopped { cause: Arc::clone(cause) }),
                calls,
            );
        }
    }

    pub(crate) fn stop_cause(&self) -> Option<&Arc<StopCause>> {
        self.stopped.as_ref()
    }
}
