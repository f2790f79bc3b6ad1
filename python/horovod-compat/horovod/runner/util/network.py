# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Addresses of this host, and ports."""

from __future__ import annotations

import fcntl
import functools
import random
import socket
import struct
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_T = TypeVar("_T")
_SIOCGIFADDR = 0x8915
_PORTS = range(1024, 65536)


def _address(interface: str) -> str | None:
    """Returns the IPv4 address of an interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            told = fcntl.ioctl(
                asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode())
            )
        except OSError:
            return None
    return socket.inet_ntoa(told[20:24])


@functools.cache
def get_local_host_addresses() -> set[str]:
    """IPv4 addresses of this host's interfaces."""
    found = (_address(name) for _, name in socket.if_nameindex())
    return {address for address in found if address is not None}


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Interfaces whose address is 127.0.0.1.

    Args:
        nic: The only one to look at.
    """
    names = (name for _, name in socket.if_nameindex() if nic in (None, "", name))
    return {name for name in names if _address(name) == "127.0.0.1"}


def resolve_host_address(host_name: str) -> str | None:
    """Returns the IPv4 address of a host, or `None`."""
    try:
        return socket.gethostbyname(host_name)
    except OSError:
        return None


def filter_local_addresses(all_host_names: Sequence[str]) -> list[str]:
    """Returns the hosts that are not this one."""
    here = get_local_host_addresses()
    return [name for name in all_host_names if resolve_host_address(name) not in here]


def find_port(server_factory: Callable[[tuple[str, int]], _T]) -> tuple[_T, int]:
    """Makes a server on a port that is free, tried in an order of chance.

    Args:
        server_factory: Takes an address and makes the server, or raises `OSError`.

    Returns:
        The server and the port.

    Raises:
        OSError: There is no such port.
    """
    first = random.randrange(len(_PORTS))  # noqa: S311 - no secret
    for port in (*_PORTS[first:], *_PORTS[:first]):
        try:
            return server_factory(("", port)), port
        except OSError:
            continue
    raise OSError("no port is free to listen on")


def get_driver_ip(nics: Iterable[str]) -> str:
    """Returns the IPv4 address of the first of several interfaces.

    Raises:
        RuntimeError: It has none.
    """
    name = next(iter(nics))
    address = _address(name)
    if address is None:
        raise RuntimeError(f"the interface has no IPv4 address: {name}")
    return address
