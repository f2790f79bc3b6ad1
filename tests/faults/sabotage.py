# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Faults from outside: real signals, and real connections that break or fall silent.

A connection is reached through its own process: `pidfd_getfd` gives this process the same socket.
There a filter that lets nothing in makes every packet vanish before the kernel answers it, as a
dead cable would; a disconnect sends a reset to the other end.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

PIDFD_GETFD: Final = 438
SO_ATTACH_FILTER: Final = 26
PROBES: Final = 3
"""Offset at which `struct tcp_info` counts questions without an answer."""
UNACKED: Final = 24
"""Offset at which it counts packets that were not confirmed."""
BYTES_ACKED: Final = 120
"""Offset at which it counts bytes that arrived at the other end; those received follow."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Connection:
    """A TCP connection between two processes, by both its ends."""

    ends: tuple[socket.socket, socket.socket]

    @property
    def traffic(self) -> int:
        """Bytes it has carried."""
        info = self.ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return sum(struct.unpack_from("QQ", info, BYTES_ACKED))

    def silence(self) -> None:
        """Makes its packets vanish, both ways."""
        for end in self.ends:
            refuse = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
            program = struct.pack("HL", 1, ctypes.addressof(refuse))
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    @property
    def waits(self) -> bool:
        """Whether either end has sent what the other did not confirm."""
        infos = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for end in self.ends]
        return any(info[PROBES] or struct.unpack_from("I", info, UNACKED)[0] for info in infos)

    def reset(self) -> None:
        """Breaks it, as a host does that has forgotten it."""
        nowhere = ctypes.create_string_buffer(struct.pack("H14x", socket.AF_UNSPEC))
        if _libc.connect(self.ends[0].fileno(), nowhere, 16) != 0:
            raise OSError(ctypes.get_errno(), "disconnect")

    def close(self) -> None:
        """Forgets it; the connection itself stays."""
        for end in self.ends:
            end.close()


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of a process's TCP sockets."""
    pidfd = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not str(entry.readlink()).startswith("socket:"):
                    continue
            except OSError:
                continue  # closed meanwhile
            copy = _libc.syscall(PIDFD_GETFD, pidfd, int(entry.name), 0)
            if copy < 0:
                if ctypes.get_errno() == 1:
                    pytest.skip(
                        "this system lets no process reach the sockets of its children "
                        "(pidfd_getfd)"
                    )
                continue
            found = socket.socket(fileno=copy)
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
            ):
                yield found
            else:
                found.close()
    finally:
        os.close(pidfd)


def _address(name: tuple[str, int]) -> tuple[str, int]:
    return name[0].removeprefix("::ffff:"), name[1]


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns the addresses on which a process listens."""
    found = []
    for one in _sockets(pid):
        with one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(_address(one.getsockname()))
    return found


class Connections:
    """The connections between some processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.of: dict[tuple[int, int], list[Connection]] = {}
        half: dict[tuple[tuple[str, int], tuple[str, int]], tuple[int, socket.socket]] = {}
        for rank, pid in enumerate(pids):
            for one in _sockets(pid):
                try:
                    near, far = _address(one.getsockname()), _address(one.getpeername())
                except OSError:
                    one.close()  # it listens, or has ended
                    continue
                other = half.pop((far, near), None)
                if other is None:
                    half[near, far] = rank, one
                else:
                    self.of.setdefault((other[0], rank), []).append(Connection((other[1], one)))
        for _, one in half.values():
            one.close()

    def busiest(self, rank: int) -> tuple[tuple[int, int], Connection]:
        """The connection of a rank that has carried most, and the two it connects."""
        own = [(pair, one) for pair, all_of in self.of.items() if rank in pair for one in all_of]
        return max(own, key=lambda entry: entry[1].traffic)

    def across(self, ranks: Collection[int]) -> list[Connection]:
        """Every connection between these ranks and the others."""
        return [
            one
            for pair, all_of in self.of.items()
            if (pair[0] in ranks) != (pair[1] in ranks)
            for one in all_of
        ]

    def close(self) -> None:
        """Forgets all."""
        for all_of in self.of.values():
            for one in all_of:
                one.close()
