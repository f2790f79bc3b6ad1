// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Attributes of a node, read while its kernel is made.
#![expect(unsafe_code, reason = "TensorFlow's functions are called through pointers")]

use std::ffi::CStr;

use crate::api::{Api, Opaque};
use crate::context::{KernelFailure, TensorflowCode, TensorflowStatus};

/// Returns a number from 0 that fits 32 bits.
///
/// # Safety
/// `construction` is TensorFlow's, of this call.
pub(crate) unsafe fn u32_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<u32, KernelFailure> {
    // SAFETY: the caller's promise.
    let value = unsafe { int_attribute(api, construction, name) }?;
    // Attributes are signed 64-bit numbers, and the engine table takes unsigned ones.
    u32::try_from(value).map_err(|_| KernelFailure {
        code: TensorflowCode::InvalidArgument,
        text: format!("{} must be a number from 0: {value}", name.to_string_lossy()),
    })
}

/// Returns a number.
///
/// # Safety
/// `construction` is TensorFlow's, of this call.
pub(crate) unsafe fn int_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<i64, KernelFailure> {
    let (status, mut value) = (TensorflowStatus::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_int)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check_ok().map(|()| value)
}

/// Returns a truth value.
///
/// # Safety
/// `construction` is TensorFlow's, of this call.
pub(crate) unsafe fn bool_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<bool, KernelFailure> {
    let (status, mut value) = (TensorflowStatus::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_bool)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check_ok().map(|()| value != 0)
}

/// Returns a text.
///
/// # Safety
/// `construction` is TensorFlow's, of this call.
pub(crate) unsafe fn string_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<String, KernelFailure> {
    let (status, mut list, mut bytes) = (TensorflowStatus::new(api), 0, 0);
    // SAFETY: the caller's promise; the first call returns the size for the second.
    unsafe {
        (api.attr_size)(construction, name.as_ptr(), &raw mut list, &raw mut bytes, status.raw);
        status.check_ok()?;
        let mut text = vec![0u8; usize::try_from(bytes).unwrap_or(0)];
        (api.attr_string)(
            construction,
            name.as_ptr(),
            text.as_mut_ptr().cast(),
            text.len(),
            status.raw,
        );
        status.check_ok()?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
