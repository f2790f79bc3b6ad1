// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Completions of one submission, which are collected and then passed to the caller of the engine
//! table once.
#![expect(unsafe_code, reason = "calls a C callback, and takes memory back")]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use farandole::engine::{CompletionCallback, Error, RequestCompletion};
use farandole::kernels::HostMemory;
use farandole_door::{EngineStatusCode, OutcomeCallback, SubmissionOutcome, TensorOutput};
use parking_lot::Mutex;

use crate::operation_numbers;
use crate::submission_failure::SubmissionFailure;

/// The receiver of an outcome.
pub(crate) struct OutcomeReceiver {
    done: OutcomeCallback,
    context: *mut c_void,
}

// SAFETY: the context is the caller's, and the caller expects `done` on another thread (DO-2).
unsafe impl Send for OutcomeReceiver {}

impl OutcomeReceiver {
    /// # Safety
    /// `done` may be called once with `context`, from any thread.
    pub(crate) unsafe fn new(done: OutcomeCallback, context: *mut c_void) -> Self {
        Self { done, context }
    }

    /// Sends the outcome to the C caller, once.
    pub(crate) fn send_outcome(self, results: Result<Vec<RequestCompletion>, SubmissionFailure>) {
        match results {
            Ok(completions) => {
                if completions.iter().any(|completion| completion.last.is_some()) {
                    // Before any caller gets it, and submits the next operation.
                    operation_numbers::restart_numbers_after_join();
                }
                let outputs: Vec<TensorOutput> = completions.iter().map(to_table_output).collect();
                self.call_done_callback(EngineStatusCode::Success, c"", &outputs);
            }
            Err(failure) => self.call_done_callback(failure.code, &failure.to_c_string(), &[]),
        }
    }

    fn call_done_callback(self, code: EngineStatusCode, message: &CStr, outputs: &[TensorOutput]) {
        let outcome = SubmissionOutcome {
            code: code as u32,
            message: message.as_ptr(),
            outputs: outputs.as_ptr(),
            output_count: outputs.len(),
        };
        // SAFETY: promised to `new`; the outcome lives until the call returns.
        unsafe { (self.done)(self.context, &raw const outcome) }
    }
}

/// Converts a completion to an output of the engine table. The memory goes along as a raw box that
/// [`free_tensor_output`] takes back.
fn to_table_output(completion: &RequestCompletion) -> TensorOutput {
    let (address, bytes, owner) = match &completion.output {
        Some(memory) => {
            // The C caller frees the memory by this pointer, after the completion here is gone.
            let owner = Box::into_raw(Box::new(memory.clone()));
            (memory.address().cast(), memory.len(), owner.cast())
        }
        None => (std::ptr::null_mut(), 0, std::ptr::null_mut()),
    };
    TensorOutput {
        address,
        bytes,
        owner,
        rows: completion.rows.as_ptr(),
        row_count: completion.rows.len(),
        number: completion.last.map_or(-1, |rank| i64::from(rank.0)),
    }
}

/// Frees an output's memory.
///
/// # Safety
/// `owner` is null, or came with an [`TensorOutput`] and was not freed.
pub(crate) unsafe extern "C" fn free_tensor_output(owner: *mut c_void) {
    if !owner.is_null() {
        // SAFETY: made by `output`, given back once by the caller's promise.
        drop(unsafe { Box::from_raw(owner.cast::<HostMemory>()) });
    }
}

/// Results of one submission as they come in.
struct GroupCompletion {
    receiver: Option<OutcomeReceiver>,
    results: Vec<Option<RequestCompletion>>,
    missing: usize,
    failure: Option<SubmissionFailure>,
}

/// Returns one callback for each of `count` requests; the last one to run calls the receiver.
pub(crate) fn group_callbacks(receiver: OutcomeReceiver, count: usize) -> Vec<CompletionCallback> {
    let gathering = Arc::new(Mutex::new(GroupCompletion {
        receiver: Some(receiver),
        results: (0..count).map(|_| None).collect(),
        missing: count,
        failure: None,
    }));
    (0..count)
        .map(|index| -> CompletionCallback {
            let gathering = Arc::clone(&gathering);
            Box::new(move |result| gather_group_result(&gathering, index, result))
        })
        .collect()
}

fn gather_group_result(
    gathering: &Mutex<GroupCompletion>,
    index: usize,
    result: Result<RequestCompletion, Error>,
) {
    let mut gathered = gathering.lock();
    gathered.missing -= 1;
    match result {
        Ok(completion) => gathered.results[index] = Some(completion),
        // The first failure is reported; later ones are mostly its consequences.
        Err(error) => gathered.failure = gathered.failure.take().or_else(|| Some(error.into())),
    }
    if gathered.missing > 0 {
        return;
    }
    let Some(receiver) = gathered.receiver.take() else { return };
    let results = match gathered.failure.take() {
        Some(failure) => Err(failure),
        None => Ok(gathered.results.drain(..).flatten().collect()),
    };
    // The receiver is foreign code, which may submit again and so come back here.
    drop(gathered);
    receiver.send_outcome(results);
}
