// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Collectives inside functions that XLA has compiled for the CPU.
//!
//! XLA cannot run our ops, but calls a function by its name, a custom call. XLA passes the
//! addresses of inputs and outputs, and a text that was fixed when the program was traced
//! ([`plan`]). XLA does not pass shapes, so the text contains them. The call blocks: XLA's thread
//! drives the operation itself, like a Python thread that waits for an operation.
//!
//! The registry of custom calls is C++ and no stable interface. Its used parts are looked up by
//! name: two functions, and `std::string` by libstdc++'s layout. Python tries a compiled call
//! before it relies on this.

mod call;
mod call_status;
mod plan;
mod registry;

use std::ffi::{CString, c_char};
use std::ptr::null;
use std::sync::OnceLock;

static XLA_REGISTERED: OnceLock<Result<(), CString>> = OnceLock::new();

/// Registers the custom call `farandole` with XLA's compiler for the CPU, once.
/// Returns null, or why that cannot be.
#[expect(unsafe_code, reason = "exported to C")]
#[unsafe(no_mangle)]
extern "C" fn farandole_tensorflow_register_xla() -> *const c_char {
    let registered = XLA_REGISTERED.get_or_init(|| {
        registry::register_custom_call_target()
            .map_err(|problem| CString::new(problem).unwrap_or_default())
    });
    registered.as_ref().map_or_else(|problem| problem.as_ptr(), |()| null())
}
