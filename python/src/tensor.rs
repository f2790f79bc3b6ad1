// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors as Python hands them in, an address and a shape, and memory that goes back by the buffer
//! protocol.
#![expect(unsafe_code, reason = "addresses come from Python, and a buffer is exported by address")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use farandole::collectives::{DeviceEvent, ResultMemory};
use farandole::engine::RequestCompletion;
use farandole::kernels::{
    Buffer, DataType, DeviceStream, HostMemory, MemoryKind, ReduceOp, copy_nontemporal,
    prefer_large_pages,
};
use farandole::session::Session;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::to_exception;

/// Returns memory of a contiguous tensor. The caller on the Python side keeps it valid until the
/// operation is consumed; that is the contract of the whole module `engine`.
///
/// # Errors
/// `ValueError` when the shape is larger than any memory, or nothing is at the address.
pub(crate) fn tensor_buffer(
    address: usize,
    dtype: DataType,
    shape: &[u64],
    memory_kind: MemoryKind,
) -> PyResult<Buffer> {
    let bytes = shape
        .iter()
        // A shape comes from Python, and a product that wraps would give too small a buffer.
        .try_fold(dtype.element_size() as u64, |bytes, dimension| bytes.checked_mul(*dimension))
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| {
            PyValueError::new_err(format!("shape is larger than any memory: {shape:?}"))
        })?;
    // An empty tensor has no memory in some frameworks, and operations on it are valid.
    if address == 0 && bytes > 0 {
        return Err(PyValueError::new_err(format!("tensor has no memory: shape {shape:?}")));
    }
    let address = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the module's contract: `farandole.torch` passes a live tensor's address with its own
    // shape and dtype, and keeps that tensor in its table of handles until the engine is done with
    // it.
    Ok(unsafe { Buffer::from_raw(address, bytes, memory_kind) })
}

/// Returns values to read, under the contract of [`tensor_buffer`] for the time of a call.
///
/// # Errors
/// `ValueError` when nothing is at the address, or it is not aligned.
pub(crate) fn slice_at<'a, T: AnyBitPattern>(address: usize, count: usize) -> PyResult<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: `farandole.torch.compress` passes addresses of live tensors with their own lengths;
    // any bits are a `T`; no argument overlaps one that is written, and no other code writes to it
    // during the call.
    Ok(unsafe { std::slice::from_raw_parts(aligned_pointer(address, count)?, count) })
}

/// Returns values to write to, like [`slice_at`].
///
/// # Errors
/// Like [`slice_at`].
pub(crate) fn slice_at_mut<'a, T: AnyBitPattern>(
    address: usize,
    count: usize,
) -> PyResult<&'a mut [T]> {
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `slice_at`, and no two arguments of a call overlap.
    Ok(unsafe { std::slice::from_raw_parts_mut(aligned_pointer(address, count)?, count) })
}

/// Types for which any bits are a valid value.
pub(crate) trait AnyBitPattern {}

impl AnyBitPattern for f32 {}
impl AnyBitPattern for u8 {}

fn aligned_pointer<T>(address: usize, count: usize) -> PyResult<*mut T> {
    let pointer = std::ptr::with_exposed_provenance_mut::<T>(address);
    // A slice over such a pointer is undefined behaviour, even if it is not read.
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(PyValueError::new_err(format!(
            "no memory for {count} values is at: {address:#x}"
        )));
    }
    Ok(pointer)
}

/// Returns the dtype with this number.
///
/// # Errors
/// `ValueError` when there is none.
pub(crate) fn dtype_from_number(number: u8) -> PyResult<DataType> {
    DataType::from_wire(number)
        .ok_or_else(|| PyValueError::new_err(format!("no such dtype: {number}")))
}

/// Returns the reduction with this number.
///
/// # Errors
/// `ValueError` when there is none.
pub(crate) fn reduce_op_from_number(number: u8) -> PyResult<ReduceOp> {
    ReduceOp::from_wire(number)
        .ok_or_else(|| PyValueError::new_err(format!("no such reduction: {number}")))
}

/// The result of an allgather or an all-to-all.
#[pyclass(frozen, module = "farandole._native.engine")]
pub(crate) struct GatheredTensor {
    memory: GatheredMemory,
    rows: Vec<u64>,
}

enum GatheredMemory {
    Host(HostMemory),
    /// On a GPU, once the event is reached.
    Device(Arc<dyn ResultMemory>, Option<Arc<dyn DeviceEvent>>),
}

impl GatheredTensor {
    /// Returns the engine's memory, if the operation brought any.
    pub(crate) fn from_completion(completion: RequestCompletion) -> Option<Self> {
        let store = match (completion.output, completion.room) {
            (Some(memory), _) => GatheredMemory::Host(memory),
            (None, room) => GatheredMemory::Device(room?, completion.reached),
        };
        Some(Self { memory: store, rows: completion.rows })
    }
}

#[pymethods]
impl GatheredTensor {
    #[getter]
    fn rows(&self) -> Vec<u64> {
        self.rows.clone()
    }

    fn __len__(&self) -> usize {
        match &self.memory {
            GatheredMemory::Host(memory) => memory.len(),
            GatheredMemory::Device(room, _) => room.as_buffer().len(),
        }
    }

    /// Returns the GPU that the memory is on, if it is on one.
    #[getter]
    fn ordinal(&self) -> Option<u32> {
        match &self.memory {
            GatheredMemory::Device(room, _) => match room.as_buffer().memory_kind() {
                MemoryKind::Device(ordinal) => Some(ordinal),
                MemoryKind::Host => None,
            },
            GatheredMemory::Host(_) => None,
        }
    }

    /// Lets a stream of the GPU move all bytes to an address there, once they exist, and frees the
    /// memory behind that. Once only; returns at once.
    #[pyo3(signature = (address, stream, /))]
    fn queue_copy_and_free(&self, address: usize, stream: usize) -> PyResult<()> {
        let (GatheredMemory::Device(room, reached), Some(ordinal)) = (&self.memory, self.ordinal())
        else {
            return Err(PyValueError::new_err("the gathered tensor is in host memory"));
        };
        let to = tensor_buffer(
            address,
            DataType::U8,
            &[self.__len__() as u64],
            MemoryKind::Device(ordinal),
        )?;
        // SAFETY: `farandole.torch` passes the framework's current stream of this GPU, which lives
        // for ever.
        let stream = unsafe { DeviceStream::from_raw(stream) };
        room.copy_out_then_release(&to, reached.as_ref(), stream)
            .map_err(|error| to_exception(error.fault(), &error))
    }

    /// Exports the memory, writable: its one user is the holder of this object.
    ///
    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let GatheredMemory::Host(memory) = &slf.get().memory else {
            return Err(PyBufferError::new_err("the gathered tensor is on a GPU"));
        };
        // SAFETY: the view comes from Python, and the object keeps its memory.
        unsafe { fill_memory_view(memory, slf.as_any(), view, flags) }
    }
}

/// Memory whose address never changes while it lives, and which other ranks of this host can work
/// in.
#[pyclass(frozen, module = "farandole._native.engine")]
pub(crate) struct SharedTensorMemory {
    memory: HostMemory,
}

impl SharedTensorMemory {
    /// Allocates zeroed memory of this session, or of none.
    ///
    /// # Errors
    /// `ValueError` when no memory is that large, `MemoryError` when there is none left.
    pub(crate) fn new(bytes: usize, session: Option<&Session>) -> PyResult<Self> {
        // Rust allows no larger allocation, and would panic.
        if isize::try_from(bytes).is_err() {
            return Err(PyValueError::new_err(format!("no memory is that large: {bytes} bytes")));
        }
        let memory = session
            .map_or_else(|| HostMemory::try_new(bytes), |session| session.allocate_memory(bytes));
        match memory {
            Some(memory) => Ok(Self { memory }),
            None => Err(PyMemoryError::new_err(format!("no memory is left for {bytes} bytes"))),
        }
    }
}

#[pymethods]
impl SharedTensorMemory {
    #[getter]
    fn address(&self) -> usize {
        self.memory.address().expose_provenance()
    }

    fn __len__(&self) -> usize {
        self.memory.len()
    }

    /// Copies `bytes` bytes from `address` to `offset`, past the caches.
    ///
    /// Raises:
    ///     `ValueError`: The memory ends before, or the bytes lie nowhere or in this memory.
    #[pyo3(signature = (offset, address, bytes, /))]
    fn copy_into(
        &self,
        py: Python<'_>,
        offset: usize,
        address: usize,
        bytes: usize,
    ) -> PyResult<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.memory.len()) {
            let (length, reason) = (self.memory.len(), "do not fit");
            return Err(PyValueError::new_err(format!(
                "{bytes} bytes at {offset} of {length} {reason}"
            )));
        }
        if bytes == 0 {
            return Ok(());
        }
        let own = self.address();
        if address == 0
            // Two slices of the same bytes, one of them mutable, would be undefined behaviour.
            || (address < own + self.memory.len() && own < address.saturating_add(bytes))
        {
            return Err(PyValueError::new_err(format!(
                "no bytes outside this memory: {bytes} at {address:#x}"
            )));
        }
        let target = self.memory.as_buffer().slice(offset, bytes);
        // SAFETY: the caller passes a live tensor's address with its own length, and waits for this
        // call; it was seen not to lie in this memory, where no operation is under way.
        let (source, target) = unsafe {
            (
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), bytes),
                target.as_bytes_mut(),
            )
        };
        py.detach(|| copy_nontemporal(source, target));
        Ok(())
    }

    /// Exports the memory, writable: tensors share it by intent.
    ///
    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the view comes from Python, and the object keeps its memory.
        unsafe { fill_memory_view(&slf.get().memory, slf.as_any(), view, flags) }
    }
}

/// Copies memory past the caches: for each copy, the address to write to, the address to read from,
/// and the number of bytes.
///
/// Raises:
///     `ValueError`: Both ranges of a copy have bytes in common, or one lies nowhere.
///     Nothing was copied then.
#[pyfunction]
#[pyo3(signature = (copies, /))]
pub(crate) fn copy_memory(py: Python<'_>, copies: Vec<(usize, usize, usize)>) -> PyResult<()> {
    let is_sound = |(to, from, bytes): &(usize, usize, usize)| {
        *bytes == 0 || (*to != 0 && *from != 0 && to.abs_diff(*from) >= *bytes)
    };
    // All are checked before the first copy, so that an error leaves nothing half done.
    if let Some((to, from, bytes)) = copies.iter().find(|copy| !is_sound(copy)) {
        return Err(PyValueError::new_err(format!("{bytes} bytes from {from:#x} to {to:#x}")));
    }
    py.detach(|| {
        for (to, from, bytes) in copies.into_iter().filter(|(_, _, bytes)| *bytes > 0) {
            // SAFETY: the caller passes the addresses of two live tensors of this length and waits
            // for the call. No other code uses the target meanwhile, and none writes the source: an
            // optimizer waits for copies of another thread before its step. Both were seen to have
            // nothing in common.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(std::ptr::with_exposed_provenance(from), bytes),
                    std::slice::from_raw_parts_mut(
                        std::ptr::with_exposed_provenance_mut(to),
                        bytes,
                    ),
                )
            };
            copy_nontemporal(from, to);
        }
    });
    Ok(())
}

/// Asks the system for large pages in memory of so many bytes that is not used yet.
#[pyfunction]
#[pyo3(signature = (address, bytes, /))]
pub(crate) fn advise_large_pages(address: usize, bytes: usize) {
    prefer_large_pages(address, bytes);
}

/// Fills a view of memory.
///
/// # Safety
/// `view` comes from Python, and `owner` keeps `memory` for as long as it lives.
unsafe fn fill_memory_view(
    memory: &HostMemory,
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let length = ffi::Py_ssize_t::try_from(memory.len())
        .map_err(|_| PyBufferError::new_err("longer than a buffer can be"))?;
    let address: *mut c_void = memory.address().cast();
    // SAFETY: the address is valid for `length` bytes as long as `owner` lives, and the view holds
    // a reference to it.
    let status = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), address, length, 0, flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}
