# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit that is stopped in order, and the server behind the stop button."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
import torch
from tests.single.training import estimator, fit, line, linear, write

import farandole.torch as hvd
from farandole.spark.common import LocalBackend
from farandole.spark.common import estimator as estimators
from farandole.spark.common.runs import stop_request
from farandole.spark.common.runs.stop_request import StopCheck, StopRequest
from farandole.spark.common.show import stop_button
from farandole.spark.common.show.progress import ProgressDisplay
from farandole.spark.common.store import LocalStore
from farandole.spark.torch.callbacks import Callback

pytestmark = pytest.mark.timeout(240)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def remote(tmp_path):
    return LocalStore(str(tmp_path)).to_remote("mine")


class Pressed(ProgressDisplay):
    """Presses the button at the first report of a kind."""

    def __init__(self, kind):
        self.kind = kind
        self.messages = []

    def offer_stop(self, stop):
        self.stop = stop
        return contextlib.nullcontext(stop)

    def show_report(self, report):
        if report["kind"] == self.kind:
            self.stop.request_stop()

    def show_message(self, text):
        self.messages.append(text)


class Slow(Callback):
    """Makes a step take 20 ms as long as a file is there, and checks that all ranks have taken
    the same steps.
    """

    def __init__(self, path):
        self.path = path

    def on_batch_end(self, _state):
        if self.path.exists():
            time.sleep(0.02)

    def on_epoch_end(self, state):
        assert len(set(hvd.allgather(torch.tensor([state.step])).tolist())) == 1


@pytest.mark.slow
def test_a_fit_ends_within_an_epoch_returns_its_model_and_can_continue(tmp_path, monkeypatch):
    x, y = line(2000)
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    shown = Pressed("step")
    monkeypatch.setattr(estimators, "create_progress_display", lambda _verbose: shown)
    slow = tmp_path / "slow"
    slow.touch()
    given = {
        "batch_size": 1,
        "run_id": "mine",
        "backend": LocalBackend(2, verbose=0),
        "callbacks": [Slow(slow)],
    }
    stopped = fit(tmp_path, linear(), epochs=3, **given)  # 20 s an epoch
    (entry,) = stopped.getHistory()
    assert 0 < entry["steps"] < 1000
    assert entry["rows"] == 2 * entry["steps"]
    assert "stopping, as asked for in the notebook" in shown.messages
    run = tmp_path / "runs/mine"
    record = json.loads((run / "_record.json").read_text())
    assert record["state"] == "ended"
    assert [one["what"] for one in record["events"]] == ["stop"]
    assert not (run / stop_request.STOP_FILE).exists()
    monkeypatch.setattr(estimators, "create_progress_display", lambda _verbose: ProgressDisplay())
    slow.unlink()
    more = fit(tmp_path, linear(), epochs=2, **given)
    assert [one["epoch"] for one in more.getHistory()] == [0, 1]
    assert more.getHistory()[0] == entry


@pytest.mark.slow
def test_a_fit_of_lightning_ends_within_an_epoch_and_validates(tmp_path, monkeypatch):
    import lightning

    from farandole.spark.lightning import TorchEstimator

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, _index):
            time.sleep(0.02)
            return torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

        def validation_step(self, batch, _index):
            self.log("val_loss", torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    x, y = line(2000)
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    write(tmp_path / "intermediate_val_data", x=x[:16], y=y[:16])
    shown = Pressed("step")
    monkeypatch.setattr(estimators, "create_progress_display", lambda _verbose: shown)
    fitted = TorchEstimator(
        model=Module(), feature_cols=["x"], label_cols=["y"], batch_size=1, epochs=3, verbose=0,
        store=LocalStore(str(tmp_path)), backend=LocalBackend(2, verbose=0),
    ).fit_on_parquet()  # fmt: skip
    (entry,) = fitted.getHistory()  # an epoch takes 20 s
    assert 0 < entry["rows"] < 2000
    assert entry["validation"]["loss"] > 0


@pytest.mark.slow
def test_a_fit_of_keras_ends_after_the_epoch_under_way(tmp_path, monkeypatch):
    import keras

    from farandole.spark.keras import KerasEstimator

    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 - Keras's
            time.sleep(0.1)

    x, y = line(64)
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    shown = Pressed("epoch")
    monkeypatch.setattr(estimators, "create_progress_display", lambda _verbose: shown)
    fitted = KerasEstimator(
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.05),
        loss="mean_squared_error", feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=1000,
        verbose=0,
        callbacks=[Slow()], store=LocalStore(str(tmp_path)), backend=LocalBackend(2, verbose=0),
    ).fit_on_parquet()  # fmt: skip
    assert 0 < len(fitted.getHistory()["loss"]) < 1000
    assert "stopping, as asked for in the notebook" in shown.messages


def test_without_a_button_workers_are_not_asked_to_look(tmp_path, monkeypatch):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    monkeypatch.setattr(stop_request.arrays, "broadcast", None)  # a call would fail
    told = []
    made = estimator(tmp_path, linear(), epochs=2)
    run = made.getBackend().run
    monkeypatch.setattr(
        made.getBackend(),
        "run",
        lambda *args, env=None, **more: told.append(env) or run(*args, **more),
    )
    assert len(made.fit_on_parquet().getHistory()) == 2
    assert told == [None]


def test_ranks_agree_about_once_a_second_however_long_a_step_takes(remote, monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setenv(stop_request.STOP_TOKEN_VARIABLE, "mine")
    monkeypatch.setattr(
        stop_request.arrays,
        "broadcast",
        lambda mine, _root, name: calls.append(now[0]) or mine,  # noqa: ARG005
    )
    halt = StopCheck(remote, clock=lambda: now[0])
    monkeypatch.setattr(halt, "_is_stop_requested", lambda: now[0] >= 50)
    for seconds in (0.001, 3.0):
        halt.begin_epoch()
        calls.clear()
        start = now[0]
        while now[0] < start + 30:
            now[0] += seconds
            assert not halt.should_stop_after_step(0) or now[0] >= 50
        assert 10 <= len(calls) <= 32, seconds
    now[0] = 100.0
    assert halt.should_stop_after_epoch(0)


def test_a_request_of_an_earlier_fit_ends_nothing(remote, monkeypatch):
    earlier, fit = StopRequest(remote), StopRequest(remote)
    earlier.request_stop()
    monkeypatch.setenv(
        stop_request.STOP_TOKEN_VARIABLE,
        fit.stop_token_variables()[stop_request.STOP_TOKEN_VARIABLE],
    )
    monkeypatch.setattr(stop_request, "_STOP_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(stop_request.arrays, "broadcast", lambda mine, _root, name: np.array(mine))  # noqa: ARG005
    halt = StopCheck(remote)
    assert not halt.should_stop_after_epoch(0)
    time.sleep(0.1)
    assert not halt.should_stop_after_epoch(0)
    fit.request_stop()
    deadline = time.monotonic() + 30
    while not halt.should_stop_after_epoch(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not halt.should_stop_after_epoch(1), (
        "another rank's answer comes from rank 0, not from the store"
    )
    fit.close()
    assert remote.read(stop_request.STOP_FILE) is None


def looking():
    return [one for one in threading.enumerate() if one.name == "farandole-stop"]


def sees_one_look(_state):
    assert len(looking()) == 1


def wait_for_their_end():
    for one in looking():
        one.join(30)
    assert looking() == []


def test_the_store_is_not_read_after_the_rank_has_ended(remote, monkeypatch):
    monkeypatch.setenv(stop_request.STOP_TOKEN_VARIABLE, "mine")
    monkeypatch.setattr(stop_request.arrays, "broadcast", lambda mine, _root, name: np.array(mine))  # noqa: ARG005
    with contextlib.closing(StopCheck(remote)) as halt:
        assert not halt.should_stop_after_epoch(0)
        assert len(looking()) == 1
    wait_for_their_end()


def test_a_process_that_trains_again_keeps_no_thread_of_the_fit_before(tmp_path, monkeypatch):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    monkeypatch.setenv(stop_request.STOP_TOKEN_VARIABLE, "mine")
    fit(tmp_path, linear(), epochs=2, callbacks=[sees_one_look])
    wait_for_their_end()


class Fake:
    """A backend that records the server's calls."""

    def __init__(self, fails=False):
        self.calls = []
        self.fails = fails
        self.in_order, self.asked = True, False

    def request_stop(self):
        if self.fails:
            raise OSError("read-only file system")
        self.calls.append("ask")

    def end_unless_double_click(self):
        self.calls.append("end")


def request(endpoint, path, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Access-Control-Allow-Origin")


@pytest.fixture
def serve():
    """Opens a server for what is called."""
    opened = []

    def open_endpoint(stop):
        opened.append(stop_button.StopEndpoint(stop))
        return opened[-1]

    yield open_endpoint
    for one in opened:
        one.close()


def test_only_a_holder_of_the_token_can_stop(serve):
    stop = Fake()
    endpoint = serve(stop)
    assert len(endpoint.path) == 34
    wrong = f"/{'0' * 32}/stop"
    for path in (
        wrong,
        "/",
        "/stop",
        endpoint.path,
        f"{endpoint.path}other",
        f"{endpoint.path}stop/",
    ):
        assert request(endpoint, path)[0] == 404, path
    assert request(endpoint, f"{endpoint.path}stop", "GET")[0] == 501
    assert stop.calls == []
    assert request(endpoint, f"{endpoint.path}stop") == (204, "*")
    assert request(endpoint, f"{endpoint.path}end")[0] == 204
    assert stop.calls == ["ask", "end"]


def test_a_store_that_refuses_the_request_is_said(serve, caplog):
    endpoint = serve(Fake(fails=True))
    assert request(endpoint, f"{endpoint.path}stop")[0] == 503
    assert "the fit cannot be stopped: read-only file system" in caplog.text


def test_a_run_without_a_store_is_interrupted_instead(tmp_path):
    stop = StopRequest(LocalStore(str(tmp_path), save_runs=False).to_remote("mine"))
    assert not stop.in_order
    assert stop.stop_token_variables() == {}
    assert "End at once</button>" in stop_button.button_html(
        "http://127.0.0.1:1/t/", in_order=False
    )
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes some time
        threading.Timer(0.05, stop.request_stop).start()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.01)


def test_the_second_click_of_a_double_click_does_not_end_the_fit(remote, monkeypatch):
    ended = []
    monkeypatch.setattr(stop_request._thread, "interrupt_main", lambda: ended.append(True))
    now = [100.0]
    stop = StopRequest(remote, clock=lambda: now[0])
    stop.request_stop()
    now[0] += 0.3
    assert not stop.end_unless_double_click()
    assert not ended
    now[0] += 3.0
    assert stop.end_unless_double_click()
    assert ended


def test_a_fit_in_another_thread_ends_at_the_next_report(remote, monkeypatch):
    monkeypatch.setattr(stop_request._thread, "interrupt_main", lambda: None)
    stop = StopRequest(remote)
    stop.raise_if_ended()
    stop.interrupt_fit()
    stop.raise_if_ended()  # the main thread gets KeyboardInterrupt
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="as asked for in the notebook"),
    ):
        pool.submit(stop.raise_if_ended).result()
