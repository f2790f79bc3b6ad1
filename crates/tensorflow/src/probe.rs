// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An op that ends on another thread well after its `compute` has returned: whether the callback survives that is
//! asked once, at load.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use crate::api::{Opaque, api};
use crate::callback::Callback;
use crate::context::{Code, Context, Failure};

/// Long enough for the caller's stack to be used by something else.
const LATER: Duration = Duration::from_millis(2);

/// There is nothing to read.
///
/// # Safety
/// TensorFlow calls it.
pub(crate) unsafe extern "C" fn create(_construction: Opaque) -> *mut c_void {
    std::ptr::null_mut()
}

/// Doubles one number, later.
///
/// # Safety
/// TensorFlow calls it with a context and a callback on its stack.
pub(crate) unsafe extern "C" fn compute(_kernel: *mut c_void, context: Opaque, done: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: `compute` has not returned.
    let callback = unsafe { Callback::take(api, done) };
    // SAFETY: used before the callback runs only.
    let context = unsafe { Context::new(api, context) };
    thread::spawn(move || {
        thread::sleep(LATER);
        if let Err(failure) = double(context) {
            context.fail(&failure);
        }
        callback.run();
    });
}

fn double(context: Context) -> Result<(), Failure> {
    let input = context.input(0)?;
    let output = context.allocate(0, input.dtype(), &input.dims(), input.bytes())?;
    let number = *input
        .integers()
        .first()
        .ok_or_else(|| Failure { code: Code::InvalidArgument, text: "nothing to double".to_owned() })?;
    // SAFETY: as large as the input, which holds a number.
    unsafe { output.data().cast::<i64>().write_unaligned(2 * number) };
    Ok(())
}
