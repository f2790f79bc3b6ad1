# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Resources of a rank and the time to form a world, by hosts and ranks: counted in real processes.

Hosts are namespaces of this machine (UTS: they differ in their names), so ranks of different hosts
are linked by TCP over the loopback device. `sockets`, `descriptors`, `threads` and `resident` are
those of the rank that has most, after every rank took part in an allreduce; `formed` is the time
from the first call of `init()` to the last return. More ranks than cores take turns: times say how
this machine copes, counts hold anywhere. Needs root; writes bench/results/scale.json.

    .venv/bin/python bench/scale.py [--worlds 1x2,2x2,4x4,8x8]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from saved import save

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.started import on_host, together

RANK = """
import json, os, sys, time
import numpy as np
import farandole.numpy as hvd

def held():
    kinds = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            pass
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
        "descriptors": len(kinds),
        "threads": int(status["Threads"]),
        "resident": int(status["VmRSS"].split()[0]) // 1024,
    }

before = held()
began = time.monotonic()
hvd.init()
ended = time.monotonic()
hvd.allreduce(np.ones(1 << 18, dtype=np.float32))
after = held()
hvd.barrier()
more = {name: after[name] - before[name] for name in after}
sys.stdout.write(json.dumps({"began": began, "ended": ended, **more}))
hvd.shutdown()
"""


def measure(hosts: int, each: int) -> dict[str, Any]:
    """Counts the resources of the ranks of a world, and measures the time to form it."""
    size = hosts * each
    told = {
        "HOROVOD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
        "FARANDOLE_PEER_TIMEOUT": "30",
    }
    environments = [{**told, "HOROVOD_RANK": str(rank)} for rank in range(size)]
    ended = together(environments, RANK, [on_host(f"host-{rank // each}") for rank in range(size)])
    failed = [one.err for one in ended if one.status != 0]
    if failed:
        raise SystemExit(failed[0])
    ranks = [json.loads(one.out) for one in ended]
    most = {
        name: max(rank[name] for rank in ranks)
        for name in ("sockets", "descriptors", "threads", "resident")
    }
    formed = max(rank["ended"] for rank in ranks) - min(rank["began"] for rank in ranks)
    return {"hosts": hosts, "ranks": size, "formed": round(formed, 3), **most}


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--worlds", default="1x2,1x4,1x8,2x1,2x2,2x4,4x2,4x4,8x2,8x4")
    worlds = [tuple(map(int, world.split("x"))) for world in parser.parse_args().worlds.split(",")]
    rows = []
    for hosts, each in worlds:
        rows.append(measure(hosts, each))
        sys.stdout.write("  ".join(f"{name} {value}" for name, value in rows[-1].items()) + "\n")
        sys.stdout.flush()
    save("scale", {"worlds": rows})


if __name__ == "__main__":
    main()
