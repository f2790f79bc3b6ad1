// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Kernels of the collectives: attributes read once, then one job for each run.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::c_void;
use std::sync::Arc;

use farandole_door::{OperationCode, SubmissionHeader};

use crate::api::{Api, Opaque, tensorflow_api};
use crate::attributes::{bool_attribute, int_attribute, string_attribute, u32_attribute};
use crate::callback::DoneCallback;
use crate::collective_node::CollectiveNode;
use crate::collective_run;
use crate::context::{KernelContext, KernelFailure, TensorflowCode, TensorflowStatus};
use crate::kernel_state::KernelState;

/// Makes the kernel of a node with this operation.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create_collective<const OPERATION: u32>(
    construction: Opaque,
) -> *mut c_void {
    let Ok(api) = tensorflow_api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { read_attributes(api, construction, OPERATION) } {
        Ok(node) => Box::into_raw(Box::new(KernelState::Collective(Arc::new(node)))).cast(),
        Err(failure) => {
            let status = TensorflowStatus::new(api);
            status.set_failure(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// Begins the operation and returns.
///
/// # Safety
/// TensorFlow calls it with the result of `create_collective`, a context, and a callback on its
/// stack.
pub(crate) unsafe extern "C" fn compute_collective(
    kernel: *mut c_void,
    context: Opaque,
    done: Opaque,
) {
    let Ok(api) = tensorflow_api() else { return };
    // SAFETY: `compute_collective` has not returned.
    let callback = unsafe { DoneCallback::take_from_caller(api, done) };
    // SAFETY: the callback has not run; the job touches the context only before it does.
    let context = unsafe { KernelContext::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute_collective` runs.
    match unsafe { kernel.cast::<KernelState>().as_ref() } {
        Some(KernelState::Collective(node)) => collective_run::begin_run(node, context, callback),
        _ => {
            context.report_failure(&KernelFailure {
                code: TensorflowCode::Internal,
                text: "the kernel was not made".to_owned(),
            });
            callback.run();
        }
    }
}

/// # Safety
/// `construction` is TensorFlow's, of this call.
unsafe fn read_attributes(
    api: &'static Api,
    construction: Opaque,
    operation: u32,
) -> Result<CollectiveNode, KernelFailure> {
    let operation = OperationCode::from_number(operation).ok_or_else(|| KernelFailure {
        code: TensorflowCode::Internal,
        text: format!("no such operation: {operation}"),
    })?;
    let reduces = matches!(operation, OperationCode::Allreduce | OperationCode::Reducescatter);
    // SAFETY: the caller's promise, for all of these.
    unsafe {
        let factor = |name| {
            if reduces {
                int_attribute(api, construction, name)
                    .map(|bits| f64::from_bits(bits.cast_unsigned()))
            } else {
                Ok(1.0)
            }
        };
        let number = |name, wanted: bool| {
            if wanted { u32_attribute(api, construction, name) } else { Ok(0) }
        };
        let name = string_attribute(api, construction, c"tensor_name")?;
        let numbered = name.is_empty();
        // The name does not contain the operation, so ranks that issue different operations match
        // on it and report the mismatch.
        let base = if numbered { "tensorflow.noname".to_owned() } else { name };
        let call = SubmissionHeader {
            operation: operation as u32,
            reduction: number(c"reduce_op", reduces)?,
            prescale: factor(c"prescale")?,
            postscale: factor(c"postscale")?,
            root: number(c"root_rank", operation == OperationCode::Broadcast)?,
            process_set: number(c"process_set", true)?,
            numbered: u32::from(numbered),
            // Driven to its end on this thread, or for a moment only: TensorFlow has few.
            attended: if bool_attribute(api, construction, c"attended")? { 1 } else { 2 },
        };
        Ok(CollectiveNode::new(operation, base, call))
    }
}
