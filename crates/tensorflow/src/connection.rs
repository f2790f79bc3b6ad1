// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The connection to the engine, through the table that Python hands over.
#![expect(unsafe_code, reason = "calls functions of the table")]

use std::ffi::CStr;
use std::sync::OnceLock;

use farandole_door::{EngineStatusCode, EngineTable, ProcessSetPlacement};

use crate::context::{KernelFailure, TensorflowCode};

static CONNECTED_TABLE: OnceLock<&'static EngineTable> = OnceLock::new();

/// Connects the engine; the first table stays.
pub(crate) fn connect_engine_table(table: &'static EngineTable) {
    CONNECTED_TABLE.get_or_init(|| table);
}

/// Returns the engine table.
///
/// # Errors
/// When Python has not connected it.
pub(crate) fn connected_engine_table() -> Result<&'static EngineTable, KernelFailure> {
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
        (connected_engine_table()?.place)(
            set,
            &raw mut place,
            message.as_mut_ptr().cast(),
            message.len(),
        )
    };
    check_status(code, &message).map(|()| place)
}

/// Checks the status that a function of the engine table returned.
pub(crate) fn check_status(code: u32, message: &[u8]) -> Result<(), KernelFailure> {
    let Some(code) = tensorflow_code(code) else { return Ok(()) };
    let text = CStr::from_bytes_until_nul(message).unwrap_or_default();
    Err(KernelFailure { code, text: text.to_string_lossy().into_owned() })
}

/// Converts a status code of the engine table to TensorFlow's code; `None` for success.
pub(crate) fn tensorflow_code(code: u32) -> Option<TensorflowCode> {
    Some(match EngineStatusCode::from_number(code) {
        EngineStatusCode::Success => return None,
        EngineStatusCode::Usage => TensorflowCode::InvalidArgument,
        EngineStatusCode::Mismatch => TensorflowCode::FailedPrecondition,
        EngineStatusCode::Unsupported => TensorflowCode::Aborted,
        EngineStatusCode::Peer | EngineStatusCode::Environment => TensorflowCode::Unknown,
        EngineStatusCode::Bug => TensorflowCode::Internal,
    })
}
