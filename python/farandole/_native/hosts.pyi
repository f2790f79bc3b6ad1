# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Jobs on several hosts: which host takes which tasks, and the agents of other hosts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

def listen_address_and_ports() -> tuple[str | None, int, int]:
    """Returns where this process may listen, according to its configuration.

    Returns:
        An address of this host, where `FARANDOLE_BIND_ADDRESS` names one or a network of it, and
        the first and the last port of `FARANDOLE_PORT_RANGE`.

    Raises:
        FarandoleUsageError: A variable cannot be understood, or this host has no such address.
    """

def networks_of_interfaces(interfaces: Sequence[str]) -> tuple[str, str | None]:
    """The networks of these interfaces.

    Returns:
        The networks of those that this host has, such as `"10.0.0.0/8,10.1.0.0/16"`; and a warning
        that names the others, if there are any.

    Raises:
        ValueError: None has one; the message names those that have.
    """

def host_slots(
    hosts: str | None = None, hostfile: str | Path | None = None
) -> list[tuple[str, int]]:
    """Hosts and their slots.

    Args:
        hosts: As `-H` has them, such as `"a:2,b:4"`.
        hostfile: A file with a host a line, such as `a slots=2`; read when `hosts` is not given.

    Returns:
        Each host with its slots. Without arguments: those of the batch system's job that this
        process runs in; empty outside of one.

    Raises:
        ValueError: Something cannot be understood; it is named.
        OSError: The file cannot be read.
    """

def place_tasks(
    hosts: Sequence[tuple[str, int]], num_proc: int
) -> tuple[list[int], list[tuple[str, int, int]]]:
    """Assigns tasks to hosts.

    Args:
        hosts: Hosts and slots, in the order of ranks; none means this host alone.
        num_proc: Number of tasks.

    Returns:
        The tasks of this host, and for every other one its name, its first task and the task after
        its last.

    Raises:
        ValueError: There are fewer slots than tasks.
    """

@final
class Remote:
    """The agent of another host, reached by ssh or by a program like it. Dropping it ends the
    workers there.
    """

    def __new__(
        cls,
        ticket: str,
        host: str,
        first: int,
        end: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None],
        payload: bytes,
        python: str,
        same_python: str,
        ssh_command: str | None = None,
        ssh_port: int | None = None,
        ssh_identity_file: str | Path | None = None,
        start_timeout: float | None = None,
    ) -> Remote:
        """Starts to connect; what comes of it is in `news`.

        Args:
            ticket: `Registrar.ticket`.
            host: The host, as ssh knows it.
            first: Its first task.
            end: The task after its last one.
            command: Program and arguments of each worker.
            env: Changes to the environment there, which has this process's variables already.
            payload: Bytes each worker can read from the descriptor named by `FARANDOLE_PAYLOAD_FD`.
            python: The interpreter there that has the package.
            same_python: Version of the interpreter that pickled the payload.
            ssh_command: Program that reaches the host; default: the batch system's own, else `ssh`.
            ssh_port: Port for ssh.
            ssh_identity_file: Key for ssh.
            start_timeout: Seconds to wait for all tasks.

        Raises:
            ValueError: The command cannot be understood.
            FarandoleEnvironmentError: The program cannot be started.
        """
    def take_notices(self) -> list[tuple[str, int | None, Any]]:
        """Returns the events since the last call, oldest first.

        Returns:
            `("ready", None, None)`: the agent has started; `("ended", task, Outcome)`; `("refused",
            task, why)`: a worker could not be run; `("gone", None, why)`: the connection ended with
            tasks of which nothing was told; `("done", None, None)`: it ended, and all was told.
        """
    def close_connection(self) -> None:
        """Ends the connection, and with it the workers there."""
