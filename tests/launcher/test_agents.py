# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Registrar and agents as a driver in Python sees them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.launcher.conftest import is_alive, until
from tests.programs import program_path

import farandole
from farandole._native.launcher import report_record, run_agent
from farandole._native.registrar import Event, Registrar
from farandole.common import pickling

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native.launcher import Outcome

WORKER = [sys.executable, "-m", "farandole.runner.worker"]


def together(registrar: Registrar, size: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Runs a function on every task, each agent in a thread."""
    payload = pickling.pickle_by_value((fn, args, {}))
    with ThreadPoolExecutor(size) as pool:
        agents = [
            pool.submit(run_agent, registrar.ticket, task, WORKER, payload=payload)
            for task in range(size)
        ]
        return [agent.result(60) for agent in agents]


def events(registrar: Registrar, kind: str) -> list[Event]:
    """Everything that happened, up to an event of a kind."""
    seen: list[Event] = []

    def arrived() -> bool:
        seen.extend(registrar.events(1.0))
        return any(event.kind == kind for event in seen)

    until(arrived, f"an event of kind {kind}")
    return seen


def test_functions_run_on_every_rank_and_their_values_come_back() -> None:
    def fn(base: int) -> tuple[int, str]:
        print("hello")
        report_record("progress", b"{}")
        return base + int(os.environ["RANK"]), os.environ["WORLD_SIZE"]

    with Registrar(2, host="127.0.0.1") as registrar:
        outcomes = together(registrar, 2, fn, 10)
        assert [pickle.loads(outcome.result or b"") for outcome in outcomes] == [
            ("ok", (10, "2")),
            ("ok", (11, "2")),
        ]
        assert [(outcome.rank, outcome.size, outcome.exit_code) for outcome in outcomes] == [
            (0, 2, 0),
            (1, 2, 0),
        ]
        seen = registrar.events(5.0)
        for kind in ("registered", "log", "metric", "exit", "result"):
            assert sorted(event.task or 0 for event in seen if event.kind == kind) == [0, 1], kind
        assert {event.text for event in seen if event.kind == "log"} == {"hello"}
        assert [seat["local_rank"] for seat in registrar.rank_assignment() or []] == [0, 1]


def test_an_exception_comes_back_with_its_traceback_and_is_the_one_blamed() -> None:
    def fn() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("no such column")
        time.sleep(600)

    with Registrar(2, host="127.0.0.1") as registrar:
        waiting, failed = together(registrar, 2, fn)
        assert (failed.aborted, failed.exit_code) == (False, 1)
        tag, kind, message, text, pickled = pickle.loads(failed.result or b"")
        assert (tag, kind, message) == ("error", "KeyError", "'no such column'")
        assert 'raise KeyError("no such column")' in text
        assert isinstance(pickle.loads(pickled), KeyError)
        assert "KeyError: 'no such column'" in failed.stderr_tail
        assert waiting.aborted
        assert waiting.signal_name == "SIGTERM"
        aborted = [event for event in events(registrar, "aborted") if event.kind == "aborted"]
        assert (aborted[0].rank, aborted[0].text) == (1, failed.reason)


def test_a_killed_worker_is_reported_with_its_signal_and_last_words() -> None:
    def fn() -> None:
        sys.stderr.write("about to go\n")
        os.kill(os.getpid(), signal.SIGKILL)

    with Registrar(1, host="127.0.0.1") as registrar:
        (outcome,) = together(registrar, 1, fn)
        assert (outcome.exit_code, outcome.signal, outcome.signal_name) == (None, 9, "SIGKILL")
        assert outcome.stderr_tail == "about to go"
        assert [
            event.stderr_tail for event in events(registrar, "exit") if event.kind == "exit"
        ] == ["about to go"]
        assert "was ended by SIGKILL" in (outcome.reason or "")


def test_a_value_that_cannot_be_pickled_is_an_error_and_an_exit_is_no_exception() -> None:
    with Registrar(1, host="127.0.0.1") as registrar:
        (outcome,) = together(registrar, 1, threading.Lock)
        assert outcome.exit_code == 1
        assert pickle.loads(outcome.result or b"")[1] == "TypeError"
    with Registrar(1, host="127.0.0.1") as registrar:
        (outcome,) = together(registrar, 1, sys.exit, 9)
        assert outcome.exit_code == 9


def test_a_wrong_token_and_an_unknown_task_are_refused() -> None:
    with Registrar(1, host="127.0.0.1") as registrar, Registrar(1, host="127.0.0.1") as other:
        with pytest.raises(farandole.FarandoleEnvironmentError, match="unknown task 3"):
            run_agent(registrar.ticket, 3, ["true"])
        with pytest.raises(ValueError, match="not a ticket"):
            run_agent(registrar.ticket[:-4], 0, ["true"])
        assert registrar.ticket not in repr(registrar)
        other.close()
        with pytest.raises(farandole.FarandoleEnvironmentError, match="cannot reach the registrar"):
            run_agent(other.ticket, 0, ["true"], start_timeout=2.0)


def test_a_driver_that_aborts_ends_its_workers_and_says_why() -> None:
    registrar = Registrar(1, host="127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        agent = pool.submit(run_agent, registrar.ticket, 0, ["sh", "-c", "echo up; sleep 600"])
        events(registrar, "log")
        registrar.abort("that is enough")
        outcome = agent.result(60)
    assert (outcome.aborted, outcome.reason) == (True, "that is enough")
    registrar.close()
    assert registrar.events(0.0) is not None


def test_waiting_for_events_can_be_interrupted() -> None:
    with Registrar(1, host="127.0.0.1") as registrar:
        main = threading.get_ident()
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            registrar.events(60.0)
        assert time.monotonic() - started < 30.0


def test_an_interrupted_agent_ends_its_worker_first(tmp_path: Any) -> None:
    program = program_path(__file__, "interrupt_agent")
    ended = subprocess.run([sys.executable, program, tmp_path], timeout=60, check=False)
    assert ended.returncode == 0


def test_a_worker_dies_with_an_agent_that_is_killed(tmp_path: Any) -> None:
    text = f"""
from farandole._native.launcher import run_agent
from farandole._native.registrar import Registrar
registrar = Registrar(1, host="127.0.0.1")
script = "sleep 600 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; wait"
run_agent(registrar.ticket, 0, ["sh", "-c", script])
"""
    agent = subprocess.Popen([sys.executable, "-c", text])
    until((tmp_path / "pids").exists, "the worker's start")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    agent.kill()
    agent.wait()
    until(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


def test_a_registrar_in_a_fork_says_so_instead_of_hanging() -> None:
    with Registrar(1, host="127.0.0.1") as registrar:
        child = os.fork()
        if child == 0:
            try:
                registrar.events(5.0)
                os._exit(1)
            except ValueError:
                registrar.close()
                os._exit(0)
        deadline = time.monotonic() + 20
        pid, status = 0, -1
        while pid == 0 and time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
        assert (pid, status) == (child, 0)


def test_run_returns_results_by_rank() -> None:
    from farandole.runner import run

    assert run(lambda base: base * int(os.environ["RANK"]), (5,), num_proc=3) == [0, 5, 10]


def test_a_report_without_a_driver_is_no_error() -> None:
    assert report_record("progress", b"") is False
