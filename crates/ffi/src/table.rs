// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table itself.
#![expect(unsafe_code, reason = "the functions of the table take pointers")]

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use farandole::engine::{Completion, Request};
use farandole::session::{self, Session};
use farandole::world::ProcessSetId;
use farandole_door::{Call, Code, Done, Door, Place, VERSION};

use crate::completion::{self, Receiver};
use crate::message::Failure;
use crate::request;

/// A table's size never comes near 4 GiB.
#[expect(clippy::cast_possible_truncation, reason = "a handful of pointers")]
const BYTES: u32 = size_of::<Door>() as u32;

static DOOR: Door = Door { version: VERSION, bytes: BYTES, submit, place, free: completion::free };

/// Longest attended wait before it begins again; the engine's own deadlines end it.
const SLICE: Duration = Duration::from_secs(3600);

/// Returns the table of this process, valid until it ends.
pub fn door() -> &'static Door {
    &DOOR
}

/// # Safety
/// Like `farandole_door::Door::submit` demands.
unsafe extern "C" fn submit(
    call: *const Call,
    requests: *const farandole_door::Request,
    count: usize,
    done: Done,
    context: *mut c_void,
    message: *mut c_char,
    capacity: usize,
) -> u32 {
    // SAFETY: the caller promises `count` requests and a call.
    let (call, requests) = unsafe { (&*call, std::slice::from_raw_parts(requests, count)) };
    // SAFETY: the caller expects `done` once, on whatever thread.
    let receiver = unsafe { Receiver::new(done, context) };
    let taken = guarded(|| {
        let session = session::current()?;
        // SAFETY: the caller promises what the requests point at.
        let requests = unsafe { request::all(&session, call, requests) }?;
        match call.attended {
            0 => start(&session, requests, receiver),
            1 => attend(&session, requests, receiver),
            _ => help(&session, requests, receiver),
        }
    });
    // SAFETY: `capacity` bytes are at `message`.
    unsafe { answer(taken, message, capacity) }
}

/// Leaves the requests with the engine's own threads.
fn start(
    session: &Arc<Session>,
    mut requests: Vec<Request>,
    receiver: Receiver,
) -> Result<(), Failure> {
    let mut callbacks = completion::callbacks(receiver, requests.len());
    if requests.len() == 1
        && let (Some(request), Some(done)) = (requests.pop(), callbacks.pop())
    {
        return Ok(session.engine().submit_with(request, done)?);
    }
    Ok(session.engine().submit_group_with(requests, callbacks)?)
}

/// Drives the requests on this thread for a moment, and leaves the rest to the engine's own
/// threads.
fn help(session: &Arc<Session>, requests: Vec<Request>, receiver: Receiver) -> Result<(), Failure> {
    let (count, mut receiver) = (requests.len(), Some(receiver));
    let later = || {
        receiver.take().map(|receiver| completion::callbacks(receiver, count)).unwrap_or_default()
    };
    if let Some(results) = session.engine().submit_helping(requests, later)?
        && let Some(receiver) = receiver
    {
        let merge = |results, result: Result<_, farandole::engine::Error>| {
            merged(results, result.map_err(Failure::from))
        };
        receiver.tell(results.into_iter().fold(Ok(Vec::with_capacity(count)), merge));
    }
    Ok(())
}

/// Drives the requests on this thread.
fn attend(
    session: &Arc<Session>,
    mut requests: Vec<Request>,
    receiver: Receiver,
) -> Result<(), Failure> {
    let engine = session.engine();
    let handles = match requests.len() {
        1 => requests
            .pop()
            .map(|request| engine.submit_attended(request))
            .into_iter()
            .collect::<Result<_, _>>()?,
        _ => engine.submit_group_attended(requests)?,
    };
    let mut results = Ok(Vec::with_capacity(handles.len()));
    for handle in handles {
        let result = loop {
            match engine.wait(handle, SLICE) {
                Ok(None) => {}
                Ok(Some(completion)) => break Ok(completion),
                Err(error) => break Err(error),
            }
        };
        results = merged(results, result.map_err(Failure::from));
    }
    receiver.tell(results);
    Ok(())
}

/// Returns the first failure, or all completions.
fn merged(
    results: Result<Vec<Completion>, Failure>,
    result: Result<Completion, Failure>,
) -> Result<Vec<Completion>, Failure> {
    let mut results = results?;
    results.push(result?);
    Ok(results)
}

/// # Safety
/// Like `farandole_door::Door::place` demands.
unsafe extern "C" fn place(
    process_set: u32,
    place: *mut Place,
    message: *mut c_char,
    capacity: usize,
) -> u32 {
    let found = guarded(|| {
        let session = session::current()?;
        let world = session.world();
        let (members, position) = match session.engine().members(ProcessSetId(process_set)) {
            Ok(members) => (members.len(), members.iter().position(|rank| *rank == world.rank)),
            Err(farandole::engine::Error::NotAMember { .. }) => (0, None),
            Err(error) => return Err(error.into()),
        };
        let found = Place {
            set_size: u32::try_from(members).unwrap_or(u32::MAX),
            set_rank: position.and_then(|position| i32::try_from(position).ok()).unwrap_or(-1),
            rank: world.rank.0,
            local_size: world.seat().local_size,
            local_rank: world.seat().local_rank.0,
        };
        // SAFETY: the caller promises room for a `Place`.
        unsafe { place.write(found) };
        Ok(())
    });
    // SAFETY: `capacity` bytes are at `message`.
    unsafe { answer(found, message, capacity) }
}

/// A panic must not cross the door.
fn guarded(run: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        Err(Failure { code: Code::Bug, text: "the engine panicked".to_owned() })
    })
}

/// # Safety
/// `capacity` bytes are at `message`.
unsafe fn answer(result: Result<(), Failure>, message: *mut c_char, capacity: usize) -> u32 {
    let Err(failure) = result else { return Code::Good as u32 };
    let text = failure.terminated();
    let bytes = text.as_bytes();
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
