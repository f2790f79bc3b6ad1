# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole run`: what a terminal sees of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import is_alive, until
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]
    Write = Callable[[str], Path]

SLEEPER = """
child = os.fork()
if child == 0:
    time.sleep(600)
print(f"pid {os.getpid()}")
print(f"pid {child}")
print("up")
time.sleep(600)
"""


def up(run: Launch, size: int = 2) -> list[int]:
    """Waits until every rank and its child run, and gives their numbers."""
    until(lambda: sum(line.endswith(":up") for line in run.lines()) == size, "all ranks up")
    pids = run.pids()
    assert len(pids) == 2 * size
    assert all(is_alive(pid) for pid in pids)
    return pids


def gone(pids: list[int]) -> None:
    """Waits until none of the processes is left."""
    until(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


def test_every_line_carries_its_rank_and_stream(launch: Start, script: Write) -> None:
    text = "print('a'); sys.stdout.write('10%\\r50%\\rdone'); print('e', rank, file=sys.stderr)"
    run = launch("-np", 2, sys.executable, script(text))
    assert run.wait() == 0
    expected = [
        f"[{rank}]<stdout>:{line}" for rank in (0, 1) for line in ("10%", "50%", "a", "done")
    ]
    assert run.lines() == expected
    assert sorted(run.err.read_text().splitlines()) == ["[0]<stderr>:e 0", "[1]<stderr>:e 1"]


def test_a_line_is_seen_when_it_is_printed(launch: Start, script: Write) -> None:
    run = launch("-np", 1, sys.executable, script("print('now'); time.sleep(600)"))
    run.until("[0]<stdout>:now")
    run.process.terminate()
    run.wait()


def test_a_worker_gets_its_rank_whatever_the_environment_contains(
    launch: Start, script: Write
) -> None:
    names = [
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
    ]
    names += [
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    ]
    run = launch(
        *("-np", 2, "--cache-capacity", 7, sys.executable),
        script(f"print(*[os.environ[name] for name in {[*names, 'FARANDOLE_CACHE_CAPACITY']}])"),
        env={"RANK": "9", "HOROVOD_RANK": "9", "WORLD_SIZE": "9"},
    )
    assert run.wait() == 0
    assert run.lines() == [
        "[0]<stdout>:2 0 2 127.0.0.1 0 2 0 2 0 1 7",
        "[1]<stdout>:2 1 2 127.0.0.1 1 2 1 2 0 1 7",
    ]


def test_the_exit_status_is_the_first_failures_and_the_others_are_ended(
    launch: Start, script: Write
) -> None:
    run = launch("-np", 2, sys.executable, script(f"if rank == 1:\n    sys.exit(7)\n{SLEEPER}"))
    assert run.wait() == 7
    gone(run.pids())
    assert "rank 1 on" in run.err.read_text()
    assert "exited with code 7; the other processes were ended" in run.err.read_text()


def test_a_killed_worker_counts_as_128_and_its_signal(launch: Start, script: Write) -> None:
    run = launch("-np", 2, sys.executable, script(SLEEPER))
    pids = up(run)
    os.kill(pids[0], signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    gone(pids)
    assert "was ended by SIGKILL" in run.err.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(launch: Start, script: Write, number: signal.Signals) -> None:
    run = launch("-np", 2, sys.executable, script(SLEEPER))
    pids = up(run)
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    gone(pids)


def test_nohup_keeps_a_job_whose_terminal_goes_away(script: Write, tmp_path: Path) -> None:
    path = script(
        "print('up', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\n"
        "print('done')\n"
    )
    words = ["nohup", sys.executable, "-m", "farandole", "run", "-np", "1", sys.executable, path]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0]<stdout>:up\n"
        job.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0
        assert job.stdout.read() == "[0]<stdout>:done\n"


def test_a_killed_launcher_leaves_no_process(launch: Start, script: Write) -> None:
    run = launch("-np", 2, sys.executable, script(SLEEPER))
    pids = up(run)
    run.process.kill()
    run.wait()
    gone(pids)


def test_a_worker_deaf_to_signals_is_ended_all_the_same(launch: Start, script: Write) -> None:
    deaf = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, "
        "signal.SIG_IGN)\n"
    )
    run = launch("-np", 2, sys.executable, script(deaf + SLEEPER))
    pids = up(run)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    gone(pids)


def test_a_failure_by_a_lost_peer_is_not_taken_for_the_first(launch: Start, script: Write) -> None:
    text = """
if rank == 0:
    from farandole import FarandoleInternalError
    raise FarandoleInternalError("lost rank 1")
time.sleep(0.2)
sys.exit(5)
"""
    run = launch("-np", 2, sys.executable, script(text))
    assert run.wait() == 5
    assert "farandole: rank 1 on" in run.err.read_text()


def test_a_missing_program_is_named(launch: Start) -> None:
    run = launch("-np", 2, "/no/such/program")
    assert run.wait() == 1
    assert "cannot start /no/such/program: No such file or directory" in run.err.read_text()


def test_a_job_that_is_too_large_for_this_host_says_so_before_anything_starts(
    launch: Start,
) -> None:
    run = launch("-np", 1_000_000, "true")
    assert run.wait() == 1
    assert run.err.read_text().startswith(
        "farandole: the job cannot begin: a job of this size needs "
    )


def test_a_bad_knob_is_named_before_anything_starts(launch: Start) -> None:
    run = launch("-np", 2, "--cache-capacity", "many", "true")
    assert run.wait() == 1
    assert "--cache-capacity must be a whole number" in run.err.read_text()


def test_output_waits_for_a_reader_that_takes_its_time(script: Write) -> None:
    lines = [f"{number} {'x' * 60}" for number in range(1500)]
    path = script("for number in range(1500):\n    print(number, 'x' * 60)")
    command = [sys.executable, "-m", "farandole", "run", "-np", "1", sys.executable, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            # The worker has long ended: what it wrote fits into the pipes. This is a pager on its
            # first page.
            run.wait(4)
        assert [line.removeprefix("[0]<stdout>:").rstrip() for line in run.stdout] == lines
        assert run.wait(20) == 0


def test_control_c_ends_a_run_whose_output_is_not_read(script: Write) -> None:
    path = script(
        "print('up', flush=True)\nfor number in range(1500):\n    print(number, 'x' * 60)"
    )
    command = [sys.executable, "-m", "farandole", "run", "-np", "1", sys.executable, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "[0]<stdout>:up\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 128 + signal.SIGINT


def test_a_child_with_its_parents_variables_is_refused_the_rank_and_the_parent_continues(
    launch: Start,
) -> None:
    program = program_path(__file__, "start_child_of_worker")
    run = launch("-np", 2, sys.executable, program)
    assert run.wait() == 0, run.err.read_text()
    told = ("alone 0 1", "heir 1", "on")
    assert run.lines() == [f"[{rank}]<stdout>:{line}" for rank in (0, 1) for line in told]


def test_workers_keep_the_memory_they_free_unless_told_otherwise(
    launch: Start, script: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"
    say = f"print(*(os.environ[name] for name in {names}))"
    run = launch("-np", 1, sys.executable, script(say))
    assert run.wait() == 0
    assert run.lines() == ["[0]<stdout>:4294967296 33554432 glibc.malloc.hugetlb=1"]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    run = launch("-np", 1, sys.executable, script(say))
    assert run.wait() == 0
    assert run.lines() == ["[0]<stdout>:1 33554432 glibc.malloc.hugetlb=1"]
