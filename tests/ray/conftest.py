# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One real Ray for the directory, with four CPUs and four GPUs, whatever the machine has."""

import os
import signal
import time

import pytest

import ray

CPUS = GPUS = 4
# Ray's own 15 starves where other tests run beside these
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(autouse=True)
def own_handlers():
    """Takes away Ray's handlers of SIGINT and SIGUSR1, which stay: later tests interrupt
    themselves.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="package")
def cluster():
    """Ray on this host. Its dashboard is another service, which nothing here asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray refuses more GPUs than it lists
        ray.init(
            address="local",
            num_cpus=CPUS,
            num_gpus=GPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield ray
    ray.shutdown()


@pytest.fixture
def resources(cluster):
    """Sees that a test gives back what it took of Ray."""
    yield cluster
    deadline = time.monotonic() + 20
    while any(
        cluster.available_resources().get(name, 0) < all_
        for name, all_ in (("CPU", CPUS), ("GPU", GPUS))
    ):
        assert time.monotonic() < deadline, cluster.available_resources()
        time.sleep(0.1)


def gone(pid, limit=20):
    """Waits until a process has ended."""
    deadline = time.monotonic() + limit
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.1)
