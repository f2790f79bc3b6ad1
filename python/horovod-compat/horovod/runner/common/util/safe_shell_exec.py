# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs a command of the shell of which nothing is left when it has ended, or when this process has.

The command's processes form a session. A watchdog holds the other end of a pipe: when this process
ends, by whatever signal, the pipe closes and the watchdog ends the session.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod.runner.util.threads import in_thread, on_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GRACEFUL_TERMINATION_TIME_S = 5
"""Seconds between asking processes to end and killing them."""

_WATCHDOG = (
    'read pid || exit 0; read _; kill -TERM -"$pid" 2>/dev/null; sleep "$1"; kill -KILL -"$pid" '
    "2>/dev/null"
)
_LOOK = 0.02


def _children(pid: int) -> list[int]:
    """Returns all processes below one, children before theirs."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def terminate_executor_shell_and_children(pid: int) -> None:
    """Asks a process and all below it to end, and kills after a while those that have not.

    Args:
        pid: The number of the process.
    """
    pids = [pid, *_children(pid)]
    _send(pids, signal.SIGTERM)
    end = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    while any(map(_is_alive, pids)) and time.monotonic() < end:
        time.sleep(_LOOK)
    _send([one for one in {*pids, *_children(pid)} if _is_alive(one)], signal.SIGKILL)


def prefix_connection(
    src_connection: Any,
    dst_stream: Any,
    prefix: str | None,
    index: int | None,
    prefix_output_with_timestamp: bool,
) -> None:
    """Copies text from a file or a connection to a stream, line by line, until its end; then closes
    it.

    Args:
        src_connection: Has a `fileno` and a `close`.
        dst_stream: Takes text.
        prefix: The name of the source.
        index: Its number; lines begin with both where both are given.
        prefix_output_with_timestamp: Whether lines carry the time, too.
    """
    decoder = codecs.getincrementaldecoder("utf8")(errors="replace")
    line = ""

    def write(text: str) -> None:
        if index is not None and prefix is not None:
            now = time.asctime() if prefix_output_with_timestamp else ""
            text = f"{now}[{index}]<{prefix}>:{text}"
        dst_stream.write(text)
        dst_stream.flush()

    while True:
        data = os.read(src_connection.fileno(), 4096)
        # A carriage return ends what a progress bar shows next.
        for part in re.split("([\r\n])", decoder.decode(data, final=not data)):
            line += part
            if part in ("\r", "\n"):
                write(line)
                line = ""
        if not data:
            break
    if line:
        write(line)
    src_connection.close()


def _end(watchdog: subprocess.Popen[bytes]) -> None:
    """Before its pipe closes, which would have it end the command's session."""
    watchdog.kill()
    watchdog.wait()
    if watchdog.stdin is not None:
        watchdog.stdin.close()


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs a command of the shell and copies what it writes.

    Args:
        command: The command.
        env: Its environment; default: this process's.
        stdout: A text stream; default: `sys.stdout`.
        stderr: A text stream; default: `sys.stderr`.
        index: Lines begin with this number and the name of their stream, if it is given.
        events: The command is ended when any of them is set.
        prefix_output_with_timestamp: Whether lines carry the time, too, where they carry the
            number.

    Returns:
        The exit code; 128 and the signal's number where a signal ended the command.

    Raises:
        OSError: The shell cannot be started.
    """
    watchdog = subprocess.Popen(  # noqa: S603 - ours
        ["/bin/sh", "-c", _WATCHDOG, "sh", str(GRACEFUL_TERMINATION_TIME_S)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    bell = watchdog.stdin.fileno() if watchdog.stdin is not None else -1
    try:
        shell = subprocess.Popen(  # noqa: S602 - a command of the shell is what is asked for
            command,
            shell=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # It tells its number by itself: this process may end before it could.
            preexec_fn=lambda: os.write(bell, b"%d\n" % os.getpid()),  # noqa: PLW1509 - no lock is taken
        )
    except BaseException:
        _end(watchdog)
        raise
    streams = (
        (shell.stdout, stdout or sys.stdout, "stdout"),
        (shell.stderr, stderr or sys.stderr, "stderr"),
    )
    copies = [
        in_thread(prefix_connection, (source, target, name, index, prefix_output_with_timestamp))
        for source, target, name in streams
    ]
    stop = threading.Event()
    for event in events or ():
        on_event(
            event,
            terminate_executor_shell_and_children,
            (shell.pid,),
            stop=stop,
            check_stop_interval_s=0.1,
        )
    try:
        code = shell.wait()
    except BaseException:
        terminate_executor_shell_and_children(shell.pid)
        shell.wait()
        raise
    finally:
        stop.set()
        _end(watchdog)
    for copy in copies:
        copy.join()
    return code if code >= 0 else 128 - code
