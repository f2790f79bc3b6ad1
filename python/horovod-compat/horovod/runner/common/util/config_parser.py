# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Arguments of `horovodrun` from a configuration file, and their environment variables.

The command of this package reads such files by itself; these functions serve scripts that call
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping
    from types import SimpleNamespace

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]

_SECTIONS = {
    "params": (
        "",
        "fusion_threshold_mb cycle_time_ms cache_capacity "  # noqa: ISC004 - one text
        "hierarchical_allreduce hierarchical_allgather torus_allreduce",
    ),
    "autotune": (
        "autotune_",
        "log_file warmup_samples steps_per_sample bayes_opt_max_samples gaussian_process_noise",
    ),
    "timeline": ("timeline_", "filename mark_cycles"),
    "stall_check": ("stall_check_", "warning_time_seconds shutdown_time_seconds"),
    "library_options": (
        "",
        "mpi_threads_disable num_nccl_streams thread_affinity gloo_timeout_seconds",
    ),
    "logging": ("log_", "level with_timestamp"),
}
"""Sections of a file: what the names of arguments begin with, and the keys."""

_VARIABLES = {
    "cycle_time_ms": HOROVOD_CYCLE_TIME,
    "cache_capacity": HOROVOD_CACHE_CAPACITY,
    "stall_check_warning_time_seconds": HOROVOD_STALL_CHECK_TIME_SECONDS,
    "stall_check_shutdown_time_seconds": HOROVOD_STALL_SHUTDOWN_TIME_SECONDS,
    "num_nccl_streams": HOROVOD_NUM_NCCL_STREAMS,
    "thread_affinity": HOROVOD_THREAD_AFFINITY,
    "gloo_timeout_seconds": HOROVOD_GLOO_TIMEOUT_SECONDS,
    "log_level": HOROVOD_LOG_LEVEL,
}
_FLAGS = {
    "hierarchical_allreduce": HOROVOD_HIERARCHICAL_ALLREDUCE,
    "hierarchical_allgather": HOROVOD_HIERARCHICAL_ALLGATHER,
    "torus_allreduce": HOROVOD_TORUS_ALLREDUCE,
    "no_stall_check": HOROVOD_STALL_CHECK_DISABLE,
    "mpi_threads_disable": HOROVOD_MPI_THREADS_DISABLE,
}
_OF_AUTOTUNE = {
    "autotune_log_file": HOROVOD_AUTOTUNE_LOG,
    "autotune_warmup_samples": HOROVOD_AUTOTUNE_WARMUP_SAMPLES,
    "autotune_steps_per_sample": HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE,
    "autotune_bayes_opt_max_samples": HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES,
    "autotune_gaussian_process_noise": HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE,
}
_NOT_NEGATIVE = (
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "num_nccl_streams",
    "thread_affinity",
    "gloo_timeout_seconds",
)


def set_args_from_config(
    args: SimpleNamespace, config: Mapping[str, Any], override_args: Collection[str]
) -> None:
    """Sets arguments from a configuration file.

    Args:
        args: The arguments, which are changed.
        config: The file's content.
        override_args: Names of arguments that were given and stay.

    Raises:
        ValueError: A controller that there is not.
    """
    controller = config.get("controller")
    if controller and not args.use_gloo and not args.use_mpi:
        if controller.lower() not in ("gloo", "mpi"):
            raise ValueError(f"No such controller supported: {controller}")
        setattr(args, f"use_{controller.lower()}", True)
    for section, (prefix, keys) in _SECTIONS.items():
        told = config.get(section) or {}
        for key in keys.split():
            if told.get(key) is not None and f"{prefix}{key}" not in override_args:
                setattr(args, f"{prefix}{key}", told[key])
    if config.get("autotune") and "autotune" not in override_args:
        args.autotune = config["autotune"].get("enabled", False)
    if config.get("stall_check") and "no_stall_check" not in override_args:
        args.no_stall_check = not config["stall_check"].get("enabled", True)


def validate_config_args(args: SimpleNamespace) -> None:
    """Refuses numbers that mean nothing.

    Raises:
        ValueError: Naming the argument.
    """
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} must be >= 0")
    noise = args.autotune_gaussian_process_noise
    if noise is not None and not 0 <= noise <= 1:
        raise ValueError(f"autotune_gaussian_process_noise={noise} must be in [0, 1]")


def set_env_from_args(
    env: MutableMapping[str, str], args: SimpleNamespace
) -> MutableMapping[str, str]:
    """Sets the variables that arguments stand for.

    Args:
        env: The variables, which are changed.
        args: The arguments.

    Returns:
        The same variables.
    """
    found: dict[str, Any] = {variable: getattr(args, name) for name, variable in _VARIABLES.items()}
    for name, variable in _FLAGS.items():
        found[variable] = None if getattr(args, name) is None else int(bool(getattr(args, name)))
    if args.fusion_threshold_mb is not None:
        found[HOROVOD_FUSION_THRESHOLD] = int(args.fusion_threshold_mb * (1 << 20))
    if args.autotune:
        found[HOROVOD_AUTOTUNE] = 1
        found |= {variable: getattr(args, name) for name, variable in _OF_AUTOTUNE.items()}
    if args.timeline_filename:
        found[HOROVOD_TIMELINE] = args.timeline_filename
        marks = args.timeline_mark_cycles
        found[HOROVOD_TIMELINE_MARK_CYCLES] = None if marks is None else int(bool(marks))
    if args.tcp_flag:
        found[NCCL_IB_DISABLE] = 1
    if args.log_with_timestamp is not None:
        found[HOROVOD_LOG_HIDE_TIME] = int(not args.log_with_timestamp)
    env.update({variable: str(value) for variable, value in found.items() if value is not None})
    return env
