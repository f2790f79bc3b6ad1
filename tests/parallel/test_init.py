# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Joining a world: waiting for others, giving up, and joining again."""

import os
import sys
import threading

import torch

import farandole.torch as hvd
from farandole._native import launcher, registrar

IMPATIENT = """
import os, signal, sys, threading
from farandole.common import basics
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    basics.init()
except KeyboardInterrupt:
    open(sys.argv[1], "w").close()
    os._exit(0 if not basics.is_initialized() else 3)
os._exit(4)
"""
ABSENT = "import sys; open(sys.argv[1]).close()"


def test_control_c_interrupts_init_while_it_waits_for_other_ranks(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    outcomes = {}
    with registrar.Registrar(2, host="127.0.0.1", start_timeout=60) as job:

        def agent(task, code):
            command = [sys.executable, "-c", code, pipe]
            outcomes[task] = launcher.run_agent(job.ticket, task, command, stream_output=False)

        agents = [
            threading.Thread(target=agent, args=pair) for pair in enumerate([IMPATIENT, ABSENT])
        ]
        for thread in agents:
            thread.start()
        for thread in agents:
            thread.join(timeout=60)
    tails = [outcomes[task].stderr_tail for task in range(2)]
    assert [outcomes[task].exit_code for task in range(2)] == [0, 0], tails


def leave_and_join_again():
    totals = []
    for _ in range(3):
        totals.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.shutdown()
        hvd.init()
    return totals


def test_a_world_can_be_left_and_joined_again(fresh_world):
    assert fresh_world(3).run(leave_and_join_again) == [[3, 3, 3]] * 3


def handles_of_the_last_world_are_gone():
    handle = hvd.allreduce_async(torch.ones(1), name=f"only here {hvd.rank()}")
    # Who leaves before the other has submitted would refuse it that.
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    try:
        hvd.synchronize(handle)
    except ValueError as error:
        return "no operation has this handle" in str(error)
    return False


def test_handles_do_not_outlive_their_world(fresh_world):
    assert fresh_world(2).run(handles_of_the_last_world_are_gone) == [True, True]


def a_handle_of_the_last_world_beside_one_of_this():
    old = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    new = hvd.allreduce_async(torch.full((1,), 7.0), op=hvd.Sum)
    try:
        hvd.synchronize(old)
    except ValueError as error:
        told = str(error)
    else:
        told = "the result of another operation"
    return told.split(";")[0], hvd.synchronize(new).item()


def test_a_handle_of_the_last_world_is_none_of_the_present_one(fresh_world):
    assert fresh_world(2).run(a_handle_of_the_last_world_beside_one_of_this) == [
        ("no operation has this handle", 14),
        ("no operation has this handle", 14),
    ]
