# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Launching: a function on several processes of this host, from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    start_timeout: float | None = None,
    verbose: bool | None = None,
    executable: str | None = None,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Runs a function on `num_proc` processes of this host and returns what it returned on each rank.

    Unlike Horovod's, a worker's exception comes back with its traceback, and is the raised error's cause where it can
    be unpickled here.

    Args:
        func: The function. It is pickled by cloudpickle once.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes.
        start_timeout: Seconds all processes may take to start; default: `FARANDOLE_START_TIMEOUT`, else 600.
        verbose: Whether to say where each rank runs.
        executable: Python interpreter of the workers; default: this one.
        env: Variables to set in every worker; `None` as a value removes one.

    Returns:
        The results by rank.

    Raises:
        FarandoleJobError: A worker failed.
        TimeoutError: Not all processes started in time.
    """
    # The gang that runs workers without Spark lives beside the one that runs them on Spark; neither loads pyspark.
    from farandole.spark.common.backend import LocalBackend  # noqa: PLC0415 - `import farandole` stays light

    backend = LocalBackend(num_proc, start_timeout=start_timeout, verbose=2 if verbose else 1, executable=executable)
    return backend.run(func, args, kwargs or {}, env)


__all__ = ["run"]
