# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Time until 64 workers on 4 hosts are up: `farandole run` next to `mpirun`, both by ssh, on the
same hosts.

Hosts are namespaces of this machine, each with an sshd of its own
(tests/launch/namespace_cluster.py). `up` is the time from the start of the launcher until the last
worker has passed a barrier of all. The workers' programs import the same; `imports` is what that
alone takes: as many processes on the same hosts, started by a shell loop, until the last has
imported. All take turns. Needs root and Debian's packages (.ci/packages); writes
bench/results/launch.json.

    .venv/bin/python bench/launch.py [--workers 64] [--hosts 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saved import save

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.launch.namespace_cluster import NamespaceCluster, missing

if TYPE_CHECKING:
    from tests.launch.namespace_cluster import Running

# The clock is one for all namespaces of a machine.
IMPORTS = """
import time
began = time.monotonic()
import json, os, numpy
import farandole.numpy as hvd
imported = time.monotonic()
"""
TELL = """
print(json.dumps({"began": began, "imported": imported, "up": time.monotonic()}), flush=True)
"""
FARANDOLE = "hvd.init()\nhvd.barrier()\n"
MPI = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
if mpi.MPI_Init(None, None) or mpi.MPI_Barrier(world):
    raise SystemExit("no MPI")
"""
PROGRAMS = {
    "imports": IMPORTS + TELL,
    "farandole": IMPORTS + FARANDOLE + TELL + "hvd.shutdown()\n",
    "mpirun": IMPORTS + MPI + TELL + "mpi.MPI_Finalize()\n",
}


def words(launcher: str, cluster: NamespaceCluster, workers: int) -> list[object]:
    """The command that starts the workers, and ends when they have ended."""
    names = [name for name in cluster.hosts if name != "head"]
    each = workers // len(names)
    hosts = ",".join(f"{name}:{each}" for name in names)
    program = [sys.executable, f"by_{launcher}.py"]
    if launcher == "farandole":
        return [sys.executable, "-m", "farandole", "run", "-np", workers, "-H", hosts, *program]
    # `mpirun` needs an option for more processes than cores: otherwise they would spin in each
    # other's way. It forwards no variable by itself.
    flags = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "--mca",
        "mpi_yield_when_idle",
        "1",
    ]
    flags += ["--mca", "btl", "self,vader,tcp"]
    flags += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    forwarded = [word for name in ("OPENBLAS_NUM_THREADS", "PYTHONPATH") for word in ("-x", name)]
    return ["mpirun", *flags, "-np", workers, "-H", hosts, *forwarded, *program]


def stamps(running: list[Running]) -> list[dict[str, float]]:
    """Returns the times that workers printed, without the prefixes of their launcher."""
    lines = (line for one in running for line in one.lines if "{" in line)
    return [json.loads(line[line.index("{") :]) for line in lines]


def once(launcher: str, cluster: NamespaceCluster, workers: int, limit: float) -> dict[str, float]:
    """One start: seconds until all are up, and what the workers say of themselves."""
    env = {"OPENBLAS_NUM_THREADS": "1", "TMPDIR": "/run/tmp"}
    began = time.monotonic()
    if launcher == "imports":
        hosts = [host for name, host in cluster.hosts.items() if name != "head"]
        loop = f'for _ in $(seq {workers // len(hosts)}); do "$@" & done; wait'
        program = [sys.executable, "by_imports.py"]
        running = [host.start("sh", "-c", loop, "sh", *program, **env) for host in hosts]
    else:
        running = [cluster["head"].start(*words(launcher, cluster, workers), **env)]
    codes = [one.wait(limit) for one in running]
    found = stamps(running)
    if any(codes) or len(found) != workers:
        sys.exit(
            f"launch: {launcher}: {len(found)} of {workers} workers: "
            f"{''.join(one.output for one in running)}"
        )
    cluster.until_quiet()
    return {
        "first": min(stamp["began"] for stamp in found) - began,
        "imported": max(stamp["imported"] for stamp in found) - began,
        "up": max(stamp["up"] for stamp in found) - began,
        "ended": time.monotonic() - began,
    }


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each time."""
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def main() -> None:
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that one start may take"
    )
    parser.add_argument("--keep", action="store_true", help="leave bench/results as it is")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"launch: skipped: {reason}")
        return
    if arguments.workers % arguments.hosts:
        parser.error("the workers must be a multiple of the hosts")
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    with NamespaceCluster(
        "head", *(f"h{number}" for number in range(1, arguments.hosts + 1))
    ) as cluster:
        for name, host in cluster.hosts.items():
            if name != "head":
                host.listen()
        cluster.login(cluster["head"])
        if cluster["head"].run("mpirun", "--version").returncode != 0:
            print("launch: without mpirun (Debian: apt-get install openmpi-bin)")
            del rows["mpirun"]
        for name in rows:
            cluster.write(f"by_{name}.py", PROGRAMS[name])
        for _ in range(arguments.rounds):
            for name, found in rows.items():
                found.append(once(name, cluster, arguments.workers, arguments.limit))
    show(arguments.workers, arguments.hosts, rows)
    if not arguments.keep:
        results: dict[str, Any] = {
            "workers": arguments.workers,
            "hosts": arguments.hosts,
            "rounds": rows,
        }
        save("launch", results, began=began)


def show(workers: int, hosts: int, rows: dict[str, list[dict[str, float]]]) -> None:
    """Prints the table: medians, and what is beyond the imports."""
    alone = middle(rows["imports"])["up"]
    print(
        f"\n{workers} workers on {hosts} hosts, {os.cpu_count()} cores, {len(rows['imports'])} "
        "rounds (seconds)"
    )
    print(f"{'':<10} {'first':>7} {'imported':>9} {'up':>7} {'ended':>7} {'beyond imports':>15}")
    for name, found in rows.items():
        row = middle(found)
        beyond = "" if name == "imports" else f"{row['up'] - alone:.2f}"
        times = (
            f"{row['first']:>7.2f} {row['imported']:>9.2f} {row['up']:>7.2f} {row['ended']:>7.2f}"
        )
        print(f"{name:<10} {times} {beyond:>15}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("launch: interrupted")
