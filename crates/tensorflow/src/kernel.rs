// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Kernels of the collectives: attributes read once, then one job for each run.
#![expect(unsafe_code, reason = "TensorFlow calls these through pointers")]

use std::ffi::{CStr, c_void};
use std::sync::{Arc, OnceLock};

use farandole_door::{Call, Operation};

use crate::api::{Api, Opaque, api};
use crate::callback::Callback;
use crate::context::{Code, Context, Failure, Status};
use crate::job;

/// The attributes of a node of the graph, independent of its tensors.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) operation: Operation,
    /// Name across ranks, or what the engine puts a number behind.
    base: String,
    /// Names of its tensors, made with the first run.
    names: OnceLock<Vec<String>>,
    pub(crate) call: Call,
}

/// Name of a tensor of a group; the first one's does not tell how many there are, so ranks whose
/// groups differ meet in it, and hear of that.
pub(crate) fn member(base: &str, index: usize, count: usize) -> String {
    match index {
        0 => base.to_owned(),
        _ => format!("{base}_{}of{count}", index + 1),
    }
}

impl Node {
    /// Names of so many tensors, which are as many in every run.
    pub(crate) fn names(&self, count: usize) -> &[String] {
        self.names
            .get_or_init(|| (0..count).map(|index| member(&self.base, index, count)).collect())
    }
}

/// Makes the kernel of a node with this operation.
///
/// # Safety
/// TensorFlow calls it with a construction.
pub(crate) unsafe extern "C" fn create<const OPERATION: u32>(construction: Opaque) -> *mut c_void {
    let Ok(api) = api() else { return std::ptr::null_mut() };
    // SAFETY: the construction lives for this call.
    match unsafe { read(api, construction, OPERATION) } {
        Ok(node) => Box::into_raw(Box::new(Kernel::Node(Arc::new(node)))).cast(),
        Err(failure) => {
            let status = Status::new(api);
            status.set(&failure);
            // SAFETY: as above.
            unsafe { (api.construction_failure)(construction, status.raw) };
            std::ptr::null_mut()
        }
    }
}

/// The object behind a kernel's pointer.
pub(crate) enum Kernel {
    /// A collective.
    Node(Arc<Node>),
    /// A question about the world, and the process set it is about.
    Question(u32, u32),
    /// The probe, and how many microseconds it takes.
    Probe(u32),
}

/// Destroys any kernel of ours.
///
/// # Safety
/// TensorFlow calls it once with what a `create` returned.
pub(crate) unsafe extern "C" fn delete(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: boxed by a `create`.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
    }
}

/// Begins the operation and returns.
///
/// # Safety
/// TensorFlow calls it with what `create` returned, a context, and a callback on its stack.
pub(crate) unsafe extern "C" fn compute(kernel: *mut c_void, context: Opaque, done: Opaque) {
    let Ok(api) = api() else { return };
    // SAFETY: `compute` has not returned.
    let callback = unsafe { Callback::take(api, done) };
    // SAFETY: the callback has not run; the job touches the context only before it does.
    let context = unsafe { Context::new(api, context) };
    // SAFETY: TensorFlow keeps the kernel while its `compute` runs.
    match unsafe { kernel.cast::<Kernel>().as_ref() } {
        Some(Kernel::Node(node)) => job::begin(node, context, callback),
        _ => {
            context.fail(&Failure {
                code: Code::Internal,
                text: "the kernel was not made".to_owned(),
            });
            callback.run();
        }
    }
}

/// # Safety
/// `construction` is TensorFlow's, of this call.
unsafe fn read(api: &'static Api, construction: Opaque, operation: u32) -> Result<Node, Failure> {
    let operation = Operation::from_number(operation).ok_or_else(|| Failure {
        code: Code::Internal,
        text: format!("no such operation: {operation}"),
    })?;
    let reduces = matches!(operation, Operation::Allreduce | Operation::Reducescatter);
    // SAFETY: the caller's promise, for all of these.
    unsafe {
        let factor = |name| {
            if reduces {
                integer(api, construction, name).map(|bits| f64::from_bits(bits.cast_unsigned()))
            } else {
                Ok(1.0)
            }
        };
        let number =
            |name, wanted: bool| if wanted { small(api, construction, name) } else { Ok(0) };
        let name = string(api, construction, c"tensor_name")?;
        let numbered = name.is_empty();
        // Not told apart by operation: ranks that issue different ones meet, and hear of it.
        let base = if numbered { "tensorflow.noname".to_owned() } else { name };
        let call = Call {
            operation: operation as u32,
            reduction: number(c"reduce_op", reduces)?,
            prescale: factor(c"prescale")?,
            postscale: factor(c"postscale")?,
            root: number(c"root_rank", operation == Operation::Broadcast)?,
            process_set: number(c"process_set", true)?,
            numbered: u32::from(numbered),
            // Driven to its end on this thread, or for a moment only: TensorFlow has few.
            attended: if boolean(api, construction, c"attended")? { 1 } else { 2 },
        };
        Ok(Node { operation, base, names: OnceLock::new(), call })
    }
}

/// Returns a number from 0 that fits 32 bits.
///
/// # Safety
/// Like [`read`].
pub(crate) unsafe fn small(
    api: &'static Api,
    construction: Opaque,
    name: &CStr,
) -> Result<u32, Failure> {
    // SAFETY: the caller's promise.
    let value = unsafe { integer(api, construction, name) }?;
    u32::try_from(value).map_err(|_| Failure {
        code: Code::InvalidArgument,
        text: format!("{} must be a number from 0: {value}", name.to_string_lossy()),
    })
}

/// # Safety
/// Like [`read`].
unsafe fn integer(api: &'static Api, construction: Opaque, name: &CStr) -> Result<i64, Failure> {
    let (status, mut value) = (Status::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_int)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check().map(|()| value)
}

/// # Safety
/// Like [`read`].
unsafe fn boolean(api: &'static Api, construction: Opaque, name: &CStr) -> Result<bool, Failure> {
    let (status, mut value) = (Status::new(api), 0);
    // SAFETY: the caller's promise.
    unsafe { (api.attr_bool)(construction, name.as_ptr(), &raw mut value, status.raw) };
    status.check().map(|()| value != 0)
}

/// # Safety
/// Like [`read`].
unsafe fn string(api: &'static Api, construction: Opaque, name: &CStr) -> Result<String, Failure> {
    let (status, mut list, mut bytes) = (Status::new(api), 0, 0);
    // SAFETY: the caller's promise; the size is told first.
    unsafe {
        (api.attr_size)(construction, name.as_ptr(), &raw mut list, &raw mut bytes, status.raw);
        status.check()?;
        let mut text = vec![0u8; usize::try_from(bytes).unwrap_or(0)];
        (api.attr_string)(
            construction,
            name.as_ptr(),
            text.as_mut_ptr().cast(),
            text.len(),
            status.raw,
        );
        status.check()?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
