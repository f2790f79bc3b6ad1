# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Time until a rank gets the error of a peer that died or stopped, compared with torch.distributed
on Gloo.

Two ranks on one host add up 4 MiB again and again; after a second, rank 1 sends itself SIGKILL or
SIGSTOP, and rank 0 notes when its call raises. Gloo's own limit for a silent peer is 30 minutes, so
it is not waited for there. Prints milliseconds, and writes them to bench/results/failures.json.

    python bench/failures.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from saved import save

CASES = [("SIGKILL", "farandole"), ("SIGKILL", "gloo"), ("SIGSTOP", "farandole")]


def work(library: str, fault: str, folder: Path) -> None:
    """One rank."""
    import torch  # noqa: PLC0415 - only ranks need it

    # the launcher ends survivors, which have still to note the time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tensor = torch.ones(1 << 20)
    if library == "gloo":
        import torch.distributed as dist  # noqa: PLC0415

        rank = int(os.environ["RANK"])
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
        )

        def call() -> None:
            dist.all_reduce(tensor)
    else:
        import farandole.torch as hvd  # noqa: PLC0415

        hvd.init()
        rank = hvd.rank()

        def call() -> None:
            hvd.allreduce_(tensor, name="step")

    began = time.monotonic()
    while rank == 0 or time.monotonic() < began + 1:
        try:
            tensor.fill_(1.0)
            call()
        except RuntimeError as error:
            (folder / "heard").write_text(json.dumps([time.monotonic(), str(error)]))
            os._exit(1)
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "began").write_text(str(time.monotonic()))
    os.kill(os.getpid(), getattr(signal, fault))


def trial(library: str, fault: str) -> tuple[float, str]:
    """Seconds from the fault to the error at rank 0, and its text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--worker", library, fault, name]
        ranks = [{"RANK": "0"}, {"RANK": "1"}]
        if library == "farandole":
            command = [sys.executable, "-m", "farandole", "run", "-np", "2", *command]
            ranks = [{}]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **rank},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in ranks
        ]
        deadline = time.monotonic() + timedelta(minutes=2).total_seconds()
        while not (folder / "heard").exists() or not (folder / "heard").stat().st_size:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        with suppress(OSError, ValueError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        for process in started:
            process.wait(60)
        at, text = json.loads((folder / "heard").read_text())
        return at - float((folder / "began").read_text()), text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="trials of each")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        library, fault, folder = arguments.worker
        work(library, fault, Path(folder))
        return
    rows = []
    print(
        f"{'fault':<8} {'library':<10} {'median':>8} {'worst':>8}  milliseconds from the fault to "
        "the peer's error"
    )
    for fault, library in CASES:
        trials = [trial(library, fault) for _ in range(arguments.repeat)]
        times = [seconds * 1e3 for seconds, _ in trials]
        print(
            f"{fault:<8} {library:<10} {statistics.median(times):>8.1f} {max(times):>8.1f}  "
            f"{trials[0][1][:90]}"
        )
        rows.append({"fault": fault, "library": library, "milliseconds": times})
    save("failures", {"rows": rows})


if __name__ == "__main__":
    main()
