# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Errors of all ranks if ranks disagree, die, or are interrupted."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

import farandole.torch as hvd

MISMATCHES = ["shape", "dtype", "op", "root", "factors", "trailing"]


def mismatch(kind):
    rank = hvd.rank()
    attempt = {
        "shape": lambda: hvd.allreduce(torch.ones(2 + rank), name="odd"),
        "dtype": lambda: hvd.allreduce(
            torch.ones(2, dtype=[torch.float32, torch.float64][rank]), name="odd"
        ),
        "op": lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][rank], name="odd"),
        "root": lambda: hvd.broadcast(torch.ones(2), root_rank=rank, name="odd"),
        "factors": lambda: hvd.allreduce(
            torch.ones(2), op=hvd.Sum, prescale_factor=1.0 + rank, name="odd"
        ),
        "trailing": lambda: hvd.allgather(torch.ones(2, 2 + rank), name="odd"),
    }[kind]
    try:
        attempt()
    except ValueError as error:
        return str(error), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return None


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank_and_the_world_continues(pair, kind):
    for message, total in pair.run(mismatch, kind):
        assert "odd" in message
        assert total == 2


def duplicate_name():
    refused = False
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        try:
            hvd.allreduce_async(torch.ones(2), name="twice")
        except ValueError as error:
            refused = "twice" in str(error)
        hvd.barrier()
        return refused, hvd.synchronize(first).tolist()
    hvd.barrier()
    return refused, hvd.allreduce(torch.ones(2), name="twice").tolist()


def test_a_name_in_flight_is_refused_where_it_is_repeated(pair):
    assert pair.run(duplicate_name) == [(True, [1, 1]), (False, [1, 1])]


def unsupported_combination():
    try:
        hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max, name="complex")
    except ValueError as error:
        return str(error), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return None


def test_an_unsupported_reduction_is_an_error_on_every_rank(pair):
    for message, total in pair.run(unsupported_combination):
        assert "complex" in message
        assert total == 2


def truths_with_factors():
    messages = []
    truths = torch.tensor([True, False])
    for call in (
        lambda: hvd.allreduce(truths, op=hvd.Sum, prescale_factor=2.0, name="scaled"),
        lambda: hvd.reducescatter(truths, op=hvd.Sum, postscale_factor=2.0, name="scaled"),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_truths_with_factors_are_refused_and_the_world_continues(pair):
    for messages, total in pair.run(truths_with_factors):
        assert [message.split(" of ")[0] for message in messages] == ["allreduce", "reducescatter"]
        assert all("takes no scale factors: bool" in message for message in messages)
        assert total == 2


def survive(victim):
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        while True:
            hvd.allreduce(torch.ones(1000), name="doomed")
    except hvd.HorovodInternalError as error:
        elapsed = time.monotonic() - started
        try:
            hvd.allreduce(torch.ones(1), name="later")
        except hvd.HorovodInternalError:
            return elapsed, str(error)
    return None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.timing
def test_a_killed_peer_is_an_error_at_every_survivor_within_a_second(fresh_world, size):
    results = fresh_world(size).run(survive, 1, tolerate=True)
    assert repr(results[1]) == "Died()"
    for rank, result in enumerate(results):
        if rank != 1:
            elapsed, message = result
            assert elapsed < 1.0
            assert "rank 1" in message


def depart_and_return():
    if hvd.rank() == 0:
        hvd.shutdown()
        return hvd.is_initialized()
    try:
        hvd.allreduce(torch.ones(1), name="alone")
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


def test_a_peer_that_shuts_down_is_an_error_naming_it(fresh_world):
    left, message = fresh_world(2).run(depart_and_return)
    assert left is False
    assert "rank 0" in message


def interrupt():
    tensor = torch.ones(1)
    interrupted = False
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensor, name="late")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            hvd.synchronize(handle)
        except KeyboardInterrupt:
            interrupted = True
        timer.join()
        hvd.allreduce(torch.ones(1), name="go on")
        return interrupted, hvd.synchronize(handle).item()
    hvd.allreduce(torch.ones(1), name="go on")
    return False, hvd.allreduce(tensor, name="late").item()


def test_control_c_interrupts_a_wait_and_the_handle_stays_valid(pair):
    assert pair.run(interrupt) == [(True, 1.0), (False, 1.0)]


def progress_without_the_interpreter():
    tensor = torch.ones(4 << 20)
    hvd.allreduce_(tensor)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    if hvd.rank() == 1:
        thread = threading.Thread(target=spin)
        thread.start()
    handle = hvd.allreduce_async_(tensor, name="big")
    if hvd.rank() == 1:
        # This thread never looks at the engine while it computes; the other rank is done anyway.
        hvd.synchronize(handle)
        stop.set()
        thread.join()
    else:
        hvd.synchronize(handle)
    return tensor.sum().item()


def test_operations_make_progress_while_a_thread_keeps_the_interpreter_busy(pair):
    assert pair.run(progress_without_the_interpreter) == [4 << 20, 4 << 20]


def hold_the_interpreter():
    handle = hvd.allreduce_async(torch.ones(1 << 16), name="held")
    started = time.monotonic()
    if hvd.rank() == 1:
        # PyDLL keeps the GIL: no Python code of this process runs for two seconds.
        ctypes.PyDLL(None).sleep(2)
        held = time.monotonic()
        hvd.synchronize(handle)
        return held - started
    hvd.synchronize(handle)
    return time.monotonic() - started


@pytest.mark.timing
def test_the_engine_needs_no_interpreter_to_serve_its_peers(pair):
    waited, held = pair.run(hold_the_interpreter)
    assert held >= 2
    assert waited < 1
