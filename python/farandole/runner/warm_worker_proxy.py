# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The proxy of a warm worker: the process that the agent starts, watches and ends.

It runs as `warm_worker_proxy.py <socket> <command...>` in a bare interpreter, so that it starts in
milliseconds. It passes its output, its pipes, its directory and its environment to the fork server
behind the socket, and ends like the worker. If no server answers, or the server declines, this
process executes the command itself.
"""

import _socket
import array
import os
import signal
import struct
import sys
import time

PIPE_VARIABLES = ("FARANDOLE_PAYLOAD_FD", "FARANDOLE_RESULT_FD")
_SERVER_TIMEOUT = 60.0
_FORK_TIMEOUT = 15.0


def main() -> None:
    """Passes the worker to the server and waits; see the module."""
    socket_path, *command = sys.argv[1:]
    server = _connect_server(socket_path)
    if server is None:
        os.execvp(command[0], command)  # noqa: S606 - the agent's own command
    _send_request(server)
    server.settimeout(_FORK_TIMEOUT)
    replies = _read_replies(server)
    started = next(replies, None)
    if started is None or started[0] != "pid":
        sys.stderr.write(
            "farandole: the fork server did not start the worker that it had accepted\n"
        )
        sys.stderr.flush()
        os._exit(70)
    # The agent ends a worker by SIGTERM, then by SIGKILL, which closes the connection.
    signal.signal(signal.SIGTERM, lambda *_: server.send(b"T"))
    server.settimeout(None)
    exit_kind, number = next(replies, ("lost", "9"))
    if exit_kind == "code":
        os._exit(int(number))
    if exit_kind == "lost":
        _kill_orphaned_group(int(started[1]))
    _exit_by_signal(int(number))


def _connect_server(socket_path: str) -> "_socket.socket | None":
    """Returns a connection to a server that is ready to fork, once it is."""
    deadline = time.monotonic() + 1.0
    while True:
        server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            server.settimeout(_SERVER_TIMEOUT)
            server.connect(socket_path)
            # The server answers when it has imported everything, or with the reason of a failure.
            return server if server.recv(1) == b"r" else None
        except (FileNotFoundError, ConnectionRefusedError):
            # The server may be about to listen: another process may have just started it.
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        except OSError:
            return None


def _send_request(server: "_socket.socket") -> None:
    pipes = {name: int(os.environ.pop(name)) for name in PIPE_VARIABLES if name in os.environ}
    fields = [os.fsencode(os.getcwd()), b" ".join(name.encode() for name in pipes)]  # noqa: PTH109 - pathlib takes long to load
    fields += [name + b"=" + value for name, value in os.environb.items()]
    message = b"\0".join(fields)
    descriptors = array.array("i", [1, 2, *pipes.values()])
    server.sendmsg(
        [struct.pack("=I", len(message))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)]
    )
    unsent = memoryview(message)
    while unsent:
        unsent = unsent[server.send(unsent) :]


def _read_replies(server: "_socket.socket"):  # noqa: ANN202 - pairs of strings, from a program without typing
    """Yields the server's lines, two words each, until it hangs up."""
    received = b""
    while True:
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            word, _, value = line.decode().partition(" ")
            yield word, value
        try:
            piece = server.recv(256)
        except OSError:
            return
        if not piece:
            return
        received += piece


def _kill_orphaned_group(worker: int) -> None:
    """Ends the processes that a worker had started, after the server has died: the kernel has
    ended the worker with the server.
    """
    try:
        os.killpg(worker, signal.SIGKILL)
    except ProcessLookupError:
        return


def _exit_by_signal(number: int) -> None:
    import resource  # noqa: PLC0415 - seldom needed

    # The worker has already written a core file if one is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
