# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What every rank is told when ranks submit different things under one name."""

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
            hvd.allreduce(torch.ones(3 if last else 2, dtype=torch.int32 if last else torch.float32), name="odd")
        except ValueError as error:
            return str(error)
        return None

    assert trio.run(several)[0].startswith("Mismatched data types: ")
