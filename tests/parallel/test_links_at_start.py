# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Links for data that open when an operation first needs them: counted in real processes on six
hosts.
"""

from __future__ import annotations

import json
import os
from typing import Final

import pytest
from tests.programs import program_path
from tests.started import on_host, together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes other host names"),
]
HOSTS: Final = 6
RANKS: Final = 12
RANK: Final = program_path(__file__, "count_sockets")


def sockets(settings: dict[str, str]) -> list[list[int]]:
    """The sockets that each rank but the first, which holds the registrar, has opened after
    `init` by each step.
    """
    told = {
        "HOROVOD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
        "FARANDOLE_PEER_TIMEOUT": "30",
        "FARANDOLE_ALLREDUCE_ALGORITHM": "hierarchy",
        **settings,
    }
    environments = [{**told, "HOROVOD_RANK": str(rank)} for rank in range(RANKS)]
    ended = together(
        environments, RANK, [on_host(f"host-{rank * HOSTS // RANKS}") for rank in range(RANKS)]
    )
    assert [one.status for one in ended] == [0] * RANKS, [
        one.err[-2000:] for one in ended if one.status != 0
    ]
    counts = [json.loads(one.out) for one in ended]
    return [[count - own[0] for count in own[1:]] for own in counts[1:]]


def test_a_small_world_has_all_its_links_from_the_start() -> None:
    assert sockets({}) == [[0, 0, 0]] * (RANKS - 1)


def test_links_open_when_an_operation_first_needs_them() -> None:
    # A rank has 10 links to other hosts. It opens 4 at the start, and the barrier at the end of
    # `init` opens one more. The allreduce uses one link to each other host, of which one is new.
    # The alltoall uses all links.
    assert sockets({"FARANDOLE_LINKS_AT_START": "0"}) == [[1, 5, 5]] * (RANKS - 1)
    assert sockets({"FARANDOLE_LINKS_AT_START": "0", "FARANDOLE_TCP_STREAMS": "2"}) == [
        [2, 10, 10]
    ] * (RANKS - 1)
