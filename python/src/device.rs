// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors on GPUs, as Python hands them in: the GPU's number, and the handle of the stream that
//! makes their values.
#![expect(unsafe_code, reason = "streams come from Python by their handles")]

use std::path::PathBuf;
use std::sync::Arc;

use farandole::collectives::DeviceEvent;
use farandole::cuda::NcclMemory;
use farandole::kernels::{DeviceStream, MemoryKind};
use farandole::session::{self, Session};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_exception;
use crate::tensor::GatheredTensor;

/// The number of a GPU and the handle of a stream on it; `None` for host memory.
pub(crate) type GpuStreamId = Option<(u32, usize)>;

/// The memory of a tensor, and the work that its values wait for.
#[derive(Clone)]
pub(crate) struct TensorPlacement {
    pub(crate) memory_kind: MemoryKind,
    pub(crate) ready: Option<Arc<dyn DeviceEvent>>,
}

impl TensorPlacement {
    /// In host memory.
    pub(crate) const HOST_MEMORY: Self = Self { memory_kind: MemoryKind::Host, ready: None };
}

/// The placements of one call: tensors of one stream share an event, because recording one costs a
/// driver call.
#[derive(Default)]
pub(crate) struct TensorPlacements(Vec<((u32, usize), TensorPlacement)>);

impl TensorPlacements {
    /// Returns the placement of a tensor.
    ///
    /// # Errors
    /// `FarandoleEnvironmentError` when there is no such GPU.
    pub(crate) fn placement_of_tensor(
        &mut self,
        stream_id: GpuStreamId,
    ) -> PyResult<TensorPlacement> {
        let Some((ordinal, stream)) = stream_id else { return Ok(TensorPlacement::HOST_MEMORY) };
        // A call has few streams, so a list is faster than a map.
        if let Some((_, placement)) = self.0.iter().find(|(known, _)| *known == (ordinal, stream)) {
            return Ok(placement.clone());
        }
        let gpu = current_session()?
            .open_gpu(ordinal, &[])
            .map_err(|error| to_exception(error.fault(), &error))?;
        // SAFETY: `farandole.torch` passes the framework's current stream of this GPU, which lives
        // for ever.
        let ready = unsafe { gpu.record_event_after(stream) }
            .map_err(|error| to_exception(error.fault(), &error))?;
        let placement =
            TensorPlacement { memory_kind: MemoryKind::Device(ordinal), ready: Some(ready) };
        self.0.push(((ordinal, stream), placement.clone()));
        Ok(placement)
    }
}

fn current_session() -> PyResult<Arc<Session>> {
    session::current_session().map_err(|error| to_exception(error.fault(), &error))
}

/// Takes up a GPU, so that operations may name its memory; false when the configuration says not
/// to.
#[pyfunction]
#[pyo3(signature = (ordinal, packages, /))]
pub(crate) fn open_device(py: Python<'_>, ordinal: u32, packages: Vec<PathBuf>) -> PyResult<bool> {
    let session = current_session()?;
    if !session.supports_device_memory() {
        return Ok(false);
    }
    py.detach(|| session.open_gpu(ordinal, &packages))
        .map_err(|error| to_exception(error.fault(), &error))?;
    Ok(true)
}

/// Memory of a GPU that communicators of NCCL register.
#[pyclass(frozen, module = "farandole._native.engine")]
pub(crate) struct RegisteredDeviceMemory(NcclMemory);

#[pymethods]
impl RegisteredDeviceMemory {
    /// Returns the memory as bytes, by the CUDA array interface, version 2: its user keeps this
    /// object.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let described = PyDict::new(py);
        // Version 3 adds a stream to wait for, which this memory does not need.
        described.set_item("version", 2)?;
        described.set_item("shape", (self.0.len(),))?;
        described.set_item("typestr", "|u1")?;
        described.set_item("data", (self.0.start_address(), false))?;
        Ok(described)
    }
}

/// Returns memory of a GPU that communicators of NCCL register, for work in the order of a stream;
/// `None` when none is asked for, or this version gives none.
#[pyfunction]
#[pyo3(signature = (ordinal, stream, bytes, /))]
pub(crate) fn allocate_registered_memory(
    py: Python<'_>,
    ordinal: u32,
    stream: usize,
    bytes: usize,
) -> PyResult<Option<RegisteredDeviceMemory>> {
    let session = current_session()?;
    let memory = py.detach(|| session.allocate_device_memory(ordinal, stream, bytes));
    memory
        .map(|memory| memory.map(RegisteredDeviceMemory))
        .map_err(|error| to_exception(error.fault(), &error))
}

/// A result that a GPU is still at work on.
#[pyclass(frozen, module = "farandole._native.engine")]
pub(crate) struct PendingDeviceResult {
    event: Arc<dyn DeviceEvent>,
    outcome: Option<Py<GatheredTensor>>,
}

impl PendingDeviceResult {
    pub(crate) fn new(event: Arc<dyn DeviceEvent>, outcome: Option<Py<GatheredTensor>>) -> Self {
        Self { event, outcome }
    }
}

#[pymethods]
impl PendingDeviceResult {
    /// Returns the GPU.
    #[getter]
    fn ordinal(&self) -> u32 {
        self.event.device_ordinal()
    }

    #[getter]
    fn outcome(&self, py: Python<'_>) -> Option<Py<GatheredTensor>> {
        self.outcome.as_ref().map(|outcome| outcome.clone_ref(py))
    }

    /// Makes later work on this stream of the GPU wait for the result. Returns at once.
    #[pyo3(signature = (stream, /))]
    fn make_gpu_stream_wait(&self, stream: usize) -> PyResult<()> {
        // SAFETY: as in `TensorPlacements::placement_of_tensor`.
        let stream = unsafe { DeviceStream::from_raw(stream) };
        self.event.make_stream_wait(stream).map_err(|error| to_exception(error.fault(), &error))
    }

    /// Returns whether the result is there.
    fn is_ready(&self) -> PyResult<bool> {
        self.event.is_ready().map_err(|error| to_exception(error.fault(), &error))
    }
}
