// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! XLA's registry of custom calls and their status, reached by the names that C++ functions have in
//! the library.
//!
//! TensorFlow's wheel exports neither's C functions. A failure is written into the status by
//! libstdc++'s layout of `std::optional<std::string>`; before that is relied on, XLA is asked to
//! read one that was written here.
#![expect(
    unsafe_code,
    reason = "symbols are looked up by name and given their types, C++ objects by their layout"
)]

use std::ffi::{CStr, c_void};

use super::call;
use super::call_status::{CppString, OPERATOR_NEW, OperatorNewFn, XlaCallStatus, write_failure};
use crate::api::find_symbol;

/// `xla::CustomCallTargetRegistry::Global()`.
const REGISTRY_GLOBAL_SYMBOL: &CStr = c"_ZN3xla24CustomCallTargetRegistry6GlobalEv";
/// `xla::CustomCallTargetRegistry::Register(std::string const&, void*, std::string const&)`.
const REGISTRY_REGISTER_SYMBOL: &CStr =
    c"_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPvS8_";
/// `xla::CustomCallStatusGetMessage(XlaCustomCallStatus const*)`.
const GET_MESSAGE_SYMBOL: &CStr = c"_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_";
/// `operator new(size_t)`, whose memory XLA's strings free.
const OPERATOR_NEW_SYMBOL: &CStr = c"_Znwm";
/// `operator delete(void*)`.
const OPERATOR_DELETE_SYMBOL: &CStr = c"_ZdlPv";

type Global = unsafe extern "C" fn() -> *mut c_void;
type Register = unsafe extern "C" fn(*mut c_void, *const CppString, *mut c_void, *const CppString);
type GetMessageFn = unsafe extern "C" fn(*const XlaCallStatus) -> CppOptionalStringView;
type Delete = unsafe extern "C" fn(*mut c_void);

/// `std::optional<std::string_view>` of libstdc++.
#[repr(C)]
struct CppOptionalStringView {
    length: usize,
    data: *const u8,
    present: bool,
}

/// Makes [`call::run_custom_call`] known to XLA's compiler for the CPU, by the name `farandole`.
///
/// # Errors
/// The reason: a part that this TensorFlow lacks, or lays out in another way.
pub(super) fn register_custom_call_target() -> Result<(), String> {
    /// # Safety
    /// As for [`find_symbol`].
    unsafe fn require_symbol<F: Copy>(name: &CStr) -> Result<F, String> {
        // SAFETY: the type is the caller's promise.
        unsafe { find_symbol(name) }
            .ok_or_else(|| format!("this TensorFlow lacks {}", name.to_string_lossy()))
    }
    // SAFETY: the functions have these types in XLA's headers; `this` is a method's first argument.
    let (global, register, get_message, new, delete) = unsafe {
        (
            require_symbol::<Global>(REGISTRY_GLOBAL_SYMBOL)?,
            require_symbol::<Register>(REGISTRY_REGISTER_SYMBOL)?,
            require_symbol::<GetMessageFn>(GET_MESSAGE_SYMBOL)?,
            require_symbol::<OperatorNewFn>(OPERATOR_NEW_SYMBOL)?,
            require_symbol::<Delete>(OPERATOR_DELETE_SYMBOL)?,
        )
    };
    // Before the check of the layout, because `write_failure` allocates with it.
    OPERATOR_NEW.get_or_init(|| new);
    // SAFETY: both are C++'s own.
    unsafe { check_status_layout(get_message, delete) }?;
    let (name, platform) = (CppString::from_static(c"farandole"), CppString::from_static(c"Host"));
    // SAFETY: the registry is a static object; it copies the texts and keeps the address of a
    // function that stays.
    unsafe {
        register(
            global(),
            &raw const name,
            call::run_custom_call as *const () as *mut c_void,
            &raw const platform,
        );
    }
    Ok(())
}

/// Lets XLA read a failure that was written here.
///
/// # Safety
/// The functions are what their types say.
unsafe fn check_status_layout(get_message: GetMessageFn, delete: Delete) -> Result<(), String> {
    // A short text would lie inside of the status and not test the pointer.
    const SAMPLE_MESSAGE: &str = "longer than what fits into a short string";
    let wrong = || "this TensorFlow has another layout of a custom call's status".to_owned();
    let mut status = XlaCallStatus {
        text: CppString { data: std::ptr::null(), length: 0, short: [0; 2] },
        failed: false,
    };
    // SAFETY: the status stands here; an empty one has no text that would be looked at.
    unsafe {
        if get_message(&raw const status).present {
            return Err(wrong());
        }
        write_failure(&raw mut status, SAMPLE_MESSAGE);
        let view = get_message(&raw const status);
        let fits = view.present
            && view.length == SAMPLE_MESSAGE.len()
            && view.data == status.text.data.cast();
        delete(status.text.data.cast_mut().cast());
        if fits { Ok(()) } else { Err(wrong()) }
    }
}
