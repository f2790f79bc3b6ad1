// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.engine`: the session of this process and its operations.
//!
//! Submitting and polling are short and keep the GIL: giving it up could cost a busy interpreter's
//! switch interval.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole::config::GradientConvention;
use farandole::engine::control_plane_model::PRIORITIZED_LIST_BYTES;
use farandole::engine::{CollectiveRequest, RequestHandle, RequestKind};
use farandole::kernels::LARGE_MEMORY_BYTES;
use farandole::registrar::Error as RegistrarError;
use farandole::session::{self, AssignedRank, InitOptions, Session};
use farandole::world::{self, ProcessSetId, Rank};
use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;

use crate::device::{
    GpuStreamId, PendingDeviceResult, RegisteredDeviceMemory, TensorPlacement, TensorPlacements,
    allocate_registered_memory, open_device,
};
use crate::error::{WorkerDismissed, to_exception};
use crate::interruptible_wait;
use crate::registrar::read_configuration;
use crate::tensor::{
    GatheredTensor, SharedTensorMemory, advise_large_pages, copy_memory, dtype_from_number,
    reduce_op_from_number, tensor_buffer,
};

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<World>()?;
    module.add_class::<GatheredTensor>()?;
    module.add_class::<SharedTensorMemory>()?;
    module.add_class::<PendingDeviceResult>()?;
    module.add_class::<RegisteredDeviceMemory>()?;
    module.add_function(wrap_pyfunction!(open_device, module)?)?;
    module.add_function(wrap_pyfunction!(init, module)?)?;
    module.add_function(wrap_pyfunction!(host_registrar, module)?)?;
    module.add_function(wrap_pyfunction!(shared_memory_identity, module)?)?;
    module.add_function(wrap_pyfunction!(rank_not_inherited_variable, module)?)?;
    module.add_function(wrap_pyfunction!(host_changes, module)?)?;
    module.add_function(wrap_pyfunction!(announce_leave, module)?)?;
    module.add_function(wrap_pyfunction!(shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(announce_clean_exit, module)?)?;
    module.add_function(wrap_pyfunction!(is_initialized, module)?)?;
    module.add_function(wrap_pyfunction!(uses_horovod_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(session_world, module)?)?;
    module.add_function(wrap_pyfunction!(allreduce, module)?)?;
    module.add_function(wrap_pyfunction!(grouped_allreduce, module)?)?;
    module.add_function(wrap_pyfunction!(broadcast, module)?)?;
    module.add_function(wrap_pyfunction!(allgather, module)?)?;
    module.add_function(wrap_pyfunction!(grouped_allgather, module)?)?;
    module.add_function(wrap_pyfunction!(alltoall, module)?)?;
    module.add_function(wrap_pyfunction!(reducescatter, module)?)?;
    module.add_function(wrap_pyfunction!(grouped_reducescatter, module)?)?;
    module.add_function(wrap_pyfunction!(barrier, module)?)?;
    module.add_function(wrap_pyfunction!(join, module)?)?;
    module.add_function(wrap_pyfunction!(process_sets, module)?)?;
    module.add_function(wrap_pyfunction!(carried_process_sets, module)?)?;
    module.add_function(wrap_pyfunction!(add_process_set, module)?)?;
    module.add_function(wrap_pyfunction!(remove_process_set, module)?)?;
    module.add_function(wrap_pyfunction!(reserve_set_channel, module)?)?;
    module.add_function(wrap_pyfunction!(add_member_set, module)?)?;
    module.add_function(wrap_pyfunction!(allocate_shared_memory, module)?)?;
    module.add_function(wrap_pyfunction!(copy_memory, module)?)?;
    module.add("LARGE_MEMORY", LARGE_MEMORY_BYTES)?;
    module.add("PRIORITIZED_LIST_BYTES", PRIORITIZED_LIST_BYTES)?;
    module.add_function(wrap_pyfunction!(advise_large_pages, module)?)?;
    module.add_function(wrap_pyfunction!(allocate_registered_memory, module)?)?;
    module.add_function(wrap_pyfunction!(is_pending, module)?)?;
    module.add_function(wrap_pyfunction!(poll, module)?)?;
    module.add_function(wrap_pyfunction!(wait, module)?)
}

/// Returns whether the gradients of collectives are Horovod's, by this process's configuration.
#[pyfunction]
fn uses_horovod_gradients() -> PyResult<bool> {
    Ok(read_configuration(&[])?.gradient_convention == GradientConvention::Horovod)
}

/// The rank of this process and the sizes of its world.
#[pyclass(frozen, module = "farandole._native.engine")]
struct World(Arc<world::World>);

#[pymethods]
impl World {
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.0.own_placement().local_rank.0
    }

    #[getter]
    fn local_size(&self) -> u32 {
        self.0.own_placement().local_size
    }

    #[getter]
    fn cross_rank(&self) -> u32 {
        self.0.own_placement().cross_rank.0
    }

    #[getter]
    fn cross_size(&self) -> u32 {
        self.0.own_placement().cross_size
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.0.generation.0
    }

    #[getter]
    fn is_homogeneous(&self) -> bool {
        self.0.is_homogeneous()
    }
}

/// Joins the world; returns true if this call began the session. If the environment does not set
/// the ticket of [`host`] and this process's rank, the fourth argument contains them.
#[pyfunction]
#[pyo3(signature = (comm, process_sets, dynamic, assigned_rank=None, /))]
fn init(
    py: Python<'_>,
    comm: Option<Vec<u32>>,
    process_sets: Vec<Vec<u32>>,
    dynamic: bool,
    assigned_rank: Option<(String, u32)>,
) -> PyResult<bool> {
    let assigned_rank = assigned_rank.map(|(ticket, rank)| AssignedRank { ticket, rank });
    let options = InitOptions { ranks: comm, process_sets, dynamic, assigned_rank };
    run_interruptibly(py, |interrupted| session::init_with_options(&options, interrupted))
}

/// Changes of hosts that workers of an elastic job have not asked for yet: seconds since the epoch,
/// and 1 where workers are to leave, 2 where workers wait to join, or both.
#[pyfunction]
fn host_changes() -> Vec<(f64, u8)> {
    let bits = |removed: bool, added: bool| u8::from(removed) | u8::from(added) << 1;
    session::take_host_changes()
        .into_iter()
        .map(|change| (change.at, bits(change.removed, change.added)))
        .collect()
}

/// Announces to the registrar of an elastic job that this worker ends at its next chance. Returns
/// false if the job is not elastic.
#[pyfunction]
#[pyo3(signature = (reason, timeout, /))]
fn announce_leave(py: Python<'_>, reason: &str, timeout: f64) -> PyResult<bool> {
    let deadline = Instant::now() + Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| session::resign_worker(reason, deadline))
        .map_err(|error| to_exception(error.fault(), &error))
}

/// Holds the registrar of a world of `size`, in the process that is its rank 0; the ticket that its
/// ranks need, a secret.
#[pyfunction]
#[pyo3(signature = (size, one_host, /))]
fn host_registrar(py: Python<'_>, size: u32, one_host: bool) -> PyResult<String> {
    py.detach(|| session::host_registrar(size, one_host))
        .map_err(|error| to_exception(error.fault(), &error))
}

/// Returns the identity of this machine's memory: equal in processes that may share memory.
#[pyfunction]
fn shared_memory_identity() -> String {
    farandole::registrar::local_host_facts::host_facts().host_hash().0
}

/// Returns a variable and its value for the processes that this one starts: they have not its rank.
#[pyfunction]
fn rank_not_inherited_variable() -> Option<(&'static str, String)> {
    session::rank_not_inherited_variable()
}

/// Runs `wait` without the GIL. If a signal handler raises an exception meanwhile, returns it.
fn run_interruptibly<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(&mut (dyn FnMut() -> bool + Send)) -> session::Result<T> + Send,
) -> PyResult<T> {
    let mut interrupt = None;
    let waited = py.detach(|| {
        wait(&mut || {
            // Only the main thread of Python runs handlers; in other threads this finds nothing.
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_some()
        })
    });
    match (waited, interrupt) {
        // The user's own exception, such as `KeyboardInterrupt`, instead of an error of Farandole.
        (Err(session::Error::Interrupted), Some(interrupt)) => Err(interrupt),
        (Err(session::Error::Registrar(RegistrarError::Dismissed { reason, .. })), _) => {
            Err(WorkerDismissed::new_err(reason))
        }
        (waited, _) => waited.map_err(|error| to_exception(error.fault(), &error)),
    }
}

/// Returns every process set: its number and its ranks.
#[pyfunction]
fn process_sets() -> PyResult<BTreeMap<u32, Vec<u32>>> {
    let sets = current_session()?.process_sets();
    Ok(sets
        .into_iter()
        .map(|(set, ranks)| (set.0, ranks.into_iter().map(|rank| rank.0).collect()))
        .collect())
}

/// Returns the numbers of the process sets that this world has taken over from the previous world,
/// among the sets that `init` created when the job began; `None` if the world has begun with the
/// sets of `init`.
#[pyfunction]
fn carried_process_sets() -> PyResult<Option<Vec<u32>>> {
    Ok(current_session()?.carried_sets().map(|sets| sets.into_iter().map(|set| set.0).collect()))
}

/// Makes a process set together with all ranks; its number.
#[pyfunction]
#[pyo3(signature = (ranks, /))]
fn add_process_set(py: Python<'_>, ranks: Vec<u32>) -> PyResult<u32> {
    let session = current_session()?;
    run_interruptibly(py, |interrupted| session.add_process_set(&ranks, interrupted))
        .map(|set| set.0)
}

/// Ends a process set together with all ranks; false, at once, when there is no such set or it is
/// the global one.
#[pyfunction]
#[pyo3(signature = (id, /))]
fn remove_process_set(py: Python<'_>, id: u32) -> PyResult<bool> {
    let session = current_session()?;
    run_interruptibly(py, |interrupted| {
        match session.remove_process_set(ProcessSetId(id), interrupted) {
            // Horovod returns false for an unknown set.
            Err(session::Error::NoSuchSet(_)) => Ok(false),
            removed => removed.map(|()| true),
        }
    })
}

/// Returns a channel that no other process set uses, for `add_member_set` on all members.
#[pyfunction]
fn reserve_set_channel() -> PyResult<u32> {
    current_session()?.reserve_set_channel().map_err(|error| to_exception(error.fault(), &error))
}

/// Makes a process set together with its members only, within `timeout` seconds; its number in this
/// process.
#[pyfunction]
#[pyo3(signature = (ranks, channel, timeout, /))]
fn add_member_set(py: Python<'_>, ranks: Vec<u32>, channel: u32, timeout: f64) -> PyResult<u32> {
    let session = current_session()?;
    let deadline = Instant::now() + Duration::try_from_secs_f64(timeout).unwrap_or_default();
    run_interruptibly(py, |interrupted| {
        session.add_member_set(&ranks, channel, deadline, interrupted)
    })
    .map(|set| set.0)
}

/// Leaves the world.
#[pyfunction]
fn shutdown(py: Python<'_>) {
    py.detach(session::shutdown);
}

/// Announces to all reachable ranks that this process ends without a failure.
#[pyfunction]
fn announce_clean_exit(py: Python<'_>) {
    py.detach(session::report_orderly_exit);
}

#[pyfunction]
fn is_initialized() -> bool {
    session::is_initialized()
}

#[pyfunction]
#[pyo3(name = "world")]
fn session_world() -> PyResult<World> {
    Ok(World(Arc::clone(current_session()?.world())))
}

#[expect(
    clippy::too_many_arguments,
    reason = "a tuple per call would cost more than the operation's own submission"
)]
#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, target, op, prescale, postscale, process_set, attended, device=None, priority=0, /))]
fn allreduce(
    name: String,
    dtype: u8,
    shape: Vec<u64>,
    source: usize,
    target: usize,
    op: u8,
    prescale: f64,
    postscale: f64,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
    priority: i32,
) -> PyResult<u64> {
    let kind = RequestKind::Allreduce { op: reduce_op_from_number(op)?, prescale, postscale };
    let tensor = (name, dtype, shape, source, Some(target));
    submit_tensor(tensor, kind, process_set, attended, device, priority)
}

/// Starts several allreduces as one unit: `(name, dtype, shape, source, target)` each.
#[pyfunction]
#[pyo3(signature = (tensors, op, prescale, postscale, process_set, devices=None, priority=0, /))]
fn grouped_allreduce(
    tensors: Vec<(String, u8, Vec<u64>, usize, usize)>,
    op: u8,
    prescale: f64,
    postscale: f64,
    process_set: u32,
    devices: Option<Vec<GpuStreamId>>,
    priority: i32,
) -> PyResult<Vec<u64>> {
    let kind = RequestKind::Allreduce { op: reduce_op_from_number(op)?, prescale, postscale };
    let tensors = tensors.into_iter().map(with_target);
    submit_group(tensors, &kind, process_set, devices, priority)
}

#[expect(clippy::too_many_arguments, reason = "as for allreduce")]
#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, target, root, process_set, attended, device=None, /))]
fn broadcast(
    name: String,
    dtype: u8,
    shape: Vec<u64>,
    source: usize,
    target: usize,
    root: u32,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
) -> PyResult<u64> {
    let kind = RequestKind::Broadcast { root: Rank(root) };
    let tensor = (name, dtype, shape, source, Some(target));
    submit_tensor(tensor, kind, process_set, attended, device, 0)
}

#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, process_set, attended, device=None, /))]
fn allgather(
    name: String,
    dtype: u8,
    shape: Vec<u64>,
    source: usize,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
) -> PyResult<u64> {
    let tensor = (name, dtype, shape, source, None);
    submit_tensor(tensor, RequestKind::Allgather, process_set, attended, device, 0)
}

/// Starts several allgathers as one unit: `(name, dtype, shape, source)` each.
#[pyfunction]
#[pyo3(signature = (tensors, process_set, devices=None, /))]
fn grouped_allgather(
    tensors: Vec<(String, u8, Vec<u64>, usize)>,
    process_set: u32,
    devices: Option<Vec<GpuStreamId>>,
) -> PyResult<Vec<u64>> {
    let tensors =
        tensors.into_iter().map(|(name, dtype, shape, source)| (name, dtype, shape, source, None));
    submit_group(tensors, &RequestKind::Allgather, process_set, devices, 0)
}

/// Starts an all-to-all; `splits` are rows for each member, or nothing for as many each.
#[expect(clippy::too_many_arguments, reason = "one call is one operation")]
#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, splits, process_set, attended, device=None, /))]
fn alltoall(
    name: String,
    dtype: u8,
    shape: Vec<u64>,
    source: usize,
    splits: Option<Vec<i64>>,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
) -> PyResult<u64> {
    let rows = |splits: Vec<i64>| -> PyResult<Vec<u64>> {
        let negative =
            |_| PyValueError::new_err(format!("splits must not be negative: {splits:?}"));
        splits.iter().map(|rows| u64::try_from(*rows).map_err(negative)).collect()
    };
    let kind = RequestKind::Alltoall { splits: splits.map(rows).transpose()? };
    let tensor = (name, dtype, shape, source, None);
    submit_tensor(tensor, kind, process_set, attended, device, 0)
}

/// Starts a reduce-scatter; `target` has room for this rank's rows.
#[expect(clippy::too_many_arguments, reason = "as for allreduce")]
#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, target, op, prescale, postscale, process_set, attended, device=None, /))]
fn reducescatter(
    name: String,
    dtype: u8,
    shape: Vec<u64>,
    source: usize,
    target: usize,
    op: u8,
    prescale: f64,
    postscale: f64,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
) -> PyResult<u64> {
    let kind = RequestKind::Reducescatter { op: reduce_op_from_number(op)?, prescale, postscale };
    let tensor = (name, dtype, shape, source, Some(target));
    submit_tensor(tensor, kind, process_set, attended, device, 0)
}

/// Starts several reduce-scatters as one unit: `(name, dtype, shape, source, target)` each.
#[pyfunction]
#[pyo3(signature = (tensors, op, prescale, postscale, process_set, devices=None, /))]
fn grouped_reducescatter(
    tensors: Vec<(String, u8, Vec<u64>, usize, usize)>,
    op: u8,
    prescale: f64,
    postscale: f64,
    process_set: u32,
    devices: Option<Vec<GpuStreamId>>,
) -> PyResult<Vec<u64>> {
    let kind = RequestKind::Reducescatter { op: reduce_op_from_number(op)?, prescale, postscale };
    let tensors = tensors.into_iter().map(with_target);
    submit_group(tensors, &kind, process_set, devices, 0)
}

#[pyfunction]
#[pyo3(signature = (name, process_set, /))]
fn barrier(name: String, process_set: u32) -> PyResult<u64> {
    submit_request(CollectiveRequest::barrier(name, ProcessSetId(process_set)), true)
}

/// Returns whether the handle's result can still be waited for.
#[pyfunction]
#[pyo3(signature = (handle, /))]
fn is_pending(handle: u64) -> bool {
    session::current_session()
        .is_ok_and(|session| session.engine().poll(RequestHandle(handle)).is_ok())
}

#[pyfunction]
#[pyo3(signature = (handle, /))]
fn poll(handle: u64) -> PyResult<bool> {
    current_session()?
        .engine()
        .poll(RequestHandle(handle))
        .map_err(|error| to_exception(error.fault(), &error))
}

/// This rank has no more data; the handle's result is the rank that joins last.
#[pyfunction]
#[pyo3(signature = (allow_gather, /))]
fn join(allow_gather: bool) -> PyResult<u64> {
    submit_request(CollectiveRequest::join("join.noname", allow_gather), true)
}

/// Waits for a result and takes it: memory that the engine filled, the rank that joined last, or
/// nothing. If a GPU has not finished the result, returns a `PendingDeviceResult`. After `timeout`
/// seconds, raises `TimeoutError`; the operation stays in progress.
#[pyfunction]
#[pyo3(signature = (handle, timeout=None, /))]
fn wait(py: Python<'_>, handle: u64, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
    let session = current_session()?;
    let limit = timeout.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let completion = interruptible_wait::wait_interruptibly(py, deadline, |slice| {
        session
            .engine()
            .wait(RequestHandle(handle), slice)
            .map_err(|error| to_exception(error.fault(), &error))
    })?;
    let Some(completion) = completion else {
        return Err(PyTimeoutError::new_err(format!(
            "the operation did not complete within {:.3} s",
            limit.unwrap_or_default().as_secs_f64()
        )));
    };
    if let Some(last) = completion.last {
        return Ok(Some(last.0.into_pyobject(py)?.into_any().unbind()));
    }
    let reached = completion.reached.clone();
    let gathered = GatheredTensor::from_completion(completion)
        .map(|gathered| Py::new(py, gathered))
        .transpose()?;
    match reached {
        None => Ok(gathered.map(Py::into_any)),
        Some(event) => Ok(Some(Py::new(py, PendingDeviceResult::new(event, gathered))?.into_any())),
    }
}

fn current_session() -> PyResult<Arc<Session>> {
    session::current_session().map_err(|error| to_exception(error.fault(), &error))
}

/// An operand as Python describes it: name, dtype, shape, and the addresses of input and output.
type TensorArguments = (String, u8, Vec<u64>, usize, Option<usize>);

fn with_target(
    (name, dtype, shape, source, target): (String, u8, Vec<u64>, usize, usize),
) -> TensorArguments {
    (name, dtype, shape, source, Some(target))
}

fn build_request(
    (name, number, shape, source, target): TensorArguments,
    kind: RequestKind,
    process_set: u32,
    placement: TensorPlacement,
) -> PyResult<CollectiveRequest> {
    let dtype = dtype_from_number(number)?;
    let input = tensor_buffer(source, dtype, &shape, placement.memory_kind)?;
    let written = match (&kind, shape.first()) {
        // The output has only the rows of this rank, and the caller passes its address without a
        // length.
        (RequestKind::Reducescatter { .. }, Some(rows)) => {
            let set = ProcessSetId(process_set);
            let own = current_session()?
                .engine()
                .own_reducescatter_rows(*rows, set)
                .map_err(|error| to_exception(error.fault(), &error))?;
            &[&[own], &shape[1..]].concat()
        }
        _ => &shape,
    };
    let output = target
        .map(|target| tensor_buffer(target, dtype, written, placement.memory_kind))
        .transpose()?;
    Ok(CollectiveRequest {
        name,
        kind,
        dtype,
        shape,
        input,
        output,
        process_set: ProcessSetId(process_set),
        ready: placement.ready,
        priority: 0,
    })
}

fn submit_tensor(
    tensor: TensorArguments,
    kind: RequestKind,
    process_set: u32,
    attended: bool,
    device: GpuStreamId,
    priority: i32,
) -> PyResult<u64> {
    let placement = TensorPlacements::default().placement_of_tensor(device)?;
    let request = build_request(tensor, kind, process_set, placement)?;
    submit_request(CollectiveRequest { priority, ..request }, attended)
}

fn submit_request(request: CollectiveRequest, attended: bool) -> PyResult<u64> {
    let session = current_session()?;
    let engine = session.engine();
    // A caller that waits next drives the progress itself, which saves waking the background
    // thread.
    let handle = if attended { engine.submit_before_wait(request) } else { engine.submit(request) };
    handle.map(|handle| handle.0).map_err(|error| to_exception(error.fault(), &error))
}

fn submit_group(
    tensors: impl Iterator<Item = TensorArguments>,
    kind: &RequestKind,
    process_set: u32,
    devices: Option<Vec<GpuStreamId>>,
    priority: i32,
) -> PyResult<Vec<u64>> {
    let mut placements = TensorPlacements::default();
    let mut devices = devices.unwrap_or_default().into_iter();
    let requests = tensors
        .map(|tensor| {
            let placement = placements.placement_of_tensor(devices.next().flatten())?;
            let request = build_request(tensor, kind.clone(), process_set, placement)?;
            Ok(CollectiveRequest { priority, ..request })
        })
        .collect::<PyResult<Vec<_>>>()?;
    let handles = current_session()?
        .engine()
        .submit_group(requests)
        .map_err(|error| to_exception(error.fault(), &error))?;
    Ok(handles.into_iter().map(|handle| handle.0).collect())
}

/// Returns memory for tensors that operations work on again and again: the other ranks of this host
/// work in it, too.
#[pyfunction]
#[pyo3(signature = (bytes, /))]
fn allocate_shared_memory(bytes: usize) -> PyResult<SharedTensorMemory> {
    SharedTensorMemory::new(bytes, session::current_session().ok().as_deref())
}
