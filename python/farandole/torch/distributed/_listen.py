# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where a rank may listen: `FARANDOLE_BIND_ADDRESS` and `FARANDOLE_PORT_RANGE` for sockets that are not the core's."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_LAST_PORT: Final = 0xFFFF
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR: asks for the IPv4 address of an interface."""


def listener(*, one_host: bool) -> tuple[socket.socket, str]:
    """A listening socket, and the address by which other ranks reach it.

    Args:
        one_host: whether all ranks are on this host: then it listens on loopback alone.

    Raises:
        ValueError: a variable is no address, no network of this host or no range of ports; the message names it.
        OSError: every port of the range is taken.
    """
    if one_host:
        return _listen(_LOOPBACK), _LOOPBACK
    wish = _told("BIND_ADDRESS")
    if wish:
        address = _address(wish)
        return _listen(address), address
    return _listen(""), os.environ.get("MASTER_ADDR") or socket.gethostname()


def _told(name: str) -> str:
    return os.environ.get(f"FARANDOLE_{name}") or os.environ.get(f"HOROVOD_{name}") or ""


def _listen(address: str) -> socket.socket:
    first, last = _ports()
    failure: OSError | None = None
    for port in range(first, last + 1):
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(2048)
        except OSError as error:
            made.close()
            failure = error
        else:
            return made
    raise OSError(f"no port from {first} to {last} can be listened on at {address or 'any address'}: {failure}")


def _ports() -> tuple[int, int]:
    text = _told("PORT_RANGE") or "0"
    head, _, tail = text.partition("-")
    try:
        first, last = int(head), int(tail or head)
    except ValueError:
        raise ValueError(f"FARANDOLE_PORT_RANGE is a port or a range such as 40000-40100: {text}") from None
    if not 0 <= first <= last <= _LAST_PORT:
        raise ValueError(f"FARANDOLE_PORT_RANGE is a port or a range such as 40000-40100: {text}")
    return first, last


def _address(wish: str) -> str:
    """The address that is meant, or this host's in the network that is."""
    try:
        network = ipaddress.ip_network(wish.strip("[]"))
    except ValueError:
        raise ValueError(f"FARANDOLE_BIND_ADDRESS is an address or a network such as 10.0.0.0/8: {wish}") from None
    if network.num_addresses == 1:
        return str(network.network_address)
    for address in _own_addresses():
        if ipaddress.ip_address(address) in network:
            return address
    raise ValueError(f"this host has no address in the network of FARANDOLE_BIND_ADDRESS: {wish}")


def _own_addresses() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                told = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return found
