# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers whose tensors change their sizes all the time hold little more memory than is alive."""

from __future__ import annotations

import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
from tests.trust import heap_soak
from tests.trust.heap_soak import MIB, soak

from farandole.spark.common import LocalBackend, SparkBackend

SECONDS = float(os.environ.get("FARANDOLE_SOAK_SECONDS", "5"))
"""Duration of the soak; `make test-trust` takes ten minutes."""

SEEN_WITHIN = 10
"""Samples, half a second each at least, within which unused memory has gone back."""

JOBS = {
    "torch": ("torch", LocalBackend, {"warm": False}),
    "torch in warm workers": ("torch", LocalBackend, {"warm": True}),
    "torch on Spark": ("torch", SparkBackend, {}),
    "tensorflow": ("tensorflow", LocalBackend, {"warm": False}),
}


def job(name):
    """Returns the results of each rank of a job."""
    kind, backend, more = JOBS[name]
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    return backend(2, verbose=0, env=env, stderr=sys.stderr, **more).run(
        functools.partial(soak, kind, SECONDS, 7)
    )


@pytest.mark.timeout(max(240, 3 * SECONDS))
@pytest.mark.usefixtures("spark")
def test_memory_stays_within_half_more_than_what_is_alive():
    cloudpickle.register_pickle_by_value(heap_soak)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        every = dict(zip(JOBS, pool.map(job, JOBS), strict=True))
    for name, ranks in every.items():
        for rank, (base, samples) in enumerate(ranks):
            assert len(samples) > SECONDS / 4, (name, len(samples))
            held, most, _ = map(max, zip(*samples, strict=True))
            # The largest that was held lately is alive for a while; what it leaves may not stay.
            window = [
                max(held for held, *_ in samples[max(0, at - 12) : at + 1])
                for at in range(len(samples))
            ]
            times = sorted(
                has / (base + lately) for (_, has, _), lately in zip(samples, window, strict=True)
            )
            print(
                f"{name}, rank {rank}: {base / MIB:.0f} MiB at first, {held / MIB:.0f} held, "
                f"{most / MIB:.0f} at most; {times[len(times) // 2]:.2f} x of what is alive, "
                f"{times[-1]:.2f} x at most"
            )
            over = 0
            for at, (lately, (_, has, used)) in enumerate(zip(window, samples, strict=True)):
                alive = base + lately
                told = name, rank, at, alive // MIB, has // MIB, used // MIB
                assert has <= 2 * alive, told
                # Memory that was freed just now stays for some seconds, in which it may be used
                # again.
                over = over + 1 if has > 1.5 * alive else 0
                assert over < SEEN_WITHIN, told


def rounds_with_a_set(count):
    """Bytes by which rank 0 grows in rounds with a process set of its own."""
    import torch

    import farandole.torch as hvd

    hvd.init(process_sets="dynamic")
    before = 0
    for number in range(count + 20):
        if number == 20:
            before = heap_soak.resident()
        alone = hvd.add_process_set([0])
        made = torch.ones(300_001), torch.empty(300_001)
        hvd.remove_process_set(alone)
        del made
    time.sleep(3.0)  # what stays unused for two seconds goes back
    hvd.barrier()
    return heap_soak.resident() - before


@pytest.mark.slow
def test_process_sets_between_large_tensors_leave_no_memory_behind():
    cloudpickle.register_pickle_by_value(heap_soak)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    growth = LocalBackend(2, verbose=0, env={"OMP_NUM_THREADS": "1"}, stderr=sys.stderr).run(
        rounds_with_a_set, (200,)
    )
    assert max(growth) < 64 * MIB, [one / MIB for one in growth]
