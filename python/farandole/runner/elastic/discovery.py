# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Host discovery of elastic jobs, in Python.

`farandole.run(..., host_discovery_script=...)` takes any object with this method; these classes are
Horovod's.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

DISCOVERY_TIMEOUT: Final = 20.0
"""Seconds that a program may take to list the hosts."""


class HostDiscovery(ABC):
    """Finds hosts. A separate thread asks every second."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the slots of each host that is available now, in the order of ranks.

        An exception of the first call ends the job; after a later one, the job keeps the hosts
        that were found last.
        """


class FixedHosts(HostDiscovery):
    """Hosts that another part of the program sets.

    Args:
        host_slots: Slots by host.
    """

    def __init__(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the hosts that were set last."""
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        """Takes other hosts from now on."""
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """Hosts as a program prints them.

    Args:
        discovery_script: Command for the shell; it prints `host` or `host:slots` a line.
        slots: Slots of hosts without a number.
    """

    def __init__(self, discovery_script: str | Path, slots: int | None) -> None:
        self._discovery_script = str(discovery_script)
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Runs the program.

        Raises:
            RuntimeError: It failed, or did not end in time.
            ValueError: It printed a line that is not a host, or a host without slots and there is
                no default.
        """
        failed = f"Failed to execute discovery script: {self._discovery_script}"
        try:
            ended = subprocess.run(  # noqa: S602 - the user's own program, which the shell is to run
                self._discovery_script,
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DISCOVERY_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{failed} did not end within {DISCOVERY_TIMEOUT:g} s and was killed"
            ) from None
        if ended.returncode != 0:
            raise RuntimeError(f"{failed}. Exit code: {ended.returncode}: {ended.stderr.strip()}")
        lines = (line.strip() for line in ended.stdout.splitlines())
        return dict(self._parse_line(line) for line in lines if line)

    def _parse_line(self, line: str) -> tuple[str, int]:
        host, colon, slots = line.rpartition(":")
        if not colon:
            if self._default_slots is None:
                raise ValueError(f"{self._discovery_script} printed a host without slots: {line}")
            return line, self._default_slots
        if not host or not slots.isdecimal():
            raise ValueError(
                f"{self._discovery_script} printed a line that is not a host such as node1 or "
                f"node1:4: {line}"
            )
        return host, int(slots)


__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]
