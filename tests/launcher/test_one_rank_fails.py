# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A script that fails on one rank: the others do not wait for it, and all get the reason."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]
    Write = Callable[[str], Path]

FAIL = "if rank == 1:\n    raise KeyError('only here')\n"
INIT = "import numpy as np, farandole.numpy as hvd\nhvd.init()\n"
TOGETHER = "hvd.allreduce(np.ones(2))\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FAIL + INIT + TOGETHER, False),
        (INIT + FAIL + TOGETHER, True),
        (INIT + TOGETHER + FAIL + TOGETHER, True),
        (INIT + TOGETHER + FAIL + "hvd.broadcast_object(rank, 1)\n", True),
        (INIT + TOGETHER + FAIL + "hvd.join()\n", True),
    ],
    ids=[
        "before init",
        "before the first operation",
        "between operations",
        "as the root",
        "before a join",
    ],
)
def test_an_exception_on_one_rank_ends_the_others_with_its_number(
    launch: Start, script: Write, text: str, told: bool
) -> None:
    run = launch("-np", 3, sys.executable, script(text))
    assert run.wait() == 1
    lines = run.err.read_text().splitlines()
    assert "[1]<stderr>:KeyError: 'only here'" in lines
    assert any(
        line.startswith("farandole: rank 1 on ") and " exited with code 1" in line for line in lines
    )
    if told:
        heard = [
            line for line in lines if "FarandoleInternalError: " in line and " rank 1 on " in line
        ]
        assert {line.split("<")[0] for line in heard} == {"[0]", "[2]"}, lines


def test_a_call_that_one_rank_is_refused_is_heard_of_by_the_others(
    launch: Start, script: Write
) -> None:
    text = (
        "try:\n    hvd.allreduce(np.ones(2, dtype='float32' if rank else 'float64'), "
        "name='differs')\n"
        "except ValueError as error:\n    print('refused', 'Mismatched' in str(error))\n"
        "print(float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))\n"
    )
    run = launch("-np", 2, sys.executable, script(INIT + text))
    assert run.wait() == 0
    expected = [f"[{rank}]<stdout>:{line}" for rank in (0, 1) for line in ("2.0", "refused True")]
    assert run.lines() == expected


def test_a_rank_that_ends_before_init_is_named_to_ranks_that_wait_for_it(
    launch: Start, script: Write
) -> None:
    run = launch("-np", 3, sys.executable, script("if rank == 1:\n    sys.exit(0)\n" + INIT))
    assert run.wait() == 1
    told = [
        line
        for line in run.err.read_text().splitlines()
        if "rank 1 on " in line and "has ended" in line
    ]
    assert told
    assert all(
        "FarandoleInternalError: rank 1 on " in line and "call init() before they end" in line
        for line in told
    )


def test_a_rank_that_ends_after_it_has_left_is_named_to_ranks_that_begin_again(
    launch: Start, script: Write
) -> None:
    text = INIT + "hvd.shutdown()\nif rank == 2:\n    sys.exit(0)\nhvd.init()\n"
    run = launch("-np", 3, sys.executable, script(text))
    assert run.wait() == 1
    assert "FarandoleInternalError: rank 2 on " in run.err.read_text()


def test_a_rank_without_waiting_ranks_may_end_without_init(launch: Start, script: Write) -> None:
    text = (
        "import numpy as np, farandole.numpy as hvd\n"
        "if rank == 1:\n    sys.exit(0)\n"
        "hvd.init(comm=[0, 2])\n"
        "print(hvd.rank(), hvd.size(), float(hvd.allreduce(1.0, op=hvd.Sum)))\n"
    )
    run = launch("-np", 3, sys.executable, script(text))
    assert run.wait() == 0, run.err.read_text()
    assert run.lines() == ["[0]<stdout>:0 2 2.0", "[2]<stdout>:1 2 2.0"]


def test_a_part_whose_rank_has_ended_gets_an_error_that_names_the_rank(
    launch: Start, script: Write
) -> None:
    text = "import farandole.numpy as hvd\nif rank == 1:\n    sys.exit(0)\nhvd.init(comm=[0, 1])\n"
    run = launch("-np", 2, sys.executable, script(text))
    assert run.wait() == 1
    assert "FarandoleInternalError: rank 1 on " in run.err.read_text()
