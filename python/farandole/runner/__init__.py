# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Launching from Python: a function on several processes, of this host or of several."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from farandole import _variables as variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from farandole.runner.elastic.discovery import HostDiscovery
    from farandole.stores.store import Store


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    host_discovery_script: str | Path | HostDiscovery | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | Path | None = None,
    disable_cache: bool | None = None,
    output_filename: str | Path | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str | None] | None = None,
    ssh_command: str | None = None,
    prefix_output_with_timestamp: bool = False,
    spares: int | None = None,
    elastic_timeout: float | None = None,
    timeline: str | Path | bool | None = None,
    ui: bool | str | Path | Store = False,
) -> list[Any]:
    """Runs a function on `num_proc` processes and returns the result of each rank.

    Without `hosts` and `hostfile` the processes run on the hosts of the batch system's job that
    this process is in (Slurm, LSF, PBS, Grid Engine, Kubernetes MPIJob), else on this host. Other
    hosts are reached by ssh and need nothing but the package.

    With `min_num_proc` or `host_discovery_script` the job is elastic: processes come and go while
    it runs, and the function returns on every rank of the last world. It trains by the
    `elastic.run` of its framework.

    Unlike Horovod's, a worker's exception comes back with its traceback, and is the raised error's
    cause where it can be unpickled here.

    Args:
        func: The function. It is pickled by cloudpickle once.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes.
        min_num_proc: Makes the job elastic: the smallest number of processes; default in an elastic
            job: `num_proc`.
        max_num_proc: Elastic: the largest number of processes; default: all slots, and with spares
            `num_proc`.
        slots: Elastic: slots of a host that is found without a number.
        reset_limit: Elastic: number of changes of the world after which the job fails; default: no
            limit.
        cooldown_range: Elastic: seconds for which a host gets no new process after a failure there:
            after the first one, and at most.
        hosts: Hosts and slots in the order of ranks, such as `"a:2,b:4"`.
        hostfile: A file with one host on each line, such as `a slots=2`.
        host_discovery_script: Makes the job elastic: a program that prints the available hosts,
            `host` or `host:slots` a line, or an object whose `find_available_hosts_and_slots()`
            returns slots by host. It is called every second.
        start_timeout: Seconds within which all processes must start; default:
            `FARANDOLE_START_TIMEOUT`, else 600.
        ssh_port: Port for ssh; default: from ssh's configuration.
        ssh_identity_file: Key for ssh; default: from ssh's configuration.
        disable_cache: Not used: nothing is cached from run to run.
        output_filename: Folder for the output of each rank, in `rank.<N>/stdout` and
            `rank.<N>/stderr`, besides this process's own streams.
        verbose: Whether to say where each rank runs.
        use_gloo: Not used: there is one engine.
        use_mpi: Not used.
        mpi_args: Not used.
        network_interface: The older form of `network_interfaces`.
        network_interfaces: Interfaces that links between hosts use side by side, such as
            `"eth0,eth1"`. They should be equally fast. The registrar uses the first one.
        executable: Python interpreter of the workers; default: this one.
        np: The older form of `num_proc`.
        min_np: The older form of `min_num_proc`.
        max_np: The older form of `max_num_proc`.
        env: Variables to set in every worker; `None` as a value removes one.
        ssh_command: Program that reaches other hosts instead of ssh, called with a host and a
            command.
        prefix_output_with_timestamp: Whether lines of the workers start with the time.
        spares: Elastic: additional processes that wait to replace a lost one.
        elastic_timeout: Elastic: seconds with too few processes after which the job fails; default:
            `FARANDOLE_ELASTIC_TIMEOUT`, else 600.
        timeline: File for one timeline of all ranks, with aligned clocks, that opens in Perfetto;
            `True` keeps it in the run of `ui`. Of an elastic job it shows the last world.
        ui: `True` opens the run viewer, prints its link and keeps the run in `farandole-runs` of
            the current directory; a store, or its path or URL, keeps it there. Shows ranks, their
            load and output, and what `farandole.spark.task.report` says.

    Returns:
        The results by rank; for an elastic job, the results of its last world.

    Raises:
        ValueError: An argument is wrong, two contradict each other, or there are fewer slots than
            processes.
        FarandoleJobError: A worker failed, or a host cannot be used.
        FarandoleEnvironmentError: The hosts of an elastic job cannot be found at its beginning.
        TimeoutError: Not all processes started in time.
    """
    # The gang that runs workers without Spark lives beside the one that runs them on Spark; neither
    # loads pyspark.
    from farandole._native import hosts as native  # noqa: PLC0415 - `import farandole` stays light
    from farandole.runner import timelines  # noqa: PLC0415
    from farandole.runner.elastic.elastic_backend import ElasticHostsBackend, ElasticRunOptions  # noqa: PLC0415
    from farandole.runner.show.function_runs import record_run_for_viewer  # noqa: PLC0415
    from farandole.runner.ssh_backend import HostsBackend, SshOptions  # noqa: PLC0415

    num_proc = _resolve_deprecated("np", np, "num_proc", num_proc)
    elastic = ElasticRunOptions(
        discovery=host_discovery_script,
        min_num_proc=_resolve_deprecated("min_np", min_np, "min_num_proc", min_num_proc),
        max_num_proc=_resolve_deprecated("max_np", max_np, "max_num_proc", max_num_proc),
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        spares=spares,
        timeout=elastic_timeout,
    )
    elastic.refuse_contradictions(hosts=hosts, hostfile=hostfile)
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    _warn_ignored(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args)
    del disable_cache
    changes = dict(env or {})
    names = _interface_names(network_interface, network_interfaces)
    if names:
        network, warning = native.networks_of_interfaces(names)
        if warning is not None:
            warnings.warn(f"network_interfaces: {warning}", stacklevel=2)
        changes.setdefault(variables.BIND_ADDRESS, network)
        changes.setdefault("NCCL_SOCKET_IFNAME", ",".join(names))
    if start_timeout is not None:
        # Workers wait for each other, too; values out of bounds are refused below.
        changes.setdefault(variables.START_TIMEOUT, str(max(float(start_timeout), 0.1)))
    settings: dict[str, Any] = {
        "start_timeout": start_timeout,
        "verbose": 2 if verbose else 1,
        "executable": executable,
        "output_folder": output_filename,
        "prefix_output_with_timestamp": prefix_output_with_timestamp,
        "bind": changes.get(variables.BIND_ADDRESS),
    }
    ssh_options = SshOptions(ssh_command, ssh_port, ssh_identity_file)
    with timelines.collect_timelines(timeline), record_run_for_viewer(ui, func, num_proc) as folder:
        settings["output_folder"] = output_filename or folder
        if elastic.is_elastic:
            backend = ElasticHostsBackend(
                elastic, num_proc, ssh_options, hosts=hosts, hostfile=hostfile, **settings
            )
        else:
            backend = HostsBackend(
                native.host_slots(hosts, hostfile), num_proc, ssh_options, **settings
            )
        return backend.run(func, args, kwargs or {}, changes)


def _resolve_deprecated(old: str, given: Any, new: str, value: Any) -> Any:
    if given is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return given


def _warn_ignored(**given: object) -> None:
    asked = [f"{name}={value!r}" for name, value in given.items() if value]
    if asked:
        warnings.warn(
            f"{', '.join(asked)} means nothing here: Farandole has one engine, without MPI and "
            "Gloo",
            stacklevel=3,
        )


def _interface_names(single: str | None, names: Iterable[str] | str | None) -> list[str]:
    if single is not None:
        warnings.warn(
            "network_interface is deprecated, use network_interfaces",
            DeprecationWarning,
            stacklevel=3,
        )
        names = names or single
    if isinstance(names, str):
        names = names.split(",")
    return [name.strip() for name in names or () if name.strip()]


__all__ = ["run"]
