# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits one after the other in this process, as in a notebook that lives for weeks; prints what the
process holds.

    python -m tests.trust.soak FOLDER FITS EVERY [COLD]

Of four fits one succeeds with two ranks, one fails in a worker, one is interrupted by the user, one
has a single rank. Workers start warm, but for one fit of COLD, which starts them the long way. A
line of JSON for every EVERY fits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
from tests.single.training import fit, line, linear, write

import farandole.torch as hvd
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend

SHARED = Path("/dev/shm")


def failing(driver, output, label):
    """A loss that raises in the first step; the driver tries losses first, where it does not."""
    if os.getpid() == driver:
        return torch.nn.functional.mse_loss(output, label)
    raise ArithmeticError("this loss always fails")


def interrupting(driver, output, label):
    """A loss by which the user of the driver presses Ctrl-C while the fit trains."""
    if os.getpid() == driver:
        return torch.nn.functional.mse_loss(output, label)
    if hvd.rank() == 0:
        os.kill(driver, signal.SIGINT)
    while True:
        signal.pause()


def run_fit(folder, kind, backends):
    """One fit; whether it ended as it should."""
    if kind == 1:
        try:
            fit(
                folder,
                linear(),
                backend=backends[2],
                epochs=1,
                loss=functools.partial(failing, os.getpid()),
            )
        except FarandoleJobError as error:
            return "this loss always fails" in str(error)
        return False
    if kind == 2:
        loss = functools.partial(interrupting, os.getpid())
        try:
            fit(folder, linear(), backend=backends[2], epochs=1, loss=loss)
        except KeyboardInterrupt:
            return True
        return False
    fitted = fit(folder, linear(), backend=backends[2 if kind == 0 else 1], epochs=1)
    return len(fitted.getHistory()) == 1


def servers():
    """Processes beside this one that have its temporary directory: fork servers of warm workers,
    and what is left.
    """
    mine, found = f"TMPDIR={os.environ['TMPDIR']}".encode(), 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if int(entry) != os.getpid():
                found += mine in Path(f"/proc/{int(entry)}/environ").read_bytes().split(b"\0")
    return found


def resident():
    """Bytes of memory of this process that are no pages of files: those count here or elsewhere
    as others map them.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def held(folder):
    """Counts the resources of this process."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "processes": servers(),
        "temporary files": sum(len(names) for _, _, names in os.walk(os.environ["TMPDIR"])),
        "temporary directories": sum(len(names) for _, names, _ in os.walk(os.environ["TMPDIR"])),
        "shared memory": sum(1 for name in os.listdir(SHARED) if "farandole" in name),
        "files of runs": sum(len(files) for _, _, files in os.walk(folder / "runs" / "once")),
        "memory": resident(),
    }


def main(folder, fits, every, cold):
    """Trains, and prints."""
    x, y = line(rows=32)
    write(folder / "intermediate_train_data", x=x, y=y)
    warm = {size: LocalBackend(size, verbose=0, warm=True, stderr=sys.stderr) for size in (1, 2)}
    slow = {size: LocalBackend(size, verbose=0, warm=False, stderr=sys.stderr) for size in (1, 2)}
    for number in range(fits):
        kind = number % 4
        backends = slow if cold and number % cold == cold - 1 else warm
        if not run_fit(folder, kind, backends):
            raise SystemExit(f"fit {number}, of kind {kind}, did not end as it should")
        if (number + 1) % every == 0:
            print(json.dumps({"fits": number + 1, **held(folder)}), flush=True)


if __name__ == "__main__":
    # A shell starts what it puts into the background deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    arguments = [int(argument) for argument in sys.argv[2:]]
    main(Path(sys.argv[1]), arguments[0], arguments[1], arguments[2] if len(arguments) > 2 else 0)
