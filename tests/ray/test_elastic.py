# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks on Ray that come and go."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest

import ray
from farandole.ray import ElasticRayExecutor, RayExecutor, ray_logger
from farandole.ray.agent_pool import ActorResources
from farandole.ray.discovery import count_workers_as_free
from farandole.ray.elastic import TestDiscovery
from farandole.ray.elastic_v2 import RayHostDiscovery

for pickler in (cloudpickle, ray.cloudpickle):
    # Workers import no test: what they run comes with its module.
    pickler.register_pickle_by_value(sys.modules[__name__])

CPUS = 4
STEPS = 40


def train(folder):
    """A regression with one parameter; tells each step, and where each rank is."""
    import time

    import torch

    import farandole.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def steps(state):
        Path(folder, f"{os.getpid()}.{hvd.rank()}").touch()
        while state.step < STEPS:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(
                model(torch.ones(4, 1)), torch.full((4, 1), 3.0)
            ).backward()
            optimizer.step()
            state.step += 1
            if hvd.rank() == 0:
                ray_logger.log({"step": state.step, "size": hvd.size()})
            time.sleep(0.05)
            state.commit()
        return hvd.rank(), state.step, round(model.weight.item(), 2)

    return steps(state)


class Killer:
    """Kills one rank when a step is reached, and keeps all records."""

    def __init__(self, folder, at):
        self.folder, self.at, self.seen, self.killed = folder, at, [], None

    def __call__(self, record):
        self.seen.append(record)
        if record["step"] >= self.at and self.killed is None:
            self.killed = next(int(one.stem) for one in self.folder.iterdir() if one.suffix == ".1")
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.parametrize("deprecated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_loses_a_rank_and_ends_as_if_it_had_not(resources, tmp_path, deprecated):
    killer = Killer(tmp_path, 10)
    if deprecated:
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=3)
        made = ElasticRayExecutor(settings, env_vars={"MINE": "1"})
        made.start()
        found = made.run(lambda: train(tmp_path), callbacks=[killer])
    else:
        made = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=3)
        made.start()
        found = made.run(train, [tmp_path], callbacks=[killer])
        made.shutdown()
    assert killer.killed is not None
    assert [one[0] for one in found] == list(range(len(found)))
    assert {one[1:] for one in found} == {(STEPS, 3.0)}
    assert 2 in {one["size"] for one in killer.seen if one["step"] > 10} | {len(found)}


@pytest.mark.slow
def test_a_node_that_discovery_takes_away_loses_its_workers_and_that_is_no_failure(
    resources, tmp_path
):
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])

    class Shrinking:
        """One slot goes when the job has begun."""

        def find_available_hosts_and_slots(self):
            return {address: 2 if any(tmp_path.iterdir()) else 3}

    settings = RayExecutor.create_settings()
    settings.discovery = Shrinking()
    made = RayExecutor(
        settings, min_workers=2, max_workers=3, override_discovery=False, reset_limit=1
    )
    made.start()
    seen = []
    found = made.run(train, [tmp_path], callbacks=[seen.append])
    made.shutdown()
    assert {one[1:] for one in found} == {(STEPS, 3.0)}
    assert len(found) == 2
    assert seen[-1]["size"] == 2


@pytest.mark.slow
def test_a_job_keeps_its_workers_when_its_discovery_counts_what_is_free(resources, tmp_path):
    settings = RayExecutor.create_settings()
    settings.discovery = RayHostDiscovery()
    made = RayExecutor(settings, min_workers=CPUS, override_discovery=False, reset_limit=1)
    made.start()
    seen = []
    found = made.run(train, [tmp_path], callbacks=[seen.append])
    made.shutdown()
    assert len(found) == CPUS
    assert {one["size"] for one in seen} == {CPUS}
    assert [one["step"] for one in seen] == list(range(1, STEPS + 1)), (
        "the job ran for some searches without a loss"
    )


@pytest.mark.slow
def test_a_job_grows_with_what_its_discovery_finds_beyond_the_slots_that_ray_counted_at_the_start(
    resources,
):
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])

    class Wide:
        """Three slots for workers without CPUs, of which Ray counts none."""

        def find_available_hosts_and_slots(self):
            return {address: 3}

    def grown():
        import time

        import torch

        import farandole.torch as hvd

        hvd.init()
        state = hvd.elastic.TorchState(step=0)

        @hvd.elastic.run
        def steps(state):
            while hvd.size() < 3 and state.step < 600:
                hvd.allreduce(torch.ones(1), name="one")
                state.step += 1
                time.sleep(0.1)
                state.commit()
            return hvd.size()

        return steps(state)

    settings = RayExecutor.create_settings()
    settings.discovery = Wide()
    made = RayExecutor(settings, min_workers=1, cpus_per_worker=0, override_discovery=False)
    made.start()
    assert made.run(grown) == [3, 3, 3]
    made.shutdown()


def test_a_function_that_always_fails_ends_the_job_with_its_error(resources):
    def fails():
        raise KeyError("of the user")

    made = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
    made.start()
    with pytest.raises(Exception, match="of the user"):
        made.run(fails)
    made.shutdown()


def test_an_executable_and_functions_that_ask_for_no_world_have_results_by_rank(resources):
    class Counter:
        def __init__(self, start, step=1):
            self.value = start + step

    made = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=2)
    made.start(
        Counter, executable_args=[10], executable_kwargs={"step": 5}, extra_env_vars={"MINE": "1"}
    )
    assert made.execute(lambda counter: (counter.value, os.environ["MINE"])) == [(15, "1")] * 2
    made.shutdown()


def test_slots_are_counted_by_what_is_free(resources):
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    discovery = RayHostDiscovery(cpus_per_worker=2)
    assert discovery.find_available_hosts_and_slots() == {address: 2}

    @ray.remote(num_cpus=1)
    class Busy:
        def ready(self):
            return True

    busy = Busy.remote()
    assert ray.get(busy.ready.remote())
    assert discovery.find_available_hosts_and_slots() == {address: 1}
    with count_workers_as_free({address: 1}):
        assert discovery.find_available_hosts_and_slots() == {address: 2}, (
            "the room of the job's own worker"
        )
    assert discovery.of_cluster() == 2
    assert RayHostDiscovery(use_gpu=True, gpus_per_worker=2).find_available_hosts_and_slots() == {
        address: 2
    }
    assert RayHostDiscovery(use_gpu=True, gpus_per_worker=5).find_available_hosts_and_slots() == {}
    ray.kill(busy)


def test_the_discovery_for_tests_takes_nodes_away_and_gives_them_back(resources):
    discovery = TestDiscovery(min_hosts=0, max_hosts=1, change_frequency_s=0)
    seen = [bool(discovery.find_available_hosts_and_slots()) for _ in range(30)]
    assert seen == [False, True] * 15, "with one node there is nothing to draw"


def test_the_pause_before_the_next_actor_grows_with_failures_and_shrinks_after_a_healthy_time():
    needs = ActorResources(pauses=(1.0, 3.0))
    assert [
        needs.restart_delay(None, 0),
        needs.restart_delay(1.0, 0),
        needs.restart_delay(2.0, 0),
    ] == [1.0, 2.0, 3.0]
    assert needs.restart_delay(3.0, healthy=3.1) == 1.0


def test_features_that_need_fixed_ranks_are_refused_in_an_elastic_job(resources):
    made = RayExecutor(RayExecutor.create_settings(), min_workers=1)
    made.start()
    with pytest.raises(NotImplementedError, match="use run"):
        made.run_remote(train)
    with pytest.raises(NotImplementedError, match="use execute"):
        made.execute_single(train)
    made.shutdown()
    with pytest.raises(ValueError, match=r"settings\.discovery"):
        RayExecutor(RayExecutor.create_settings(), min_workers=1, override_discovery=False).start()


def test_elastic_jobs_that_would_each_hold_half_of_what_they_need_run_one_after_the_other(
    resources, tmp_path
):
    """Four CPUs, and each of two jobs needs three: one worker at a time, they would get two
    each.
    """

    def run(number):
        made = RayExecutor(
            RayExecutor.create_settings(), min_workers=3, max_workers=4, elastic_timeout=90
        )
        made.start()
        return [one[1:] for one in made.run(quick, [tmp_path / str(number)])]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert all(len(one) >= 3 and set(one) == {(True,)} for one in found)


def quick(path):
    """A few steps of at least three ranks."""
    import farandole.numpy as hvd

    hvd.init()
    enough = hvd.size() >= 3
    path.touch()
    return hvd.rank(), enough


def test_an_elastic_job_that_finds_no_room_says_so_in_time(resources):
    made = RayExecutor(
        RayExecutor.create_settings(), min_workers=64, max_workers=64, elastic_timeout=2
    )
    made.start()
    with pytest.raises(TimeoutError, match=r"64 bundles of .* within 2 s"):
        made.run(train)
