// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table itself.
#![expect(unsafe_code, reason = "the functions of the table take pointers")]

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use farandole::engine::{CollectiveRequest, Error, RequestCompletion};
use farandole::session::{self, Session};
use farandole::world::ProcessSetId;
use farandole_door::{
    EngineStatusCode, EngineTable, OutcomeCallback, ProcessSetPlacement, SubmissionHeader,
    TABLE_VERSION,
};

use crate::completion::{self, OutcomeReceiver};
use crate::request;
use crate::submission_failure::SubmissionFailure;

/// A table's size never comes near 4 GiB.
#[expect(clippy::cast_possible_truncation, reason = "a handful of pointers")]
const TABLE_BYTES: u32 = size_of::<EngineTable>() as u32;

static ENGINE_TABLE: EngineTable = EngineTable {
    version: TABLE_VERSION,
    bytes: TABLE_BYTES,
    submit: submit_requests,
    place: write_placement,
    free: completion::free_tensor_output,
};

/// Longest attended wait before it begins again; the engine's own deadlines end it.
const ATTENDED_WAIT_LIMIT: Duration = Duration::from_secs(3600);

/// Returns the table of this process, valid until it ends.
pub fn engine_table() -> &'static EngineTable {
    &ENGINE_TABLE
}

/// # Safety
/// Like `farandole_door::EngineTable::submit` demands.
unsafe extern "C" fn submit_requests(
    call: *const SubmissionHeader,
    requests: *const farandole_door::TensorRequest,
    count: usize,
    done: OutcomeCallback,
    context: *mut c_void,
    message: *mut c_char,
    capacity: usize,
) -> u32 {
    // SAFETY: the caller promises `count` requests and a call.
    let (call, requests) = unsafe { (&*call, std::slice::from_raw_parts(requests, count)) };
    // SAFETY: the caller expects `done` once, on whatever thread.
    let receiver = unsafe { OutcomeReceiver::new(done, context) };
    let taken = catch_panic(|| {
        let session = session::current_session()?;
        // SAFETY: the caller promises that the pointers in the requests are valid.
        let requests = unsafe { request::convert_requests(&session, call, requests) }?;
        match call.attended {
            0 => submit_to_engine_threads(&session, requests, receiver),
            1 => drive_requests_to_end(&session, requests, receiver),
            _ => drive_requests_briefly(&session, requests, receiver),
        }
    });
    // SAFETY: `capacity` bytes are at `message`.
    unsafe { write_status(taken, message, capacity) }
}

/// Leaves the requests with the engine's own threads.
fn submit_to_engine_threads(
    session: &Arc<Session>,
    requests: Vec<CollectiveRequest>,
    receiver: OutcomeReceiver,
) -> Result<(), SubmissionFailure> {
    let callbacks = completion::group_callbacks(receiver, requests.len());
    Ok(session.engine().submit_group_with_callbacks(requests, callbacks)?)
}

/// Drives the requests on this thread for a moment, and leaves the rest to the engine's own
/// threads.
fn drive_requests_briefly(
    session: &Arc<Session>,
    requests: Vec<CollectiveRequest>,
    receiver: OutcomeReceiver,
) -> Result<(), SubmissionFailure> {
    let (count, mut receiver) = (requests.len(), Some(receiver));
    let later = || {
        receiver
            .take()
            .map(|receiver| completion::group_callbacks(receiver, count))
            .unwrap_or_default()
    };
    if let Some(results) = session.engine().submit_and_drive_briefly(requests, later)?
        && let Some(receiver) = receiver
    {
        let results: Result<_, Error> = results.into_iter().collect();
        receiver.send_outcome(results.map_err(SubmissionFailure::from));
    }
    Ok(())
}

/// Drives the requests on this thread.
fn drive_requests_to_end(
    session: &Arc<Session>,
    requests: Vec<CollectiveRequest>,
    receiver: OutcomeReceiver,
) -> Result<(), SubmissionFailure> {
    let engine = session.engine();
    let wait = |handle| loop {
        // After the limit of one wait, the next begins. The engine's own deadlines end the
        // operation.
        if let Some(result) = engine.wait(handle, ATTENDED_WAIT_LIMIT).transpose() {
            break result;
        }
    };
    let handles = engine.submit_group_before_wait(requests)?;
    // All end before the first failure is reported: then the caller may reuse the memory.
    let results: Vec<Result<RequestCompletion, Error>> = handles.into_iter().map(wait).collect();
    let results: Result<_, Error> = results.into_iter().collect();
    receiver.send_outcome(results.map_err(SubmissionFailure::from));
    Ok(())
}

/// # Safety
/// Like `farandole_door::EngineTable::place` demands.
unsafe extern "C" fn write_placement(
    process_set: u32,
    place: *mut ProcessSetPlacement,
    message: *mut c_char,
    capacity: usize,
) -> u32 {
    let found = catch_panic(|| {
        let session = session::current_session()?;
        let world = session.world();
        let (members, position) =
            match session.engine().process_set_members(ProcessSetId(process_set)) {
                Ok(members) => (members.len(), members.iter().position(|rank| *rank == world.rank)),
                // A rank that is not in the set can ask, too: its answer is a rank of -1.
                Err(farandole::engine::Error::NotAMember { .. }) => (0, None),
                Err(error) => return Err(error.into()),
            };
        let found = ProcessSetPlacement {
            set_size: u32::try_from(members).unwrap_or(u32::MAX),
            set_rank: position.and_then(|position| i32::try_from(position).ok()).unwrap_or(-1),
            rank: world.rank.0,
            local_size: world.own_placement().local_size,
            local_rank: world.own_placement().local_rank.0,
        };
        // SAFETY: the caller promises room for a `ProcessSetPlacement`.
        unsafe { place.write(found) };
        Ok(())
    });
    // SAFETY: `capacity` bytes are at `message`.
    unsafe { write_status(found, message, capacity) }
}

/// Converts a panic to a failure, because a panic must not unwind into C.
fn catch_panic(
    run: impl FnOnce() -> Result<(), SubmissionFailure>,
) -> Result<(), SubmissionFailure> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        Err(SubmissionFailure {
            code: EngineStatusCode::Bug,
            text: "the engine panicked".to_owned(),
        })
    })
}

/// # Safety
/// `capacity` bytes are at `message`.
unsafe fn write_status(
    result: Result<(), SubmissionFailure>,
    message: *mut c_char,
    capacity: usize,
) -> u32 {
    let Err(failure) = result else { return EngineStatusCode::Success as u32 };
    let text = failure.to_c_string();
    let bytes = text.as_bytes();
    // Room for the zero that ends the text in C.
    let length = bytes.len().min(capacity.saturating_sub(1));
    if capacity > 0 {
        // SAFETY: `length` + 1 bytes are within the caller's room.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.cast::<u8>(), length);
            message.add(length).write(0);
        }
    }
    failure.code as u32
}

#[cfg(test)]
mod tests;
