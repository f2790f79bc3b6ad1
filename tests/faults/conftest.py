# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What every experiment needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.faults import experiment

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _first_and_last_world() -> Iterator[None]:
    """What a process keeps for good (the thread of its clients) is there before anything is counted.

    Each world shows that one starts right after what happened to the world before; the last one does for the last.
    """
    experiment.a_world_works("allreduce", [None])
    yield
    experiment.a_world_works("allreduce", ["host0", "host0", "host1"])
