# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A worker with a notice of its end leaves at its next commit: the others continue, and it is no
failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import is_alive, until
from tests.launcher.elastic import QUICK, SLOW, TRAIN, finish, members, own

import farandole

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]
    Train = Callable[..., list[str]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Writes the training script, with a line to run in each step, and gives the command."""

    def write(line: str = "pass", before: str = "") -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(before + TRAIN.replace("AT_EACH_STEP", line))
        return [sys.executable, str(path)]

    return write


def check_departure(run: Launch, before: list[dict[str, int]], who: int) -> None:
    """Checks that one is gone, that the others continued with their state, and that no message
    calls it a failure.
    """
    pids = {one["pid"] for rank, one in enumerate(before) if rank != who}
    after = members(run, len(pids))
    told = f"{run.out.read_text()}\n{run.err.read_text()}"
    assert {one["pid"] for one in after} == pids, told
    assert all(one["from"] == 1 for one in after), told
    until(lambda: not is_alive(before[who]["pid"]), "its end")
    said = own(run)
    assert "was ended by" not in said, said
    assert "exited with" not in said, said
    assert "lost" not in said, said


def catches(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process has a handler of its own for a signal: a notice that was heeded
    takes it away.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_connected(pid: int) -> bool:
    """Returns whether a worker has opened its connection to the registrar, as `init` does first."""
    return any(
        os.readlink(entry).startswith("socket:") for entry in Path(f"/proc/{pid}/fd").iterdir()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGPWR])
@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_has_a_worker_leave_at_its_next_commit(
    launch: Start, train: Train, who: int, number: signal.Signals
) -> None:
    run = launch("-np", 3, "--min-np", 1, *SLOW, *train())
    before = members(run, 3)
    os.kill(before[who]["pid"], number)
    check_departure(run, before, who)
    finish(run, 2)


def test_a_script_that_hears_of_its_end_otherwise_leaves_by_a_call(
    launch: Start, train: Train
) -> None:
    line = (
        "hvd.rank() == 2 and state.step == 5 and "
        "__import__('farandole.common.elastic').common.elastic.leave('spot')"
    )
    run = launch("-np", 3, "--min-np", 1, *SLOW, *train(line))
    before = members(run, 3)
    check_departure(run, before, 2)
    finish(run, 2)


def test_its_host_rests_for_a_while_and_is_used_again(launch: Start, train: Train) -> None:
    run = launch("-np", 2, "--min-np", 1, *QUICK, *train())
    before = members(run, 2)
    began = time.monotonic()
    os.kill(before[1]["pid"], signal.SIGTERM)
    check_departure(run, before, 1)
    members(run, 2)
    assert time.monotonic() - began >= 1.0
    finish(run, 2)


def test_a_worker_whose_notice_is_over_before_its_commit_is_no_failure_either(
    launch: Start, train: Train
) -> None:
    # One rank never comes to its commit once the file is there.
    line = "\n        while os.path.exists(f'hang-{os.getpid()}'): open('hangs', 'w').close()"
    run = launch("-np", 3, "--min-np", 1, *SLOW, *train(line))
    before = members(run, 3)
    (run.out.parent / f"hang-{before[1]['pid']}").touch()
    until((run.out.parent / "hangs").exists, "a rank that hangs")
    os.kill(before[1]["pid"], signal.SIGTERM)
    until(lambda: not catches(before[1]["pid"], signal.SIGTERM), "its heed of the notice")
    assert is_alive(before[1]["pid"])
    os.kill(before[1]["pid"], signal.SIGTERM)  # who sends it again means it
    check_departure(run, before, 1)
    finish(run, 2)


def test_a_dismissed_spare_leaves_without_a_message(launch: Start, train: Train) -> None:
    says = "import os\nprint(f'pid {os.getpid()}', flush=True)\n"
    run = launch("-np", 2, "--min-np", 1, "--spares", 1, *SLOW, *train(before=says))
    known = {one["pid"] for one in members(run, 2)}
    until(lambda: len(run.pids()) == 3, "a spare")
    (spare,) = set(run.pids()) - known
    until(
        lambda: "farandole/_native" in (Path("/proc") / str(spare) / "maps").read_text(),
        "its imports",
    )
    until(lambda: is_connected(spare), "its call of init")
    os.kill(spare, signal.SIGTERM)
    until(lambda: not is_alive(spare), "the spare's end")
    assert "was ended by" not in own(run)
    finish(run, 2)


def _function(folder: Path) -> tuple[int, int]:
    import numpy as np

    import farandole.numpy as hvd
    from farandole.common.elastic import ObjectState, leave_and_join, run_fn

    def loop(state: ObjectState) -> tuple[int, int]:
        (folder / f"{hvd.rank()}-of-{hvd.size()}").write_text(str(os.getpid()))
        while not hvd.allreduce(np.array([float((folder / "enough").exists())]), op=hvd.Max)[0]:
            time.sleep(0.02)
            state.commit()
        return hvd.rank(), hvd.size()

    hvd.init()
    return run_fn(loop, leave_and_join)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))


def test_a_worker_of_a_function_leaves_and_the_results_are_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[BaseException] = []

    def signal_ranks() -> None:
        try:
            note = tmp_path / "2-of-3"
            until(lambda: note.exists() and bool(note.read_text()), "three ranks")
            os.kill(int(note.read_text()), signal.SIGTERM)
            until((tmp_path / "1-of-2").exists, "two ranks")
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            (tmp_path / "enough").touch()

    thread = threading.Thread(target=signal_ranks)
    thread.start()
    found = farandole.run(
        _function, (tmp_path,), num_proc=3, min_num_proc=2, cooldown_range=(600, 3600)
    )
    thread.join()
    assert not errors, errors
    assert found == [(0, 2), (1, 2)]
    assert "was ended by" not in capsys.readouterr().err
