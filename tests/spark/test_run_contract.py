# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Promises of all backends, checked for each backend.

Functions for workers are nested: the worker cannot import this file, and cloudpickle carries nested
ones by value.
"""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from farandole.spark import FarandoleJobError
from farandole.spark.common.backend import Backend, LocalBackend, SparkBackend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(90, func_only=True)

MakeBackend = "Callable[..., Backend]"


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.newest), "spark"])
def backend(request: pytest.FixtureRequest) -> Callable[..., Backend]:
    if request.param == "local":
        return lambda **options: LocalBackend(2, **options)
    request.getfixturevalue("spark")
    return lambda **options: SparkBackend(2, **options)


def test_results_come_back_by_rank(backend):
    def rank_and_size():
        import os

        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])

    assert backend().run(rank_and_size) == [(0, 2, 0), (1, 2, 1)]


def test_arguments_and_closures_reach_the_function(backend):
    offset = 40

    def add(a, b, *, c):
        return a + b + c + offset

    assert backend().run(add, args=(1,), kwargs={"b": 2, "c": 3}) == [46, 46]
    assert backend().num_processes() == 2


@pytest.mark.newest
def test_none_is_a_result(backend):
    assert backend().run(lambda: None) == [None, None]


def test_a_result_of_50_megabytes_comes_back_whole(backend):
    def big():
        import os

        return bytes([int(os.environ["RANK"])]) * (50 << 20)

    results = backend().run(big)
    assert [len(result) for result in results] == [50 << 20] * 2
    assert [(result[0], result[-1]) for result in results] == [(0, 0), (1, 1)]


@pytest.mark.newest
def test_a_backend_runs_again_and_again(backend):
    runner = backend()
    assert [runner.run(lambda i=i: i) for i in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_an_exception_on_one_rank_carries_its_traceback_and_the_original(backend):
    def fail_on_one():
        import os

        def deep_inside(value):
            raise KeyError(value)

        if os.environ["RANK"] == "1":
            deep_inside("no such layer")

    with pytest.raises(FarandoleJobError) as caught:
        backend().run(fail_on_one)
    error = caught.value
    assert error.rank == 1
    assert "KeyError" in error.reason
    assert "deep_inside" in error.remote_traceback
    assert "deep_inside" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("no such layer",)


@pytest.mark.newest
def test_an_exception_that_the_driver_cannot_rebuild_still_tells_its_type_and_message(backend):
    def fail():
        class Unpicklable(ValueError):
            def __reduce__(self):
                raise TypeError("never")

        raise Unpicklable("the odd one")

    with pytest.raises(FarandoleJobError, match="the odd one") as caught:
        backend().run(fail)
    assert "Unpicklable" in caught.value.exception_type


@pytest.mark.timing
def test_a_failing_rank_ends_the_others_at_once(backend, pids):
    note = pids.note

    def fail_while_others_sleep():
        import os
        import time

        note()
        if os.environ["RANK"] == "0":
            raise RuntimeError("early")
        time.sleep(600)

    started = time.monotonic()
    with pytest.raises(FarandoleJobError, match="early") as caught:
        backend().run(fail_while_others_sleep)
    assert time.monotonic() - started < 30
    assert caught.value.rank == 0
    assert pids.gone(len(pids.seen()), limit=0.5)


@pytest.mark.timing
def test_a_killed_worker_is_named_with_signal_and_stderr_within_five_seconds(backend, pids):
    note = pids.note

    def suicidal():
        import os
        import signal
        import sys
        import time

        note()
        if os.environ["RANK"] == "1":
            print("my last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    started = time.monotonic()
    with pytest.raises(FarandoleJobError) as caught:
        backend().run(suicidal)
    assert time.monotonic() - started < 8, "start-up and five seconds"
    error = caught.value
    assert (error.rank, error.signal_name, error.exit_code) == (1, "SIGKILL", None)
    assert "my last words" in error.stderr_tail
    assert "my last words" in str(error)
    assert "SIGKILL" in str(error)
    assert "memory" in str(error)
    assert pids.gone(len(pids.seen()), limit=0.5)


@pytest.mark.timing
def test_a_worker_killed_in_a_collective_is_named_and_not_the_survivor_that_noticed(backend, pids):
    note = pids.note

    def train():
        import os
        import signal

        import torch

        import farandole.torch as hvd

        hvd.init()
        note()
        for step in range(100_000):
            hvd.allreduce(torch.ones(1000), name="gradient")
            if step == 50 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(FarandoleJobError) as caught:
        backend().run(train)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")
    assert pids.gone(2, limit=0.5)


@pytest.mark.newest
def test_an_exit_code_is_reported(backend):
    def leave():
        import os
        import sys

        if os.environ["RANK"] == "0":
            sys.exit(7)

    with pytest.raises(FarandoleJobError, match="7") as caught:
        backend().run(leave)
    assert (caught.value.rank, caught.value.exit_code) == (0, 7)


@pytest.mark.newest
def test_a_function_that_ends_its_process_without_a_result_is_an_error(backend):
    def vanish():
        import os

        os._exit(0)

    with pytest.raises(FarandoleJobError, match="without a result"):
        backend().run(vanish)


@pytest.mark.newest
def test_a_function_that_leaves_a_pool_of_threads_and_one_at_work_is_waited_for_and_no_longer(
    backend, tmp_path
):
    folder = str(tmp_path)

    def leave():
        import concurrent.futures
        import os
        import threading
        import time

        import __main__

        __main__.pool = concurrent.futures.ThreadPoolExecutor(2)  # outlives the function
        __main__.pool.submit(len, "started").result()
        path = os.path.join(folder, os.environ["RANK"])

        def write():
            time.sleep(0.2)
            open(path, "w").close()

        threading.Thread(target=write).start()
        return "left"

    assert backend(start_timeout=60).run(leave) == ["left", "left"]
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_the_next_run_works_after_a_failure(backend):
    runner = backend()

    def fail():
        raise ValueError

    with pytest.raises(FarandoleJobError):
        runner.run(fail)
    assert runner.run(lambda: "fine") == ["fine", "fine"]


@pytest.mark.timing
def test_an_interrupt_leaves_nothing_behind_and_the_next_run_works(backend, pids):
    note = pids.note

    def sleep():
        import time

        note()
        time.sleep(600)

    runner = backend()

    def interrupt():
        pids.wait(2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(sleep)
    interrupter.join()
    assert pids.gone(2, limit=0.5)
    assert runner.run(lambda: 1) == [1, 1]


def test_records_reach_the_callback_with_their_rank(backend):
    def train():
        import os

        from farandole.spark.task import report

        return [
            report({"step": step, "loss": 1 / (step + 1), "who": os.environ["RANK"]})
            for step in range(5)
        ]

    seen: list[tuple[int, dict]] = []
    here = threading.get_ident()
    threads = set()

    def on_progress(rank, record):
        threads.add(threading.get_ident())
        seen.append((rank, record))

    assert backend().run(train, on_progress=on_progress) == [[True] * 5] * 2
    assert threads == {here}
    for rank in (0, 1):
        assert [record["step"] for of, record in seen if of == rank] == list(range(5))
    assert all(int(record["who"]) == rank for rank, record in seen)


@pytest.mark.timing
def test_a_callback_that_raises_ends_the_job(backend, pids):
    note = pids.note

    def train():
        import time

        from farandole.spark.task import report

        note()
        report({"step": 0})
        time.sleep(600)

    def on_progress(rank, record):
        raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        backend().run(train, on_progress=on_progress)
    assert pids.gone(len(pids.seen()), limit=0.5)


@pytest.mark.newest
def test_a_variable_is_set_and_another_removed(backend, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_GONE", "here")

    def look():
        import os

        return os.environ.get("FARANDOLE_TEST_SET"), os.environ.get("FARANDOLE_TEST_GONE")

    env = {"FARANDOLE_TEST_SET": "yes", "FARANDOLE_TEST_GONE": None}
    assert backend().run(look, env=env) == [("yes", None)] * 2


def test_an_object_that_cannot_be_pickled_is_an_error_before_the_start(backend):
    lock = threading.Lock()

    def locked():
        return lock

    for call, guilty in (
        ((locked,), "variable 'lock' of locked"),
        ((print, (1, {"deep": [lock]})), "argument 1['deep'][0]"),
        ((print, (), {"sep": lock}), "argument 'sep'"),
    ):
        with pytest.raises(
            TypeError,
            match=rf"cannot be pickled for the workers: .*{re.escape(guilty)}: cannot pickle",
        ):
            backend().run(*call)


def test_arguments_and_variables_that_no_process_can_have_are_refused_by_name(backend):
    for given, told in (
        ({"args": 5}, "args must be a list or a tuple of arguments: 5"),
        ({"args": "abc"}, "args must be a list or a tuple of arguments: 'abc'"),
        ({"kwargs": [1]}, r"kwargs must be a dict of arguments by name: \[1\]"),
        ({"env": {"A=B": "x"}}, "env has a variable with an invalid name or value: 'A=B' is 'x'"),
        ({"env": {"A": "x\0y"}}, "env has a variable with an invalid name or value"),
        ({"env": {"": None}}, "env has a variable with an invalid name or value: '' is None"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            backend().run(print, **given)


def test_numbers_that_cannot_be_are_refused_by_name(backend):
    for kind in (LocalBackend, SparkBackend):
        for wrong, told in (
            (0, "num_proc must be at least 1: 0"),
            ("2", "num_proc must be a whole number: '2'"),
        ):
            with pytest.raises((TypeError, ValueError), match=told):
                kind(wrong)
    for wrong in ("soon", 0, float("nan")):
        with pytest.raises((TypeError, ValueError), match="start_timeout must be"):
            backend(start_timeout=wrong).run(print)


def test_a_stream_that_cannot_be_written_to_is_refused_by_name(backend):
    with pytest.raises(TypeError, match=r"stderr must be a stream of text: 'log\.txt'"):
        backend(stderr="log.txt").run(print)


def test_lines_of_workers_reach_the_drivers_streams_with_their_rank(backend):
    def talk():
        import os
        import sys

        rank = os.environ["RANK"]
        for i in range(100):
            print(f"line {i} of {rank}")
        print(f"complaint of {rank}", file=sys.stderr)

    stdout, stderr = io.StringIO(), io.StringIO()
    backend(stdout=stdout, stderr=stderr).run(talk)
    for rank in (0, 1):
        prefix = f"[{rank}]<stdout>:"
        lines = [line for line in stdout.getvalue().splitlines() if line.startswith(prefix)]
        assert lines == [f"{prefix}line {i} of {rank}" for i in range(100)]
        assert f"[{rank}]<stderr>:complaint of {rank}" in stderr.getvalue().splitlines()


def test_a_missing_interpreter_is_named(backend):
    with pytest.raises(FarandoleJobError, match="/no/such/python"):
        backend(executable="/no/such/python").run(lambda: None)
