# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All processes of an elastic job are killed at once; new ones continue from the commit in the
store.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

SCRIPT = program_path(__file__, "commit_to_store")


def test_new_processes_continue_from_the_store_when_all_are_killed(
    launch: Start, tmp_path: Path
) -> None:
    flags = ("-np", 2, "--min-np", 2, "--blacklist-cooldown-range", 1, 2)
    run = launch(*flags, sys.executable, SCRIPT, tmp_path / "store")
    assert run.process.wait(300) == 0, run.err.read_text()
    output = run.out.read_text()
    assert sorted((run.out.parent).glob("killed-*")), output
    begun = [int(step) for step in re.findall(r"begins at (\d+) of 2", output)]
    assert begun[:2] == [0, 0]
    assert len(begun) == 4, output
    assert begun[2] == begun[3]
    assert 2 <= begun[2] <= 20
    assert re.findall(r"ends with (\S+) on 2", output) == ["40", "40"]
    assert set(re.findall(r"written by (\d)", output)) == {"0"}
