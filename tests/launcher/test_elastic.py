# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs on this host: workers that are killed, slots that change, hosts that cannot be
found.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import is_alive, until
from tests.launcher.elastic import QUICK, SLOW, TRAIN, Hosts, failed, finish, members, own, worlds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes the training script, with a line to run in each step, and gives the command."""

    def write(line: str = "pass", before: str = "") -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(before + TRAIN.replace("AT_EACH_STEP", line))
        return [sys.executable, str(path)]

    return write


def test_a_killed_worker_is_replaced_and_the_others_keep_their_processes_and_ranks(
    launch: Start, train
) -> None:
    run = launch("-np", 4, "--min-np", 2, *QUICK, *train())
    before = members(run, 4)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = members(run, 3)
    kept = [one["pid"] for rank, one in enumerate(before) if rank != 1]
    assert sorted(one["pid"] for one in after) == sorted(kept)
    assert after[0]["pid"] == before[0]["pid"]
    assert all(one["from"] == 1 for one in after), "they went on from what they had"
    again = members(run, 4)
    assert {one["pid"] for one in again} > set(kept)
    said = finish(run, 4)
    assert "rank 1 on localhost was ended by SIGKILL" in said
    assert "world 3 has 4 ranks" in said


def test_a_spare_takes_over_without_waiting_for_the_cooldown(launch: Start, train) -> None:
    run = launch("-np", 2, "--min-np", 2, "--spares", 1, *SLOW, *train())
    before = members(run, 2)
    os.kill(before[1]["pid"], signal.SIGKILL)
    until(lambda: len(worlds(run)) == 4, "a second world")
    after = members(run, 2)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] != before[1]["pid"]
    finish(run, 2)


def test_a_worker_imports_what_optimizers_import_before_it_joins_a_world_that_waits(
    launch: Start, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport torch\nimport farandole.torch as hvd\nassert 'torch._dynamo' not in "
        "sys.modules\n"
        "hvd.init()\nprint('loaded', 'torch._dynamo' in sys.modules, flush=True)\n"
    )
    for flags, is_loaded in (("--min-np", 1), True), ((), False):
        run = launch("-np", 1, *flags, sys.executable, script)
        assert run.wait() == 0, run.err.read_text()
        assert f":loaded {is_loaded}" in run.out.read_text()


def test_all_workers_that_are_killed_are_started_again(launch: Start, train) -> None:
    run = launch("-np", 2, "--min-np", 2, *QUICK, *train())
    before = members(run, 2)
    for one in before:
        os.kill(one["pid"], signal.SIGKILL)
    until(lambda: len(worlds(run)) == 4, "a second world")
    assert {one["pid"] for one in members(run, 2)}.isdisjoint(one["pid"] for one in before)
    said = finish(run, 2)
    assert (
        "world 2 has 2 ranks, all of them new: state that the script has not stored is lost" in said
    )


def test_slots_that_come_and_go_change_the_world(launch: Start, train, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    run = launch("-np", 2, "--min-np", 1, *hosts.flags, *train())
    first = members(run, 2)
    hosts.are("localhost:3")
    second = members(run, 3)
    assert [one["pid"] for one in second[:2]] == [one["pid"] for one in first]
    hosts.are("localhost:1")
    (last,) = members(run, 1)
    assert last["pid"] == first[0]["pid"]
    assert last["from"] == 1
    said = finish(run, 1)
    assert "localhost" not in said.replace("discover", ""), f"slots that go are no failure: {said}"


def test_slots_without_a_number_are_those_of_the_flag(launch: Start, train, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost")
    run = launch("-np", 2, "--slots-per-host", 2, *hosts.flags, *train())
    members(run, 2)
    finish(run, 2)
    run = launch("-np", 2, *hosts.flags, *train())
    failed(
        run,
        "printed a host without slots, and --slots-per-host does not say how many it has: "
        "localhost",
    )


def test_the_world_changes_no_more_often_than_the_limit_says(launch: Start, train) -> None:
    run = launch("-np", 3, "--min-np", 1, "--reset-limit", 1, *SLOW, *train())
    os.kill(members(run, 3)[2]["pid"], signal.SIGKILL)
    os.kill(members(run, 2)[1]["pid"], signal.SIGKILL)
    failed(run, "resets during the elastic job exceeded the limit: 1")


def test_too_few_slots_end_the_job_in_time_with_what_there_is(
    launch: Start, train, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    run = launch("-np", 3, "--min-np", 3, "--elastic-timeout", 3, *hosts.flags, *train())
    failed(run, "timed out after 3.0s waiting for a world of at least 3 workers", "localhost:2")


def test_too_few_slots_after_a_loss_end_the_job_and_name_the_loss(launch: Start, train) -> None:
    run = launch("-np", 2, "--min-np", 2, "--elastic-timeout", 3, *SLOW, *train())
    os.kill(members(run, 2)[1]["pid"], signal.SIGKILL)
    failed(
        run, "rank 1 on localhost was ended by SIGKILL", "at least 2 workers", "no new worker for"
    )


def test_fixed_hosts_without_room_are_refused_at_once(launch: Start, train) -> None:
    run = launch("-np", 3, "--min-np", 1, "-H", "localhost:2", *train())
    failed(run, "Requested more processes (3) than there are available slots (2)")


def test_a_script_that_fails_at_first_ends_the_job_with_horovods_words(
    launch: Start, train, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    hosts.trouble.write_text("echo no cluster >&2; exit 3")
    run = launch("-np", 2, *hosts.flags, *train())
    failed(run, f"Failed to execute discovery script: {hosts.program}. Exit code: 3: no cluster")


@pytest.mark.parametrize("trouble", ["echo busy >&2; exit 3", "sleep 600 & sleep 600"])
def test_a_script_that_fails_or_hangs_later_is_tried_again(
    launch: Start, train, tmp_path: Path, trouble: str
) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    run = launch("-np", 1, "--discovery-timeout", 1, *hosts.flags, *train())
    members(run, 1)
    hosts.trouble.write_text(trouble)
    hosts.are("localhost:2")
    until(lambda: "the hosts that were found last are kept" in own(run), "a failure that is told")
    assert run.process.poll() is None
    hosts.trouble.write_text("")
    members(run, 2)
    said = finish(run, 2)
    assert said.count("the hosts that were found last are kept") == 1, said


def test_a_hanging_script_ends_with_the_job(launch: Start, train, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    run = launch("-np", 1, *hosts.flags, *train())
    members(run, 1)
    pids = tmp_path / "pids"
    hosts.trouble.write_text(f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    until(pids.exists, "the script to hang")
    finish(run, 1)
    until(
        lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), "the script's end"
    )


def test_a_bug_in_a_step_ends_the_job_with_its_traceback(launch: Start, train) -> None:
    run = launch(
        "-np",
        2,
        "--min-np",
        1,
        *QUICK,
        *train("if state.step == 5: raise LookupError('no such row')"),
    )
    failed(run, "rank ", "exited with code 1")
    assert run.process.returncode == 1
    assert "LookupError: no such row" in run.err.read_text()
    assert len(worlds(run)) <= 4, "nobody was started again and again"


def test_a_bug_before_init_ends_the_job_at_once(launch: Start, train) -> None:
    run = launch("-np", 2, "--min-np", 1, *QUICK, *train(before="import sys\nsys.exit(7)\n"))
    failed(run, "exited with code 7")
    assert run.process.returncode == 7


def test_a_program_that_never_calls_init_is_not_started_again(launch: Start) -> None:
    run = launch("-np", 2, "--min-np", 1, "echo", "hello")
    failed(run, "ended before it called init()")
    assert len(run.lines()) <= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(launch: Start, train, number: signal.Signals) -> None:
    run = launch("-np", 2, "--min-np", 1, *QUICK, *train())
    pids = [one["pid"] for one in members(run, 2)]
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    until(lambda: not any(map(is_alive, pids)), "the workers' end")


def test_a_killed_launcher_leaves_nothing(launch: Start, train) -> None:
    run = launch("-np", 2, "--min-np", 1, *train())
    pids = [one["pid"] for one in members(run, 2)]
    run.process.kill()
    until(lambda: not any(map(is_alive, pids)), "the workers' end")


def test_files_of_the_ranks_grow_with_the_world(launch: Start, train, tmp_path: Path) -> None:
    hosts, out = Hosts(tmp_path, "localhost:1"), tmp_path / "ranks"
    run = launch("-np", 1, "--output-filename", out, *hosts.flags, *train())
    members(run, 1)
    hosts.are("localhost:2")
    members(run, 2)
    finish(run, 2)
    assert "over 2" in (out / "rank.1" / "stdout").read_text()
