# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backends: where an estimator's training function runs. This is Horovod's module;
`SparkBackend` is defined here.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from farandole.common.argument_checks import make_minimum_check
from farandole.runner import forwarded_variables
from farandole.runner.backend import Backend, LocalBackend, given_size_bounds
from farandole.runner.gang import JobOutput
from farandole.runner.job_limits import spark_start_timeout_seconds
from farandole.spark import runner
from farandole.spark.job.session_adapter import SparkSessionAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.runner.backend import OnProgress
    from farandole.stores.store import Store

__all__ = ["Backend", "LocalBackend", "SparkBackend", "default_num_proc"]


_CALL_ARGUMENTS = {"fn", "args", "kwargs", "on_progress", "num_proc", "env", "timeline", "ui"}
"""Arguments of `farandole.spark.run` and `run_elastic` that are not for backends, or that a backend
sets in each run.
"""
_RUN_KEYWORDS = set(inspect.signature(runner.run).parameters) - _CALL_ARGUMENTS
_RUN_ELASTIC_KEYWORDS = (
    set(inspect.signature(runner.run_elastic).parameters)
    - _CALL_ARGUMENTS
    - {"min_num_proc", "max_num_proc", "min_np", "max_np", "nics", "ends_on_error"}
)
_NUMERIC_KEYWORDS = (
    "start_timeout",
    "verbose",
    "prefix_output_with_timestamp",
    "warm",
    "elastic_timeout",
    "reset_limit",
)
"""Arguments of `farandole.spark.run` and `run_elastic` that are numbers."""
_DRIVER_ONLY_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "SPARK_HOME",
)


def default_num_proc() -> int:
    """Returns the default number of processes: the default parallelism of the active Spark context.

    Raises:
        ValueError: There is no active context.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - backends exist where Spark does not

    context = SparkContext._active_spark_context  # noqa: SLF001 - the way to it that makes none
    if context is None:
        raise ValueError("there is no active Spark context: pass num_proc")
    return context.defaultParallelism


class CurrentStandardStream:
    """The present `sys.stdout` or `sys.stderr`, which a progress bar replaces while it shows.

    Args:
        name: of the stream.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self._name), name)


class SparkBackend(Backend):
    """Workers in the tasks of the active Spark session.

    Unlike `farandole.spark.run`, `SparkBackend` forwards variables of the driver to the workers:
    the settings of Farandole, of frameworks and of numerical libraries that
    `farandole.runner.forwarded_variables` lists. `CUDA_VISIBLE_DEVICES` and variables that look
    like secrets are never forwarded. `verbose=2` names the variables that were left out.

    With `min_num_proc` or `max_num_proc` the job is elastic, like a job of
    `farandole.spark.run_elastic`: when a worker is lost, the other workers continue, and a new
    worker replaces it when Spark has a slot.

    Args:
        num_proc: Number of processes; for an elastic job, the number at its start. Default: Spark's
            default parallelism.
        env: Environment of the workers instead of the driver's; all of it is sent.
        pass_env: Names of further variables of the driver that are forwarded, or patterns such as
            `"WANDB_*"`.
        min_num_proc: Smallest number of processes; default: `num_proc`.
        max_num_proc: Largest number of processes; default: `num_proc`.
        **kwargs: Further arguments of `farandole.spark.run`, such as `stdout`, `verbose` or
            `start_timeout`; for an elastic job, arguments of `farandole.spark.run_elastic`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        *,
        pass_env: Sequence[str] = (),
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._num_proc = None if num_proc is None else make_minimum_check(1)("num_proc", num_proc)
        self._bounds = given_size_bounds(num_proc, min_num_proc, max_num_proc)
        self._env = dict(env) if env is not None else None
        if isinstance(pass_env, str) or not all(isinstance(one, str) for one in pass_env):
            raise TypeError(f"pass_env is a list of names and patterns of variables: {pass_env!r}")
        self._pass_env = tuple(pass_env)
        name, known = (
            ("run_elastic", _RUN_ELASTIC_KEYWORDS) if self._bounds else ("run", _RUN_KEYWORDS)
        )
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise TypeError(
                f"SparkBackend takes what farandole.spark.{name} takes, but not "
                f"{', '.join(unknown)}: {', '.join(sorted(known))}"
            )
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Like `Backend.run`; also raises the errors of `farandole.spark.run`."""
        base: dict[str, str | None] = dict(self._env or {})
        if self._env is None:
            taken, left = forwarded_variables.split_forwarded_variables(
                os.environ, self._pass_env, _DRIVER_ONLY_VARIABLES
            )
            base |= taken
            self._report_unforwarded_variables(left)
        merged = {
            name: value
            for name, value in (base | dict(env or {})).items()
            if name not in _DRIVER_ONLY_VARIABLES
        }
        more: dict[str, Any] = {"env": merged, "on_progress": on_progress, **self._kwargs}
        if self._bounds:
            more |= {"ends_on_error": True, **self._bounds}
            return runner.run_elastic(fn, args, kwargs, self._num_proc, **more)
        return runner.run(fn, args, kwargs, self.num_processes(), **more)

    def _report_unforwarded_variables(self, left: Sequence[str]) -> None:
        if left:
            output = JobOutput(
                self._kwargs.get("stdout"),
                self._kwargs.get("stderr"),
                verbose=self._kwargs.get("verbose", 1),
            )
            names = ", ".join(left)
            output.print_message(
                "variables of the driver that are not forwarded to the workers (pass_env adds "
                f"names): {names}",
                2,
            )

    def plain(self) -> dict[str, Any]:
        """Returns the arguments for a backend of the same kind and numbers: no environment, no
        stream, no store.
        """
        given = {name: self._kwargs[name] for name in _NUMERIC_KEYWORDS if name in self._kwargs}
        return {"num_proc": self._num_proc, **self._bounds, **given}

    def num_processes(self) -> int:
        """Returns the number of workers; for an elastic job, the number at its start. If no number
        is given, Spark decides.
        """
        if self._num_proc is None:
            most = self._bounds.get("max_num_proc")
            return (
                SparkSessionAdapter.from_active_session().default_parallelism()
                if most is None
                else most
            )
        return self._num_proc

    def max_processes(self) -> int:
        """Returns the largest number of workers that a job may have at a time."""
        return max(self.num_processes(), self._bounds.get("max_num_proc", 0))

    def min_processes(self) -> int:
        """Returns the smallest number of workers with which an elastic job continues."""
        return self._bounds.get("min_num_proc", self.num_processes())

    def check(self) -> None:
        """Like `Backend.check`."""
        SparkSessionAdapter.from_active_session().check_job_size(
            self._bounds.get("min_num_proc") or self.num_processes()
        )
        spark_start_timeout_seconds(self._kwargs.get("start_timeout"))
        JobOutput(self._kwargs.get("stdout"), self._kwargs.get("stderr"))

    def through(self, store: Store) -> Backend:
        """Like `Backend.through`. Without a store, results travel in Spark's rows, whose size
        `spark.driver.maxResultSize` limits.
        """
        if type(self) is not SparkBackend or self._kwargs.get("store") is not None:
            return self  # another class may have attributes of its own, which a copy would lack
        more: dict[str, Any] = {**self._bounds, **self._kwargs, "store": store}
        return SparkBackend(self._num_proc, self._env, pass_env=self._pass_env, **more)
