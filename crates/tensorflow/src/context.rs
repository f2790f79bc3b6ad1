// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors, statuses and the context of a running kernel, as values that clean up after themselves.
#![expect(unsafe_code, reason = "calls TensorFlow's C API")]

use std::ffi::{CStr, CString, c_int, c_void};

use crate::api::{Api, DeallocateTensorFn, Opaque};

/// Codes of a status that are used here; TensorFlow's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum TensorflowCode {
    Unknown = 2,
    InvalidArgument = 3,
    FailedPrecondition = 9,
    Aborted = 10,
    Internal = 13,
}

/// The reason why a kernel failed.
#[derive(Debug)]
pub(crate) struct KernelFailure {
    pub(crate) code: TensorflowCode,
    pub(crate) text: String,
}

/// A TensorFlow status.
pub(crate) struct TensorflowStatus {
    api: &'static Api,
    pub(crate) raw: Opaque,
}

impl TensorflowStatus {
    pub(crate) fn new(api: &'static Api) -> Self {
        // SAFETY: no arguments.
        Self { api, raw: unsafe { (api.new_status)() } }
    }

    /// Checks the status that TensorFlow has set.
    pub(crate) fn check_ok(&self) -> Result<(), KernelFailure> {
        // SAFETY: the status lives.
        if unsafe { (self.api.get_code)(self.raw) } == 0 {
            return Ok(());
        }
        // SAFETY: the message lives as long as the status.
        let text = unsafe { CStr::from_ptr((self.api.message)(self.raw)) };
        Err(KernelFailure {
            code: TensorflowCode::Internal,
            text: text.to_string_lossy().into_owned(),
        })
    }

    /// Puts a failure in.
    pub(crate) fn set_failure(&self, failure: &KernelFailure) {
        let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the status lives and copies the text.
        unsafe { (self.api.set_status)(self.raw, failure.code as c_int, text.as_ptr()) };
    }
}

impl Drop for TensorflowStatus {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { (self.api.delete_status)(self.raw) };
    }
}

/// A reference to a tensor.
pub(crate) struct TensorflowTensor {
    api: &'static Api,
    raw: Opaque,
}

// SAFETY: tensors are reference counted across threads.
unsafe impl Send for TensorflowTensor {}

impl TensorflowTensor {
    /// Returns a tensor on memory that `deallocate` frees.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes until `deallocate` is called with `argument`.
    pub(crate) unsafe fn from_memory(
        api: &'static Api,
        dtype: c_int,
        dims: &[i64],
        (data, bytes): (*mut c_void, usize),
        (deallocate, argument): (DeallocateTensorFn, *mut c_void),
    ) -> Self {
        let rank = c_int::try_from(dims.len()).unwrap_or(c_int::MAX);
        // SAFETY: the caller's promise.
        let raw = unsafe {
            (api.new_tensor)(dtype, dims.as_ptr(), rank, data, bytes, deallocate, argument)
        };
        Self { api, raw }
    }

    pub(crate) fn element_type(&self) -> c_int {
        // SAFETY: the tensor lives.
        unsafe { (self.api.tensor_type)(self.raw) }
    }

    pub(crate) fn dims(&self) -> Vec<i64> {
        // SAFETY: the tensor lives, and indices are below its rank.
        unsafe {
            (0..(self.api.num_dims)(self.raw))
                .map(|index| (self.api.dim)(self.raw, index))
                .collect()
        }
    }

    pub(crate) fn byte_size(&self) -> usize {
        // SAFETY: the tensor lives.
        unsafe { (self.api.tensor_bytes)(self.raw) }
    }

    pub(crate) fn data_address(&self) -> *mut c_void {
        // SAFETY: the tensor lives.
        unsafe { (self.api.tensor_data)(self.raw) }
    }

    /// Returns the elements of a host tensor of 64-bit integers.
    pub(crate) fn to_integers(&self) -> Vec<i64> {
        let (data, count) =
            (self.data_address().cast::<i64>(), self.byte_size() / size_of::<i64>());
        // SAFETY: `count` elements are there.
        (0..count).map(|index| unsafe { data.add(index).read_unaligned() }).collect()
    }
}

impl Drop for TensorflowTensor {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: this value holds one reference to the tensor, and drops it once.
            unsafe { (self.api.delete_tensor)(self.raw) };
        }
    }
}

/// The context of one run of a kernel.
#[derive(Clone, Copy)]
pub(crate) struct KernelContext {
    pub(crate) api: &'static Api,
    raw: Opaque,
}

// SAFETY: TensorFlow lets an asynchronous kernel use its context on any thread until the callback
// has run.
unsafe impl Send for KernelContext {}

impl KernelContext {
    /// # Safety
    /// `raw` is the context of a run whose callback has not run, and stays so while this is used.
    pub(crate) unsafe fn new(api: &'static Api, raw: Opaque) -> Self {
        Self { api, raw }
    }

    pub(crate) fn num_inputs(self) -> c_int {
        // SAFETY: `self.raw` is alive by the contract of `new`; so in the methods below.
        unsafe { (self.api.num_inputs)(self.raw) }
    }

    /// Returns an input. `status` must be OK at the call, and is OK afterwards if this succeeds.
    pub(crate) fn get_input(
        self,
        index: c_int,
        status: &TensorflowStatus,
    ) -> Result<TensorflowTensor, KernelFailure> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe { (self.api.get_input)(self.raw, index, &raw mut raw, status.raw) };
        status.check_ok()?;
        Ok(TensorflowTensor { api: self.api, raw })
    }

    /// Returns an output of the extents `dims`.
    pub(crate) fn allocate_output(
        self,
        index: c_int,
        dtype: c_int,
        dims: &[i64],
        bytes: usize,
    ) -> Result<TensorflowTensor, KernelFailure> {
        let status = TensorflowStatus::new(self.api);
        let rank = c_int::try_from(dims.len()).unwrap_or(c_int::MAX);
        // SAFETY: as above.
        let raw = unsafe {
            (self.api.allocate_output)(
                self.raw,
                index,
                dtype,
                dims.as_ptr(),
                rank,
                bytes,
                status.raw,
            )
        };
        status.check_ok()?;
        Ok(TensorflowTensor { api: self.api, raw })
    }

    /// Returns the output with this index on the memory of the input with the same index if it is
    /// not needed otherwise, else on new memory; `status` as for [`Self::get_input`].
    pub(crate) fn forward_or_allocate(
        self,
        index: c_int,
        dims: &[i64],
        status: &TensorflowStatus,
    ) -> Result<(TensorflowTensor, bool), KernelFailure> {
        let rank = c_int::try_from(dims.len()).unwrap_or(c_int::MAX);
        let mut forwarded: c_int = -1;
        // SAFETY: as above; one candidate.
        let raw = unsafe {
            (self.api.forward_or_allocate)(
                self.raw,
                &raw const index,
                1,
                index,
                dims.as_ptr(),
                rank,
                &raw mut forwarded,
                status.raw,
            )
        };
        status.check_ok()?;
        Ok((TensorflowTensor { api: self.api, raw }, forwarded >= 0))
    }

    pub(crate) fn set_output(
        self,
        index: c_int,
        tensor: &TensorflowTensor,
    ) -> Result<(), KernelFailure> {
        let status = TensorflowStatus::new(self.api);
        // SAFETY: as above.
        unsafe { (self.api.set_output)(self.raw, index, tensor.raw, status.raw) };
        status.check_ok()
    }

    pub(crate) fn report_failure(self, failure: &KernelFailure) {
        let status = TensorflowStatus::new(self.api);
        status.set_failure(failure);
        // SAFETY: as above; the status is copied.
        unsafe { (self.api.context_failure)(self.raw, status.raw) };
    }
}
