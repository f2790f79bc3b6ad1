// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.cuda`: what there is of CUDA, our kernels, and NCCL, each by itself: for
//! checks on a GPU.
#![expect(unsafe_code, reason = "kernels work on addresses that come from Python")]

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use farandole::collectives::{Buffer, Communicator as _, Operation, Place, Segment, Token};
use farandole::config::Config;
use farandole::cuda::{
    self, Cache, Driver, Gpu, GpuLane, Inputs, Nccl, NcclCommunicator, Nvrtc, Places,
};
use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;

use crate::error::raise;
use crate::tensor::{dtype, reduce_op};

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Kernels>()?;
    module.add_class::<Ring>()?;
    module.add_function(wrap_pyfunction!(inventory, module)?)?;
    module.add_function(wrap_pyfunction!(built, module)?)?;
    module.add_function(wrap_pyfunction!(packed_bytes, module)?)
}

fn places(named: &str, packages: Vec<PathBuf>) -> Places {
    let mut places = Places::of(named);
    places.packages.extend(packages);
    places
}

fn told(error: cuda::Error) -> PyErr {
    raise(error.fault(), &error)
}

fn failed(error: farandole::collectives::Error) -> PyErr {
    raise(error.fault(), &error)
}

/// Returns every library and GPU: its name, whether it can be used, and its version and place or
/// why not.
#[pyfunction]
#[pyo3(signature = (named, packages, /))]
fn inventory(py: Python<'_>, named: &str, packages: Vec<PathBuf>) -> Vec<(String, bool, String)> {
    let places = places(named, packages);
    let findings = py.detach(|| cuda::inventory(&places));
    findings.into_iter().map(|finding| (finding.name, finding.works, finding.detail)).collect()
}

/// Returns whether there is a driver, and NCCL's version code; 0 where there is none, or no driver.
#[pyfunction]
#[pyo3(signature = (packages, /))]
fn built(py: Python<'_>, packages: Vec<PathBuf>) -> PyResult<(bool, i32)> {
    let config = Config::from_env().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let places = places(&config.cuda_libraries, packages);
    Ok(py.detach(|| cuda::built(&places)))
}

/// Returns the bytes of the buffer that tensors of so many elements are packed into.
#[pyfunction]
#[pyo3(signature = (counts, number, /))]
fn packed_bytes(counts: Vec<u64>, number: u8) -> PyResult<u64> {
    let tensors: Vec<(u64, u64)> = counts.into_iter().map(|count| (0, count)).collect();
    Ok(cuda::plan(&tensors, dtype(number)?.size() as u64).map_err(told)?.1)
}

/// The kernels on one GPU. Calls put work on a stream and return.
#[pyclass(frozen, module = "farandole._native.cuda")]
struct Kernels(cuda::Kernels);

#[pymethods]
impl Kernels {
    #[new]
    #[pyo3(signature = (ordinal, named, packages, cache, /))]
    fn new(
        py: Python<'_>,
        ordinal: u32,
        named: &str,
        packages: Vec<PathBuf>,
        cache: PathBuf,
    ) -> PyResult<Self> {
        let places = places(named, packages);
        py.detach(|| {
            let context = Gpu::new(Driver::load(&places)?, ordinal).context()?;
            cuda::Kernels::load(context, &Nvrtc::load(&places)?, &Cache::new(cache)).map(Self)
        })
        .map_err(told)
    }

    /// Packs tensors, given by address and number of elements, into a buffer, or unpacks them.
    #[expect(clippy::too_many_arguments, reason = "one call is one launch")]
    #[pyo3(signature = (pack, tensors, tensor, buffer, base, factor, stream, /))]
    fn transfer(
        &self,
        pack: bool,
        tensors: Vec<(u64, u64)>,
        tensor: u8,
        buffer: u8,
        base: u64,
        factor: f64,
        stream: usize,
    ) -> PyResult<()> {
        let types = (dtype(tensor)?, dtype(buffer)?);
        // SAFETY: the caller passes addresses of live tensors with their own lengths and the stream
        // it uses them on.
        unsafe { self.0.transfer(pack, &tensors, types, base, factor, stream) }.map_err(told)
    }

    /// Reduces buffers of `count` elements, in this order, into `out`.
    #[expect(clippy::too_many_arguments, reason = "one call is one launch")]
    #[pyo3(signature = (number, op, addresses, prescale, postscale, out, count, stream, /))]
    fn reduce(
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
        let dtype = dtype(number)?;
        let inputs =
            Inputs::new(&addresses, dtype, reduce_op(op)?, (prescale, postscale)).map_err(told)?;
        // SAFETY: as for `transfer`.
        unsafe { self.0.reduce(dtype, &inputs, out, count, stream) }.map_err(told)
    }

    /// Returns the bytes that `adasum` needs for itself.
    #[staticmethod]
    #[pyo3(signature = (count, /))]
    fn adasum_scratch(count: u64) -> u64 {
        cuda::Kernels::adasum_scratch(count)
    }

    /// The Adasum of two vectors of `count` elements into `out`.
    #[expect(clippy::too_many_arguments, reason = "one call is three launches")]
    #[pyo3(signature = (number, a, b, out, count, scratch, stream, /))]
    fn adasum(
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
        unsafe { self.0.adasum(dtype(number)?, (a, b, out), count, scratch, stream) }.map_err(told)
    }
}

/// NCCL's communicator of one member, to compare the work around NCCL with NCCL itself.
#[pyclass(frozen, module = "farandole._native.cuda")]
struct Ring {
    communicator: Mutex<NcclCommunicator<GpuLane>>,
    ordinal: u32,
}

/// The longest that forming it, or an operation, may take.
const PATIENCE: Duration = Duration::from_secs(60);

#[pymethods]
impl Ring {
    #[new]
    #[pyo3(signature = (ordinal, named, packages, /))]
    fn new(py: Python<'_>, ordinal: u32, named: &str, packages: Vec<PathBuf>) -> PyResult<Self> {
        let places = places(named, packages);
        py.detach(|| {
            let nccl = Nccl::load(&places).map_err(told)?;
            let lane =
                Gpu::new(Driver::load(&places).map_err(told)?, ordinal).lane().map_err(told)?;
            // Last: with the name NCCL opens a port, which only a communicator of that name closes.
            let id = nccl.unique_id().map_err(told)?;
            let communicator =
                NcclCommunicator::form(nccl, lane, id, (0, 1), PATIENCE).map_err(failed)?;
            Ok(Self { communicator: Mutex::new(communicator), ordinal })
        })
    }

    /// Sums a tensor over the one member, which leaves it as it is; returns when that is done. What
    /// the caller has put on its own stream is not waited for.
    #[pyo3(signature = (address, bytes, number, /))]
    fn allreduce(&self, py: Python<'_>, address: usize, bytes: usize, number: u8) -> PyResult<()> {
        let dtype = dtype(number)?;
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller passes a live tensor's address with its own length, and waits for this
        // call.
        let buffer = unsafe { Buffer::from_raw(address, bytes, Place::Device(self.ordinal)) };
        let operation = Operation::Allreduce {
            dtype,
            op: farandole::collectives::ReduceOp::Sum,
            prescale: 1.0,
            postscale: 1.0,
            segments: vec![Segment { input: buffer.clone(), output: buffer }],
        };
        py.detach(|| {
            let mut communicator =
                self.communicator.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            communicator.submit(Token(0), operation).map_err(failed)?;
            let (started, mut done) = (Instant::now(), Vec::new());
            while done.is_empty() {
                communicator.progress(&mut done).map_err(failed)?;
                if started.elapsed() > PATIENCE {
                    communicator.abandon();
                    return Err(PyTimeoutError::new_err(format!(
                        "no answer of NCCL within {PATIENCE:?}"
                    )));
                }
            }
            Ok(())
        })
    }
}
