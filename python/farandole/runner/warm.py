# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Warm workers: processes that start with a framework already imported.

A short job spends most of its time in `import torch`, once per worker. A fork server
(`farandole.runner.forkserver`) imports it once for all workers of its owner (an executor or a
driver) and forks each of them in milliseconds. The agent starts a proxy (`farandole.runner.proxy`),
which passes its pipes and its environment to the server and ends like the worker. If there is no
server, or the server declines, the proxy becomes the worker itself.

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

from farandole._native.launcher import ALLOCATOR
from farandole.common.notebook import in_notebook
from farandole.common.scratch import own_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SWITCH: Final = "FARANDOLE_WARM_WORKERS"
IDLE: Final = "FARANDOLE_WARM_IDLE_SECONDS"
PRELOADS: Final = ("torch", "farandole.torch", "farandole.spark.torch.remote")
"""Modules that a server imports. The first must be importable; others that are not are left out."""
_LIGHTNING: Final = ("lightning.pytorch", "pytorch_lightning")

_IDLE_SECONDS: Final = 120.0
_START: Final = 10.0
_HERE: Final = Path(__file__).parent
_SOCKET_PATH: Final = 100
# Variables that an import can depend on. The rest of the environment is set in the forked worker.
_FOR_IMPORTS: Final = re.compile(
    r"PYTHON(?!_)|LD_|OMP_|MKL_|KMP_|OPENBLAS_|NUMEXPR_|TORCH|PYTORCH|ATEN_|MALLOC_|GLIBC_|LC_|LANG$|HOME$|VIRTUAL_ENV$"
)
# A server has one thread. Workers set their own number of threads.
_ALONE: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_TUNING: Final = ("pyspark.ml.tuning", "pyspark.ml.connect.tuning")


@dataclass(frozen=True)
class Warm:
    """Asks for workers that are forked from a server.

    Attributes:
        preload: Modules it imports.
        idle: Seconds without work after which it leaves.
    """

    preload: tuple[str, ...] = PRELOADS
    idle: float = _IDLE_SECONDS


def wanted(asked: bool | None, by_default: bool) -> Warm | None:
    """Returns the settings of a job's warm workers, or `None` if its workers are not warm.

    Only a driver that has imported torch has workers that will: others gain nothing.

    Args:
        asked: What the caller says; `None` leaves it to `FARANDOLE_WARM_WORKERS`, and that to
            `by_default`.
        by_default: The default outside of notebooks and of Spark's searches over parameters.

    Raises:
        ValueError: A variable does not parse.
    """
    on = asked
    if on is None:
        on = _switch()
    if on is None:
        on = "torch" in sys.modules and (by_default or _in_notebook() or in_search())
    if not on:
        return None
    idle = os.environ.get(IDLE, "")
    try:
        return Warm(_preloads(), float(idle) if idle else _IDLE_SECONDS)
    except ValueError:
        raise ValueError(f"{IDLE} must be a number of seconds: {idle}") from None


def command(
    warm: Warm, cold: Sequence[str], changes: Mapping[str, str | None], owner: int
) -> list[str]:
    """Returns the command that starts a worker by the server, which is started if it does not run.

    Args:
        warm: What the server is to be.
        cold: The command that starts it without; its first word is the interpreter.
        changes: The worker's environment, as changes of this process's.
        owner: Process the server belongs to.

    Returns:
        `cold` itself where a server cannot be.
    """
    env = {name: value for name, value in (os.environ | dict(changes)).items() if value is not None}
    try:
        folder = own_folder()
        place = folder / f"warm-{_digest(warm, cold[0], env, owner)}"
        if len(str(place)) > _SOCKET_PATH:
            return list(cold)
        if not place.exists():
            _start(warm, cold[0], env, owner, place)
    except (OSError, subprocess.SubprocessError):
        return list(cold)
    return [cold[0], "-I", "-S", str(_HERE / "proxy.py"), str(place), *cold]


def executor() -> int:
    """Returns the owner of a server that this Spark task starts: Spark's own process, above its
    Python processes.
    """
    pid = os.getppid()
    while pid > 1:
        told = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"pyspark" not in told or b"python" not in told.partition(b"\0")[0]:
            break
        pid = _parent(pid)
    return pid


def started(pid: int) -> int:
    """Returns the start of a process in the kernel's ticks. A later process with the same id has
    another one.
    """
    return int(_stat(pid)[19])


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _preloads() -> tuple[str, ...]:
    """Returns the modules that workers will import: torch, and Lightning if this driver has its
    estimator.
    """
    if "farandole.spark.lightning.estimator" not in sys.modules:
        return PRELOADS
    packages = tuple(name for name in _LIGHTNING if name in sys.modules)
    return (*PRELOADS, *packages, "farandole.lightning", "farandole.spark.lightning.remote")


def _switch() -> bool | None:
    told = os.environ.get(SWITCH, "auto").lower()
    if told in ("", "auto"):
        return None
    if told in ("1", "true", "on", "yes"):
        return True
    if told in ("0", "false", "off", "no"):
        return False
    raise ValueError(f"{SWITCH} must be auto, on or off: {told}")


def _in_notebook() -> bool:
    return in_notebook() or "DATABRICKS_RUNTIME_VERSION" in os.environ


def in_search() -> bool:
    """Returns whether a search over parameters of Spark ML called: it fits again and again."""
    frame = sys._getframe()  # noqa: SLF001 - the callers' modules
    while frame is not None:
        if frame.f_globals.get("__name__") in _TUNING:
            return True
        frame = frame.f_back
    return False


def _digest(warm: Warm, interpreter: str, env: Mapping[str, str], owner: int) -> str:
    roots = [
        part or str(Path.cwd()) for part in env.get("PYTHONPATH", "").split(os.pathsep)
    ] + sys.path
    facts = {
        "owner": [owner, started(owner)],
        "python": [os.path.realpath(interpreter), sys.version],
        "preload": warm.preload,
        "packages": [[root, _installed(root)] for root in dict.fromkeys(roots)],
        "farandole": [
            _changed(path) for path in (*sorted(_HERE.glob("*.py")), *_HERE.parent.glob("_native*"))
        ],
        "directory": str(Path.cwd()),
        "env": {
            name: value
            for name, value in sorted(env.items())
            if _FOR_IMPORTS.match(name) and name not in _ALONE
        },
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _installed(root: str) -> int | None:
    """Returns the time of the last change to the packages of a directory; `None` if it holds no
    packages.

    In other directories, such as the one a notebook runs in, files come and go as jobs write them.
    What the server has imported from there it looks at by itself.
    """
    folder = Path(root)
    is_for_packages = folder.name in ("site-packages", "dist-packages")
    return (
        _changed(folder)
        if is_for_packages or next(folder.glob("*.dist-info"), None) is not None
        else None
    )


def _changed(path: str | Path) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _start(warm: Warm, interpreter: str, env: Mapping[str, str], owner: int, place: Path) -> None:
    """Starts a server and returns when it listens; of several at once, one stays."""
    arguments = [str(place), str(owner), str(started(owner)), repr(warm.idle), *warm.preload]
    # One thread, also in the libraries that count cores when they are loaded: a process with
    # threads cannot be forked. The C library reads these when it starts; agents set them for
    # workers that come the long way.
    alone = dict.fromkeys(_ALONE, "1")
    subprocess.run(  # noqa: S603 - this interpreter, this package
        [interpreter, "-m", "farandole.runner.forkserver", *arguments],
        env={**ALLOCATOR, **env, **alone},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_START,
        check=True,
    )
