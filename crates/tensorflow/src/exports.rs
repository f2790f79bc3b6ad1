// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Functions that Python calls after it has loaded the ops.
#![expect(unsafe_code, reason = "exported to C")]

use std::ffi::{CString, c_char};
use std::ptr::null;
use std::sync::OnceLock;

use farandole_door::{EngineTable, TABLE_VERSION};

use crate::connection::connect_engine_table;
use crate::definition;

static REGISTRATION_PROBLEM: OnceLock<CString> = OnceLock::new();

/// Returns the reason why the ops are not registered; null when they are.
#[unsafe(no_mangle)]
extern "C" fn farandole_tensorflow_problem() -> *const c_char {
    match definition::check_ops_registered() {
        Ok(()) => null(),
        Err(problem) => {
            REGISTRATION_PROBLEM.get_or_init(|| CString::new(problem).unwrap_or_default()).as_ptr()
        }
    }
}

/// Connects the engine. Returns 0, or the table version that this library was built for.
///
/// # Safety
/// `table` is null or the address from the extension's capsule.
#[unsafe(no_mangle)]
unsafe extern "C" fn farandole_tensorflow_connect(table: *const EngineTable) -> u32 {
    // SAFETY: a table lives until the process ends (DO-1).
    let Some(table) = (unsafe { table.as_ref() }) else { return TABLE_VERSION };
    // Python then reports both versions, and the ops stay unconnected.
    if table.version != TABLE_VERSION || (table.bytes as usize) < size_of::<EngineTable>() {
        return TABLE_VERSION;
    }
    connect_engine_table(table);
    0
}
