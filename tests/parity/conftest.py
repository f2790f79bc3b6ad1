# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Processes that all fits of a directory share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.parity.gang import StandingGang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="package")
def gangs() -> Iterator[Callable[[int], StandingGang]]:
    """A function that returns a backend of so many processes."""
    found: dict[int, StandingGang] = {}

    def gang(size: int) -> StandingGang:
        return found.setdefault(size, StandingGang(size))

    yield gang
    for one in found.values():
        one.close()
