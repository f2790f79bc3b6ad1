# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Problems that users of Horovod's elastic training reported, one a test. Numbers: the list of
pains.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import is_alive, until
from tests.launcher.elastic import QUICK, SLOW, TRAIN, Hosts, finish, members, own
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]
    Write = Callable[[str], list[str]]


@pytest.fixture
def program(tmp_path: Path) -> Write:
    """Writes a training script and gives the command that runs it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(text)
        return [sys.executable, str(path)]

    return write


# In a job of fixed size a failure is an exception, which a script may answer.
ANSWERS = program_path(__file__, "answer_lost_rank")


def test_19_killing_one_worker_aborts_all(launch: Start, program: Write) -> None:
    run = launch("-np", 3, sys.executable, ANSWERS)
    until(lambda: len(run.pids()) == 3, "three ranks")
    victim = next(line.split()[-1] for line in run.lines() if line.startswith("[1]<stdout>:pid "))
    os.kill(int(victim), signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL, "that of the one that was killed"
    answers = [line for line in run.lines() if ":answered " in line]
    assert len(answers) == 2
    assert all("rank 1" in line for line in answers)
    assert "134" not in own(run)
    assert "SIGABRT" not in own(run)
    # In an elastic job the others do not even end.
    run = launch("-np", 3, "--min-np", 1, *SLOW, *program(TRAIN.replace("AT_EACH_STEP", "pass")))
    before = members(run, 3)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = members(run, 2)
    assert {one["pid"] for one in after} == {before[0]["pid"], before[2]["pid"]}
    finish(run, 2)


# Operations have no names, so that each rank numbers them by itself.
NAMELESS = TRAIN.replace(
    "AT_EACH_STEP",
    """
        if state.step % 3 == 0:
            hvd.allreduce(np.ones(4))
        for _ in range(state.step % 5):
            hvd.allgather(np.ones(2))
        if state.step == 20:
            open("numbered", "w").close()
""",
)


def test_20_a_new_worker_hangs_at_start_up_while_old_ones_wait(
    launch: Start, program: Write, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    run = launch("-np", 2, "--min-np", 1, *hosts.flags, *program(NAMELESS))
    members(run, 2)
    until(
        (run.out.parent / "numbered").exists,
        "some dozens of operations, which the old ones have numbered",
    )
    hosts.are("localhost:3")
    members(run, 3)
    finish(run, 3)


def test_21_a_deadlock_after_graceful_removal_below_the_least_size(
    launch: Start, program: Write, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:3")
    run = launch(
        "-np", 3, "--min-np", 2, *hosts.flags, *program(TRAIN.replace("AT_EACH_STEP", "pass"))
    )
    before = members(run, 3)
    hosts.are("localhost:1")
    until(
        lambda: not is_alive(before[1]["pid"]) and not is_alive(before[2]["pid"]),
        "two workers to leave",
    )
    hosts.are("localhost:3")
    until(
        lambda: sum(":world 3 rank" in line for line in run.lines()) == 6, "a second world of three"
    )
    after = members(run, 3)
    assert after[0]["pid"] == before[0]["pid"]
    assert all(one["from"] == 1 for one in after), "newcomers have what the survivor had"
    finish(run, 3)


EXITS = TRAIN.replace(
    "AT_EACH_STEP", "if state.step == 20 and hvd.rank() == 2 and hvd.size() == 3: sys.exit(0)"
)


def test_22_one_worker_that_ends_well_ends_the_job_as_a_success(
    launch: Start, program: Write, tmp_path: Path
) -> None:
    # One that its host's slots are taken from.
    hosts = Hosts(tmp_path, "localhost:3")
    run = launch(
        "-np", 3, "--min-np", 1, *hosts.flags, *program(TRAIN.replace("AT_EACH_STEP", "pass"))
    )
    before = members(run, 3)
    hosts.are("localhost:2")
    until(lambda: not is_alive(before[2]["pid"]), "the third worker's end")
    assert [one["pid"] for one in members(run, 2)] == [one["pid"] for one in before[:2]]
    assert run.process.poll() is None
    finish(run, 2)
    # One whose script ends it, with a code that says nothing is wrong: the others do not go with it
    # as if all was done.
    run = launch("-np", 3, "--min-np", 1, *SLOW, *program(EXITS))
    before = members(run, 3)
    assert [one["pid"] for one in members(run, 2)] == [one["pid"] for one in before[:2]]
    finish(run, 2)


# Every step's samples are written to a file of the process, once the step is finished on all ranks.
SAMPLES = program_path(__file__, "write_samples")


def test_23_samples_are_repeated_after_a_graceful_scale_down(
    launch: Start, program: Write, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:3")
    run = launch(
        "-np", 3, "--min-np", 1, *hosts.flags, sys.executable, SAMPLES, env={"OMP_NUM_THREADS": "1"}
    )
    members(run, 3)
    hosts.are("localhost:2")
    assert run.wait() == 0, run.err.read_text()
    assert sum(line.endswith(":over 2") for line in run.lines()) == 2
    notes = [
        json.loads(line)
        for path in run.out.parent.glob("samples-*")
        for line in path.read_text().splitlines()
    ]
    for epoch in range(3):
        counts = Counter(
            sample for epoch_of_note, batch in notes if epoch_of_note == epoch for sample in batch
        )
        assert set(counts) == set(range(360))
        repeated = sum(counts.values()) - 360
        # Two ranks of batches of four deal out multiples of eight; what is left after the change
        # need not be one.
        assert repeated <= 1, f"{repeated} samples of epoch {epoch} came again"


def test_24_a_host_that_failed_for_a_moment_never_comes_back(
    launch: Start, program: Write, tmp_path: Path
) -> None:
    command = program(TRAIN.replace("AT_EACH_STEP", "pass"))
    run = launch("-np", 2, "--min-np", 1, *QUICK, *command)
    for _ in range(2):
        os.kill(members(run, 2)[1]["pid"], signal.SIGKILL)
        members(run, 1)
    members(run, 2)
    finish(run, 2)
    # Slots that were taken away on purpose are no failure, and are used at once when they are there
    # again.
    hosts = Hosts(tmp_path, "localhost:2")
    run = launch("-np", 2, "--min-np", 1, *SLOW, *hosts.flags, *command)
    members(run, 2)
    hosts.are("localhost:1")
    members(run, 1)
    hosts.are("localhost:2")
    members(run, 2)
    finish(run, 2)


# Two sets of two ranks, and one that is added later. Each rank says what its sets are in every
# world.
SETS = program_path(__file__, "describe_process_sets")


def told_sets(run: Launch, size: int, worlds: int = 1) -> dict[int, list[str]]:
    """Returns each rank's lines about its process sets in the last of `worlds` worlds of this
    size.
    """
    found: dict[int, list[str]] = {}

    def fits() -> bool:
        lines = [
            line.split(":sets ", 1)[1]
            for line in run.out.read_text().splitlines()
            if ":sets " in line
        ]
        rows = [line.split() for line in lines if line.startswith(f"{size} ")]
        found.clear()
        found.update({int(rank): sets for _, rank, *sets in rows[-size:]})
        return len(rows) == worlds * size and len(found) == size

    until(fits, f"a world of {size} in {run.out.read_text()}\n{run.err.read_text()}")
    return dict(sorted(found.items()))


def test_25_elastic_training_with_process_sets_fails(launch: Start, program: Write) -> None:
    run = launch("-np", 4, "--min-np", 2, *QUICK, sys.executable, SETS)
    before = members(run, 4)
    assert told_sets(run, 4) == {
        0: ["[0,2]:2", "[1,3]:0", "[0,1]:2"],
        1: ["[0,2]:0", "[1,3]:2", "[0,1]:2"],
        2: ["[0,2]:2", "[1,3]:0", "[0,1]:0"],
        3: ["[0,2]:0", "[1,3]:2", "[0,1]:0"],
    }
    os.kill(before[1]["pid"], signal.SIGKILL)
    # The survivors are ranks 0, 2 and 3; of three ranks the last one is now rank 1.
    after = {one["pid"]: one["rank"] for one in members(run, 3)}
    low, other, lone = (after[before[old]["pid"]] for old in (0, 2, 3))
    pair = f"[{min(low, other)},{max(low, other)}]".replace(" ", "")
    assert told_sets(run, 3) == {
        low: [f"{pair}:2", f"[{lone}]:0", f"[{low}]:1"],
        other: [f"{pair}:2", f"[{lone}]:0", f"[{low}]:0"],
        lone: [f"{pair}:0", f"[{lone}]:1", f"[{low}]:0"],
    }
    # A newcomer knows which set is which, and is in none.
    until(
        lambda: sum(":world 4 rank" in line for line in run.lines()) == 8, "a second world of four"
    )
    again = members(run, 4)
    (new,) = {one["pid"] for one in again} - {one["pid"] for one in before}
    rank = next(one["rank"] for one in again if one["pid"] == new)
    sets = told_sets(run, 4, worlds=2)
    assert [entry.split(":")[0] for entry in sets[rank]] == [pair, f"[{lone}]", f"[{low}]"]
    assert [entry.split(":")[1] for entry in sets[rank]] == ["0", "0", "0"]
    assert all(
        [entry.split(":")[0] for entry in one] == [pair, f"[{lone}]", f"[{low}]"]
        for one in sets.values()
    )
    finish(run, 4)


def test_26_a_dead_peer_leaves_the_others_spinning_for_ever_in_a_job_of_fixed_size(
    launch: Start, program: Write
) -> None:
    run = launch("-np", 3, "--peer-timeout", 2, sys.executable, ANSWERS)
    until(lambda: len(run.pids()) == 3, "three ranks")
    victim = int(
        next(line.split()[-1] for line in run.lines() if line.startswith("[1]<stdout>:pid "))
    )
    with stopped(victim):
        until(
            lambda: sum(":answered " in line for line in run.lines()) == 2,
            "an error on both of the others",
            20.0,
        )
        assert all("rank 1" in line for line in run.lines() if ":answered " in line), run.lines()
        assert run.wait() != 0


def test_26_a_dead_peer_leaves_the_others_spinning_for_ever(launch: Start, program: Write) -> None:
    command = program(TRAIN.replace("AT_EACH_STEP", "pass"))
    run = launch("-np", 3, "--peer-timeout", 2, "--min-np", 1, *SLOW, *command)
    before = members(run, 3)
    with stopped(before[1]["pid"]):
        assert {one["pid"] for one in members(run, 2)} == {before[0]["pid"], before[2]["pid"]}
        assert "rank 1" in finish(run, 2)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for a while; it may be ended meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
