// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Kernels of the collectives: attributes read once, then one job for each run.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::{CStr, c_void};
use std::sync::{Arc, OnceLock};

use farandole_door::{OperationCode, SubmissionHeader};

use crate::api::{Api, Opaque, tensorflow_api};
use crate::callback::DoneCallback;
use crate::collective_run;
use crate::context::{KernelContext, KernelFailure, TensorflowCode, TensorflowStatus};

/// The attributes of a node of the graph, independent of its tensors.
#[derive(Debug)]
pub(crate) struct CollectiveNode {
    pub(crate) operation: OperationCode,
    /// The name across ranks, or the prefix to which the engine appends a number.
    base: String,
    /// Names of its tensors, made with the first run.
    names: OnceLock<Vec<String>>,
    pub(crate) call: SubmissionHeader,
}

/// Returns the name of a tensor of a group. The first name has no size, so ranks with groups of
/// different sizes match on it and report the mismatch.
pub(crate) fn group_tensor_name(base: &str, index: usize, count: usize) -> String {
    match index {
        0 => base.to_owned(),
        _ => format!("{base}_{}of{count}", index + 1),
    }
}

impl CollectiveNode {
    /// Names of so many tensors, which are as many in every run.
    pub(crate) fn tensor_names(&self, count: usize) -> &[String] {
        self.names.get_or_init(|| {
            (0..count).map(|index| group_tensor_name(&self.base, index, count)).collect()
        })
    }
}

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

/// The object behind a kernel's pointer.
pub(crate) enum KernelState {
    /// A collective.
    Collective(Arc<CollectiveNode>),
    /// A question about the world, and the process set it is about.
    WorldQuery(u32, u32),
    /// The probe, and how many microseconds it takes.
    Probe(u32),
}

/// Destroys any kernel of ours.
///
/// # Safety
/// TensorFlow calls it once with a pointer that `create_collective` returned.
pub(crate) unsafe extern "C" fn delete_kernel(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: boxed by a `create_collective`.
        drop(unsafe { Box::from_raw(kernel.cast::<KernelState>()) });
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
    let callback = unsafe { DoneCallback::move_from(api, done) };
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
        Ok(CollectiveNode { operation, base, names: OnceLock::new(), call })
    }
}

/// Returns a number from 0 that fits 32 bits.
///
/// # Safety
/// Like [`read_attributes`].
pub(crate) unsafe fn u32_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<u32, KernelFailure> {
    // SAFETY: the caller's promise.
    let value = unsafe { int_attribute(api, construction, name) }?;
    u32::try_from(value).map_err(|_| KernelFailure {
        code: TensorflowCode::InvalidArgument,
        text: format!("{} must be a number from 0: {value}", name.to_string_lossy()),
    })
}

/// # Safety
/// Like [`read_attributes`].
unsafe fn int_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<i64, KernelFailure> {
    let (status, mut value) = (TensorflowStatus::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_int)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check_ok().map(|()| value)
}

/// # Safety
/// Like [`read_attributes`].
unsafe fn bool_attribute(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<bool, KernelFailure> {
    let (status, mut value) = (TensorflowStatus::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_bool)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check_ok().map(|()| value != 0)
}

/// # Safety
/// Like [`read_attributes`].
unsafe fn string_attribute(
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
