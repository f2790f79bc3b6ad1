# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce between hosts that are network namespaces, next to torch Gloo in the same processes.

Every host has a network, IPC and host-name namespace of its own and a veth pair to a bridge in this
process's namespace, where the registrar listens. Worlds run at the speed of the machine, then
shaped by `tc tbf`. Rows alternate between the two libraries, and from 64 KiB on float32 that
travels as bfloat16 (`Compression.bf16`). `cpu` is the processor time of one call in milliseconds,
over all ranks. Writes bench/results/netns.json.

    bench/netns.sh [--hosts 2 4] [--ranks-per-host 1] [--rates 0 2gbit] [--sizes 1024 67108864] [--seconds 2]
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from allreduce import human, summary, turn
from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUBNET = "10.231.77"
HUB = 254
ROUNDS = 5
"""Turns of each library per size."""
COMPRESSED_FROM = 64 << 10
"""Bytes from which on float32 is also sent as bfloat16."""


def command(*words: str) -> None:
    """Runs a program that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"netns: {' '.join(words)}: {done.stderr.strip()}")


def bridge() -> None:
    """The switch of all hosts, in this process's own namespace."""
    command("ip", "link", "set", "lo", "up")
    command("ip", "link", "add", "br0", "type", "bridge")
    command("ip", "address", "add", f"{SUBNET}.{HUB}/24", "dev", "br0")
    command("ip", "link", "set", "br0", "up")


class Host:
    """A namespace with one agent process in it, which runs the ranks of this host."""

    def __init__(self, number: int, arguments: list[str], script: str = __file__) -> None:
        """Starts the process of `script` and plugs its cable in; it runs nothing before `start`."""
        self.number = number
        own = [
            "unshare",
            "--net",
            "--ipc",
            "--uts",
            "--",
            sys.executable,
            script,
            "--agent",
            str(number),
        ]
        self.process = subprocess.Popen(
            [*own, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # Its first line says that it is in its namespaces.
        if next(self.lines(), "") != "ready":
            sys.exit("netns: no namespace for a host")
        near, far = f"port{number}", f"eth{number}"
        command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        command("ip", "link", "set", far, "netns", str(self.process.pid))
        command("ip", "link", "set", near, "master", "br0")
        command("ip", "link", "set", near, "up")

    def start(self, ticket: str) -> None:
        """Hands the job's ticket over, on which the ranks start."""
        assert self.process.stdin is not None
        self.process.stdin.write(ticket + "\n")
        self.process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Returns the lines that the agent and its ranks print."""
        assert self.process.stdout is not None
        return (line.rstrip("\n") for line in self.process.stdout)

    def __enter__(self) -> Self:
        """As it is."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, and with it its namespaces."""
        self.process.kill()
        self.process.wait()
        # The other end goes with its namespace, which the kernel ends at its leisure.
        subprocess.run(
            ["ip", "link", "delete", f"port{self.number}"], check=False, capture_output=True
        )


def plugged(number: int, rate: str) -> tuple[str, str]:
    """In the process of a host: says that it is there, and brings its network up; the line it
    got, and its card.
    """
    command("hostname", f"host{number}")
    print("ready", flush=True)
    line = sys.stdin.readline().strip()
    card = f"eth{number}"
    if line:
        command("ip", "link", "set", "lo", "up")
        command("ip", "address", "add", f"{SUBNET}.{number + 1}/24", "dev", card)
        command("ip", "link", "set", card, "up")
        if rate != "0":
            command(
                "tc",
                "qdisc",
                "add",
                "dev",
                card,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "512kb",
                "latency",
                "20ms",
            )
    return line, card


def run_world(
    hosts: int, options: list[str], ranks_per_host: int = 1, script: str = __file__
) -> Iterator[str]:
    """Runs a world of hosts and returns the lines of the first one.

    Args:
        hosts: Number of hosts.
        options: Options of the processes of hosts.
        ranks_per_host: Ranks of each host.
        script: The script that hosts run.
    """
    from farandole._native.registrar import Registrar  # noqa: PLC0415 - needed here only

    with ExitStack() as stack:
        size = hosts * ranks_per_host
        registrar = stack.enter_context(Registrar(size, host=f"{SUBNET}.{HUB}"))
        worlds = [stack.enter_context(Host(number, options, script)) for number in range(hosts)]
        for host in worlds:
            host.start(registrar.ticket)
        yield from worlds[0].lines()
        codes = [host.process.wait(60) for host in worlds]
    if any(codes):
        sys.exit(f"{Path(script).stem}: hosts ended with {codes}")


def run_ranks(
    number: int, rate: str, worker: list[str], ranks_per_host: int = 1, *, card_option: str = ""
) -> None:
    """Runs the ranks of a host, in its process.

    Args:
        number: Number of the host.
        rate: What `tc` shapes the host to; "0" for nothing.
        worker: The script of a rank, and its options.
        ranks_per_host: Ranks of each host.
        card_option: Option of a rank for the name of the host's card, if it has one.
    """
    from farandole._native.launcher import run_agent  # noqa: PLC0415 - needed here only

    ticket, card = plugged(number, rate)
    if not ticket:
        return
    env: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": card}
    command_line = [sys.executable, *worker, *([card_option, card] if card_option else [])]
    ranks = range(number * ranks_per_host, (number + 1) * ranks_per_host)
    with ThreadPoolExecutor(ranks_per_host) as pool:
        runs = [
            pool.submit(run_agent, ticket, rank, command_line, env=env, stream_output=False)
            for rank in ranks
        ]
        outcomes = [run.result() for run in runs]
    for outcome in outcomes:
        if outcome.exit_code != 0:
            name = Path(worker[0]).stem
            sys.exit(f"{name}: rank {outcome.rank}: {outcome.reason}\n{outcome.stderr_tail}")


def cpu() -> float:
    """Processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(sizes: list[int], seconds: float) -> None:
    """One rank: measures every size; rank 0 prints one line of JSON per size."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    import farandole.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for size in sizes:
        tensor = torch.ones(size // 4)
        name = f"bench.{size}"
        calls: dict[str, Callable[[], object]] = {
            "farandole": lambda tensor=tensor, name=name: hvd.allreduce_(
                tensor, name=name, op=hvd.Sum
            ),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
        }
        if size >= COMPRESSED_FROM:
            calls["bf16"] = lambda tensor=tensor, name=name: hvd.allreduce(
                tensor, name=f"{name}.bf16", op=hvd.Sum, compression=hvd.Compression.bf16
            )
        counts = {}
        for library, call in calls.items():
            # Ranks must agree on the number of calls: rank 0 decides by what one call takes.
            once = hvd.broadcast_object(statistics.median(turn(call, 3)))
            counts[library] = max(3, min(2000, int(seconds / ROUNDS / max(once, 1e-6))))
        times: dict[str, list[float]] = {library: [] for library in calls}
        spent = dict.fromkeys(calls, 0.0)
        for _ in range(ROUNDS):
            for library, call in calls.items():
                tensor.fill_(1.0)
                dist.barrier()
                before = cpu()
                times[library] += turn(call, counts[library])
                spent[library] += (
                    (cpu() - before) / (counts[library] + min(20, counts[library])) / ROUNDS
                )
                if library != "bf16" and not bool((tensor[: 1 << 10] > 1.0).all()):
                    sys.exit("netns: a wrong sum")
        total = torch.tensor([spent[library] * 1e3 for library in calls], dtype=torch.float64)
        dist.all_reduce(total)
        if hvd.rank() == 0:
            row: dict[str, Any] = {"bytes": size}
            for at, library in enumerate(calls):
                row[library] = {**summary(times[library]), "cpu_ms": float(total[at])}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


def run(hosts: int, rate: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures in a world of hosts and prints its rows."""
    each = arguments.ranks_per_host
    shaped = "unshaped" if rate == "0" else rate
    print(
        f"\n{hosts} hosts of {each} ranks on {os.cpu_count()} cores, {shaped} (microseconds; cpu "
        "in milliseconds)"
    )
    print(
        f"{'size':>8}  {'library':<9} {'calls':>6} {'min':>9} {'p50':>9} {'p99':>9} {'cpu':>8} "
        f"{'GB/s':>6}  ratio"
    )
    options = ["--rate", rate, "--ranks-per-host", str(each)]
    options += ["--seconds", str(arguments.seconds), "--sizes", *map(str, arguments.sizes)]
    rows = []
    for line in run_world(hosts, options, each):
        if not line.startswith("{"):
            print(line)
            continue
        row = {"hosts": hosts, "ranks_per_host": each, "rate": rate, **json.loads(line)}
        rows.append(row)
        show(row)
    if len(rows) != len(arguments.sizes):
        sys.exit("netns: rows are missing")
    return rows


def show(row: dict[str, Any]) -> None:
    """Prints one row of each library, and the ratio of medians."""
    row["ratio"] = row["farandole"]["p50"] / row["gloo"]["p50"]
    for library in ("farandole", "gloo", "bf16"):
        if library not in row:
            continue
        times = row[library]
        numbers = " ".join(f"{times[key]:>9.1f}" for key in ("min", "p50", "p99"))
        speed = row["bytes"] / times["p50"] / 1e3
        tail = f"  {row['ratio']:.3f} x gloo" if library == "farandole" else ""
        if library == "bf16":
            row["of_float32"] = times["p50"] / row["farandole"]["p50"]
            tail = f"  {row['of_float32']:.3f} x float32"
        count = f"{human(row['bytes']):>8}  {library:<9} {times['count']:>6}"
        print(f"{count} {numbers} {times['cpu_ms']:>8.2f} {speed:>6.2f}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="sizes of the world")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--rates", nargs="+", default=["0", "2gbit"], help="what tc shapes each host to; 0: nothing"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1 << 10, 64 << 20], help="bytes of float32"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="time for each library at each size"
    )
    parser.add_argument("--keep", action="store_true", help="print only, and write no file")
    for own in ("--agent", "--rate"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.sizes, arguments.seconds)
        return
    if arguments.agent is not None:
        worker = [__file__, "--worker", "--seconds", str(arguments.seconds)]
        worker += ["--sizes", *map(str, arguments.sizes)]
        run_ranks(int(arguments.agent), arguments.rate, worker, arguments.ranks_per_host)
        return
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("netns: ended by SIGTERM"))
    bridge()
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows = [
        row
        for hosts in arguments.hosts
        for rate in arguments.rates
        for row in run(hosts, rate, arguments)
    ]
    if not arguments.keep:
        save("netns", {"rows": rows}, began=began)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("netns: interrupted")
