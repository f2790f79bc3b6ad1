// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The status of a custom call, written by the layout that libstdc++ gives to its parts.
#![expect(unsafe_code, reason = "writes a C++ object by its layout")]

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// `operator new`.
pub(super) type OperatorNewFn = unsafe extern "C" fn(usize) -> *mut c_void;

/// Gives the memory of texts, which XLA frees.
pub(super) static OPERATOR_NEW: OnceLock<OperatorNewFn> = OnceLock::new();

/// `std::string` of libstdc++: where the text is, its length, and room for a short one, to which
/// `data` points then; for a long one the room begins with the capacity.
#[repr(C)]
pub(super) struct CppString {
    pub(super) data: *const c_char,
    pub(super) length: usize,
    pub(super) short: [usize; 2],
}

impl CppString {
    /// Returns a text to be read only: C++ must not destroy it, and never gets to.
    pub(super) fn from_static(text: &'static CStr) -> Self {
        let length = text.count_bytes();
        Self { data: text.as_ptr(), length, short: [length, 0] }
    }
}

/// `XlaCustomCallStatus`: a `std::optional<std::string>` of libstdc++, empty while all is well.
#[repr(C)]
pub(super) struct XlaCallStatus {
    pub(super) text: CppString,
    pub(super) failed: bool,
}

/// Reports to XLA that a call failed.
///
/// # Safety
/// `status` is the status that XLA passed to a call that has not returned, and no failure was
/// written to it before.
pub(super) unsafe fn write_failure(status: *mut XlaCallStatus, text: &str) {
    let Some(allocate) = OPERATOR_NEW.get() else { return };
    // SAFETY: the caller's promise; XLA's destructor frees the memory, which is as large as the
    // capacity says, and 1.
    unsafe {
        // In libstdc++, a text outside of the object always has a capacity above 15.
        let data = allocate(text.len().max(16) + 1).cast::<u8>();
        std::ptr::copy_nonoverlapping(text.as_ptr(), data, text.len());
        data.add(text.len()).write(0);
        let text =
            CppString { data: data.cast(), length: text.len(), short: [text.len().max(16), 0] };
        status.write(XlaCallStatus { text, failed: true });
    }
}
