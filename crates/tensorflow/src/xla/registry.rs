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

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use super::call;
use crate::api::symbol;

/// `xla::CustomCallTargetRegistry::Global()`.
const GLOBAL: &CStr = c"_ZN3xla24CustomCallTargetRegistry6GlobalEv";
/// `xla::CustomCallTargetRegistry::Register(std::string const&, void*, std::string const&)`.
const REGISTER: &CStr =
    c"_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPvS8_";
/// `xla::CustomCallStatusGetMessage(XlaCustomCallStatus const*)`.
const GET_MESSAGE: &CStr = c"_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_";
/// `operator new(size_t)`, whose memory XLA's strings free.
const NEW: &CStr = c"_Znwm";
/// `operator delete(void*)`.
const DELETE: &CStr = c"_ZdlPv";

type Global = unsafe extern "C" fn() -> *mut c_void;
type Register = unsafe extern "C" fn(*mut c_void, *const Text, *mut c_void, *const Text);
type GetMessage = unsafe extern "C" fn(*const Status) -> View;
type New = unsafe extern "C" fn(usize) -> *mut c_void;
type Delete = unsafe extern "C" fn(*mut c_void);

static ALLOCATE: OnceLock<New> = OnceLock::new();

/// `std::string` of libstdc++: where the text is, its length, and room for a short one, to which
/// `data` points then; for a long one the room begins with the capacity.
#[repr(C)]
struct Text {
    data: *const c_char,
    length: usize,
    short: [usize; 2],
}

impl Text {
    /// Returns a text to be read only: C++ must not destroy it, and never gets to.
    fn over(text: &'static CStr) -> Self {
        let length = text.count_bytes();
        Self { data: text.as_ptr(), length, short: [length, 0] }
    }
}

/// `XlaCustomCallStatus`: a `std::optional<std::string>` of libstdc++, empty while all is well.
#[repr(C)]
pub(super) struct Status {
    text: Text,
    failed: bool,
}

/// `std::optional<std::string_view>` of libstdc++.
#[repr(C)]
struct View {
    length: usize,
    data: *const u8,
    present: bool,
}

/// Makes [`call::run`] known to XLA's compiler for the CPU, by the name `farandole`.
///
/// # Errors
/// The reason: a part that this TensorFlow lacks, or lays out in another way.
pub(super) fn register() -> Result<(), String> {
    let found = |name: &'static CStr| {
        symbol(name).ok_or_else(|| format!("this TensorFlow lacks {}", name.to_string_lossy()))
    };
    let (global, register, get_message) = (found(GLOBAL)?, found(REGISTER)?, found(GET_MESSAGE)?);
    let (new, delete) = (found(NEW)?, found(DELETE)?);
    // SAFETY: the functions have these types in XLA's headers; `this` is a method's first argument.
    let (global, register, get_message, new, delete) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Global>(global),
            std::mem::transmute::<*mut c_void, Register>(register),
            std::mem::transmute::<*mut c_void, GetMessage>(get_message),
            std::mem::transmute::<*mut c_void, New>(new),
            std::mem::transmute::<*mut c_void, Delete>(delete),
        )
    };
    ALLOCATE.get_or_init(|| new);
    // SAFETY: both are C++'s own.
    unsafe { check_layout(get_message, delete) }?;
    let (name, platform) = (Text::over(c"farandole"), Text::over(c"Host"));
    // SAFETY: the registry is a static object; it copies the texts and keeps the address of a
    // function that stays.
    unsafe {
        register(
            global(),
            &raw const name,
            call::run as *const () as *mut c_void,
            &raw const platform,
        );
    }
    Ok(())
}

/// Lets XLA read a failure that was written here.
///
/// # Safety
/// The functions are what their types say.
unsafe fn check_layout(get_message: GetMessage, delete: Delete) -> Result<(), String> {
    const SAMPLE: &str = "longer than what fits into a short string";
    let wrong = || "this TensorFlow has another layout of a custom call's status".to_owned();
    let mut status =
        Status { text: Text { data: std::ptr::null(), length: 0, short: [0; 2] }, failed: false };
    // SAFETY: the status stands here; an empty one has no text that would be looked at.
    unsafe {
        if get_message(&raw const status).present {
            return Err(wrong());
        }
        fail(&raw mut status, SAMPLE);
        let view = get_message(&raw const status);
        let fits =
            view.present && view.length == SAMPLE.len() && view.data == status.text.data.cast();
        delete(status.text.data.cast_mut().cast());
        if fits { Ok(()) } else { Err(wrong()) }
    }
}

/// Tells XLA that a call failed.
///
/// # Safety
/// `status` is what XLA passed to a call that has not returned, and no failure was told before.
pub(super) unsafe fn fail(status: *mut Status, text: &str) {
    let Some(allocate) = ALLOCATE.get() else { return };
    // SAFETY: the caller's promise; XLA's destructor frees the memory, which is as large as the
    // capacity says, and 1.
    unsafe {
        let data = allocate(text.len().max(16) + 1).cast::<u8>();
        std::ptr::copy_nonoverlapping(text.as_ptr(), data, text.len());
        data.add(text.len()).write(0);
        let text = Text { data: data.cast(), length: text.len(), short: [text.len().max(16), 0] };
        status.write(Status { text, failed: true });
    }
}
