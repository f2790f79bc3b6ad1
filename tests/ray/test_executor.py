# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`RayExecutor` with ranks that stay."""

import os
import sys
import time

import numpy as np
import pytest

import ray
from farandole.ray import BaseHorovodWorker, RayExecutor, ray_logger
from farandole.ray.runner import placement_variables_by_rank
from farandole.ray.utils import map_blocking
from farandole.runner.errors import FarandoleJobError

# Actors import no test: what they run comes with its module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def total(value):
    """The sum of a value over all ranks, with where this one sits."""
    import farandole.numpy as hvd

    hvd.init()
    got = hvd.allreduce(np.full(3, float(value)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), got.tolist()


@pytest.fixture
def executor(resources):
    """Three ranks."""
    made = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3)
    made.start(extra_env_vars={"MINE": "of the user"})
    yield made
    made.shutdown()


def test_a_function_runs_on_all_ranks_of_one_world_and_results_come_by_rank(executor):
    assert executor.run(total, [2]) == [(rank, 3, rank, [6.0] * 3) for rank in range(3)]
    assert executor.run(total, kwargs={"value": 1})[2] == (2, 3, 2, [3.0] * 3)
    references = executor.run_remote(total, [3])
    assert [one[0] for one in ray.get(references)] == [0, 1, 2]


def test_the_world_can_be_left_and_joined_again(executor):
    def twice():
        import farandole.numpy as hvd

        first = total(1)
        hvd.shutdown()
        return first, total(1)

    found = executor.run(twice)
    assert [one[0] for one in found] == [one[1] for one in found]


def test_ranks_know_where_they_sit_and_have_the_users_variables(executor):
    found = executor.run(lambda: dict(os.environ))
    assert [one["HOROVOD_RANK"] for one in found] == ["0", "1", "2"]
    assert [one["HOROVOD_LOCAL_RANK"] for one in found] == ["0", "1", "2"]
    assert {one["HOROVOD_CROSS_SIZE"] for one in found} == {"1"}
    assert {one["MINE"] for one in found} == {"of the user"}
    assert len({one["HOROVOD_HOSTNAME"] for one in found}) == 1


def test_an_executable_stays_between_calls(resources):
    class Counter:
        def __init__(self, start, step=1):
            self.value, self.step = start, step

        def up(self):
            self.value += self.step
            return self.value

    made = RayExecutor(RayExecutor.create_settings(), num_hosts=1, num_workers_per_host=2)
    made.start(Counter, executable_args=[10], executable_kwargs={"step": 5})
    try:
        assert made.execute(lambda counter: counter.up()) == [15, 15]
        assert made.execute_single(lambda counter: counter.up()) == 20
        assert made.execute(lambda counter: counter.value) == [20, 15]
    finally:
        made.shutdown()


def test_an_exception_of_a_rank_comes_back_unchanged_and_no_rank_waits_for_it(executor):
    def one_fails():
        import farandole.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("of rank 1")
        return hvd.allreduce(np.ones(2))

    started = time.monotonic()
    with pytest.raises(KeyError, match="of rank 1"):
        executor.run(one_fails)
    assert time.monotonic() - started < 30
    assert executor.run(total, [1])[0][3] == [3.0] * 3, "the workers form another world"


def test_a_rank_that_dies_is_named_with_its_node(executor):
    def one_dies():
        import farandole.numpy as hvd

        hvd.init()
        if hvd.rank() == 2:
            os._exit(3)
        return hvd.allreduce(np.ones(2))

    with pytest.raises(
        FarandoleJobError, match=r"the process of rank 2 on node [\d.]+ died: "
    ) as raised:
        executor.run(one_dies)
    assert raised.value.rank == 2


def test_records_of_workers_reach_the_callbacks_while_the_function_runs(executor):
    def log():
        import farandole.numpy as hvd

        hvd.init()
        for step in range(3):
            ray_logger.log({"rank": hvd.rank(), "step": step})
        return hvd.rank()

    seen = []
    assert executor.run(log, callbacks=[seen.append]) == [0, 1, 2]
    assert sorted((one["rank"], one["step"]) for one in seen) == [
        (rank, step) for rank in range(3) for step in range(3)
    ]


def test_a_record_without_a_receiver_causes_one_warning():
    ray_logger.warning_raised = False
    with pytest.warns(UserWarning, match="logging is not configured"):
        ray_logger.log({"loss": 1})
    ray_logger.log({"loss": 1})


def test_a_current_placement_group_is_used_and_stays(resources):
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready(), timeout=60)

    @ray.remote(num_cpus=1)
    def trial():
        made = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        made.start()
        found = made.run(total, [1])
        made.shutdown()
        return found

    placed = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    try:
        assert len(ray.get(trial.options(scheduling_strategy=placed).remote(), timeout=120)) == 2
        assert ray.util.placement_group_table(group)["state"] == "CREATED"
    finally:
        remove_placement_group(group)


def test_a_job_that_does_not_fit_is_refused_in_time_with_the_available_resources(resources):
    settings = RayExecutor.create_settings(placement_group_timeout_s=2)
    made = RayExecutor(settings, num_workers=64)
    with pytest.raises(TimeoutError, match=r"64 bundles of \{'CPU': 1\}.*'CPU': 4"):
        made.start()
    made.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_workers": 2}, "max_workers is for elastic jobs"),
        ({"min_workers": 1, "num_workers": 2}, "min_workers"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "use_gpu is False"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}, "at least 1"),
        ({"num_workers": 1, "num_hosts": 1}, "not both"),
        ({"num_workers": 0}, "num_workers must be at least 1: 0"),
        ({"min_workers": 3, "max_workers": 2}, "2 is below 3"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_calls_before_start_say_so(resources):
    made = RayExecutor(RayExecutor.create_settings(), num_workers=1)
    with pytest.raises(RuntimeError, match="call start first"):
        made.run(total, [1])


def test_gpus_of_a_host_are_seen_by_all_its_ranks_those_of_local_rank_0_first():
    found = placement_variables_by_rank(["a", "b", "a"], [["2", "3"], ["0", "1"], ["0", "1"]])
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["2,3,0,1", "0,1", "2,3,0,1"]
    assert [one["HOROVOD_LOCAL_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["HOROVOD_CROSS_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["HOROVOD_CROSS_SIZE"] for one in found] == ["2", "2", "1"]


def test_a_worker_of_ones_own_is_the_same_actor(resources):
    remote = ray.remote(num_cpus=1)(BaseHorovodWorker)
    workers = [remote.remote(rank, 2) for rank in range(2)]
    assert map_blocking(lambda worker: worker.execute.remote(lambda made: made), workers) == [
        None,
        None,
    ]
    assert map_blocking(lambda worker: worker.get_gpu_ids.remote(), workers) == [[], []]
    assert ray.get(workers[1].env_vars.remote())["HOROVOD_SIZE"] == "2"
    for worker in workers:
        ray.kill(worker)


def test_horovods_names_are_farandoles(resources):
    import horovod.ray

    assert horovod.ray.RayExecutor is RayExecutor
