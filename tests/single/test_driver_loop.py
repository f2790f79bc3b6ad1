# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's loop of an elastic job: late results, and workers that cannot start."""

from __future__ import annotations

import pickle
import threading
import time
from types import SimpleNamespace

import pytest

from farandole.runner.elastic import agent_pool, driver_loop
from farandole.runner.elastic.agent_pool import ThreadedAgentPool
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import JobOutput
from farandole.runner.worker_task_outcome import TaskOutcome

pytestmark = pytest.mark.timeout(60)


class FakeRegistrar:
    """A registrar whose job has finished in a world of some ranks, or never forms a world."""

    def __init__(self, ranks: int, *, end: SimpleNamespace | None = None) -> None:
        self.seats = [{"rank": rank, "task": rank, "host": "h"} for rank in range(ranks)]
        kinds = ("assigned", "finished") if ranks else ()
        self.waiting = [SimpleNamespace(kind=kind) for kind in kinds] + ([end] if end else [])

    def events(self, timeout):
        found, self.waiting = self.waiting, []
        if not found:
            time.sleep(min(timeout, 0.02))
        return found

    def rank_assignment(self):
        return self.seats

    def close(self):
        pass


class FakePool(ThreadedAgentPool):
    """Workers that are functions of their slot and of the number of the attempt in it."""

    def __init__(self, slots, attempt):
        super().__init__(
            slots, lambda run, name: threading.Thread(target=run, name=name, daemon=True)
        )
        self.attempt, self.attempts, self.slots = attempt, [0] * slots, threading.local()
        self.free = list(range(slots))

    def _prepare_thread(self):
        with self._lock:
            self.slots.own = self.free.pop(0)

    def _run_worker(self, task):
        slot = self.slots.own
        self.attempts[slot] += 1
        return self.attempt(self, slot, task, self.attempts[slot])


def succeed(pool, task, value):
    pool.endings[task] = TaskOutcome(
        task, "h", rank=task, exit_code=0, result=pickle.dumps(("ok", value))
    )


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(driver_loop, "_RESULT_TIMEOUT", 0.2)
    monkeypatch.setattr(driver_loop, "_EVENT_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(agent_pool, "_RESTART_DELAY", 0.01)
    monkeypatch.setattr(agent_pool, "_MAX_RESTART_DELAY", 0.02)


def run(registrar, pool):
    return driver_loop.run_elastic_job(registrar, pool, JobOutput(verbose=0), None)


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (0.0, 1.0), (0.5, 1.5)])
def test_results_that_take_longer_than_the_timeout_come_while_their_agents_run(seconds):
    def attempt(pool, slot, task, number):
        pool._stopped.wait(seconds[task])  # the result is on its way by rows, ray.get or ssh
        succeed(pool, task, task * 10)

    assert run(FakeRegistrar(2), FakePool(2, attempt)) == [0, 10]


def test_an_agent_that_never_ends_does_not_hold_the_job_for_ever(monkeypatch):
    monkeypatch.setattr(driver_loop, "_TRANSFER_TIMEOUT", 0.5)
    registrar = FakeRegistrar(1)
    registrar.waiting.append(
        SimpleNamespace(kind="exit", task=0, rank=0, exit_code=0, signal=None, stderr_tail="")
    )
    with pytest.raises(FarandoleJobError, match="without a result"):
        run(registrar, FakePool(1, lambda pool, *_: pool._stopped.wait(30) and None))


def test_an_agent_that_is_gone_without_a_result_is_not_waited_for_long():
    def attempt(pool, slot, task, number):
        pool.endings[task] = TaskOutcome(task, "h", rank=task, exit_code=1)
        pool._stopped.wait(0 if number == 1 else 60)

    began = time.monotonic()
    with pytest.raises(FarandoleJobError):
        run(FakeRegistrar(1), FakePool(1, attempt))
    assert time.monotonic() - began < 30


def test_a_host_that_refuses_workers_does_not_end_a_job_whose_other_hosts_still_start():
    registrar = FakeRegistrar(0)

    def attempt(pool, slot, task, number):
        if slot:
            return "bad: no module"
        pool._stopped.wait(1.0)
        succeed(pool, task, "well")
        registrar.seats = [{"rank": 0, "task": task, "host": "h"}]
        registrar.waiting += [SimpleNamespace(kind=kind) for kind in ("assigned", "finished")]
        return None

    pool = FakePool(4, attempt)
    assert run(registrar, pool) == ["well"]
    assert len(pool.refusals) > 9


def test_a_job_ends_when_every_slot_was_refused_in_a_row():
    pool = FakePool(4, lambda _pool, slot, *_: f"host{slot}: no module")
    with pytest.raises(FarandoleJobError, match=r"no worker could be started: host\d: no module"):
        run(FakeRegistrar(0), pool)
    assert min(pool.attempts) >= driver_loop._MAX_REFUSALS


def test_a_job_that_never_starts_names_the_last_refusal():
    end = SimpleNamespace(kind="aborted", task=None, text="1 of 2 workers registered in 9 s")
    registrar = FakeRegistrar(0)

    def attempt(pool, slot, task, number):
        if slot:
            registrar.waiting.append(end)
            return "bad: no module"
        pool._stopped.wait(30)
        return None

    with pytest.raises(FarandoleJobError, match=r"1 of 2 .* in 9 s.*bad: no module"):
        run(registrar, FakePool(2, attempt))
