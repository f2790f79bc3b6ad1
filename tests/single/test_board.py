# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The files that are written for TensorBoard, read by its messages. A slow test has TensorBoard
itself read them.
"""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
import threading
import time

import pytest
import torch

from farandole.spark.common import LocalStore
from farandole.spark.common.runs import tensorboard
from farandole.spark.common.runs.tensorboard import EVENTS_FILE, TensorboardTracker

PARAMETERS = {"batch_size": 8, "shuffle": True, "loss_weights": [0.5, 0.5], "run_id": "mine"}


def step(epoch, number, loss=0.5):
    place = {"epoch": epoch, "epochs": 3, "step": number, "steps": 10}
    return {"kind": "step", **place, "rows_per_second": 100.0, "loss": loss}


class Store:
    """A run's store whose writes wait while `open` is not set, and whose next reads fail."""

    def __init__(self, remote):
        self._remote = remote
        self.logs_subdir = remote.logs_subdir
        self.asked, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.failures = 0
        self.written = []

    def read(self, name):
        if self.failures:
            self.failures -= 1
            raise OSError("the store is not there")
        return self._remote.read(name)

    def write(self, name, data):
        self.asked.set()
        self.open.wait(60)
        self._remote.write(name, data)
        self.written.append((name, data))


class Run:
    """A run's trackers and files, by a clock that the test sets."""

    def __init__(self, directory):
        self.now = 0.0
        self.logs = directory / "runs/mine/logs"
        self.store = Store(LocalStore(str(directory)).to_remote("mine"))

    def tracker(self):
        return TensorboardTracker(self.store, PARAMETERS, clock=lambda: self.now)

    @property
    def details(self):
        return (self.logs / EVENTS_FILE).read_bytes()

    @property
    def steps(self):
        return (self.logs / "steps" / EVENTS_FILE).read_bytes()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def values(data, tag):
    """Returns the values of a tag in a file, with their steps."""
    from tensorboard.compat.proto.event_pb2 import Event

    found, place = [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length
        found += [(event.step, value) for value in event.summary.value if value.tag == tag]
    return found


def points(data, tag):
    from tensorboard.util import tensor_util

    return [
        (place, tensor_util.make_ndarray(value.tensor).item()) for place, value in values(data, tag)
    ]


def ends(data):
    from tensorboard.plugins.hparams import metadata

    found = [value for _, value in values(data, metadata.SESSION_END_INFO_TAG)]
    return [
        metadata.parse_session_end_info_plugin_data(one.metadata.plugin_data.content).status
        for one in found
    ]


def test_it_has_parameters_steps_and_the_model(run):
    from tensorboard.plugins.hparams import api_pb2, metadata

    with run.tracker() as tracker:
        for number in (1, 2, 3):
            run.now += 1
            tracker.log_report(step(1, number, loss=1 / number))
        tracker.log_report(step(1, 4))  # too soon
        tracker.log_report({"kind": "epoch", "entry": {}})
        deadline = time.monotonic() + 30
        while (
            len(
                points(run.steps, "step/loss")
                if (run.logs / "steps" / EVENTS_FILE).exists()
                else ()
            )
            < 3
        ):
            assert time.monotonic() < deadline, (
                "an epoch's points are not written while the fit runs"
            )
            time.sleep(0.01)
        assert points(run.steps, "step/loss") == [(11, 1.0), (12, 0.5), (13, pytest.approx(1 / 3))]
        tracker.log_model(torch.nn.Linear(2, 1), "pytorch")
    assert points(run.steps, "step/rows_per_second")[0] == (11, 100.0)
    ((_, begin),) = values(run.details, metadata.SESSION_START_INFO_TAG)
    told = metadata.parse_session_start_info_plugin_data(begin.metadata.plugin_data.content).hparams
    assert told["batch_size"].number_value == 8
    assert told["shuffle"].bool_value
    assert told["loss_weights"].string_value == "[0.5, 0.5]"
    assert ends(run.details) == [api_pb2.STATUS_SUCCESS]
    ((_, text),) = values(run.details, "model")
    assert b"Linear(in_features=2, out_features=1, bias=True)" in text.tensor.string_val[0]


def test_files_grow_from_fit_to_fit_and_a_failure_is_marked(run):
    from tensorboard.plugins.hparams import api_pb2

    with run.tracker() as tracker:
        tracker.log_report(step(0, 1))
    details, steps = run.details, run.steps
    with pytest.raises(RuntimeError), run.tracker() as tracker:  # noqa: PT012 - the report comes before
        tracker.log_report(step(1, 1))
        raise RuntimeError
    assert run.details.startswith(details)
    assert run.steps.startswith(steps)
    assert [place for place, _ in points(run.steps, "step/loss")] == [1, 11]
    assert ends(run.details) == [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE]


def test_a_slow_store_does_not_delay_reports_and_the_end_writes_everything(run):
    run.store.open.clear()
    with run.tracker() as tracker:
        assert run.store.asked.wait(30)
        for epoch in range(3):
            run.now += 20
            tracker.log_report(step(epoch, 1))
            tracker.log_report({"kind": "epoch", "entry": {}})
        assert run.store.written == []
        run.store.open.set()
    assert [place for place, _ in points(run.steps, "step/loss")] == [1, 11, 21]
    assert ends(run.details)
    for file in {name for name, _ in run.store.written}:
        sizes = [data for name, data in run.store.written if name == file]
        assert all(after.startswith(before) for before, after in itertools.pairwise(sizes))


def test_no_thread_is_left_after_a_fit(run):
    with run.tracker():
        assert "farandole-tensorboard" in [one.name for one in threading.enumerate()]
    assert "farandole-tensorboard" not in [one.name for one in threading.enumerate()]


def fitted_twice(run, monkeypatch, failures):
    """The files after a first fit; a second one follows, at whose begin so many reads fail."""
    monkeypatch.setattr(tensorboard, "_RETRY_DELAY_SECONDS", 0.0)
    with run.tracker() as tracker:
        tracker.log_report(step(0, 1))
    before = run.details, run.steps
    run.store.failures = failures
    with run.tracker() as tracker:
        tracker.log_report(step(1, 1))
    return before


def test_earlier_events_stay_where_a_file_cannot_be_read_at_first(run, caplog, monkeypatch):
    details, steps = fitted_twice(run, monkeypatch, failures=2)
    assert run.details.startswith(details)
    assert run.steps.startswith(steps)
    assert [place for place, _ in points(run.steps, "step/loss")] == [1, 11]
    assert "for TensorBoard cannot be read: the store is not there" in caplog.text


def test_a_file_that_can_never_be_read_is_left_as_it_is(run, caplog, monkeypatch):
    details, steps = fitted_twice(run, monkeypatch, failures=1000)
    assert (run.details, run.steps) == (details, steps)
    told = [one.getMessage() for one in caplog.records]
    for name in (f"logs/{EVENTS_FILE}", f"logs/steps/{EVENTS_FILE}"):
        lost = (
            f"{name} for TensorBoard cannot be read: the store is not there; it lacks events of "
            "this fit"
        )
        assert told.count(lost) == 1


def test_it_does_not_load_tensorflow(tmp_path):
    code = f"""
import sys
from farandole.spark.common import LocalStore
from farandole.spark.common.runs.tensorboard import TensorboardTracker

with TensorboardTracker(LocalStore({str(tmp_path)!r}).to_remote("mine"), {{"rate": 0.1}}) as tracker:
    tracker.log_report({step(0, 1)!r})
    tracker.log_model("a model", "pytorch")
assert "tensorboard" in sys.modules
assert "tensorflow" not in sys.modules
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_long_run_has_a_few_thousand_points(run):
    with run.tracker() as tracker:
        for number in range(5000):
            run.now += 0.5
            tracker.log_report(step(0, number))
    # 2,000 in the first 1,000 seconds, then one a second.
    assert len(points(run.steps, "step/loss")) == pytest.approx(3500, abs=2)


def test_a_store_that_cannot_be_written_fails_no_fit(run, caplog, monkeypatch):
    monkeypatch.setattr(tensorboard, "_RETRY_DELAY_SECONDS", 0.0)
    run.logs.parent.mkdir(parents=True)
    run.logs.write_text("a file in the place of the directory")
    with run.tracker() as tracker:
        tracker.log_report(step(0, 1))
    assert "for TensorBoard cannot be written" in caplog.text


def test_without_the_library_the_error_says_what_to_install(run, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        run.tracker()
