// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.engine`: the session of this process and its operations.
//!
//! Submitting and polling are short and keep the GIL: giving it up could cost a busy interpreter's
//! switch interval.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole::collectives::LARGE;
use farandole::config::Gradients;
use farandole::engine::{Handle, Kind, Request};
use farandole::registrar::Error as RegistrarError;
use farandole::session::{self, Session, Told, Wishes};
use farandole::world::{self, ProcessSetId, Rank};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::{DeviceMemory, Given, Reached, Spot, Spots, device_memory, open_device};
use crate::error::{WorkerDismissed, raise};
use crate::registrar::configuration;
use crate::runtime;
use crate::tensor::{Gathered, Mapped, buffer, copy_memory, dtype, prepare_memory, reduce_op};

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<World>()?;
    module.add_class::<Gathered>()?;
    module.add_class::<Mapped>()?;
    module.add_class::<Reached>()?;
    module.add_class::<DeviceMemory>()?;
    module.add_function(wrap_pyfunction!(open_device, module)?)?;
    module.add_function(wrap_pyfunction!(init, module)?)?;
    module.add_function(wrap_pyfunction!(host, module)?)?;
    module.add_function(wrap_pyfunction!(here, module)?)?;
    module.add_function(wrap_pyfunction!(holder, module)?)?;
    module.add_function(wrap_pyfunction!(host_changes, module)?)?;
    module.add_function(wrap_pyfunction!(resign, module)?)?;
    module.add_function(wrap_pyfunction!(shutdown, module)?)?;
    module.add_function(wrap_pyfunction!(leave, module)?)?;
    module.add_function(wrap_pyfunction!(is_initialized, module)?)?;
    module.add_function(wrap_pyfunction!(has_horovods_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(world_of_session, module)?)?;
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
    module.add_function(wrap_pyfunction!(mapped, module)?)?;
    module.add_function(wrap_pyfunction!(copy_memory, module)?)?;
    module.add("LARGE_MEMORY", LARGE)?;
    module.add_function(wrap_pyfunction!(prepare_memory, module)?)?;
    module.add_function(wrap_pyfunction!(device_memory, module)?)?;
    module.add_function(wrap_pyfunction!(is_pending, module)?)?;
    module.add_function(wrap_pyfunction!(poll, module)?)?;
    module.add_function(wrap_pyfunction!(wait, module)?)
}

/// Returns whether the gradients of collectives are Horovod's, by this process's configuration.
#[pyfunction]
fn has_horovods_gradients() -> PyResult<bool> {
    Ok(configuration(&[])?.gradient_convention == Gradients::Horovod)
}

/// The place of this process in the world.
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
        self.0.seat().local_rank.0
    }

    #[getter]
    fn local_size(&self) -> u32 {
        self.0.seat().local_size
    }

    #[getter]
    fn cross_rank(&self) -> u32 {
        self.0.seat().cross_rank.0
    }

    #[getter]
    fn cross_size(&self) -> u32 {
        self.0.seat().cross_size
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

/// Joins the world; true when this call began the session. `told`: the ticket of [`host`] and this
/// process's rank, where the environment does not tell them.
#[pyfunction]
#[pyo3(signature = (comm, process_sets, dynamic, told=None, /))]
fn init(
    py: Python<'_>,
    comm: Option<Vec<u32>>,
    process_sets: Vec<Vec<u32>>,
    dynamic: bool,
    told: Option<(String, u32)>,
) -> PyResult<bool> {
    let told = told.map(|(ticket, rank)| Told { ticket, rank });
    let wishes = Wishes { ranks: comm, process_sets, dynamic, told };
    interruptible(py, |interrupted| session::begin(&wishes, interrupted))
}

/// Changes of hosts that workers of an elastic job have not asked for yet: seconds since the epoch,
/// and 1 where workers are to leave, 2 where workers wait to join, or both.
#[pyfunction]
fn host_changes() -> Vec<(f64, u8)> {
    let bits = |removed: bool, added: bool| u8::from(removed) | u8::from(added) << 1;
    session::host_changes()
        .into_iter()
        .map(|change| (change.at, bits(change.removed, change.added)))
        .collect()
}

/// Tells the registrar of an elastic job that this worker ends at its next chance; false where the
/// job is not elastic.
#[pyfunction]
#[pyo3(signature = (reason, timeout, /))]
fn resign(py: Python<'_>, reason: &str, timeout: f64) -> PyResult<bool> {
    let deadline = Instant::now() + Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| session::resign(reason, deadline)).map_err(|error| raise(error.fault(), &error))
}

/// Holds the registrar of a world of `size`, in the process that is its rank 0; the ticket that its
/// ranks need, a secret.
#[pyfunction]
#[pyo3(signature = (size, one_host, /))]
fn host(py: Python<'_>, size: u32, one_host: bool) -> PyResult<String> {
    py.detach(|| session::host(size, one_host)).map_err(|error| raise(error.fault(), &error))
}

/// Returns the identity of this machine's memory: equal in processes that may share memory.
#[pyfunction]
fn here() -> String {
    farandole::registrar::host::facts().hash().0
}

/// Returns a variable and its value for the processes that this one starts: they have not its rank.
#[pyfunction]
fn holder() -> Option<(&'static str, String)> {
    session::holder()
}

/// Runs `wait` without the GIL; what a signal handler raises meanwhile is the result.
fn interruptible<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(&mut (dyn FnMut() -> bool + Send)) -> session::Result<T> + Send,
) -> PyResult<T> {
    let mut interrupt = None;
    let waited = py.detach(|| {
        wait(&mut || {
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_some()
        })
    });
    match (waited, interrupt) {
        (Err(session::Error::Interrupted), Some(interrupt)) => Err(interrupt),
        (Err(session::Error::Registrar(RegistrarError::Dismissed { reason, .. })), _) => {
            Err(WorkerDismissed::new_err(reason))
        }
        (waited, _) => waited.map_err(|error| raise(error.fault(), &error)),
    }
}

/// Returns every process set: its number and its ranks.
#[pyfunction]
fn process_sets() -> PyResult<BTreeMap<u32, Vec<u32>>> {
    let sets = current()?.process_sets();
    Ok(sets
        .into_iter()
        .map(|(set, ranks)| (set.0, ranks.into_iter().map(|rank| rank.0).collect()))
        .collect())
}

/// Returns the numbers of the process sets that this world has taken over from the world before, of
/// those that `init` was asked for when the job began; `None` if it has begun with those that
/// `init` was asked for.
#[pyfunction]
fn carried_process_sets() -> PyResult<Option<Vec<u32>>> {
    Ok(current()?.carried_sets().map(|sets| sets.into_iter().map(|set| set.0).collect()))
}

/// Makes a process set together with all ranks; its number.
#[pyfunction]
#[pyo3(signature = (ranks, /))]
fn add_process_set(py: Python<'_>, ranks: Vec<u32>) -> PyResult<u32> {
    let session = current()?;
    interruptible(py, |interrupted| session.add_process_set(&ranks, interrupted)).map(|set| set.0)
}

/// Ends a process set together with all ranks; false, at once, when there is no such set or it is
/// the global one.
#[pyfunction]
#[pyo3(signature = (id, /))]
fn remove_process_set(py: Python<'_>, id: u32) -> PyResult<bool> {
    let session = current()?;
    interruptible(py, |interrupted| {
        match session.remove_process_set(ProcessSetId(id), interrupted) {
            Err(session::Error::NoSuchSet(_)) => Ok(false),
            removed => removed.map(|()| true),
        }
    })
}

/// Leaves the world.
#[pyfunction]
fn shutdown(py: Python<'_>) {
    py.detach(session::shutdown);
}

/// Tells the others, as far as they can be told, that this process ends well.
#[pyfunction]
fn leave(py: Python<'_>) {
    py.detach(session::leave);
}

#[pyfunction]
fn is_initialized() -> bool {
    session::is_initialized()
}

#[pyfunction]
#[pyo3(name = "world")]
fn world_of_session() -> PyResult<World> {
    Ok(World(Arc::clone(current()?.world())))
}

#[expect(
    clippy::too_many_arguments,
    reason = "a tuple per call would cost more than the operation's own submission"
)]
#[pyfunction]
#[pyo3(signature = (name, dtype, shape, source, target, op, prescale, postscale, process_set, attended, device=None, /))]
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
    device: Given,
) -> PyResult<u64> {
    let kind = Kind::Allreduce { op: reduce_op(op)?, prescale, postscale };
    submit(
        request(
            name,
            kind,
            dtype,
            shape,
            source,
            Some(target),
            process_set,
            Spots::default().of(device)?,
        )?,
        attended,
    )
}

/// Starts several allreduces as one unit: `(name, dtype, shape, source, target)` each.
#[pyfunction]
#[pyo3(signature = (tensors, op, prescale, postscale, process_set, devices=None, /))]
fn grouped_allreduce(
    tensors: Vec<(String, u8, Vec<u64>, usize, usize)>,
    op: u8,
    prescale: f64,
    postscale: f64,
    process_set: u32,
    devices: Option<Vec<Given>>,
) -> PyResult<Vec<u64>> {
    let kind = Kind::Allreduce { op: reduce_op(op)?, prescale, postscale };
    submit_group(tensors, devices, |(name, dtype, shape, source, target), spot| {
        request(name, kind.clone(), dtype, shape, source, Some(target), process_set, spot)
    })
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
    device: Given,
) -> PyResult<u64> {
    let kind = Kind::Broadcast { root: Rank(root) };
    submit(
        request(
            name,
            kind,
            dtype,
            shape,
            source,
            Some(target),
            process_set,
            Spots::default().of(device)?,
        )?,
        attended,
    )
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
    device: Given,
) -> PyResult<u64> {
    submit(
        request(
            name,
            Kind::Allgather,
            dtype,
            shape,
            source,
            None,
            process_set,
            Spots::default().of(device)?,
        )?,
        attended,
    )
}

/// Starts several allgathers as one unit: `(name, dtype, shape, source)` each.
#[pyfunction]
#[pyo3(signature = (tensors, process_set, devices=None, /))]
fn grouped_allgather(
    tensors: Vec<(String, u8, Vec<u64>, usize)>,
    process_set: u32,
    devices: Option<Vec<Given>>,
) -> PyResult<Vec<u64>> {
    submit_group(tensors, devices, |(name, dtype, shape, source), spot| {
        request(name, Kind::Allgather, dtype, shape, source, None, process_set, spot)
    })
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
    device: Given,
) -> PyResult<u64> {
    let rows = |splits: Vec<i64>| -> PyResult<Vec<u64>> {
        let negative =
            |_| PyValueError::new_err(format!("splits must not be negative: {splits:?}"));
        splits.iter().map(|rows| u64::try_from(*rows).map_err(negative)).collect()
    };
    let kind = Kind::Alltoall { splits: splits.map(rows).transpose()? };
    submit(
        request(name, kind, dtype, shape, source, None, process_set, Spots::default().of(device)?)?,
        attended,
    )
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
    device: Given,
) -> PyResult<u64> {
    let kind = Kind::Reducescatter { op: reduce_op(op)?, prescale, postscale };
    submit(
        request(
            name,
            kind,
            dtype,
            shape,
            source,
            Some(target),
            process_set,
            Spots::default().of(device)?,
        )?,
        attended,
    )
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
    devices: Option<Vec<Given>>,
) -> PyResult<Vec<u64>> {
    let kind = Kind::Reducescatter { op: reduce_op(op)?, prescale, postscale };
    submit_group(tensors, devices, |(name, dtype, shape, source, target), spot| {
        request(name, kind.clone(), dtype, shape, source, Some(target), process_set, spot)
    })
}

#[pyfunction]
#[pyo3(signature = (name, process_set, /))]
fn barrier(name: String, process_set: u32) -> PyResult<u64> {
    submit(Request::barrier(name, ProcessSetId(process_set)), true)
}

/// Returns whether the handle's result can still be waited for.
#[pyfunction]
#[pyo3(signature = (handle, /))]
fn is_pending(handle: u64) -> bool {
    session::current().is_ok_and(|session| session.engine().poll(Handle(handle)).is_ok())
}

#[pyfunction]
#[pyo3(signature = (handle, /))]
fn poll(handle: u64) -> PyResult<bool> {
    current()?.engine().poll(Handle(handle)).map_err(|error| raise(error.fault(), &error))
}

/// This rank has no more data; the handle's result is the rank that joins last.
#[pyfunction]
#[pyo3(signature = (allow_gather, /))]
fn join(allow_gather: bool) -> PyResult<u64> {
    submit(Request::join("join.noname", allow_gather), true)
}

/// Waits for a result and takes it: memory the engine filled, the rank that joined last, or
/// nothing; what a GPU is still at work on comes as `Reached`.
#[pyfunction]
#[pyo3(signature = (handle, /))]
fn wait(py: Python<'_>, handle: u64) -> PyResult<Option<Py<PyAny>>> {
    let session = current()?;
    let completion = runtime::wait(py, None, |slice| {
        session.engine().wait(Handle(handle), slice).map_err(|error| raise(error.fault(), &error))
    })?;
    let Some(completion) = completion else { return Ok(None) };
    if let Some(last) = completion.last {
        return Ok(Some(last.0.into_pyobject(py)?.into_any().unbind()));
    }
    let reached = completion.reached.clone();
    let gathered = Gathered::of(completion).map(|gathered| Py::new(py, gathered)).transpose()?;
    match reached {
        None => Ok(gathered.map(Py::into_any)),
        Some(event) => Ok(Some(Py::new(py, Reached::new(event, gathered))?.into_any())),
    }
}

fn current() -> PyResult<Arc<Session>> {
    session::current().map_err(|error| raise(error.fault(), &error))
}

#[expect(clippy::too_many_arguments, reason = "as for allreduce")]
fn request(
    name: String,
    kind: Kind,
    number: u8,
    shape: Vec<u64>,
    source: usize,
    target: Option<usize>,
    process_set: u32,
    spot: Spot,
) -> PyResult<Request> {
    let dtype = dtype(number)?;
    let input = buffer(source, dtype, &shape, spot.place)?;
    let written = match (&kind, shape.first()) {
        (Kind::Reducescatter { .. }, Some(rows)) => {
            let set = ProcessSetId(process_set);
            let own = current()?
                .engine()
                .own_rows(*rows, set)
                .map_err(|error| raise(error.fault(), &error))?;
            &[&[own], &shape[1..]].concat()
        }
        _ => &shape,
    };
    let output = target.map(|target| buffer(target, dtype, written, spot.place)).transpose()?;
    Ok(Request {
        name,
        kind,
        dtype,
        shape,
        input,
        output,
        process_set: ProcessSetId(process_set),
        ready: spot.ready,
    })
}

fn submit(request: Request, attended: bool) -> PyResult<u64> {
    let session = current()?;
    let engine = session.engine();
    let handle = if attended { engine.submit_attended(request) } else { engine.submit(request) };
    handle.map(|handle| handle.0).map_err(|error| raise(error.fault(), &error))
}

fn submit_group<T>(
    tensors: Vec<T>,
    devices: Option<Vec<Given>>,
    request: impl Fn(T, Spot) -> PyResult<Request>,
) -> PyResult<Vec<u64>> {
    let (mut spots, mut devices) = (Spots::default(), devices.unwrap_or_default().into_iter());
    let spotted =
        |tensor| spots.of(devices.next().flatten()).and_then(|spot| request(tensor, spot));
    let requests = tensors.into_iter().map(spotted).collect::<PyResult<Vec<_>>>()?;
    let handles =
        current()?.engine().submit_group(requests).map_err(|error| raise(error.fault(), &error))?;
    Ok(handles.into_iter().map(|handle| handle.0).collect())
}

/// Returns memory for tensors that operations work on again and again: the other ranks of this host
/// work in it, too.
#[pyfunction]
#[pyo3(signature = (bytes, /))]
fn mapped(bytes: usize) -> PyResult<Mapped> {
    Mapped::new(bytes, session::current().ok().as_deref())
}
