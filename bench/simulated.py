# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduces between hosts that are network namespaces, next to what `farandole simulate` says of
them.

First the latency and the bandwidth of a TCP connection between two namespaces are measured, and
what a core copies. With these, each allreduce is simulated, and then measured as bench/netns.sh
measures it. A simulated rank has a core of its own, so worlds should have no more ranks than this
machine has cores. Writes bench/results/simulated.json.

    bench/simulated.sh [--hosts 2] [--ranks-per-host 1] [--rates 2gbit] [--sizes 4 1048576 67108864] [--keep]
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import netns
from allreduce import human
from saved import save

PORT = 7077
PINGS = 2000
PING = 64
BLOCK = 1 << 20
SECONDS = 2.0
SEALING = 0.03e-9
"""Seconds of a core for each byte that one end seals or opens:
docs/developer-guide/network-security.md.
"""


def received(connection: socket.socket, count: int) -> None:
    """Takes so many bytes."""
    while count > 0:
        part = connection.recv(min(count, BLOCK))
        if not part:
            sys.exit("simulated: the other end is gone")
        count -= len(part)


def answer() -> None:
    """The first host: sends pings back, then counts bytes until the end and says that it has
    them.
    """
    with (
        socket.create_server((f"{netns.SUBNET}.1", PORT)) as server,
        server.accept()[0] as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            received(connection, PING)
            connection.sendall(bytes(PING))
        while connection.recv(BLOCK):
            pass
        connection.sendall(b"!")


def reached() -> socket.socket:
    """A connection to the first host, which may still be on its way up."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((f"{netns.SUBNET}.1", PORT), timeout=20)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ask() -> dict[str, float]:
    """The second host: seconds one way, and bytes per second."""
    with reached() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(bytes(PING))
            received(connection, PING)
            times.append(time.perf_counter() - began)
        sent, block, began = 0, bytes(BLOCK), time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            connection.sendall(block)
            sent += BLOCK
        connection.shutdown(socket.SHUT_WR)
        received(connection, 1)
        return {
            "latency": statistics.median(times) / 2,
            "bandwidth": sent / (time.perf_counter() - began),
        }


def link(rate: str) -> dict[str, float]:
    """Measures a connection between two namespaces."""
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(netns.Host(number, ["--rate", rate], __file__))
            for number in range(2)
        ]
        for host in hosts:
            host.start("go")
        found = next((line for line in hosts[1].lines() if line.startswith("{")), "")
        for host in hosts:
            host.process.wait(60)
    if not found:
        sys.exit("simulated: the link could not be measured")
    return json.loads(found)


def copied() -> float:
    """Bytes per second that a core copies, of blocks that no cache holds."""
    source, target = bytearray(64 << 20), memoryview(bytearray(64 << 20))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return len(source) / statistics.median(times)


def simulated(
    hosts: int, each: int, facts: dict[str, float], sizes: list[int]
) -> list[dict[str, Any]]:
    """Returns the rows that the command prints."""
    options = {
        "ranks": hosts * each,
        "hosts": hosts,
        "bandwidth": facts["bandwidth"] * 8 / 1e9,
        "latency": facts["latency"] * 1e6,
        "copy-rate": facts["copy"] / 1e9,
        "socket-rate": facts["socket"] / 1e9,
        # Bytes of a connection were measured, without headers.
        "mtu": 65535,
        "bytes": ",".join(map(str, sizes)),
    }
    words = [sys.executable, "-m", "farandole", "simulate", "--json"]
    words += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"simulated: {done.stderr.strip()}")
    return json.loads(done.stdout)["allreduces"]


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="namespaces")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--rates", nargs="+", default=["2gbit"], help="what tc shapes each host to; 0: nothing"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[4, 1 << 20, 64 << 20], help="bytes of float32"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="time for each library at each size"
    )
    parser.add_argument("--keep", action="store_true", help="print only, and write no file")
    for own in ("--agent", "--rate"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent is not None:
        number = int(arguments.agent)
        if netns.plugged(number, arguments.rate)[0]:
            if number == 0:
                answer()
            else:
                print(json.dumps(ask()), flush=True)
        return
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("simulated: ended by SIGTERM"))
    netns.bridge()
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # A core sends at the rate of an unshaped connection, less the time of sealing.
    socket_rate = 1 / (1 / link("0")["bandwidth"] + SEALING)
    rows = []
    for rate in arguments.rates:
        facts = {**link(rate), "copy": copied(), "socket": socket_rate}
        told = simulated(arguments.hosts, arguments.ranks_per_host, facts, arguments.sizes)
        measured = netns.run(arguments.hosts, rate, arguments)
        print(
            f"\n{facts['latency'] * 1e6:.1f} us, {facts['bandwidth'] * 8 / 1e9:.2f} Gbit/s, a "
            "core copies",
            end=" ",
        )
        print(f"{facts['copy'] / 1e9:.1f} GB/s and sends {socket_rate / 1e9:.1f} GB/s")
        print(f"{'size':>8} {'measured us':>12} {'simulated us':>13}  simulated / measured")
        for row, answered in zip(measured, told, strict=True):
            times = (row["farandole"]["p50"], answered["seconds"] * 1e6)
            print(
                f"{human(row['bytes']):>8} {times[0]:>12.1f} {times[1]:>13.1f}  "
                f"{times[1] / times[0]:.2f}"
            )
            rows.append({**row, "facts": facts, "simulated": answered})
    if not arguments.keep:
        save("simulated", {"rows": rows}, began=began)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("simulated: interrupted")
