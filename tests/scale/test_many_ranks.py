# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sixty-four processes on eight hosts, which are namespaces of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.programs import program_path
from tests.started import on_host, together

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes other host names"),
]
HOSTS: Final = 8
RANKS: Final = 64
COLLECTIVES: Final = program_path(__file__, "check_collectives")
DEATH: Final = program_path(__file__, "name_killed_rank")


def run(script: Path) -> list[str]:
    """Returns the output of each rank, the error of a rank that failed, and `None` for the one
    that was killed.
    """
    told = {
        "HOROVOD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
        "FARANDOLE_START_TIMEOUT": "110",
        # Many more ranks than cores: a rank may not run for a while.
        "FARANDOLE_PEER_TIMEOUT": "30",
        "FARANDOLE_SHARED_MEMORY_BYTES": "32MiB",
        "FARANDOLE_LINKS_AT_START": "16",
    }
    ranks = [{**told, "HOROVOD_RANK": str(rank)} for rank in range(RANKS)]
    prefixes = [on_host(f"host-{rank // (RANKS // HOSTS)}") for rank in range(RANKS)]
    ended = together(ranks, script, prefixes, [str(HOSTS), str(RANKS)])
    return [one.out if one.status == 0 else f"{one.status}: {one.err[-2000:]}" for one in ended]


def test_every_collective_of_64_ranks_on_8_hosts_is_right() -> None:
    assert run(COLLECTIVES) == ["right"] * RANKS


def test_63_ranks_name_the_one_that_was_killed() -> None:
    ended = run(DEATH)
    assert ended.pop(RANKS // 2 - 1).startswith("-9")
    assert all(float(seconds) < 60 for seconds in ended)
