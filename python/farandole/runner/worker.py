# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The worker's entry: `python -m farandole.runner.worker` runs one pickled function and sends its
value back.

The agent passes two pipes by number: `FARANDOLE_PAYLOAD_FD` contains the cloudpickled `(fn, args,
kwargs)`, and `FARANDOLE_RESULT_FD` takes the cloudpickled `("ok", value)` or `("error", type name,
message, traceback, pickled exception or None)`. Both are the agent's own, so the pickles that are
loaded here come from the process that started this one. The process exits with 0 after "ok" and 1
after "error".
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
import traceback
from typing import Any, Final, NoReturn

from farandole import _variables as variables
from farandole.common import pickling
from farandole.runner.job_observer import REPORTS_VARIABLE

PAYLOAD_FD: Final = variables.PAYLOAD_FD
RESULT_FD: Final = variables.RESULT_FD
EXECUTOR_VARIABLE: Final = variables.SPARK_EXECUTOR
"""The worker's Spark executor or Ray node, which the driver of an elastic job asks for."""


def main() -> int:
    """Runs the function of this process's payload.

    Returns:
        The exit status.
    """
    payload = _take_descriptor_variable(PAYLOAD_FD)
    result = _take_descriptor_variable(RESULT_FD)
    if payload is None or result is None:
        sys.stderr.write(
            f"farandole.runner.worker is started by an agent, which sets {PAYLOAD_FD} and "
            f"{RESULT_FD}\n"
        )
        return 2
    with os.fdopen(payload, "rb") as pipe:
        packed = pipe.read()
    if EXECUTOR_VARIABLE in os.environ:
        from farandole._native import launcher  # noqa: PLC0415 - other workers need not load it first

        launcher.report_record(EXECUTOR_VARIABLE, os.environ[EXECUTOR_VARIABLE].encode())
    if REPORTS_VARIABLE in os.environ:
        from farandole.runner import load_reports  # noqa: PLC0415 - as above

        load_reports.start_rank_reports()
    status, record = _call_function(packed)
    del packed
    try:
        answer = pickling.pickle_by_value(record)
    except Exception as error:  # noqa: BLE001 - the value's own fault
        failure = TypeError(f"the function returned a value that cannot be pickled: {error}")
        sys.stderr.write(f"{failure}\n")
        status, answer = 1, pickling.pickle_by_value(_failure_record(failure))
    _flush_streams()
    with os.fdopen(result, "wb") as pipe:
        pipe.write(answer)
    return status


def _call_function(packed: bytes) -> tuple[int, tuple[Any, ...]]:
    try:
        fn, args, kwargs = pickle.loads(packed)  # noqa: S301 - the agent's own pipe
        return 0, ("ok", fn(*args, **kwargs))
    except SystemExit as error:
        # `sys.exit(0)` in a function is a plain end; any other status is a failure with its own
        # exit code.
        if error.code is None or error.code == 0:
            return 0, ("ok", None)
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        return (error.code & 0xFF or 1) if isinstance(error.code, int) else 1, _failure_record(
            error
        )
    except KeyboardInterrupt as error:
        return 130, _failure_record(error)
    except BaseException as error:  # noqa: BLE001 - the driver reports any exception
        record = _failure_record(error)
        # Also on stderr, as of any script: logs have it even if the result is lost.
        sys.stderr.write(record[3])
        return 1, record


def _failure_record(error: BaseException) -> tuple[str, str, str, str, bytes | None]:
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    # The first frame is `_call_function`, which does not help the user.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(kind, error, frames))
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an exception that cannot describe itself
        message = ""
    return "error", name, message, text, _pickle_exception(error)


def _pickle_exception(error: BaseException) -> bytes | None:
    """Returns the pickled exception; `None` if it cannot be unpickled, because many exceptions
    take arguments that they do not keep.
    """
    try:
        packed = pickling.pickle_by_value(error)
        same = isinstance(pickle.loads(packed), type(error))  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - the traceback has the same information
        return None
    return packed if same else None


def _take_descriptor_variable(variable: str) -> int | None:
    """Returns the descriptor that a variable names, and removes the variable: the worker's child
    processes must not use the descriptor.
    """
    number = os.environ.pop(variable, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed by the function: nothing is left in it


def _exit_process(status: int) -> NoReturn:
    """Ends the process as the interpreter would, but does not unload modules: with torch that takes
    seconds.

    In the interpreter's order: pools of threads are ended, non-daemon threads are awaited, and exit
    functions run.
    """
    threading._shutdown()  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue] - the interpreter calls it at exit, too
    atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter runs them at exit, too
    _flush_streams()
    os._exit(status)


if __name__ == "__main__":
    _exit_process(main())
