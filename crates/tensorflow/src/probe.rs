// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An op that ends on another thread well after its `compute` has returned: whether the callback
//! survives that is asked once, at load. Without a delay it ends at once, and costs what any
//! asynchronous op costs.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use crate::api::{Opaque, api};
use crate::callback::Callback;
use crate::context::{Code, Context, Failure, Status};
use crate::kernel::{Kernel, small};

/// Reads the delay in microseconds; 2 ms is long enough for the caller's stack to be used by
/// something else.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create(construction: Opaque) -> *mut c_void {
    let Ok(api) = api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { small(api, construction, c"delay") } {
        Ok(delay) => Box::into_raw(Box::new(Kernel::Probe(delay))).cast(),
        Err(failure) => {
            let status = Status::new(api);
            status.set(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// Doubles one number, later.
///
/// # Safety
/// TensorFlow calls it with what `create` returned, a context, and a callback on its stack.
pub(crate) unsafe extern "C" fn compute(kernel: *mut c_void, context: Opaque, done: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: `compute` has not returned.
    let callback = unsafe { Callback::take(api, done) };
    // SAFETY: used before the callback runs only.
    let context = unsafe { Context::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute` runs.
    let delay = match unsafe { kernel.cast::<Kernel>().as_ref() } {
        Some(Kernel::Probe(delay)) => Duration::from_micros(u64::from(*delay)),
        _ => Duration::ZERO,
    };
    let end = move || {
        if let Err(failure) = double(context) {
            context.fail(&failure);
        }
        callback.run();
    };
    if delay.is_zero() {
        end();
    } else {
        thread::spawn(move || {
            thread::sleep(delay);
            end();
        });
    }
}

fn double(context: Context) -> Result<(), Failure> {
    let input = context.input(0, &Status::new(context.api))?;
    let output = context.allocate(0, input.dtype(), &input.dims(), input.bytes())?;
    let number = *input.integers().first().ok_or_else(|| Failure {
        code: Code::InvalidArgument,
        text: "nothing to double".to_owned(),
    })?;
    // SAFETY: as large as the input, which holds a number.
    unsafe { output.data().cast::<i64>().write_unaligned(2 * number) };
    Ok(())
}
