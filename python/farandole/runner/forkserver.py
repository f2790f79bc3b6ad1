# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fork server of warm workers: imports once, forks at once. Started by
`farandole.runner.warm_workers`.

`python -m farandole.runner.forkserver <socket> <owner> <owner's start> <idle seconds> <module...>`
returns when the server listens in the background. The server talks to
`farandole.runner.warm_worker_proxy`, and only to processes of the same user:

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

from farandole.common import scratch_directories
from farandole.common.counted_noun import format_counted_noun
from farandole.common.resource_limits import usable_cores
from farandole.runner import worker
from farandole.runner.warm_workers import process_start_ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG: Final = 1
_HANDSHAKE_TIMEOUT: Final = 10.0
_STALE_CHECK_INTERVAL: Final = 0.2
_MAX_REQUEST_BYTES: Final = 64 << 20
_MIN_REQUEST_FIELDS: Final = 3


@dataclass
class ForkedWorker:
    """A forked worker."""

    pid: int
    pidfd: int
    stand_in: socket.socket

    def owned_descriptors(self) -> list[int]:
        """Descriptors that no other worker may hold."""
        return [self.pidfd, self.stand_in.fileno()]


def main(arguments: Sequence[str]) -> int:
    """Serves until the owner is gone, or no request has come for the idle time.

    Args:
        arguments: See the module.

    Returns:
        The exit status.
    """
    socket_path, owner, born, idle, *preload = arguments
    lock = os.open(f"{socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another one serves
    try:
        tie = os.pidfd_open(int(owner))
        if process_start_ticks(int(owner)) != int(born):
            return 1
    except OSError:
        return 1
    os.truncate(lock, 0)
    os.write(lock, f"{owner} {born} {_boot_and_pid_namespace()}".encode())
    remove_sockets_of_ended_owners(Path(socket_path).parent)
    Path(socket_path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # and its files go
    try:
        ForkServer(listener, (lock, tie), float(idle), preload).serve_requests()
    finally:
        for path in (socket_path, f"{socket_path}.lock"):
            Path(path).unlink(missing_ok=True)
    return 0


def remove_sockets_of_ended_owners(folder: Path) -> None:
    """Removes files of killed servers whose owners have ended: such an owner starts no other
    server there.

    Args:
        folder: Folder of the sockets; each has a lock beside it that names the owner.
    """
    for lock in folder.glob("warm-*.lock"):
        try:
            owner, born, numbers = lock.read_text().split()
            if numbers != _boot_and_pid_namespace():
                continue  # a process of another container or host, which has another number here
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if process_start_ticks(int(owner)) == int(born):
                    continue
        except (OSError, ValueError):
            continue
        for path in (lock.with_suffix(""), lock):
            path.unlink(missing_ok=True)


def _boot_and_pid_namespace() -> str:
    """Returns the boot of the kernel and the namespace of the process ids that this process sees.
    The first namespace of each host has the same name.
    """
    return f"{scratch_directories.boot_id()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - no path


class ForkServer:
    """The loop of one thread over stand-ins, workers and the owner."""

    def __init__(
        self, listener: socket.socket, held: tuple[int, int], idle: float, preload: Sequence[str]
    ) -> None:
        self._listener = listener
        self._own_descriptors = held
        self._owner_pidfd = held[1]
        self._idle = idle
        self._children: dict[int, ForkedWorker] = {}
        self._unusable_reason = _import_modules(preload) or _fork_obstacle()
        _warm_up_before_forks()
        self._files = _imported_files()
        self._checked_at: float | None = None
        # All present objects stay: without freeze, each collection in a worker would touch their
        # pages and copy them.
        gc.collect()
        gc.freeze()

    def serve_requests(self) -> None:
        """Forks a process for each request; returns when there is no reason to stay."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._owner_pidfd, select.POLLIN)
        busy = time.monotonic()
        while True:
            if self._children:
                busy = time.monotonic()
            idle_seconds = self._idle - (time.monotonic() - busy)
            ready = dict(poll.poll(None if self._children else max(0.0, idle_seconds) * 1000))
            if self._owner_pidfd in ready:
                return self._kill_workers()
            if not ready and not self._children and time.monotonic() - busy >= self._idle:
                return None
            self._handle_ready(poll, ready)
            if self._listener.fileno() in ready:
                busy = time.monotonic()
                if (
                    not self._register_forked_worker(poll)
                    and self._have_imported_files_changed()
                    and not self._children
                ):
                    return None  # a fresh one does better

    def _handle_ready(self, poll: select.poll, ready: dict[int, int]) -> None:
        for child in list(self._children.values()):
            if child.pidfd in ready:
                self._reap_worker(poll, child)
            elif child.stand_in.fileno() in ready:
                self._handle_stand_in_message(poll, child)

    def _register_forked_worker(self, poll: select.poll) -> bool:
        """Forks for the next stand-in; returns whether that was possible."""
        child = self._fork_for_request()
        if child is None:
            return False
        self._children[child.pid] = child
        poll.register(child.pidfd, select.POLLIN)
        poll.register(child.stand_in, select.POLLIN)
        return True

    def _fork_for_request(self) -> ForkedWorker | None:
        stand_in, _ = self._listener.accept()
        descriptors: list[int] = []
        try:
            stand_in.settimeout(_HANDSHAKE_TIMEOUT)
            if not _is_same_user(stand_in):
                return self._decline_request(stand_in)
            if self._unusable_reason or _fork_obstacle() or self._have_imported_files_changed():
                return self._decline_request(stand_in)
            stand_in.sendall(b"r")
            message, descriptors = _receive_request(stand_in)
            pid = os.fork()
            if pid == 0:
                others = [
                    number
                    for child in self._children.values()
                    for number in child.owned_descriptors()
                ]
                _become_worker(
                    message,
                    descriptors,
                    [self._listener.fileno(), *self._own_descriptors, stand_in.fileno(), *others],
                )
            pidfd = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                stand_in.sendall(b"pid %d\n" % pid)
            return ForkedWorker(pid, pidfd, stand_in)
        except (OSError, ValueError):
            return self._decline_request(stand_in)
        finally:
            _close_descriptors(descriptors)

    @staticmethod
    def _decline_request(stand_in: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stand_in.sendall(b"n")
        stand_in.close()

    def _have_imported_files_changed(self) -> bool:
        """Returns whether an imported file has changed. One check serves all workers that are
        requested together.
        """
        if (
            self._checked_at is not None
            and time.monotonic() < self._checked_at + _STALE_CHECK_INTERVAL
        ):
            return False
        self._checked_at = time.monotonic()
        return any(_modification_time(path) != at for path, at in self._files.items())

    def _handle_stand_in_message(self, poll: select.poll, child: ForkedWorker) -> None:
        try:
            word = child.stand_in.recv(1)
        except OSError:
            word = b""
        if word == b"T":
            _signal_worker_group(child.pid, signal.SIGTERM)
        elif not word:
            poll.unregister(child.stand_in)
            _signal_worker_group(child.pid, signal.SIGKILL)

    def _reap_worker(self, poll: select.poll, child: ForkedWorker) -> None:
        # Until the worker is waited for, no other process or group can get its number.
        _signal_worker_group(child.pid, signal.SIGKILL)
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

    def _kill_workers(self) -> None:
        for child in self._children.values():
            _signal_worker_group(child.pid, signal.SIGKILL)


def _import_modules(preload: Sequence[str]) -> str | None:
    """Imports the modules; returns the reason why the server cannot be used, if any."""
    for number, name in enumerate(preload):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module's body may raise any exception
            if number == 0:
                return f"{name} cannot be imported: {error!r}"
    return None


def _warm_up_before_forks() -> None:
    """Does work once that every worker would repeat in its own pages: a third of a worker's
    lifetime, measured.
    """
    if "numpy" in sys.modules:
        # NumPy loads the module at its first use: when a worker seeds its random numbers.
        importlib.import_module("numpy.random")
    compiler = sys.modules.get("farandole.spark.torch.training.deferred_compiler")
    if compiler is not None:
        # The first optimizer of every worker would import the compiler, which takes longer than
        # the import of torch.
        compiler.defer_compiler()
    for finalizer in list(weakref.finalize._registry):  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        # When a worker exits, it does not destroy the objects that the imports have made, such as
        # thousands of operators of torch.
        finalizer.atexit = False


def _fork_obstacle() -> str | None:
    """Returns the reason why this process cannot be forked, if any: a fork has only the thread
    that forks.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    return (
        None if threads == 1 else f"the imports left {format_counted_noun(threads - 1, 'thread')}"
    )


def _imported_files() -> dict[str, int | None]:
    """Returns every imported file, and the time of its last change."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: _modification_time(path) for path in paths if isinstance(path, str)}


def _modification_time(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - four times as fast, and called for a thousand files
    except OSError:
        return None


def _is_same_user(stand_in: socket.socket) -> bool:
    """Returns whether the other end is a process of this user."""
    credentials = stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _receive_request(stand_in: socket.socket) -> tuple[bytes, list[int]]:
    """Receives the request of a stand-in.

    Raises:
        ValueError: It is no request.
        OSError: The stand-in is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(stand_in, 4, 8)
    try:
        message = _receive_message(stand_in, head)
        # A directory, the names of pipes: two descriptors for the output, one for each of the
        # pipes.
        fields = message.split(b"\0", 2)
        is_one = len(fields) >= _MIN_REQUEST_FIELDS and len(descriptors) == 2 + len(
            fields[1].split()
        )
    except OSError:
        _close_descriptors(descriptors)
        raise
    if not is_one:
        _close_descriptors(descriptors)
        raise ValueError("not a request")
    return message, descriptors


def _close_descriptors(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _receive_message(stand_in: socket.socket, head: bytes) -> bytes:
    """Receives the message after its length; empty if the length is invalid or the stand-in
    hangs up.
    """
    length = struct.unpack("=I", head)[0] if len(head) == struct.calcsize("=I") else 0
    message = bytearray()
    while len(message) < length <= _MAX_REQUEST_BYTES:
        piece = stand_in.recv(length - len(message))
        if not piece:
            return b""
        message += piece
    return bytes(message)


def _become_worker(message: bytes, descriptors: list[int], foreign: list[int]) -> NoReturn:
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
        _reopen_streams()
        _reset_forked_process()
        # As in a worker that was started without the fork server.
        sys.modules["__main__"] = worker
        sys.argv = [str(Path(worker.__file__))]
        status = worker.main()
    except BaseException:  # noqa: BLE001 - it must not continue as a server
        import traceback  # noqa: PLC0415 - seldom needed

        traceback.print_exc()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)
    worker._exit_process(status)  # noqa: SLF001 - as the worker's own module does


def _reopen_streams() -> None:
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


def _reset_forked_process() -> None:
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
        cores = usable_cores()
        torch.set_num_threads(min(int(asked), cores) if asked.isdigit() and int(asked) else cores)
        torch.default_generator.seed()


def _signal_worker_group(group: int, number: int) -> None:
    """Signals a worker and the processes it started."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        # The worker does not lead its own group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
