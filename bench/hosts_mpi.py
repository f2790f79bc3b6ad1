# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce among several hosts next to Open MPI: `farandole run` and `mpirun` by ssh in turns.

Hosts are namespaces of this machine, each with an sshd of its own
(tests/launch/namespace_cluster.py). Each start times calls on float32 for some seconds on rank 0; a
round is one start of each. Needs root, Debian's packages (.ci/packages) and mpi4py; writes
bench/results/hosts_mpi.json.

    .venv/bin/python bench/hosts_mpi.py [--hosts 4] [--ranks-per-host 2] [--bytes 67108864]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from saved import save

from launch import words

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.launch.namespace_cluster import NamespaceCluster, missing

TIMED = """
import json, statistics, time
import numpy as np
array = np.ones({bytes} // 4, np.float32)
times = []
{setup}
deadline = time.monotonic() + {seconds}
while more(time.monotonic() < deadline):
    array.fill(1.0)
    barrier()
    began = time.perf_counter()
    call()
    times.append((time.perf_counter() - began) * 1e6)
if rank == 0:
    assert array[0] == size, array[0]
    found = {{"p50": statistics.median(times[1:]), "least": min(times), "count": len(times)}}
    print(json.dumps(found))
{end}
"""
"""All ranks stop after the same call: rank 0 says whether there is another."""
FARANDOLE = """
import farandole.numpy as hvd
hvd.init()
rank, size, barrier = hvd.rank(), hvd.size(), hvd.barrier
call = lambda: hvd.allreduce_(array, name="bench", op=hvd.Sum)
more = lambda goes_on: bool(hvd.broadcast(np.array([goes_on]), 0, name="more")[0])
"""
MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, size, barrier = world.Get_rank(), world.Get_size(), world.Barrier
call = lambda: world.Allreduce(MPI.IN_PLACE, array)
more = lambda goes_on: world.bcast(goes_on)
"""
SETUPS = {"farandole": (FARANDOLE, "hvd.shutdown()"), "mpirun": (MPI, "")}


def once(launcher: str, cluster: NamespaceCluster, ranks: int, limit: float) -> dict[str, float]:
    """One start: what rank 0 printed."""
    env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TMPDIR": "/run/tmp"}
    running = cluster["head"].start(*words(launcher, cluster, ranks), **env)
    code = running.wait(limit)
    lines = [line[line.index("{") :] for line in running.lines if '{"p50"' in line]
    if code or len(lines) != 1:
        sys.exit(f"hosts_mpi: {launcher} ended with {code}: {running.output}")
    cluster.until_quiet()
    return json.loads(lines[0])


def measured(
    cluster: NamespaceCluster, ranks: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Medians of each start, in microseconds."""
    found: dict[str, list[float]] = {launcher: [] for launcher in SETUPS}
    for number in range(arguments.rounds):
        for launcher, medians in found.items():
            row = once(launcher, cluster, ranks, arguments.limit)
            medians.append(row["p50"])
            print(f"round {number}: {launcher:<10} {row['p50']:>10.0f} us, {row['count']} calls")
    return found


def main() -> None:
    """Measures, prints the ratio and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one start")
    parser.add_argument("--keep", action="store_true", help="leave bench/results as it is")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"hosts_mpi: skipped: {reason}")
        return
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with NamespaceCluster(
        "head", *(f"h{number}" for number in range(1, arguments.hosts + 1))
    ) as cluster:
        for name, host in cluster.hosts.items():
            if name != "head":
                host.listen()
        cluster.login(cluster["head"])
        for launcher, (setup, end) in SETUPS.items():
            program = TIMED.format(
                setup=setup, end=end, bytes=arguments.bytes, seconds=arguments.seconds
            )
            cluster.write(f"by_{launcher}.py", program)
        found = measured(cluster, arguments.hosts * arguments.ranks_per_host, arguments)
    ours, theirs = (statistics.median(found[launcher]) for launcher in ("farandole", "mpirun"))
    print(
        f"{arguments.hosts} hosts of {arguments.ranks_per_host} ranks on {os.cpu_count()} cores, "
        f"{arguments.bytes} bytes: {ours:.0f} us, {ours / theirs:.3f} x Open MPI"
    )
    if not arguments.keep:
        shape = {name: getattr(arguments, name) for name in ("hosts", "ranks_per_host", "bytes")}
        save("hosts_mpi", {**shape, "p50": found, "ratio": ours / theirs}, began=began)


if __name__ == "__main__":
    main()
