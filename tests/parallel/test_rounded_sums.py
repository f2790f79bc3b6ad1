# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compressors to 16 bits round partial sums between hosts, unless configured otherwise."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.programs import program_path
from tests.started import on_host, together

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes other host names"),
]
# The ranks of the first host bring 256 and 1, which bfloat16 rounds to 256, as float16 does with
# 2048 and 1; the second host brings the same with the other sign, without the 1. Rounded between
# hosts the sum is 0, else it is 1.
TORCH: Final = program_path(__file__, "rounded_sums_torch")
TENSORFLOW: Final = program_path(__file__, "rounded_sums_tensorflow")


def sums(script: Path) -> dict[str, list[float]]:
    """Returns the sum of each name, which is the same on all four ranks of two hosts."""
    told = {"HOROVOD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    ranks = [{"HOROVOD_RANK": str(rank), **told} for rank in range(4)]
    ended = together(ranks, script, [on_host(name) for name in "aabb"])
    assert [one.status for one in ended] == [0] * 4, ended[0].err
    results = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert all(result == results[0] for result in results)
    return results[0]


def test_torch_rounds_partial_sums_where_the_compressor_says_so() -> None:
    for name, values in sums(TORCH).items():
        assert values == ([1.0] if name.startswith(("exact", "uncompressed")) else [0.0]), name


def test_tensorflow_rounds_partial_sums_where_the_compressor_says_so() -> None:
    for name, values in sums(TENSORFLOW).items():
        assert values == ([1.0] if name.startswith("exact") else [0.0]), name
