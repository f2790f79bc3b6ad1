# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Two hosts with a hostile network: every connection between them ends at a relay, which does harm.

The hosts are network namespaces, each joined to a namespace of the relay's that has the other
host's address. The relay accepts what rank 1 dials, dials rank 0 with rank 1's address, and
forwards bytes; nothing tells it from the other host.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.launch.namespace_cluster import Hold, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADDRESSES: Final = ("10.231.79.1", "10.231.79.2")
"""Addresses of the hosts of rank 0 and rank 1."""
PORTS: Final = range(47100, 47110)
"""The first is the registrar's, the others are for links."""
DIALER, ACCEPTOR = 0, 1
HANDSHAKE: Final = (144 + 32, 110 + 34)
"""Bytes of a handshake from the dialer and from the acceptor."""
HELLO: Final = b"farandol"
LINK, BEAT = 1, 3
"""Carriers in a hello."""


@dataclass(frozen=True)
class Harm:
    """A change to the bytes that one side of a connection sends."""

    carrier: int
    """On connections of this carrier, in the order in which they are made until it was done
    once.
    """
    side: int
    """Sender of the bytes: the dialer or the acceptor."""
    offset: int
    """Bytes after the handshake that are forwarded as they are."""
    length: int
    """Bytes after the offset that are held back until all are there."""
    does: Callable[[bytes], bytes]
    """Takes them and gives those that are sent in their place."""


@dataclass
class Relay:
    """Forwards connections between the two hosts."""

    holds: tuple[Hold, Hold]
    harm: Harm | None
    harmed: list[int] = field(default_factory=list)
    """The ports of connections to which harm was done."""
    seen: set[int] = field(default_factory=set)
    """The carriers of connections that were made."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    sockets: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Listens on every port that rank 1 may dial."""
        ready = threading.Barrier(len(PORTS) + 1)
        for port in PORTS:
            self.run(self.accept, port, ready)
        ready.wait(30)

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def keep(self, one: socket.socket) -> socket.socket:
        with self.lock:
            self.sockets.append(one)
        return one

    def accept(self, port: int, ready: threading.Barrier) -> None:
        enter(self.holds[1])
        door = self.keep(socket.create_server((ADDRESSES[0], port), backlog=64))
        ready.wait(30)
        with suppress(OSError):
            while True:
                near = self.keep(door.accept()[0])
                self.run(self.forward, near, port)

    def forward(self, near: socket.socket, port: int) -> None:
        enter(self.holds[0])
        try:
            far = self.keep(
                socket.create_connection((ADDRESSES[0], port), 30, source_address=(ADDRESSES[1], 0))
            )
        except OSError:
            near.close()
            return
        far.settimeout(None)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = near.recv(11, socket.MSG_PEEK | socket.MSG_WAITALL)
        carrier = first[10] if first.startswith(HELLO) and len(first) == 11 else 0
        self.seen.add(carrier)
        harm = self.harm if self.harm is not None and self.harm.carrier == carrier else None
        for side, (source, target) in enumerate(((near, far), (far, near))):
            self.run(
                self.pump,
                source,
                target,
                side,
                harm if harm is not None and harm.side == side else None,
                port,
            )

    def pump(
        self, source: socket.socket, target: socket.socket, side: int, harm: Harm | None, port: int
    ) -> None:
        with suppress(OSError):
            if harm is not None:
                forward(source, target, HANDSHAKE[side] + harm.offset)
                part = exactly(source, harm.length)
                with self.lock:
                    mine = not self.harmed and len(part) == harm.length
                    if mine:
                        self.harmed.append(port)
                target.sendall(harm.does(part) if mine else part)
            while got := source.recv(1 << 16):
                target.sendall(got)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Ends all connections and threads."""
        while any(thread.is_alive() for thread in self.threads):
            with self.lock:
                sockets = list(self.sockets)
            for one in sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            for thread in list(self.threads):
                thread.join(0.2)


def exactly(source: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer where the connection ends before."""
    parts = bytearray()
    while len(parts) < length and (got := source.recv(length - len(parts))):
        parts += got
    return bytes(parts)


def forward(source: socket.socket, target: socket.socket, length: int) -> None:
    """Hands on so many bytes as they come."""
    while length and (got := source.recv(min(length, 1 << 16))):
        target.sendall(got)
        length -= len(got)


def enter(hold: Hold) -> None:
    """This thread makes its sockets in the namespace from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/proc/{hold.pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(space)


@contextmanager
def hosts(harm: Harm | None) -> Iterator[tuple[Relay, list[list[str]]]]:
    """The relay, and the words before a command that run it on the host of each rank."""
    places = [Hold("--net", "--uts", "--ipc") for _ in range(4)]
    ranks, relays = places[:2], places[2:]
    try:
        for rank, (host, relay) in enumerate(zip(ranks, relays, strict=True)):
            name = [f"fd{os.getpid() % 100000}{end}{rank}" for end in "hr"]
            checked(["ip", "link", "add", name[0], "type", "veth", "peer", "name", name[1]])
            for link, hold, address in zip(
                name, (host, relay), (ADDRESSES[rank], ADDRESSES[1 - rank]), strict=True
            ):
                checked(["ip", "link", "set", link, "netns", str(hold.pid)])
                inside = hold.inside("--net")
                checked([*inside, "ip", "link", "set", link, "name", "eth0"])
                checked([*inside, "ip", "address", "add", f"{address}/24", "dev", "eth0"])
                checked([*inside, "ip", "link", "set", "eth0", "up"])
                checked([*inside, "ip", "link", "set", "lo", "up"])
            checked([*host.inside("--uts"), "hostname", f"host-{rank}"])
        relay = Relay((relays[0], relays[1]), harm)
        try:
            relay.start()
            yield relay, [host.inside("--net", "--uts", "--ipc") for host in ranks]
        finally:
            relay.end()
    finally:
        for place in places:
            place.end()
