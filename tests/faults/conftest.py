# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures of all experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.faults import experiment

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _first_and_last_world() -> Iterator[None]:
    """Forms a world before the first experiment and after the last, so that objects kept for good
    are not counted.

    Each world shows that one starts right after what happened to the world before; the last one
    does for the last.
    """
    experiment.a_world_works("allreduce", [None])
    yield
    experiment.a_world_works("allreduce", ["host0", "host0", "host1"])
