// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.cuda`: what there is of CUDA, our kernels, and NCCL, each by itself: for
//! checks on a GPU.
#![expect(unsafe_code, reason = "kernels work on addresses that come from Python")]

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use farandole::collectives::{
    CollectiveOperation, Communicator as _, OperationToken, TensorSegment,
};
use farandole::config::Config;
use farandole::cuda::{
    self, CudaDriver, GpuDevice, GpuStream, KernelCache, LibrarySearchPath, NcclCommunicator,
    NcclLibrary, NvrtcCompiler, ReductionInputs,
};
use farandole::kernels::{Buffer, MemoryKind};
use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;

use crate::error::to_exception;
use crate::tensor::{dtype_from_number, reduce_op_from_number};

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<GpuKernels>()?;
    module.add_class::<SingleMemberNccl>()?;
    module.add_function(wrap_pyfunction!(cuda_inventory, module)?)?;
    module.add_function(wrap_pyfunction!(has_driver_and_nccl_version, module)?)?;
    module.add_function(wrap_pyfunction!(packed_buffer_bytes, module)?)
}

fn library_search_path(named: &str, packages: Vec<PathBuf>) -> LibrarySearchPath {
    let mut places = LibrarySearchPath::from_knob(named);
    places.packages.extend(packages);
    places
}

fn cuda_exception(error: cuda::Error) -> PyErr {
    to_exception(error.fault(), &error)
}

fn collectives_exception(error: farandole::collectives::Error) -> PyErr {
    to_exception(error.fault(), &error)
}

/// Returns every library and GPU: its name, whether it can be used, and its version and place or
/// why not.
#[pyfunction]
#[pyo3(signature = (named, packages, /))]
fn cuda_inventory(
    py: Python<'_>,
    named: &str,
    packages: Vec<PathBuf>,
) -> Vec<(String, bool, String)> {
    let places = library_search_path(named, packages);
    let findings = py.detach(|| cuda::collect_inventory(&places));
    findings.into_iter().map(|finding| (finding.name, finding.works, finding.detail)).collect()
}

/// Returns whether there is a driver, and NCCL's version code; 0 where there is none, or no driver.
#[pyfunction]
#[pyo3(signature = (packages, /))]
fn has_driver_and_nccl_version(py: Python<'_>, packages: Vec<PathBuf>) -> PyResult<(bool, i32)> {
    let config = Config::from_env().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let places = library_search_path(&config.cuda_libraries, packages);
    Ok(py.detach(|| cuda::detect_driver_and_nccl_version(&places)))
}

/// Returns the bytes of the buffer that tensors of so many elements are packed into.
#[pyfunction]
#[pyo3(signature = (counts, number, /))]
fn packed_buffer_bytes(counts: Vec<u64>, number: u8) -> PyResult<u64> {
    let tensors: Vec<(u64, u64)> = counts.into_iter().map(|count| (0, count)).collect();
    Ok(cuda::plan_pack_launches(&tensors, dtype_from_number(number)?.element_size() as u64)
        .map_err(cuda_exception)?
        .1)
}

/// The kernels on one GPU. Calls put work on a stream and return.
#[pyclass(frozen, module = "farandole._native.cuda")]
struct GpuKernels(cuda::KernelModule);

#[pymethods]
impl GpuKernels {
    #[new]
    #[pyo3(signature = (ordinal, named, packages, cache, /))]
    fn new(
        py: Python<'_>,
        ordinal: u32,
        named: &str,
        packages: Vec<PathBuf>,
        cache: PathBuf,
    ) -> PyResult<Self> {
        let places = library_search_path(named, packages);
        py.detach(|| {
            let context =
                GpuDevice::new(CudaDriver::load_from(&places)?, ordinal).primary_context()?;
            cuda::KernelModule::compile_and_load(
                context,
                &NvrtcCompiler::load_from(&places)?,
                &KernelCache::new(cache),
            )
            .map(Self)
        })
        .map_err(cuda_exception)
    }

    /// Packs tensors, given by address and number of elements, into a buffer, or unpacks them.
    #[expect(clippy::too_many_arguments, reason = "one call is one launch")]
    #[pyo3(signature = (pack, tensors, tensor, buffer, base, factor, stream, /))]
    fn pack_tensors(
        &self,
        pack: bool,
        tensors: Vec<(u64, u64)>,
        tensor: u8,
        buffer: u8,
        base: u64,
        factor: f64,
        stream: usize,
    ) -> PyResult<()> {
        let types = (dtype_from_number(tensor)?, dtype_from_number(buffer)?);
        // SAFETY: the caller passes addresses of live tensors with their own lengths and the stream
        // it uses them on.
        unsafe { self.0.pack_or_unpack_tensors(pack, &tensors, types, base, factor, stream) }
            .map_err(cuda_exception)
    }

    /// Reduces buffers of `count` elements, in this order, into `out`.
    #[expect(clippy::too_many_arguments, reason = "one call is one launch")]
    #[pyo3(signature = (number, op, addresses, prescale, postscale, out, count, stream, /))]
    fn reduce_buffers(
        &self,
        number: u8,
        op: u8,
        addresses: Vec<u64>,
        prescale: f64,
        postscale: f64,
        out: u64,
        count: u64,
        stream: usize,
    ) -> PyResult<()> {
        let dtype = dtype_from_number(number)?;
        let inputs = ReductionInputs::new(
            &addresses,
            dtype,
            reduce_op_from_number(op)?,
            (prescale, postscale),
        )
        .map_err(cuda_exception)?;
        // SAFETY: as for `transfer`.
        unsafe { self.0.reduce_buffers(dtype, &inputs, out, count, stream) }.map_err(cuda_exception)
    }

    /// Returns the bytes that `adasum_vectors` needs for itself.
    #[staticmethod]
    #[pyo3(signature = (count, /))]
    fn adasum_scratch(count: u64) -> u64 {
        cuda::KernelModule::adasum_scratch_bytes(count)
    }

    /// Writes the Adasum of two vectors of `count` elements to `out`.
    #[expect(clippy::too_many_arguments, reason = "one call is three launches")]
    #[pyo3(signature = (number, a, b, out, count, scratch, stream, /))]
    fn adasum_vectors(
        &self,
        number: u8,
        a: u64,
        b: u64,
        out: u64,
        count: u64,
        scratch: u64,
        stream: usize,
    ) -> PyResult<()> {
        // SAFETY: as for `transfer`.
        unsafe {
            self.0.adasum_vectors(dtype_from_number(number)?, (a, b, out), count, scratch, stream)
        }
        .map_err(cuda_exception)
    }
}

/// NCCL's communicator of one member, to compare the work around NCCL with NCCL itself.
#[pyclass(frozen, module = "farandole._native.cuda")]
struct SingleMemberNccl {
    communicator: Mutex<NcclCommunicator<GpuStream>>,
    ordinal: u32,
}

/// The longest that forming it, or an operation, may take.
const NCCL_TIMEOUT: Duration = Duration::from_secs(60);

#[pymethods]
impl SingleMemberNccl {
    #[new]
    #[pyo3(signature = (ordinal, named, packages, /))]
    fn new(py: Python<'_>, ordinal: u32, named: &str, packages: Vec<PathBuf>) -> PyResult<Self> {
        let places = library_search_path(named, packages);
        py.detach(|| {
            let nccl = NcclLibrary::load_from(&places).map_err(cuda_exception)?;
            let lane =
                GpuDevice::new(CudaDriver::load_from(&places).map_err(cuda_exception)?, ordinal)
                    .create_stream()
                    .map_err(cuda_exception)?;
            // Last: with the name NCCL opens a port, which only a communicator of that name closes.
            let id = nccl.create_unique_id().map_err(cuda_exception)?;
            let communicator =
                NcclCommunicator::begin_forming(nccl, lane, id, (0, 1), NCCL_TIMEOUT)
                    .map_err(collectives_exception)?;
            Ok(Self { communicator: Mutex::new(communicator), ordinal })
        })
    }

    /// Sums a tensor over the one member, which leaves the tensor unchanged, and waits for the sum.
    /// The function does not wait for work on the caller's stream.
    #[pyo3(signature = (address, bytes, number, /))]
    fn allreduce(&self, py: Python<'_>, address: usize, bytes: usize, number: u8) -> PyResult<()> {
        let dtype = dtype_from_number(number)?;
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller passes a live tensor's address with its own length, and waits for this
        // call.
        let buffer = unsafe { Buffer::from_raw(address, bytes, MemoryKind::Device(self.ordinal)) };
        let operation = CollectiveOperation::Allreduce {
            dtype,
            op: farandole::kernels::ReduceOp::Sum,
            prescale: 1.0,
            postscale: 1.0,
            segments: vec![TensorSegment { input: buffer.clone(), output: buffer }],
        };
        py.detach(|| {
            let mut communicator =
                self.communicator.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            communicator
                .submit_operation(OperationToken(0), operation)
                .map_err(collectives_exception)?;
            let (started, mut done) = (Instant::now(), Vec::new());
            // Spins, because this class measures the time of NCCL, and a sleep would add to it.
            while done.is_empty() {
                communicator.make_progress(&mut done).map_err(collectives_exception)?;
                if started.elapsed() > NCCL_TIMEOUT {
                    communicator.abandon_operations();
                    return Err(PyTimeoutError::new_err(format!(
                        "no answer of NCCL within {NCCL_TIMEOUT:?}"
                    )));
                }
            }
            Ok(())
        })
    }
}
