# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Errors of all ranks if ranks submit different operations under one name."""

import time

import pytest
import torch

import farandole.torch as hvd

KINDS = {
    "dtype": "Mismatched data types: tensor ",
    "shape": "Mismatched ALLREDUCE tensor shapes: tensor ",
    "factors": "Mismatched prescale and/or postscale factors: tensor ",
    "reduction": "Mismatched reduction operation: tensor ",
    "root": "Mismatched BROADCAST root ranks: tensor ",
    "trailing": "Mismatched ALLGATHER tensor shapes: tensor ",
}


def submit(kind):
    last = hvd.rank() == hvd.size() - 1
    ones = torch.ones(2, 3)
    try:
        match kind:
            case "dtype":
                hvd.allreduce(ones.double() if last else ones, name="odd")
            case "shape":
                hvd.allreduce(torch.ones(3, 2) if last else ones, name="odd")
            case "factors":
                hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5 if last else 1.0, name="odd")
            case "reduction":
                hvd.allreduce(ones, op=hvd.Max if last else hvd.Sum, name="odd")
            case "root":
                hvd.broadcast(ones, root_rank=int(last), name="odd")
            case "trailing":
                hvd.allgather(torch.ones(2, 4) if last else ones, name="odd")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_shows_what_every_rank_submitted_grouped_where_they_agree(trio, kind):
    messages = trio.run(submit, kind)
    assert len(set(messages)) == 1
    message = messages[0]
    assert message.startswith(KINDS[kind])
    assert "odd: ranks 0-1 submitted " in message
    assert "; rank 2 submitted " in message
    shown = {
        "dtype": ["float32 [2, 3]", "float64 [2, 3]"],
        "shape": ["[2, 3]", "[3, 2]"],
        "factors": ["factors 0.5 and 1"],
        "reduction": ["allreduce Sum", "allreduce Max"],
        "root": ["from rank 0", "from rank 1"],
        "trailing": ["3]", "4]"],
    }[kind]
    assert all(part in message for part in shown), message


def test_the_first_rule_that_fails_is_named(trio):
    def several():
        last = hvd.rank() == 2
        try:
            hvd.allreduce(
                torch.ones(3 if last else 2, dtype=torch.int32 if last else torch.float32),
                name="odd",
            )
        except ValueError as error:
            return str(error)
        return None

    assert trio.run(several)[0].startswith("Mismatched data types: ")


def test_unnamed_operations_that_differ_are_an_error_at_once_and_the_world_continues(trio):
    def different():
        ones = torch.ones(2)
        try:
            if hvd.rank() == 1:
                hvd.broadcast(ones, root_rank=0)
            else:
                hvd.allreduce(ones)
        except ValueError as error:
            return str(error), hvd.allreduce(ones, op=hvd.Sum).tolist()
        return None

    for text, after in trio.run(different):
        assert text.startswith("Mismatched operations: tensor "), text
        assert "ranks 0, 2 submitted allreduce Average of float32 [2]" in text, text
        assert "; rank 1 submitted broadcast of float32 [2] on the host from rank 0" in text, text
        assert after == [3.0, 3.0]


OBJECTS = {
    "broadcast_object": "broadcast of int64 [1, 1, 1, 1]",
    "allgather_object": "allgather of uint8 [.., 1, 1, 1]",
}


def mixed(helper, other):
    calls = {
        "broadcast_object": lambda: hvd.broadcast_object("an object"),
        "allgather_object": lambda: hvd.allgather_object("an object"),
        "allreduce": lambda: hvd.allreduce(torch.ones(2)),
        "a size": lambda: hvd.broadcast(torch.ones(1, dtype=torch.int64), root_rank=0),
        "bytes": lambda: hvd.allgather(torch.ones(3, dtype=torch.uint8)),
    }
    try:
        calls[helper if hvd.rank() == 1 else other]()
    except ValueError as error:
        return str(error), hvd.allgather_object(hvd.rank()), hvd.broadcast_object(hvd.rank(), 2)
    return None


@pytest.mark.parametrize(
    ("helper", "other"),
    [
        ("broadcast_object", "allreduce"),
        ("broadcast_object", "a size"),
        ("broadcast_object", "allgather_object"),
        ("allgather_object", "allreduce"),
        ("allgather_object", "bytes"),
    ],
)
def test_ranks_that_move_objects_while_others_do_something_else_get_an_error_at_once(
    trio, helper, other
):
    for text, everybody, last in trio.run(mixed, helper, other):
        assert text.startswith("Mismatched "), text
        assert f"rank 1 submitted {OBJECTS[helper]}" in text, text
        assert (everybody, last) == ([0, 1, 2], 2)


def told_of_groups(step):
    """Returns the errors of a step and of the next one, which come soon."""
    began, errors = time.monotonic(), []
    for attempt in (step, lambda: hvd.allreduce(torch.ones(1), name="later")):
        try:
            attempt()
        except ValueError as error:
            errors.append(str(error))
    assert time.monotonic() - began < 30
    return errors


def by_hand():
    tensors = [torch.ones(2), torch.ones(3)]

    def step():
        if hvd.rank() == 1:
            handles = [hvd.grouped_allreduce_async(tensors)]
        else:
            handles = [hvd.allreduce_async(tensor) for tensor in tensors]
        errors = []
        for handle in handles:
            try:
                hvd.synchronize(handle)
            except ValueError as error:
                errors.append(error)
        assert len(errors) == len(handles)
        raise errors[-1]

    return told_of_groups(step)


def by_an_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = 1 if hvd.rank() == 1 else 3
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), groups=groups
    )

    def step():
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()

    return told_of_groups(step)


def by_name():
    tensors = [torch.ones(2)] * (3 if hvd.rank() == 1 else 2)
    return told_of_groups(lambda: hvd.grouped_allreduce(tensors, name="group"))


@pytest.mark.parametrize("how", [by_hand, by_an_optimizer, by_name])
def test_ranks_that_group_differently_are_all_told_at_once(fresh_world, how):
    for errors in fresh_world(3).run(how):
        assert len(errors) == 2, errors
        assert all("Mismatched groups: tensor " in text for text in errors), errors
        assert all(
            "ranks 0, 2 submitted " in text and "rank 1 submitted " in text for text in errors
        ), errors
