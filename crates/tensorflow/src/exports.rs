// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Functions that Python calls after it has loaded the ops.
#![expect(unsafe_code, reason = "exported to C")]

use std::ffi::{CStr, CString, c_char};
use std::ptr::null;
use std::sync::OnceLock;

use farandole_door::{EngineTable, ProcessSetPlacement, TABLE_VERSION};

use crate::context::{KernelFailure, TensorflowCode};
use crate::definition;

static CONNECTED_TABLE: OnceLock<&'static EngineTable> = OnceLock::new();
static REGISTRATION_PROBLEM: OnceLock<CString> = OnceLock::new();

/// Returns the engine's door.
///
/// # Errors
/// When Python has not connected it.
pub(crate) fn connected_table() -> Result<&'static EngineTable, KernelFailure> {
    CONNECTED_TABLE.get().copied().ok_or_else(|| KernelFailure {
        code: TensorflowCode::FailedPrecondition,
        text: "the ops are not connected to the engine: import farandole.tensorflow".to_owned(),
    })
}

/// Returns the place of this process in a process set.
pub(crate) fn query_placement(set: u32) -> Result<ProcessSetPlacement, KernelFailure> {
    let (mut place, mut message) = (ProcessSetPlacement::default(), [0u8; 512]);
    // SAFETY: both have room.
    let code = unsafe {
        (connected_table()?.place)(set, &raw mut place, message.as_mut_ptr().cast(), message.len())
    };
    check_status(code, &message).map(|()| place)
}

/// Checks the status that a function of the door returned.
pub(crate) fn check_status(code: u32, message: &[u8]) -> Result<(), KernelFailure> {
    let Some(code) = tensorflow_code(code) else { return Ok(()) };
    let text = CStr::from_bytes_until_nul(message).unwrap_or_default();
    Err(KernelFailure { code, text: text.to_string_lossy().into_owned() })
}

/// Converts a status code of the door to TensorFlow's code; `None` for success.
pub(crate) fn tensorflow_code(code: u32) -> Option<TensorflowCode> {
    Some(match farandole_door::EngineStatusCode::from_number(code) {
        farandole_door::EngineStatusCode::Success => return None,
        farandole_door::EngineStatusCode::Usage => TensorflowCode::InvalidArgument,
        farandole_door::EngineStatusCode::Mismatch => TensorflowCode::FailedPrecondition,
        farandole_door::EngineStatusCode::Unsupported => TensorflowCode::Aborted,
        farandole_door::EngineStatusCode::Peer | farandole_door::EngineStatusCode::Environment => {
            TensorflowCode::Unknown
        }
        farandole_door::EngineStatusCode::Bug => TensorflowCode::Internal,
    })
}

/// Returns the reason why the ops are not registered; null when they are.
#[unsafe(no_mangle)]
extern "C" fn farandole_tensorflow_problem() -> *const c_char {
    match definition::registration_state() {
        Ok(()) => null(),
        Err(problem) => {
            REGISTRATION_PROBLEM.get_or_init(|| CString::new(problem).unwrap_or_default()).as_ptr()
        }
    }
}

/// Connects the engine. Returns 0, or the version of the door that this library was built for.
///
/// # Safety
/// `connected_table` is the address from the extension's capsule.
#[unsafe(no_mangle)]
unsafe extern "C" fn farandole_tensorflow_connect(door: *const EngineTable) -> u32 {
    // SAFETY: a table lives until the process ends (DO-1).
    let Some(door) = (unsafe { door.as_ref() }) else { return TABLE_VERSION };
    if door.version != TABLE_VERSION || (door.bytes as usize) < size_of::<EngineTable>() {
        return TABLE_VERSION;
    }
    CONNECTED_TABLE.get_or_init(|| door);
    0
}
