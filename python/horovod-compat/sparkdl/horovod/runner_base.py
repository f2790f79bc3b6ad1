# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`HorovodRunner`: a training function on Spark's tasks, or on processes of the driver."""

from __future__ import annotations

import io
import operator
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from sparkdl.horovod import MESSAGE_KIND

if TYPE_CHECKING:
    from collections.abc import Callable

LOG_VERBOSITIES = ("all", "log_callback_only")
_RANK_PREFIX = re.compile(r"^(.*?)\[(\d+)\](<(?:stdout|stderr)>:)")

__all__ = ["HorovodRunner"]


class HorovodRunner:
    """Runs a function with Horovod's calls on several ranks.

    Args:
        np: Number of ranks. If it is positive, they are Spark tasks that start together, and the
            run fails if Spark has fewer slots. If it is negative, `-np` ranks are processes of the
            driver, and Spark is not needed. 0 takes all slots that Spark has now; it is deprecated,
            because executors may still be on their way.
        driver_log_verbosity: With `"all"`, all lines of all ranks appear in the driver's output.
            With `"log_callback_only"`, lines of ranks on Spark stay in the logs of their tasks, and
            only messages of `sparkdl.horovod.log_to_driver` and of
            `sparkdl.horovod.tensorflow.keras.LogCallback` appear. Lines of ranks on the driver
            always appear. A line begins with its rank and stream: `[1,0]<stdout>:`.

    Attributes:
        num_processor: The argument `np`.

    Raises:
        TypeError: `np` is no integer.
        ValueError: `driver_log_verbosity` has another value.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if isinstance(np, bool):
            raise TypeError(f"np must be an integer: {np}")
        self.num_processor = operator.index(np)
        if driver_log_verbosity not in LOG_VERBOSITIES:
            raise ValueError(
                f"driver_log_verbosity must be one of {', '.join(LOG_VERBOSITIES)}: "
                f"{driver_log_verbosity!r}"
            )
        self._shows_all_lines = driver_log_verbosity == "all"

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Calls `main(**kwargs)` on every rank.

        Args:
            main: The function. cloudpickle sends it and its arguments to the ranks, so it imports
                what it needs itself.
            **kwargs: Its arguments.

        Returns:
            The result of rank 0.

        Raises:
            FarandoleJobError: A rank has failed. The error has its traceback.
            ValueError: Spark has fewer task slots than `np`.
        """
        import horovod  # noqa: F401, PLC0415 - sets Horovod's convention for gradients

        stdout, stderr = _MpirunLines(sys.stdout), _MpirunLines(sys.stderr)
        if self.num_processor < 0:
            from farandole.runner.backend import LocalBackend  # noqa: PLC0415 - loads little

            backend = LocalBackend(-self.num_processor, stdout=stdout, stderr=stderr)
            return backend.run(main, kwargs=kwargs, on_progress=_print_message)[0]
        from farandole.spark import run  # noqa: PLC0415 - as above

        streams = {"stdout": stdout, "stderr": stderr} if self._shows_all_lines else {}
        return run(
            main,
            kwargs=kwargs,
            num_proc=self.num_processor or _count_slots(),
            on_progress=_print_message,
            **streams,
        )[0]


class _MpirunLines(io.TextIOBase):
    """Writes lines of ranks with the prefixes of `mpirun --tag-output`, which notebooks showed.

    Args:
        target: Receiver of the lines.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def write(self, text: str) -> int:
        self._target.write(_RANK_PREFIX.sub(r"\1[1,\2]\3", text))
        return len(text)

    def flush(self) -> None:
        self._target.flush()


def _count_slots() -> int:
    from farandole.spark.job.session_adapter import SparkSessionAdapter  # noqa: PLC0415 - as above

    warnings.warn(
        "np=0 is deprecated: it takes the task slots that Spark has at this moment. Set np to the "
        "number of ranks that you need",
        DeprecationWarning,
        stacklevel=3,
    )
    cluster = SparkSessionAdapter.from_active_session()
    return cluster.slot_count() or cluster.default_parallelism()


def _print_message(rank: int, record: dict[str, Any]) -> None:
    """Prints a message of `log_to_driver`; other reports of a rank are no messages."""
    del rank
    if record.get("kind") == MESSAGE_KIND:
        print(record.get("text"), flush=True)  # noqa: T201 - the driver's output
