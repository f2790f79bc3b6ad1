# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What every experiment needs."""

from __future__ import annotations

import pytest
from tests.faults import experiment


@pytest.fixture(scope="session", autouse=True)
def _first_world() -> None:
    """What a process keeps for good (the thread of its clients) is there before anything is counted."""
    experiment.a_world_works("allreduce", [None])
