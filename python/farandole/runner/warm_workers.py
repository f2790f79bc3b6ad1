# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Warm workers: processes that start with a framework already imported.

A short job spends most of its time in `import torch`, once per worker. A fork server
(`farandole.runner.forkserver`) imports it once for all workers of its owner (an executor or a
driver) and forks each of them in milliseconds. The agent starts a proxy
(`farandole.runner.warm_worker_proxy`), which passes its pipes and its environment to the server and
ends like the worker. If there is no server, or the server declines, the proxy becomes the worker
itself.

A server serves one owner, one environment and one state of the installed packages. The name of its
socket is their digest. It ends with its owner, and after a time without work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables
from farandole._native.launcher import ALLOCATOR
from farandole._native.settings import read_setting
from farandole.common.notebook import in_notebook
from farandole.common.scratch_directories import boot_id, private_user_directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SWITCH_VARIABLE: Final = variables.WARM_WORKERS
PRELOADED_MODULES: Final = ("torch", "farandole.torch", "farandole.spark.torch.remote")
"""Modules that a server imports. The first must be importable; others that are not are left out."""
_LIGHTNING_MODULES: Final = ("lightning.pytorch", "pytorch_lightning")

_IDLE_SECONDS: Final = 120.0
_START_TIMEOUT: Final = 10.0
_RUNNER_FOLDER: Final = Path(__file__).parent
_MAX_SOCKET_PATH: Final = 100
# Variables that an import can depend on. The rest of the environment is set in the forked worker.
_IMPORT_VARIABLES: Final = re.compile(
    r"PYTHON(?!_)|LD_|OMP_|MKL_|KMP_|OPENBLAS_|NUMEXPR_|TORCH|PYTORCH|ATEN_|MALLOC_|GLIBC_|LC_|LANG$|HOME$|VIRTUAL_ENV$"
)
# A server has one thread. Workers set their own number of threads.
_THREAD_COUNT_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_SEARCH_MODULES: Final = ("pyspark.ml.tuning", "pyspark.ml.connect.tuning")


@dataclass(frozen=True)
class WarmWorkerSettings:
    """Settings of workers that are forked from a server.

    Attributes:
        preload: Modules it imports.
        idle: Seconds without work after which it leaves.
    """

    preload: tuple[str, ...] = PRELOADED_MODULES
    idle: float = _IDLE_SECONDS


def resolve_warm_worker_settings(asked: bool | None, by_default: bool) -> WarmWorkerSettings | None:
    """Returns the settings of a job's warm workers, or `None` if its workers are not warm.

    Only if the driver has imported torch, its workers will import torch: others gain nothing.

    Args:
        asked: The choice of the caller; `None` takes `FARANDOLE_WARM_WORKERS`, else `by_default`.
        by_default: The default outside of notebooks and of Spark's searches over parameters.

    Raises:
        ValueError: A variable does not parse.
    """
    on = asked
    if on is None:
        on = _warm_workers_switch()
    if on is None:
        on = "torch" in sys.modules and (
            by_default or _in_notebook_or_databricks() or is_called_by_parameter_search()
        )
    if not on:
        return None
    idle = read_setting(variables.WARM_IDLE_SECONDS)
    return WarmWorkerSettings(_modules_to_preload(), _IDLE_SECONDS if idle is None else idle)


def warm_worker_command(
    warm: WarmWorkerSettings, cold: Sequence[str], changes: Mapping[str, str | None], owner: int
) -> list[str]:
    """Returns the command that starts a worker by the fork server, and starts the server if needed.

    Args:
        warm: Settings of the server.
        cold: Command that starts the worker without the server; its first word is the interpreter.
        changes: Differences of the worker's environment from this process's environment.
        owner: Process the server belongs to.

    Returns:
        `cold` itself where no server can run.
    """
    env = {name: value for name, value in (os.environ | dict(changes)).items() if value is not None}
    try:
        folder = private_user_directory()
        socket_path = folder / f"warm-{_server_digest(warm, cold[0], env, owner)}"
        if len(str(socket_path)) > _MAX_SOCKET_PATH:
            return list(cold)
        if not socket_path.exists():
            _start_server(warm, cold[0], env, owner, socket_path)
    except (OSError, subprocess.SubprocessError):
        return list(cold)
    return [
        cold[0],
        "-I",
        "-S",
        str(_RUNNER_FOLDER / "warm_worker_proxy.py"),
        str(socket_path),
        *cold,
    ]


def fork_server_owner_pid() -> int:
    """Returns the owner of a server that this Spark task starts: Spark's own process, above its
    Python processes.
    """
    pid = os.getppid()
    while pid > 1:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"pyspark" not in command_line or b"python" not in command_line.partition(b"\0")[0]:
            break
        pid = _parent_pid(pid)
    return pid


def process_start_ticks(pid: int) -> int:
    """Returns the start time of a process in the kernel's ticks; a later process with the same id
    has another start time.
    """
    return int(_stat_fields(pid)[19])


def _parent_pid(pid: int) -> int:
    return int(_stat_fields(pid)[1])


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _modules_to_preload() -> tuple[str, ...]:
    """Returns the modules that workers will import: torch, and Lightning if this driver has its
    estimator.
    """
    if "farandole.spark.lightning.estimator" not in sys.modules:
        return PRELOADED_MODULES
    packages = tuple(name for name in _LIGHTNING_MODULES if name in sys.modules)
    return (
        *PRELOADED_MODULES,
        *packages,
        "farandole.lightning",
        "farandole.spark.lightning.remote",
    )


def _warm_workers_switch() -> bool | None:
    setting = read_setting(SWITCH_VARIABLE).lower()
    if setting == "auto":
        return None
    if setting in ("1", "true", "on", "yes"):
        return True
    if setting in ("0", "false", "off", "no"):
        return False
    raise ValueError(f"{SWITCH_VARIABLE} must be auto, on or off: {setting}")


def _in_notebook_or_databricks() -> bool:
    return in_notebook() or "DATABRICKS_RUNTIME_VERSION" in os.environ


def is_called_by_parameter_search() -> bool:
    """Returns whether a search over parameters of Spark ML called: it fits again and again."""
    frame = sys._getframe()  # noqa: SLF001 - the callers' modules
    while frame is not None:
        if frame.f_globals.get("__name__") in _SEARCH_MODULES:
            return True
        frame = frame.f_back
    return False


def _server_digest(
    warm: WarmWorkerSettings, interpreter: str, env: Mapping[str, str], owner: int
) -> str:
    roots = [
        part or str(Path.cwd()) for part in env.get("PYTHONPATH", "").split(os.pathsep)
    ] + sys.path
    facts = {
        "owner": [owner, process_start_ticks(owner), boot_id()],
        "python": [os.path.realpath(interpreter), sys.version],
        "preload": warm.preload,
        "packages": [[root, _packages_changed_at(root)] for root in dict.fromkeys(roots)],
        "farandole": [
            _modification_time_or_none(path)
            for path in (
                *sorted(_RUNNER_FOLDER.glob("*.py")),
                *_RUNNER_FOLDER.parent.glob("_native*"),
            )
        ],
        "directory": str(Path.cwd()),
        "env": {
            name: value
            for name, value in sorted(env.items())
            if _IMPORT_VARIABLES.match(name) and name not in _THREAD_COUNT_VARIABLES
        },
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _packages_changed_at(root: str) -> int | None:
    """Returns the time of the last change to the packages of a directory; `None` if it holds no
    packages.

    In other directories, such as the one a notebook runs in, files come and go as jobs write them.
    The server itself checks the files that it has imported from there.
    """
    folder = Path(root)
    is_for_packages = folder.name in ("site-packages", "dist-packages")
    return (
        _modification_time_or_none(folder)
        if is_for_packages or next(folder.glob("*.dist-info"), None) is not None
        else None
    )


def _modification_time_or_none(path: str | Path) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _start_server(
    warm: WarmWorkerSettings,
    interpreter: str,
    env: Mapping[str, str],
    owner: int,
    socket_path: Path,
) -> None:
    """Starts a server and returns when it listens; if several start at once, one stays."""
    arguments = [
        str(socket_path),
        str(owner),
        str(process_start_ticks(owner)),
        repr(warm.idle),
        *warm.preload,
    ]
    # One thread, also in the libraries that count cores when they are loaded: a process with
    # threads cannot be forked. The C library reads the variables of `ALLOCATOR` at the start of
    # a process; agents set them for workers that start without a server.
    alone = dict.fromkeys(_THREAD_COUNT_VARIABLES, "1")
    subprocess.run(  # noqa: S603 - this interpreter, this package
        [interpreter, "-m", "farandole.runner.forkserver", *arguments],
        env={**ALLOCATOR, **env, **alone},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_START_TIMEOUT,
        check=True,
    )
