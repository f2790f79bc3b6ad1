# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs: workers that come and go, run by a thread of this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

@final
class ElasticJob:
    """A running elastic job. Dropping it ends it."""

    def __new__(
        cls,
        num_proc: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None],
        payload: bytes,
        python: str,
        same_python: str,
        options: Mapping[str, str] = ...,
        discovery: object | None = None,
        hosts: str | None = None,
        hostfile: str | Path | None = None,
        ssh_command: str | None = None,
        ssh_port: int | None = None,
        ssh_identity_file: str | Path | None = None,
    ) -> ElasticJob:
        """Starts it; what comes of it is in `news`.

        Args:
            num_proc: Number of workers that the first world waits for.
            command: Program and arguments of each worker.
            env: Changes to the environment of workers.
            payload: Bytes each worker can read from the descriptor named by `FARANDOLE_PAYLOAD_FD`.
            python: The interpreter that has the package on other hosts.
            same_python: Version of the interpreter that pickled the payload.
            options: Knobs by key, such as `min_num_proc`.
            discovery: An object whose `find_available_hosts_and_slots()` says which hosts there
                are.
            hosts: Hosts that do not change, such as `"a:2,b:4"`.
            hostfile: A file of hosts that may change.
            ssh_command: Program that reaches other hosts; default: the batch system's own, else
                `ssh`.
            ssh_port: Port for ssh.
            ssh_identity_file: Key for ssh.

        Raises:
            ValueError: Something cannot be understood, or numbers contradict each other.
        """
    def take_events(self, timeout: float) -> list[tuple[str, Any]]:
        """Returns the events since the last call, oldest first.

        Args:
            timeout: Seconds to wait for the first.

        Returns:
            `("line", (rank, stream, text))`; `("metric", (task, rank, kind, data))`: a record of a
            worker or its agent; `("loss", sentence)`: a worker or a host is out; `("world",
            (generation, [(task, host), ...]))` by rank; and last `("ended", outcomes)`: those of
            the last world by rank, or the first failure and the others, or `("failed", exception)`:
            the job could not begin or go on.
        """
    def request_end(self) -> None:
        """Ends the job: with time for last checkpoints the first time, soon the second, at once
        the third.
        """
