# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets and worlds of part of the ranks, on real processes."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch

import farandole.torch as hvd
from farandole.common.process_sets import add_process_set, global_process_set, remove_process_set

DYNAMIC = {"FARANDOLE_DYNAMIC_PROCESS_SETS": "1"}


def every_operation_in_subsets():
    first = add_process_set([0, 2])
    second = add_process_set([2, 1])
    rank = hvd.rank()
    for mine in [chosen for chosen in (first, second) if chosen.included()]:
        members, place = mine.ranks, mine.rank()
        ones = torch.ones(3) * (place + 1)
        assert (
            hvd.allreduce(ones, op=hvd.Average, process_set=mine, name="same").tolist() == [1.5] * 3
        )
        assert hvd.allgather(torch.full((place,), rank), process_set=mine).tolist() == [members[1]]
        assert hvd.broadcast(torch.tensor([rank]), members[1], process_set=mine).tolist() == [
            members[1]
        ]
        received, splits = hvd.alltoall(
            torch.tensor([rank] * 3), torch.tensor([1, 2]), process_set=mine
        )
        assert received.tolist() == [rank for rank in members for _ in range(place + 1)]
        assert splits.tolist() == [place + 1] * 2
        scattered = hvd.reducescatter(torch.arange(3.0), op=hvd.Sum, process_set=mine)
        assert scattered.tolist() == [[0, 2], [4]][place]
        hvd.barrier(process_set=mine)
    outside = [chosen for chosen in (first, second) if not chosen.included()]
    for foreign in outside:
        with pytest.raises(ValueError, match=f"rank {rank} is not a member of process set"):
            hvd.allreduce(torch.ones(1), process_set=foreign)
        with pytest.raises(ValueError, match="is not a member"):
            foreign.rank()
    numbers = [first.process_set_id, second.process_set_id]
    assert [remove_process_set(first), remove_process_set(first), remove_process_set(second)] == [
        True,
        False,
        True,
    ]
    assert not remove_process_set(global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=first)
    return numbers


def sets_differ_between_ranks():
    with pytest.raises(ValueError, match="rank 0 submitted an addition") as raised:
        add_process_set([[0, 1], [1, 2], [1, 2]][hvd.rank()])
    with pytest.raises(ValueError, match="has the ranks of process set 0"):
        add_process_set([2, 1, 0])
    with pytest.raises(ValueError, match="at least one rank of 0 to 2"):
        add_process_set([0, 7])
    return str(raised.value), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def a_set_does_not_wait_for_another():
    pair = add_process_set([0, 1])
    if hvd.rank() == 2:
        hvd.allreduce(torch.ones(1), name="go")
        done, total = False, 0
        slow = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="slow")
    else:
        slow = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="slow")
        total = sum(
            hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() for _ in range(20)
        )
        done = hvd.poll(slow)
        hvd.allreduce(torch.ones(1), name="go")
    result = hvd.synchronize(slow).item()
    remove_process_set(pair)
    return done, total, result


def test_sets_that_come_and_go(fresh_world):
    """Overlapping sets, numbers used again, ranks that disagree, and sets that do not wait for
    each other.
    """
    world = fresh_world(3, env=DYNAMIC)
    for _ in range(2):
        assert world.run(every_operation_in_subsets) == [[1, 2]] * 3
    for message, total in world.run(sets_differ_between_ranks):
        assert "rank 0 submitted an addition of process set [0, 1]" in message
        assert "ranks 1-2 submitted an addition of process set [1, 2]" in message
        assert total == 3
    assert world.run(a_set_does_not_wait_for_another) == [
        (False, 40, 3),
        (False, 40, 3),
        (False, 0, 3),
    ]


def sets_from_the_start():
    hvd.shutdown()
    evens, odd = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[evens, odd])
    mine = odd if hvd.rank() == 1 else evens
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item()
    with pytest.raises(ValueError, match="process sets are fixed"):
        add_process_set([0, 1])
    numbers = (evens.process_set_id, odd.process_set_id)
    copies = [copy.copy(evens), copy.deepcopy(evens), pickle.loads(pickle.dumps(evens))]
    assert [again.process_set_id for again in copies] == [1, 1, 1]
    assert copy.deepcopy(hvd.global_process_set) is hvd.global_process_set
    hvd.shutdown()
    hvd.init()
    assert [again.process_set_id for again in copies] == [None, None, None]
    return numbers, total, evens.process_set_id


def test_sets_given_to_init_exist_from_the_start_and_end_with_the_world(fresh_world):
    assert fresh_world(3).run(sets_from_the_start) == [((1, 2), total, None) for total in (2, 1, 2)]


def wrong_sets():
    rank = hvd.rank()
    hvd.shutdown()
    messages = []
    for sets in (
        [hvd.ProcessSet([0]), hvd.ProcessSet([rank, 1] if rank == 0 else [1])],
        [hvd.ProcessSet([0, 1])],
        [hvd.ProcessSet([0, 5])],
    ):
        with pytest.raises(ValueError) as raised:
            hvd.init(process_sets=sets)
        messages.append(str(raised.value))
    hvd.init()
    return messages, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_init_names_the_entry_that_is_wrong_on_every_rank(fresh_world):
    for messages, total in fresh_world(2).run(wrong_sets):
        assert "process_sets[1]: " in messages[0]
        assert messages[1].startswith("process_sets[0] has the ranks of process set 0")
        assert messages[2].startswith("process_sets[0] must be at least one rank of 0 to 1")
        assert total == 2


def a_world_of_some():
    whole = hvd.rank()
    hvd.shutdown()
    if whole == 1:
        with pytest.raises(
            ValueError, match="rank 1 is not among the ranks that init was asked for: 0, 2"
        ):
            hvd.init(comm=[2, 0])
        return hvd.is_initialized()
    hvd.init(comm=[2, 0])
    return hvd.rank(), hvd.size(), hvd.allgather(torch.tensor([whole])).tolist()


def test_some_ranks_form_a_world_of_their_own(fresh_world):
    assert fresh_world(3).run(a_world_of_some) == [(0, 2, [0, 2]), False, (1, 2, [0, 2])]


CHILD = """
import farandole.torch as hvd
try:
    hvd.init()
except ValueError as error:
    print(error)
"""


def a_child_calls_init():
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
        check=True,
    )
    return child.stdout, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_a_child_does_not_take_its_parents_rank(pair):
    for rank, (message, total) in enumerate(pair.run(a_child_calls_init)):
        assert f"rank {rank} is already process" in message
        assert total == 2
