# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts, their slots, and which rank sits where."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOST = re.compile(r"([\w.-]+):([0-9]+)")


class HostInfo:
    """A host and the number of processes that it has room for.

    Args:
        hostname: Its name or address.
        slots: The number.
    """

    def __init__(self, hostname: str, slots: int) -> None:
        self.hostname = hostname
        self.slots = slots

    @classmethod
    def from_string(cls, host_string: str) -> Self:
        """Reads `host:slots`.

        Raises:
            ValueError: The text is of another form.
        """
        hostname, colon, slots = host_string.strip().rpartition(":")
        if not colon or not slots.isdecimal():
            raise ValueError(f"a host must be given as name:slots: {host_string!r}")
        return cls(hostname, int(slots))

    def __repr__(self) -> str:
        """Shows both."""
        return f"HostInfo({self.hostname!r}, {self.slots})"


@dataclass
class SlotInfo:
    """The place of one process: its host and its ranks."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Rank, size, local rank, local size, cross rank and cross size, with commas."""
        told = (
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.cross_rank,
            self.cross_size,
        )
        return ",".join(map(str, told))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)
"""Place of a process without a slot."""


def parse_host_files(filename: str) -> str:
    """Reads lines of `host slots=number`, with comments and empty lines among them.

    Returns:
        The hosts as `host:number`, with commas.

    Raises:
        ValueError: A line is of another form; the message has its number.
        OSError: The file cannot be read.
    """
    hosts: list[str] = []
    for number, line in enumerate(Path(filename).read_text().splitlines(), 1):
        told = line.partition("#")[0].split()
        if not told:
            continue
        slots = re.fullmatch(r"slots=([0-9]+)", told[1]) if len(told) > 1 else None
        if slots is None:
            raise ValueError(
                f"{filename}, line {number}: a host must be given as `name slots=number`: {line!r}"
            )
        hosts.append(f"{told[0]}:{slots[1]}")
    return ",".join(hosts)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Reads `host:slots` with commas.

    Returns:
        The names in order, and the slots by name.

    Raises:
        ValueError: A host is of another form.
    """
    found: dict[str, int] = {}
    for host in hosts.split(","):
        match = _HOST.fullmatch(host.strip())
        if match is None:
            raise ValueError(
                f"Invalid host input: hosts must be given as worker-0:2,worker-1:2, not {host!r}"
            )
        found[match[1]] = int(match[2])
    return list(found), found


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Reads `host:slots` with commas.

    Raises:
        ValueError: A host is of another form.
    """
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Gives out ranks host by host.

    Args:
        hosts: The hosts and their slots.
        min_num_proc: The number of processes that there must be room for.
        max_num_proc: The most processes; default: as many as there are slots.

    Raises:
        ValueError: There are fewer slots than processes.
    """
    left = sum(host.slots for host in hosts)
    if max_num_proc is not None:
        left = min(left, max_num_proc)
    size = left
    if size < min_num_proc:
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({size})"
        )
    sizes: list[tuple[str, int]] = []
    for host in hosts:
        sizes.append((host.hostname, min(host.slots, left)))
        left -= sizes[-1][1]
    across: defaultdict[int, list[str]] = defaultdict(list)
    for name, count in sizes:
        for local_rank in range(count):
            across[local_rank].append(name)
    places = [(name, local_rank, count) for name, count in sizes for local_rank in range(count)]
    return [
        SlotInfo(
            name,
            rank,
            local_rank,
            across[local_rank].index(name),
            size,
            count,
            len(across[local_rank]),
        )
        for rank, (name, local_rank, count) in enumerate(places)
    ]
