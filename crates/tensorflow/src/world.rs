// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Size and rank as ops: asked when the graph runs, not when it is built, so that a graph outlives
//! a world.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::{c_int, c_void};

use crate::api::{Opaque, tensorflow_api};
use crate::attributes::u32_attribute;
use crate::connection::query_placement;
use crate::context::{KernelContext, KernelFailure, TensorflowCode, TensorflowStatus};
use crate::kernel_state::KernelState;

pub(crate) const QUERY_SIZE: u32 = 0;
pub(crate) const QUERY_RANK: u32 = 1;
pub(crate) const QUERY_LOCAL_SIZE: u32 = 2;
pub(crate) const QUERY_LOCAL_RANK: u32 = 3;
pub(crate) const QUERY_INCLUDED: u32 = 4;

/// TensorFlow's number of 32-bit integers.
pub(crate) const DT_INT32: c_int = 3;

/// Makes the kernel of a question.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create_world_query<const QUESTION: u32>(
    construction: Opaque,
) -> *mut c_void {
    let Ok(api) = tensorflow_api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { u32_attribute(api, construction, c"process_set") } {
        Ok(set) => Box::into_raw(Box::new(KernelState::WorldQuery(QUESTION, set))).cast(),
        Err(failure) => {
            let status = TensorflowStatus::new(api);
            status.set_failure(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// Computes the answer to a query.
///
/// # Safety
/// TensorFlow calls it with what `create_world_query` returned and a context.
pub(crate) unsafe extern "C" fn compute_world_query(kernel: *mut c_void, context: Opaque) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: the context lives for this call.
    let context = unsafe { KernelContext::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute_world_query` runs.
    let answered = match unsafe { kernel.cast::<KernelState>().as_ref() } {
        Some(KernelState::WorldQuery(question, set)) => answer_world_query(*question, *set),
        _ => Err(KernelFailure {
            code: TensorflowCode::Internal,
            text: "the kernel was not made".to_owned(),
        }),
    };
    if let Err(failure) = answered.and_then(|number| set_scalar_output(context, 0, number)) {
        context.report_failure(&failure);
    }
}

/// Puts a number into an output.
pub(crate) fn set_scalar_output(
    context: KernelContext,
    index: c_int,
    number: i32,
) -> Result<(), KernelFailure> {
    let tensor = context.allocate_output(index, DT_INT32, &[], size_of::<i32>())?;
    // SAFETY: one number is there.
    unsafe { tensor.data_address().cast::<i32>().write_unaligned(number) };
    Ok(())
}

/// Returns the answer to a question about a process set.
pub(crate) fn answer_world_query(question: u32, set: u32) -> Result<i32, KernelFailure> {
    let place = query_placement(set)?;
    let number = match question {
        QUERY_SIZE => place.set_size,
        QUERY_LOCAL_SIZE => place.local_size,
        QUERY_LOCAL_RANK => place.local_rank,
        QUERY_INCLUDED => u32::from(place.set_rank >= 0),
        _ => u32::try_from(place.set_rank).map_err(|_| KernelFailure {
            code: TensorflowCode::InvalidArgument,
            text: format!("this rank is not a member of process set {set}"),
        })?,
    };
    i32::try_from(number).map_err(|_| KernelFailure {
        code: TensorflowCode::Internal,
        text: format!("too large: {number}"),
    })
}
