# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Events of a gang that its first task writes to a store, while the store fails at times."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from farandole.spark.job import task_rendezvous
from farandole.spark.job.task_rendezvous import RendezvousHost, StoredEventReader, TaskRendezvous

pytestmark = pytest.mark.timeout(60)
NO_FIELDS = dict.fromkeys(task_rendezvous._EVENT_FIELDS)


def event(kind, **fields):
    return SimpleNamespace(**{**NO_FIELDS, "kind": kind, "data": None, **fields})


class FakeRegistrar:
    """A registrar whose events are given, one batch for each question."""

    def __init__(self, batches):
        self.batches = list(batches)

    def events(self, timeout):
        time.sleep(min(timeout, 0.01))
        return self.batches.pop(0) if self.batches else []

    def rank_assignment(self):
        return [{"rank": 0, "task": 0, "host": "h"}]

    def close(self):
        pass


class FailingSpill:
    """A directory of a store. Some writes fail, before or after the file is there."""

    def __init__(self, failing, *, is_written):
        self.files, self.writes = {}, 0
        self.failing, self.is_written = failing, is_written

    def write_file(self, name, data):
        self.writes += 1
        fails = self.writes - 1 in self.failing
        if not fails or self.is_written:
            self.files[name] = data
        if fails:
            raise OSError("the store is away")

    def list_files(self, _folder):
        return sorted(self.files)

    def read_file(self, name):
        return self.files[name]


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(task_rendezvous, "_EVENT_INTERVAL", 0.0)


def record(spill, batches):
    """Writes all events of a gang, and returns those that the driver read meanwhile and after."""
    host = RendezvousHost(FakeRegistrar(batches), TaskRendezvous((), 1, spill))
    reader, found = StoredEventReader(spill), []
    while host._thread.is_alive():
        found += list(reader.new_events())
    host.wait_and_close()
    return [*found, *reader.new_events()]


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_event_arrives_once_and_in_order_although_writes_fail(is_written, first, count):
    batches = [
        [event("assigned")],
        [event("log", rank=0, stream="stdout", text="one")],
        [event("metric", text="m", data=b"1")],
        [event("exit", task=0, rank=0, exit_code=0)],
    ]
    spill = FailingSpill(set(range(first, first + count)), is_written=is_written)
    found = record(spill, batches)
    assert [one.kind for one in found] == ["assigned", "log", "metric", "exit"]
    assert found[0].seats == [{"rank": 0, "task": 0, "host": "h"}]


def test_a_store_that_stays_away_costs_lines_of_output_before_other_events(monkeypatch, caplog):
    monkeypatch.setattr(task_rendezvous, "_MAX_WAITING_LINES", 10)
    monkeypatch.setattr(task_rendezvous, "_LAST_WRITE_TIMEOUT", 0.5)
    logs = [[event("log", rank=0, stream="stdout", text=f"{number}")] for number in range(100)]
    exit_event = [event("exit", task=0, rank=0, exit_code=0)]
    batches = [[event("assigned")], *logs[:50], [event("metric", text="m")], *logs[50:], exit_event]
    spill = FailingSpill(set(range(1, 140)), is_written=False)
    found = record(spill, batches)
    kinds = [one.kind for one in found]
    assert [kind for kind in kinds if kind != "log"] == ["assigned", "metric", "exit"]
    assert 0 < kinds.count("log") < 30
    assert kinds.count("log") + sum(one.dropped or 0 for one in found) == 100
    assert "the store is away" in caplog.text
    assert len(caplog.records) == 1


def test_a_store_that_never_comes_back_does_not_hold_the_task_for_ever(monkeypatch):
    monkeypatch.setattr(task_rendezvous, "_LAST_WRITE_TIMEOUT", 0.3)
    began = time.monotonic()
    spill = FailingSpill(range(10**9), is_written=False)
    assert record(spill, [[event("exit", task=0, rank=0, exit_code=0)]]) == []
    assert time.monotonic() - began < 30
