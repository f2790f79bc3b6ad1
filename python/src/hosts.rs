// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.hosts`: jobs on several hosts, for drivers in Python.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use farandole::launcher::allocation::{LocalEnvironment, detect_allocation};
use farandole::launcher::hosts::{parse_hostfile, parse_hosts};
use farandole::launcher::{
    AgentNotice, Error, HostSlots, RemoteAgent, RemoteShell, RemoteTasks, forwarded_environment,
    split_local_tasks,
};
use farandole::registrar::Ticket;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::to_exception;
use crate::launcher::PyWorkerOutcome;
use crate::registrar::{read_configuration, registrar_exception as registrar_error};

/// This host's tasks, and every other host with its first task and the one after its last.
type TasksByHost = (Vec<u32>, Vec<(String, u32, u32)>);
/// A notice: its kind, its task, and its value.
type AgentNoticeTuple = (&'static str, Option<u32>, Py<PyAny>);

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRemoteHost>()?;
    module.add_function(wrap_pyfunction!(networks_of_interfaces, module)?)?;
    module.add_function(wrap_pyfunction!(listen_address_and_ports, module)?)?;
    module.add_function(wrap_pyfunction!(host_slots, module)?)?;
    module.add_function(wrap_pyfunction!(place_tasks, module)?)
}

pub(crate) fn launcher_exception(failure: &Error) -> PyErr {
    to_exception(failure.fault(), failure)
}

/// Returns the networks of these interfaces, and a warning if this host lacks some.
#[pyfunction]
fn networks_of_interfaces(interfaces: Vec<String>) -> PyResult<(String, Option<String>)> {
    let networks = farandole::registrar::local_host_facts::interface_networks(&interfaces)
        .map_err(|failure| registrar_error(&failure))?;
    let warning = networks.missing_network_warning();
    Ok((networks.bind_list, warning))
}

/// Returns the address and the ports on which this process may listen, by its configuration: an
/// address of this host, if one is named, and the first and the last port.
#[pyfunction]
fn listen_address_and_ports() -> PyResult<(Option<String>, u16, u16)> {
    let config = read_configuration(&[])?;
    let address =
        farandole::registrar::local_host_facts::resolve_bind_address(&config.bind_address);
    let address = address.map_err(|failure| registrar_error(&failure))?;
    Ok((
        address.map(|address| address.to_string()),
        config.port_range.first,
        config.port_range.last,
    ))
}

/// Hosts and their slots: as given, as a file has them, or as the batch system says; none for this
/// host alone.
#[pyfunction]
#[pyo3(signature = (hosts=None, hostfile=None))]
fn host_slots(hosts: Option<&str>, hostfile: Option<PathBuf>) -> PyResult<Vec<(String, u32)>> {
    let found = match (hosts, hostfile) {
        (Some(text), _) => parse_hosts(text),
        (None, Some(path)) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(&path).map_err(|error| {
                io::Error::new(error.kind(), format!("cannot read the host file {name}: {error}"))
            })?;
            parse_hostfile(&name, &text)
        }
        (None, None) => detect_allocation(&LocalEnvironment).and_then(|found| match found {
            Some(found) => found.check_launch_host().map(|()| found.hosts),
            None => Ok(Vec::new()),
        }),
    };
    let found = found.map_err(|failure| launcher_exception(&failure))?;
    Ok(found.into_iter().map(|host| (host.host, host.slots)).collect())
}

/// Returns the tasks of this host, and `(host, first task, task after the last)` of every other
/// one.
#[pyfunction]
fn place_tasks(py: Python<'_>, hosts: Vec<(String, u32)>, num_proc: u32) -> PyResult<TasksByHost> {
    let hosts: Vec<HostSlots> =
        hosts.into_iter().map(|(host, slots)| HostSlots::new(host, slots)).collect();
    let (local_tasks, remote_placements) = py
        .detach(|| split_local_tasks(&hosts, num_proc))
        .map_err(|failure| launcher_exception(&failure))?;
    Ok((
        local_tasks,
        remote_placements
            .into_iter()
            .map(|one| (one.host, one.tasks.start, one.tasks.end))
            .collect(),
    ))
}

/// The agent of another host.
#[pyclass(frozen, name = "Remote", module = "farandole._native.hosts")]
struct PyRemoteHost {
    remote: RemoteAgent,
    notices: Mutex<mpsc::Receiver<AgentNotice>>,
}

#[pymethods]
impl PyRemoteHost {
    #[new]
    #[pyo3(signature = (ticket, host, first, end, command, *, env, payload, python, same_python, ssh_command=None, ssh_port=None, ssh_identity_file=None, start_timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "the Python signature")]
    fn new(
        ticket: &str,
        host: String,
        first: u32,
        end: u32,
        command: Vec<String>,
        env: BTreeMap<String, Option<String>>,
        payload: Vec<u8>,
        python: String,
        same_python: String,
        ssh_command: Option<&str>,
        ssh_port: Option<u16>,
        ssh_identity_file: Option<PathBuf>,
        start_timeout: Option<f64>,
    ) -> PyResult<Self> {
        let config = read_configuration(&[(
            "start_timeout",
            start_timeout.map(|seconds| seconds.to_string()),
        )])?;
        let ticket: Ticket = ticket.parse().map_err(|failure| registrar_error(&failure))?;
        let shell = remote_shell(ssh_command, ssh_port, ssh_identity_file, config.start_timeout)
            .map_err(|failure| launcher_exception(&failure))?;
        let mut environment = forwarded_environment();
        environment.extend(env);
        let python_path = environment.get("PYTHONPATH").cloned().flatten();
        let folder = std::env::current_dir()
            .ok()
            .and_then(|folder| folder.into_os_string().into_string().ok());
        let tasks = RemoteTasks {
            host,
            shell,
            python,
            python_path,
            same_python: Some(same_python),
            ticket,
            tasks: (first..end).collect(),
            elastic: false,
            command,
            environment,
            folder,
            payload: Some(Arc::new(payload)),
            collect_result: true,
            start_timeout: config.start_timeout,
            peer_timeout: config.peer_timeout,
            outage: Duration::ZERO,
            detached: false,
        };
        let (sender, notices) = mpsc::channel();
        // Notices without a receiver belong to a job that is over.
        let remote = RemoteAgent::connect_agent(tasks, move |notice| drop(sender.send(notice)))
            .map_err(|failure| launcher_exception(&failure))?;
        Ok(Self { remote, notices: Mutex::new(notices) })
    }

    /// Returns the events since the last call, oldest first: `("ready", None, None)`, `("ended",
    /// task, outcome)`, `("refused", task, why)`, `("gone", None, why)` or `("done", None, None)`.
    /// `("refused", task, why)`, `("gone", None, why)` or `("done", None, None)`.
    fn take_notices(&self, py: Python<'_>) -> PyResult<Vec<AgentNoticeTuple>> {
        let notices: Vec<AgentNotice> = self.notices.lock().try_iter().collect();
        notices
            .into_iter()
            .map(|notice| {
                Ok(match notice {
                    AgentNotice::Ready => ("ready", None, py.None()),
                    AgentNotice::AllReported => ("done", None, py.None()),
                    AgentNotice::HostLost { error, .. } => {
                        ("gone", None, error.message_with_causes().into_pyobject(py)?.into())
                    }
                    AgentNotice::WorkerEnded { task, outcome: Ok(outcome) } => (
                        "ended",
                        Some(task.0),
                        Py::new(py, PyWorkerOutcome::new(py, outcome))?.into_any(),
                    ),
                    AgentNotice::WorkerEnded { task, outcome: Err(failure) } => (
                        "refused",
                        Some(task.0),
                        failure.message_with_causes().into_pyobject(py)?.into(),
                    ),
                })
            })
            .collect()
    }

    /// Ends the connection, and with it the workers there.
    fn close_connection(&self) {
        self.remote.close_connection();
    }
}

/// Returns the program that was asked for, else the batch system's own, else ssh.
pub(crate) fn remote_shell(
    command: Option<&str>,
    port: Option<u16>,
    identity: Option<PathBuf>,
    connect: std::time::Duration,
) -> farandole::launcher::Result<RemoteShell> {
    // An option of ssh means that the user wants ssh, also inside of a batch job.
    let own = if command.is_none() && port.is_none() && identity.is_none() {
        detect_allocation(&LocalEnvironment)?.and_then(|found| found.shell)
    } else {
        None
    };
    match own {
        Some(shell) => Ok(shell),
        None => RemoteShell::parse_ssh_command_option(
            command.unwrap_or("ssh"),
            port,
            identity.as_deref(),
            connect,
        ),
    }
}
