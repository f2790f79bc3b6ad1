# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports about missing ranks, and the operations that end because of them."""

import ctypes
import os
import re
import time

import pytest
import torch

import farandole.torch as hvd
from farandole.common.exceptions import HorovodInternalError
from farandole.common.process_sets import add_process_set, remove_process_set

CHECK = {"FARANDOLE_STALL_CHECK_TIME_SECONDS": "0.3"}


def redirect(path):
    """Redirects stderr of this process and its engine to a file of the test."""
    file = os.open(path.format(rank=hvd.rank()), os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    os.close(file)


def await_text(path, text, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open(path) as file:
            content = file.read()
        if text in content:
            return content
        time.sleep(0.02)
    raise AssertionError(f"{text!r} was not said: {content}")


def lingering_in_a_function(path):
    # A slow start may be reported first; this rank continues after its own absence was reported.
    await_text(path.format(rank=0), "in lingering_in_a_function")


def late(path):
    redirect(path)
    hvd.barrier()
    if hvd.rank() == 1:
        other = hvd.allreduce_async(torch.ones(2), name="other")
        lingering_in_a_function(path)
    tensor = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="late").tolist()
    if hvd.rank() != 1:
        other = hvd.allreduce_async(torch.ones(2), name="other")
    hvd.synchronize(other)
    return tensor


def test_a_report_names_the_missing_what_they_wait_in_and_where_and_all_ends_well(
    fresh_world, tmp_path
):
    path = str(tmp_path / "{rank}.err")
    assert fresh_world(2, env=CHECK).run(late, path) == [[2, 2], [2, 2]]
    said = (tmp_path / "0.err").read_text()
    assert (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
        "of ranks"
    ) in said
    assert "for more than 0.3 seconds." in said
    assert "Missing ranks:\n" in said
    assert any("late" in names.split("]")[0] for names in said.split("\n1: [")[1:])
    assert "other (for " in said
    assert "Thread MainThread:" in said
    assert "in lingering_in_a_function" in said
    assert (tmp_path / "1.err").read_text() == ""


def late_and_unheard(seconds):
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    os.close(reader)
    hvd.barrier()
    late = hvd.rank() == 1
    time.sleep(seconds * late)
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="late").tolist()
    # Once more without a waiter, so that the engine's own thread reports it.
    time.sleep(seconds * late)
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="later")
    time.sleep(seconds * (not late))
    return total, hvd.synchronize(handle).tolist()


def test_an_unreadable_report_ends_nothing(fresh_world):
    assert fresh_world(2, env=CHECK).run(late_and_unheard, 1.0) == [([2, 2], [2, 2])] * 2


def deaf(path):
    redirect(path)
    hvd.barrier()
    if hvd.rank() == 1:
        # Sleeps without giving up the interpreter's lock until the report must be out.
        ctypes.PyDLL(None).usleep(4_500_000)
    return hvd.allreduce(torch.ones(2), op=hvd.Sum, name="late").tolist()


@pytest.mark.timing
def test_a_rank_whose_interpreter_is_stuck_is_reported_as_such(fresh_world, tmp_path):
    fresh_world(2, env=CHECK).run(deaf, str(tmp_path / "{rank}.err"))
    said = (tmp_path / "0.err").read_text()
    assert "waits in no operation." in said
    assert "no answer within 2s" in said


def lost():
    name = "somewhere else" if hvd.rank() == 2 else "common"
    try:
        hvd.allreduce(torch.ones(2), name=name)
    except HorovodInternalError as error:
        return str(error)
    return None


def test_beyond_the_shutdown_time_all_ranks_fail_naming_the_guilty(fresh_world):
    env = {**CHECK, "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS": "0.6"}
    messages = fresh_world(3, env=env).run(lost)
    for message in messages:
        assert "ranks that did not come: " in message
    assert any("allreduce of" in message or "common" in message for message in messages)


def waited(path):
    redirect(path)
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1.0)
    return hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()


@pytest.mark.parametrize(
    "env",
    [
        {
            "FARANDOLE_STALL_CHECK_DISABLE": "1",
            **CHECK,
            "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS": "0.4",
        },
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.4"},
    ],
    ids=["disabled", "contradictory"],
)
def test_a_check_that_is_off_or_a_shutdown_before_the_first_warning_ends_nothing(
    fresh_world, tmp_path, env
):
    assert fresh_world(2, env=env).run(waited, str(tmp_path / "{rank}.err")) == [[2, 2], [2, 2]]
    assert "Missing ranks" not in (tmp_path / "0.err").read_text()


APART = {
    **CHECK,
    "FARANDOLE_DYNAMIC_PROCESS_SETS": "1",
    "FARANDOLE_MEETING_TIMEOUT": "1.5",
    "FARANDOLE_COLLECTIVE_TIMEOUT": "60",
}
"""Short limits; the last one is longer than a test may take."""


def two_ways(path, first, second):
    """Rank 0 submits one operation, the others another; returns their errors, which come soon."""
    redirect(path)
    pair = add_process_set([0, 1])
    hvd.barrier()
    ways = {
        "barrier": hvd.barrier,
        "addition": lambda: add_process_set([0]),
        "another addition": lambda: add_process_set([1]),
        "removal": lambda: remove_process_set(pair),
        "barrier of two": lambda: hvd.barrier(process_set=pair),
        "join": hvd.join,
        "shutdown": hvd.shutdown,
    }
    began = time.monotonic()
    try:
        ways[first if hvd.rank() == 0 else second]()
    except (ValueError, HorovodInternalError) as error:
        assert time.monotonic() - began < 30
        if first == "join":
            hvd.join()
        return str(error)
    return None


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (
            "barrier",
            "addition",
            ("rank 0 in barrier of ", "ranks 1-2 in an addition of process set [0]"),
        ),
        (
            "addition",
            "barrier",
            ("rank 0 in an addition of process set [0]", "ranks 1-2 in barrier of "),
        ),
        ("barrier of two", "removal", ("rank 0 in barrier of ", " in a removal of process set 1")),
    ],
)
def test_ranks_that_wait_in_different_meetings_are_reported_and_then_the_job_ends(
    fresh_world, tmp_path, first, second, names
):
    told = fresh_world(3, env=APART).run(two_ways, str(tmp_path / "{rank}.err"), first, second)
    said = (tmp_path / "0.err").read_text()
    assert (
        "their programs have parted ways. The job ends when that has lasted for 1.5 seconds."
        in said
    )
    assert "Thread MainThread:" in said
    assert "in two_ways" in said
    for text in told:
        assert text is not None
        assert "the programs of the ranks have parted ways: for " in text
        lasted = re.search(r"have parted ways: for ([\d.]+)s ", text)
        assert lasted is not None, text
        assert float(lasted[1]) >= 1.5, text
        assert all(name in text for name in names), text


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("addition", "another addition", "Mismatched changes of process sets: "),
        ("addition", "removal", "Mismatched changes of process sets: "),
        ("join", "barrier", "is not possible while ranks have joined: 0"),
        ("join", "addition", "is not possible while ranks have joined: 0"),
        ("shutdown", "barrier", "rank 0 on "),
        ("shutdown", "addition", "rank 0 on "),
        ("shutdown", "join", "rank 0 on "),
    ],
)
def test_operations_that_can_never_match_are_an_error_at_once(
    fresh_world, tmp_path, first, second, says
):
    env = {**APART, "FARANDOLE_STALL_CHECK_TIME_SECONDS": "50"}
    told = fresh_world(3, env=env).run(two_ways, str(tmp_path / "{rank}.err"), first, second)
    for text in told[1:]:
        assert says in text


def joins_early(path):
    redirect(path)
    hvd.barrier()
    if hvd.rank() == 0:
        lingering_in_a_function(path)
        hvd.allreduce(torch.ones(2), name="one more")
    return hvd.join()


def test_ranks_that_have_joined_report_the_others(fresh_world, tmp_path):
    path = str(tmp_path / "{rank}.err")
    assert fresh_world(3, env=CHECK).run(joins_early, path) == [0, 0, 0]
    said = (tmp_path / "0.err").read_text()
    assert "\n0: [join.noname]" in said
    assert "join has waited for " in said
    assert "submitted by ranks: 1, 2" in said
    assert "Rank 0 on " in said
    assert "have parted ways" not in said


def never_joins(folder):
    """Rank 0 joins when the others have given it up."""
    try:
        end = time.monotonic() + 60
        while hvd.rank() == 0 and len(os.listdir(folder)) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        hvd.join()
    except HorovodInternalError as error:
        open(f"{folder}/{hvd.rank()}", "w").close()
        return str(error)
    return None


def test_a_join_that_lasts_too_long_names_the_missing_ranks(fresh_world, tmp_path):
    env = {**CHECK, "FARANDOLE_COLLECTIVE_TIMEOUT": "1.5"}
    for text in fresh_world(3, env=env).run(never_joins, str(tmp_path))[1:]:
        assert "join" in text
        assert "ranks that did not come: 0" in text
