# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Registration of compressors at the engine. `tests/parallel/test_rounded_sums.py` shows the
sums.
"""

from __future__ import annotations

import pytest

from farandole.common.util import (
    OPERATION_NAMES,
    Average,
    Max,
    Sum,
    allows_rounded_sums,
    engine_op_number,
    op_of_engine_number,
    resolve_op_argument,
)
from farandole.torch.compression import Compression


def test_sums_and_averages_alone_have_a_rounded_form() -> None:
    assert {op for op in OPERATION_NAMES if engine_op_number(op) != op} == {Average, Sum}
    assert [op_of_engine_number(engine_op_number(op)) for op in OPERATION_NAMES] == list(
        OPERATION_NAMES
    )
    assert engine_op_number(Sum, rounds=False) == Sum
    assert engine_op_number(Max) == Max


@pytest.mark.parametrize("op", [Average, Sum])
def test_a_script_cannot_ask_for_a_rounded_form_by_number(op: int) -> None:
    with pytest.raises(ValueError, match="op must be one of"):
        resolve_op_argument(engine_op_number(op), None)


def test_compressors_to_16_bits_round_and_those_of_a_script_do_as_they_say() -> None:
    class Exact(Compression.bf16):
        rounds_partial_sums = False

    class Own:
        """Written for Horovod."""

    kinds = [Compression.fp16, Compression.bf16, Compression.none, Exact, Own]
    assert [allows_rounded_sums(kind) for kind in kinds] == [True, True, False, False, False]
