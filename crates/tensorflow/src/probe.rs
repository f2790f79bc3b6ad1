// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An op that ends on another thread well after its `compute_callback_probe` has returned. It
//! checks once, at load, that the callback survives. Without a delay the op ends at once, and has
//! the cost of any asynchronous op.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::c_void;
use std::thread;
use std::time::Duration;

use crate::api::{Opaque, tensorflow_api};
use crate::attributes::u32_attribute;
use crate::callback::DoneCallback;
use crate::context::{KernelContext, KernelFailure, TensorflowCode, TensorflowStatus};
use crate::kernel_state::KernelState;

/// Reads the delay in microseconds; 2 ms is long enough for the caller's stack to be used by
/// something else.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create_callback_probe(construction: Opaque) -> *mut c_void {
    let Ok(api) = tensorflow_api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { u32_attribute(api, construction, c"delay") } {
        Ok(delay) => Box::into_raw(Box::new(KernelState::Probe(delay))).cast(),
        Err(failure) => {
            let status = TensorflowStatus::new(api);
            status.set_failure(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// Doubles one number, later.
///
/// # Safety
/// TensorFlow calls it with what `create_callback_probe` returned, a context, and a callback on its
/// stack.
pub(crate) unsafe extern "C" fn compute_callback_probe(
    kernel: *mut c_void,
    context: Opaque,
    done: Opaque,
) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: `compute_callback_probe` has not returned.
    let callback = unsafe { DoneCallback::take_from_caller(api, done) };
    // SAFETY: used before the callback runs only.
    let context = unsafe { KernelContext::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute_callback_probe` runs.
    let delay = match unsafe { kernel.cast::<KernelState>().as_ref() } {
        Some(KernelState::Probe(delay)) => Duration::from_micros(u64::from(*delay)),
        _ => Duration::ZERO,
    };
    let end = move || {
        if let Err(failure) = double_input(context) {
            context.report_failure(&failure);
        }
        callback.run();
    };
    if delay.is_zero() {
        end();
    } else {
        // On another thread after the return: the test is that the callback survives the stack of
        // the caller.
        thread::spawn(move || {
            thread::sleep(delay);
            end();
        });
    }
}

fn double_input(context: KernelContext) -> Result<(), KernelFailure> {
    let input = context.get_input(0, &TensorflowStatus::new(context.api))?;
    let output =
        context.allocate_output(0, input.element_type(), &input.dims(), input.byte_size())?;
    let number = *input.to_integers().first().ok_or_else(|| KernelFailure {
        code: TensorflowCode::InvalidArgument,
        text: "nothing to double".to_owned(),
    })?;
    // SAFETY: as large as the input, which holds a number.
    unsafe { output.data_address().cast::<i64>().write_unaligned(2 * number) };
    Ok(())
}
