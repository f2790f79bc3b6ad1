// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Functions that Python calls after it has loaded the ops.
#![expect(unsafe_code, reason = "exported to C")]

use std::ffi::{CStr, CString, c_char};
use std::ptr::null;
use std::sync::OnceLock;

use farandole_door::{Door, Place, VERSION};

use crate::context::{Code, Failure};
use crate::definition;

static DOOR: OnceLock<&'static Door> = OnceLock::new();
static PROBLEM: OnceLock<CString> = OnceLock::new();

/// Returns the engine's door.
///
/// # Errors
/// When Python has not connected it.
pub(crate) fn door() -> Result<&'static Door, Failure> {
    DOOR.get().copied().ok_or_else(|| Failure {
        code: Code::FailedPrecondition,
        text: "the ops are not connected to the engine: import farandole.tensorflow".to_owned(),
    })
}

/// Returns the place of this process in a process set.
pub(crate) fn place(set: u32) -> Result<Place, Failure> {
    let (mut place, mut message) = (Place::default(), [0u8; 512]);
    // SAFETY: both have room.
    let code =
        unsafe { (door()?.place)(set, &raw mut place, message.as_mut_ptr().cast(), message.len()) };
    refused(code, &message).map(|()| place)
}

/// The failure that a function of the door reported.
pub(crate) fn refused(code: u32, message: &[u8]) -> Result<(), Failure> {
    let Some(code) = translated(code) else { return Ok(()) };
    let text = CStr::from_bytes_until_nul(message).unwrap_or_default();
    Err(Failure { code, text: text.to_string_lossy().into_owned() })
}

/// TensorFlow's code for the door's; none when all went well.
pub(crate) fn translated(code: u32) -> Option<Code> {
    Some(match farandole_door::Code::from_number(code) {
        farandole_door::Code::Good => return None,
        farandole_door::Code::Usage => Code::InvalidArgument,
        farandole_door::Code::Mismatch => Code::FailedPrecondition,
        farandole_door::Code::Unsupported => Code::Aborted,
        farandole_door::Code::Peer | farandole_door::Code::Environment => Code::Unknown,
        farandole_door::Code::Bug => Code::Internal,
    })
}

/// Returns the reason why the ops are not registered; null when they are.
#[unsafe(no_mangle)]
extern "C" fn farandole_tensorflow_problem() -> *const c_char {
    match definition::state() {
        Ok(()) => null(),
        Err(problem) => PROBLEM.get_or_init(|| CString::new(problem).unwrap_or_default()).as_ptr(),
    }
}

/// Connects the engine. Returns 0, or the version of the door that this library was built for.
///
/// # Safety
/// `door` is the address from the extension's capsule.
#[unsafe(no_mangle)]
unsafe extern "C" fn farandole_tensorflow_connect(door: *const Door) -> u32 {
    // SAFETY: a table lives until the process ends (DO-1).
    let Some(door) = (unsafe { door.as_ref() }) else { return VERSION };
    if door.version != VERSION || (door.bytes as usize) < size_of::<Door>() {
        return VERSION;
    }
    DOOR.get_or_init(|| door);
    0
}
