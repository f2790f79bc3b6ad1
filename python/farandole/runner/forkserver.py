# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fork server of warm workers: imports once, forks at once. Started by `farandole.runner.warm`.

`python -m farandole.runner.forkserver <socket> <owner> <owner's start> <idle seconds> <module...>`
returns when the server listens in the background. The server talks to `farandole.runner.proxy`, and
only to processes of its own user:

- server: `r` if it can fork, anything else if it cannot;
- proxy: length, descriptors, and `directory NUL names of pipes NUL name=value NUL ...`;
- server: `pid <number>`, later `code <number>` or `signal <number>`;
- proxy: `T` for SIGTERM; if it closes the connection, the worker gets SIGKILL.

The server forks only while it has a single thread and no imported file has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from farandole.runner import worker
from farandole.runner.warm import started

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG: Final = 1
_WORD: Final = 10.0
_GLANCE: Final = 0.2
_MOST: Final = 64 << 20
_HEAD: Final = 3


@dataclass
class Child:
    """A forked worker."""

    pid: int
    pidfd: int
    stand_in: socket.socket

    def descriptors(self) -> list[int]:
        """Descriptors that no other worker may hold."""
        return [self.pidfd, self.stand_in.fileno()]


def main(arguments: Sequence[str]) -> int:
    """Serves until the owner is gone or nothing was asked for long enough.

    Args:
        arguments: See the module.

    Returns:
        The exit status.
    """
    place, owner, born, idle, *preload = arguments
    lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another one serves
    try:
        tie = os.pidfd_open(int(owner))
        if started(int(owner)) != int(born):
            return 1
    except OSError:
        return 1
    os.truncate(lock, 0)
    os.write(lock, f"{owner} {born} {_numbers()}".encode())
    sweep(Path(place).parent)
    Path(place).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(place)
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # and its files go
    try:
        Server(listener, (lock, tie), float(idle), preload).serve()
    finally:
        for path in (place, f"{place}.lock"):
            Path(path).unlink(missing_ok=True)
    return 0


def sweep(folder: Path) -> None:
    """Removes files of killed servers whose owners have ended, so that none of them starts another
    server there.

    Args:
        folder: Where sockets are, each with a lock beside it that names the owner.
    """
    for lock in folder.glob("warm-*.lock"):
        try:
            owner, born, numbers = lock.read_text().split()
            if numbers != _numbers():
                continue  # another container's process, which has another number here
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if started(int(owner)) == int(born):
                    continue
        except (OSError, ValueError):
            continue
        for path in (lock.with_suffix(""), lock):
            path.unlink(missing_ok=True)


def _numbers() -> str:
    """In which namespace processes have the numbers that they have here."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path


class Server:
    """The loop of one thread over stand-ins, workers and the owner."""

    def __init__(
        self, listener: socket.socket, held: tuple[int, int], idle: float, preload: Sequence[str]
    ) -> None:
        self._listener = listener
        self._held = held
        self._tie = held[1]
        self._idle = idle
        self._children: dict[int, Child] = {}
        self._useless = _import(preload) or _threads()
        _settle()
        self._files = _files()
        self._looked: float | None = None
        # All present objects stay: without freeze, each collection in a worker would touch their
        # pages and copy them.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Forks a process for each request; returns when there is no reason to stay."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._tie, select.POLLIN)
        busy = time.monotonic()
        while True:
            if self._children:
                busy = time.monotonic()
            left = self._idle - (time.monotonic() - busy)
            ready = dict(poll.poll(None if self._children else max(0.0, left) * 1000))
            if self._tie in ready:
                return self._end_all()
            if not ready and not self._children and time.monotonic() - busy >= self._idle:
                return None
            self._look(poll, ready)
            if self._listener.fileno() in ready:
                busy = time.monotonic()
                if not self._take(poll) and self._is_stale() and not self._children:
                    return None  # a fresh one does better

    def _look(self, poll: select.poll, ready: dict[int, int]) -> None:
        for child in list(self._children.values()):
            if child.pidfd in ready:
                self._reap(poll, child)
            elif child.stand_in.fileno() in ready:
                self._heard(poll, child)

    def _take(self, poll: select.poll) -> bool:
        """Forks for the next stand-in; whether it could."""
        child = self._accept()
        if child is None:
            return False
        self._children[child.pid] = child
        poll.register(child.pidfd, select.POLLIN)
        poll.register(child.stand_in, select.POLLIN)
        return True

    def _accept(self) -> Child | None:
        stand_in, _ = self._listener.accept()
        descriptors: list[int] = []
        try:
            stand_in.settimeout(_WORD)
            if not _is_own(stand_in):
                return self._decline(stand_in)
            if self._useless or _threads() or self._is_stale():
                return self._decline(stand_in)
            stand_in.sendall(b"r")
            message, descriptors = _request(stand_in)
            pid = os.fork()
            if pid == 0:
                others = [
                    number for child in self._children.values() for number in child.descriptors()
                ]
                _become(
                    message,
                    descriptors,
                    [self._listener.fileno(), *self._held, stand_in.fileno(), *others],
                )
            pidfd = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                stand_in.sendall(b"pid %d\n" % pid)
            return Child(pid, pidfd, stand_in)
        except (OSError, ValueError):
            return self._decline(stand_in)
        finally:
            _close(descriptors)

    @staticmethod
    def _decline(stand_in: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stand_in.sendall(b"n")
        stand_in.close()

    def _is_stale(self) -> bool:
        """Returns whether an imported file has changed. One check serves all workers that are
        requested together.
        """
        if self._looked is not None and time.monotonic() < self._looked + _GLANCE:
            return False
        self._looked = time.monotonic()
        return any(_modified(path) != at for path, at in self._files.items())

    def _heard(self, poll: select.poll, child: Child) -> None:
        try:
            word = child.stand_in.recv(1)
        except OSError:
            word = b""
        if word == b"T":
            _kill(child.pid, signal.SIGTERM)
        elif not word:
            poll.unregister(child.stand_in)
            _kill(child.pid, signal.SIGKILL)

    def _reap(self, poll: select.poll, child: Child) -> None:
        # Until it is waited for, its number is its own, and its group's.
        _kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            child.stand_in.sendall(b"code %d\n" % code if code >= 0 else b"signal %d\n" % -code)
        poll.unregister(child.pidfd)
        with contextlib.suppress(KeyError):
            poll.unregister(child.stand_in)
        os.close(child.pidfd)
        child.stand_in.close()
        del self._children[child.pid]

    def _end_all(self) -> None:
        for child in self._children.values():
            _kill(child.pid, signal.SIGKILL)


def _import(preload: Sequence[str]) -> str | None:
    """Imports; why the server is of no use, if it is of none."""
    for number, name in enumerate(preload):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module's body does
            if number == 0:
                return f"{name} cannot be imported: {error!r}"
    return None


def _settle() -> None:
    """Does once what every worker would do, each in pages of its own: a third of a worker's
    life, measured.
    """
    if "numpy" in sys.modules:
        # NumPy loads it when it is first asked for, which is for every worker's own random numbers.
        importlib.import_module("numpy.random")
    compiler = sys.modules.get("farandole.spark.torch.training.compiler")
    if compiler is not None:
        # The first optimizer of every worker would import it, which takes longer than to import
        # torch.
        compiler.defer()
    for finalizer in list(weakref.finalize._registry):  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        # At its exit a worker does not take apart what the imports have built, such as torch's
        # thousands of operators.
        finalizer.atexit = False


def _threads() -> str | None:
    """Returns the reason why this process cannot be forked, if any: a fork has only the thread
    that forks.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    return None if threads == 1 else f"the imports left {threads - 1} threads"


def _files() -> dict[str, int | None]:
    """Returns every file that was imported, and when it was written."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: _modified(path) for path in paths if isinstance(path, str)}


def _modified(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - four times as fast, and asked of a thousand files
    except OSError:
        return None


def _is_own(stand_in: socket.socket) -> bool:
    """Returns whether the other end is a process of this user."""
    told = stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", told)[1] == os.getuid()


def _request(stand_in: socket.socket) -> tuple[bytes, list[int]]:
    """Receives the request of a stand-in.

    Raises:
        ValueError: It is no request.
        OSError: The stand-in is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(stand_in, 4, 8)
    try:
        message = _message(stand_in, head)
        # A directory, the names of pipes: two descriptors for the output, one for each of the
        # pipes.
        words = message.split(b"\0", 2)
        is_one = len(words) >= _HEAD and len(descriptors) == 2 + len(words[1].split())
    except OSError:
        _close(descriptors)
        raise
    if not is_one:
        _close(descriptors)
        raise ValueError("not a request")
    return message, descriptors


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _message(stand_in: socket.socket, head: bytes) -> bytes:
    """Receives the message after its length; empty if the length is invalid or the stand-in
    hangs up.
    """
    length = struct.unpack("=I", head)[0] if len(head) == struct.calcsize("=I") else 0
    message = bytearray()
    while len(message) < length <= _MOST:
        piece = stand_in.recv(length - len(message))
        if not piece:
            return b""
        message += piece
    return bytes(message)


def _become(message: bytes, descriptors: list[int], foreign: list[int]) -> NoReturn:
    """Turns this fork into the worker; never returns."""
    status = 1
    try:
        parent = os.getppid()
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        directory, names, *variables = message.split(b"\0")
        os.environb.clear()
        for variable in variables:
            name, _, value = variable.partition(b"=")
            os.environb[name] = value
        for name, descriptor in zip(names.split(), descriptors[2:], strict=True):
            os.environb[name] = b"%d" % descriptor
        for number in foreign:
            os.close(number)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (descriptors[0], 1), (descriptors[1], 2)):
            os.dup2(source, target)
        for number in (null, *descriptors[:2]):
            os.close(number)
        os.chdir(directory)
        _own_streams()
        _own_state()
        # As in a worker that was started as a process of its own.
        sys.modules["__main__"] = worker
        sys.argv = [str(Path(worker.__file__))]
        status = worker.main()
    except BaseException:  # noqa: BLE001 - it must not continue as a server
        import traceback  # noqa: PLC0415 - seldom needed

        traceback.print_exc()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)
    worker._leave(status)  # noqa: SLF001 - as the worker's own module does


def _own_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 - it lives as long as the process
            descriptor,
            "r" if descriptor == 0 else "w",
            closefd=False,
            errors="backslashreplace" if name == "stderr" else None,
        )
        if descriptor:
            stream.reconfigure(line_buffering=name == "stderr", write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _own_state() -> None:
    """Gives a forked worker its own signal handlers, CPU affinity and random numbers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    importlib.invalidate_caches()  # modules may have come since the server looked
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        asked = os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS") or ""
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(min(int(asked), cores) if asked.isdigit() and int(asked) else cores)
        torch.default_generator.seed()


def _kill(group: int, number: int) -> None:
    """Signals a worker and what it started."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        # It has not come to lead its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
