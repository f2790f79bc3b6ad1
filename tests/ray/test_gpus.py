# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""GPUs that ranks see. Ray assigns the configured number, also without hardware."""

import os
import sys

import cloudpickle
import pytest

import ray
from farandole.ray import RayBackend, RayExecutor

for pickler in (cloudpickle, ray.cloudpickle):
    # Workers import no test: what they run comes with its module.
    pickler.register_pickle_by_value(sys.modules[__name__])


def seen():
    """A rank's local rank, and the GPUs that it sees."""
    import farandole.numpy as hvd

    hvd.init()
    return hvd.local_rank(), [int(gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]


def apart(found, each):
    """Returns whether ranks see as many GPUs as each needs, and none that another sees."""
    gpus = [gpu for _, own in found for gpu in own]
    return [len(own) for _, own in found] == [each] * len(found) and len(set(gpus)) == len(gpus)


@pytest.mark.parametrize(
    "ranks",
    [
        {"num_workers": 2},
        pytest.param({"num_hosts": 1, "num_workers_per_host": 2}, marks=pytest.mark.slow),
    ],
)
def test_each_rank_sees_the_gpus_of_its_node_and_finds_its_own_by_its_local_rank(resources, ranks):
    executor = RayExecutor(RayExecutor.create_settings(), use_gpu=True, gpus_per_worker=2, **ranks)
    executor.start()
    try:
        own = [
            [int(gpu) for gpu in ray.get(worker.get_gpu_ids.remote())]
            for worker in executor.adapter.workers
        ]
        found = executor.run(seen)
    finally:
        executor.shutdown()
    assert [local for local, _ in found] == [0, 1]
    assert found[0][1] == found[1][1]
    assert sorted(found[0][1]) == [0, 1, 2, 3]
    assert [visible[2 * local : 2 * local + 2] for local, visible in found] == own


@pytest.mark.slow
def test_a_rank_of_an_elastic_job_sees_exactly_its_own_gpus(resources):
    executor = RayExecutor(
        RayExecutor.create_settings(), min_workers=2, max_workers=2, use_gpu=True, gpus_per_worker=2
    )
    executor.start()
    found = executor.run(seen)
    executor.shutdown()
    assert apart(found, each=2), found


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [{}, {"min_num_proc": 1, "max_num_proc": 2}])
def test_a_rank_of_a_backend_sees_exactly_its_own_gpus(resources, elastic):
    found = RayBackend(2, use_gpu=True, gpus_per_worker=2, verbose=0, **elastic).run(seen)
    assert apart(found, each=2), found
