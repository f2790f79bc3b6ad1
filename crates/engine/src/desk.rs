// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The place where callers leave requests and get results: names in flight, handles, the queue to
//! the driving thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::callbacks::{Call, Callback};
use crate::hash::{Map, Set};
use crate::set::{Entry, Finished};
use crate::signature::{Call as Signed, Signature};
use crate::{Cause, Completion, Error, Handle, Result};

/// A request that passed the local checks.
pub(crate) struct Submission {
    pub(crate) set: usize,
    pub(crate) entry: Entry,
    pub(crate) signature: Signature,
}

enum State {
    Pending,
    Called(Callback),
    Done(Result<Completion>),
}

#[derive(Default)]
struct Names {
    in_flight: Set<Arc<str>>,
    left: Option<Arc<Cause>>,
    /// This rank's join in flight: nothing else may be submitted.
    joined: Option<Handle>,
}

/// Handles are numbered through all engines of a process: one of a world that is over means nothing
/// in the next.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Guarded by one lock, held for a few dozen instructions at a time and never while another lock is
/// taken.
#[derive(Default)]
pub(crate) struct Desk {
    handles: Map<u64, State>,
    /// By key.
    sets: Map<usize, Names>,
    queue: VecDeque<Submission>,
    stopped: Option<Arc<Cause>>,
}

impl Desk {
    /// Returns the reason why requests of this set are refused, if they are.
    pub(crate) fn open(&self, set: usize) -> Result<()> {
        let left = || self.sets.get(&set).and_then(|names| names.left.as_ref());
        match self.stopped.as_ref().or_else(left) {
            Some(cause) => Err(Error::Stopped { cause: Arc::clone(cause) }),
            None => Ok(()),
        }
    }

    /// Returns whether this rank has joined in the set.
    pub(crate) fn has_joined(&self, set: usize) -> bool {
        self.sets.get(&set).is_some_and(|names| names.joined.is_some())
    }

    /// Returns whether a name is taken.
    pub(crate) fn is_in_flight(&self, set: usize, name: &str) -> bool {
        self.sets.get(&set).is_some_and(|names| names.in_flight.contains(name))
    }

    /// Takes a request whose name is free in an open set.
    pub(crate) fn admit(
        &mut self,
        mut submission: Submission,
        callback: Option<Callback>,
    ) -> Handle {
        let handle = Handle(NEXT.fetch_add(1, Ordering::Relaxed));
        submission.entry.handle = handle;
        let names = self.sets.entry(submission.set).or_default();
        names.in_flight.insert(Arc::clone(&submission.entry.name));
        if matches!(submission.signature.call, Signed::Join { .. }) {
            names.joined = Some(handle);
        }
        self.handles.insert(handle.0, callback.map_or(State::Pending, State::Called));
        self.queue.push_back(submission);
        handle
    }

    /// Moves the queue.
    pub(crate) fn drain(&mut self, into: &mut VecDeque<Submission>) {
        if into.is_empty() {
            std::mem::swap(&mut self.queue, into);
        } else {
            into.append(&mut self.queue);
        }
    }

    /// Returns whether the result is there.
    pub(crate) fn is_done(&self, handle: Handle) -> Result<bool> {
        match self.handles.get(&handle.0) {
            Some(State::Done(_)) => Ok(true),
            Some(State::Pending) => Ok(false),
            Some(State::Called(_)) | None => Err(Error::UnknownHandle { handle }),
        }
    }

    /// Returns whether there is something to wait for.
    pub(crate) fn is_pending(&self, handle: Handle) -> bool {
        matches!(self.is_done(handle), Ok(false))
    }

    /// Takes the result if it is there; the handle is gone then.
    pub(crate) fn take(&mut self, handle: Handle) -> Result<Option<Completion>> {
        if !self.is_done(handle)? {
            return Ok(None);
        }
        match self.handles.remove(&handle.0) {
            Some(State::Done(result)) => result.map(Some),
            _ => Ok(None),
        }
    }

    /// Sends a result to a callback: at once, into `calls`, if it exists already. The handle is
    /// gone.
    pub(crate) fn hand_over(&mut self, handle: Handle, callback: Callback, calls: &mut Vec<Call>) {
        match self.handles.remove(&handle.0) {
            Some(State::Done(result)) => calls.push((callback, result)),
            Some(State::Pending) => drop(self.handles.insert(handle.0, State::Called(callback))),
            Some(State::Called(_)) | None => {
                calls.push((callback, Err(Error::UnknownHandle { handle })))
            }
        }
    }

    /// Stores results; callbacks that are due are handed out instead.
    pub(crate) fn post(&mut self, set: usize, finished: &mut Vec<Finished>, calls: &mut Vec<Call>) {
        for Finished { handle, name, result } in finished.drain(..) {
            self.free(set, handle, &name);
            self.finish(handle, result, calls);
        }
    }

    fn finish(&mut self, handle: Handle, result: Result<Completion>, calls: &mut Vec<Call>) {
        match self.handles.get_mut(&handle.0) {
            Some(State::Called(_)) => {
                if let Some(State::Called(callback)) = self.handles.remove(&handle.0) {
                    calls.push((callback, result));
                }
            }
            Some(state) => *state = State::Done(result),
            None => {}
        }
    }

    /// From now on the set refuses requests, also those of callers that looked it up before. That
    /// is kept for good.
    pub(crate) fn leave(&mut self, set: usize, cause: &Arc<Cause>) {
        let names = self.sets.entry(set).or_default();
        names.left.get_or_insert_with(|| Arc::clone(cause));
    }

    fn free(&mut self, set: usize, handle: Handle, name: &Arc<str>) {
        if let Some(names) = self.sets.get_mut(&set) {
            names.in_flight.remove(name);
            names.joined.take_if(|joined| *joined == handle);
        }
    }

    /// From now on everything is refused; what was drained but not taken up, or not drained, fails.
    /// The first cause stays.
    pub(crate) fn stop(
        &mut self,
        cause: Arc<Cause>,
        intake: &mut VecDeque<Submission>,
        calls: &mut Vec<Call>,
    ) {
        let cause = Arc::clone(self.stopped.get_or_insert(cause));
        for Submission { set, entry, .. } in intake.drain(..).chain(std::mem::take(&mut self.queue))
        {
            let (operation, tensor) = (entry.operation, Arc::clone(&entry.name));
            self.free(set, entry.handle, &tensor);
            self.finish(
                entry.handle,
                Err(Error::Failed { operation, tensor, cause: Arc::clone(&cause) }),
                calls,
            );
        }
    }

    /// Ends a set whose last user panicked while holding it.
    pub(crate) fn end(&mut self, cause: &Arc<Cause>, calls: &mut Vec<Call>) {
        let open =
            |(number, state): (&u64, &State)| (!matches!(state, State::Done(_))).then_some(*number);
        let lost: Vec<u64> = self.handles.iter().filter_map(open).collect();
        for number in lost {
            self.finish(Handle(number), Err(Error::Stopped { cause: Arc::clone(cause) }), calls);
        }
    }

    pub(crate) fn stopped(&self) -> Option<&Arc<Cause>> {
        self.stopped.as_ref()
    }
}
