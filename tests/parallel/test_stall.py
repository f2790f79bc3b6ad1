# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What is said about ranks that do not come, and what ends because of them."""

import ctypes
import os
import time

import pytest
import torch

import farandole.torch as hvd
from farandole.common.exceptions import HorovodInternalError

CHECK = {"FARANDOLE_STALL_CHECK_TIME_SECONDS": "0.3"}


def redirect(path):
    """What this process writes to stderr goes to a file of the test as well as its engine's."""
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
    # A slow start may be reported first; this rank goes on when its own absence was.
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


def test_a_report_names_the_missing_what_they_wait_in_and_where_and_all_ends_well(fresh_world, tmp_path):
    path = str(tmp_path / "{rank}.err")
    assert fresh_world(2, env=CHECK).run(late, path) == [[2, 2], [2, 2]]
    said = (tmp_path / "0.err").read_text()
    assert "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks" in said
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
    # Once more while nobody waits, and the engine's own thread is the one that says it.
    time.sleep(seconds * late)
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="later")
    time.sleep(seconds * (not late))
    return total, hvd.synchronize(handle).tolist()


def test_a_report_that_nobody_can_read_ends_nothing(fresh_world):
    assert fresh_world(2, env=CHECK).run(late_and_unheard, 1.0) == [([2, 2], [2, 2])] * 2


def deaf(path):
    redirect(path)
    hvd.barrier()
    if hvd.rank() == 1:
        # Sleeps without giving up the interpreter's lock until the report must be out.
        ctypes.PyDLL(None).usleep(4_500_000)
    return hvd.allreduce(torch.ones(2), op=hvd.Sum, name="late").tolist()


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
        {"FARANDOLE_STALL_CHECK_DISABLE": "1", **CHECK, "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS": "0.4"},
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.4"},
    ],
    ids=["disabled", "contradictory"],
)
def test_a_check_that_is_off_or_a_shutdown_before_the_first_warning_ends_nothing(fresh_world, tmp_path, env):
    assert fresh_world(2, env=env).run(waited, str(tmp_path / "{rank}.err")) == [[2, 2], [2, 2]]
    assert "Missing ranks" not in (tmp_path / "0.err").read_text()
