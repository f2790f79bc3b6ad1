// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Size and rank as ops: asked when the graph runs, not when it is built, so that a graph outlives
//! a world.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::{c_int, c_void};

use crate::api::{Opaque, api};
use crate::context::{Code, Context, Failure, Status};
use crate::exports;
use crate::kernel::{Kernel, small};

pub(crate) const SIZE: u32 = 0;
pub(crate) const RANK: u32 = 1;
pub(crate) const LOCAL_SIZE: u32 = 2;
pub(crate) const LOCAL_RANK: u32 = 3;
pub(crate) const INCLUDED: u32 = 4;

/// TensorFlow's number of 32-bit integers.
pub(crate) const INT32: c_int = 3;

/// Makes the kernel of a question.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create<const QUESTION: u32>(construction: Opaque) -> *mut c_void {
    let Ok(api) = api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { small(api, construction, c"process_set") } {
        Ok(set) => Box::into_raw(Box::new(Kernel::Question(QUESTION, set))).cast(),
        Err(failure) => {
            let status = Status::new(api);
            status.set(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// Answers.
///
/// # Safety
/// TensorFlow calls it with what `create` returned and a context.
pub(crate) unsafe extern "C" fn compute(kernel: *mut c_void, context: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: the context lives for this call.
    let context = unsafe { Context::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute` runs.
    let answered = match unsafe { kernel.cast::<Kernel>().as_ref() } {
        Some(Kernel::Question(question, set)) => answer(*question, *set),
        _ => Err(Failure { code: Code::Internal, text: "the kernel was not made".to_owned() }),
    };
    if let Err(failure) = answered.and_then(|number| scalar(context, 0, number)) {
        context.fail(&failure);
    }
}

/// Puts a number into an output.
pub(crate) fn scalar(context: Context, index: c_int, number: i32) -> Result<(), Failure> {
    let tensor = context.allocate(index, INT32, &[], size_of::<i32>())?;
    // SAFETY: one number is there.
    unsafe { tensor.data().cast::<i32>().write_unaligned(number) };
    Ok(())
}

/// Returns the answer to a question about a process set.
pub(crate) fn answer(question: u32, set: u32) -> Result<i32, Failure> {
    let place = exports::place(set)?;
    let number = match question {
        SIZE => place.set_size,
        LOCAL_SIZE => place.local_size,
        LOCAL_RANK => place.local_rank,
        INCLUDED => u32::from(place.set_rank >= 0),
        _ => u32::try_from(place.set_rank).map_err(|_| Failure {
            code: Code::InvalidArgument,
            text: format!("this rank is not a member of process set {set}"),
        })?,
    };
    i32::try_from(number)
        .map_err(|_| Failure { code: Code::Internal, text: format!("too large: {number}") })
}
