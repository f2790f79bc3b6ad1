// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Completions of one submission, which are collected and then passed through the door once.
#![expect(unsafe_code, reason = "calls back across the door, and takes memory back")]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use farandole::collectives::Memory;
use farandole::engine::{Callback, Completion, Error};
use farandole_door::{Code, Done, Outcome, Output};
use parking_lot::Mutex;

use crate::message::Failure;
use crate::names;

/// The receiver of an outcome.
pub(crate) struct Receiver {
    done: Done,
    context: *mut c_void,
}

// SAFETY: the context is the caller's, and the caller expects `done` on another thread (DO-2).
unsafe impl Send for Receiver {}

impl Receiver {
    /// # Safety
    /// `done` may be called once with `context`, from any thread.
    pub(crate) unsafe fn new(done: Done, context: *mut c_void) -> Self {
        Self { done, context }
    }

    /// Tells the other side, once.
    pub(crate) fn tell(self, results: Result<Vec<Completion>, Failure>) {
        match results {
            Ok(completions) => {
                if completions.iter().any(|completion| completion.last.is_some()) {
                    // Before any caller gets it, and submits the next operation.
                    names::joined();
                }
                let outputs: Vec<Output> = completions.iter().map(output).collect();
                self.call(Code::Good, c"", &outputs);
            }
            Err(failure) => self.call(failure.code, &failure.terminated(), &[]),
        }
    }

    fn call(self, code: Code, message: &CStr, outputs: &[Output]) {
        let outcome = Outcome {
            code: code as u32,
            message: message.as_ptr(),
            outputs: outputs.as_ptr(),
            output_count: outputs.len(),
        };
        // SAFETY: promised to `new`; the outcome lives until the call returns.
        unsafe { (self.done)(self.context, &raw const outcome) }
    }
}

/// The memory goes along as a raw box that [`free`] takes back.
fn output(completion: &Completion) -> Output {
    let (address, bytes, owner) = match &completion.output {
        Some(memory) => {
            let owner = Box::into_raw(Box::new(memory.clone()));
            (memory.address().cast(), memory.len(), owner.cast())
        }
        None => (std::ptr::null_mut(), 0, std::ptr::null_mut()),
    };
    Output {
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
/// `owner` is null, or came with an [`Output`] and was not freed.
pub(crate) unsafe extern "C" fn free(owner: *mut c_void) {
    if !owner.is_null() {
        // SAFETY: made by `output`, given back once by the caller's promise.
        drop(unsafe { Box::from_raw(owner.cast::<Memory>()) });
    }
}

/// Results of one submission as they come in.
struct Gathering {
    receiver: Option<Receiver>,
    results: Vec<Option<Completion>>,
    missing: usize,
    failure: Option<Failure>,
}

/// Returns one callback for each of `count` requests; the last to run tells the receiver.
pub(crate) fn callbacks(receiver: Receiver, count: usize) -> Vec<Callback> {
    let gathering = Arc::new(Mutex::new(Gathering {
        receiver: Some(receiver),
        results: (0..count).map(|_| None).collect(),
        missing: count,
        failure: None,
    }));
    (0..count)
        .map(|index| -> Callback {
            let gathering = Arc::clone(&gathering);
            Box::new(move |result| arrive(&gathering, index, result))
        })
        .collect()
}

fn arrive(gathering: &Mutex<Gathering>, index: usize, result: Result<Completion, Error>) {
    let mut gathered = gathering.lock();
    gathered.missing -= 1;
    match result {
        Ok(completion) => gathered.results[index] = Some(completion),
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
    drop(gathered);
    receiver.tell(results);
}
