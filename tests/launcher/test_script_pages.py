# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the pages `torch.md` and `lightning.md`, started by the command that the pages
name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.started import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

PAGES = Path(__file__).parents[2] / "docs" / "user-guide"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_the_script_of_torch_md_continues_after_its_last_complete_epoch(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    whole = blocks(PAGES / "torch.md", "python")[0]
    short = whole.replace("EPOCHS = 5", "EPOCHS = 3")
    assert short != whole
    path = tmp_path / "train.py"
    run, told = None, []
    for script in (short, whole):
        path.write_text(script)
        run = launch("-np", 2, sys.executable, path, env=ONE_THREAD, after=run)
        assert run.wait() == 0, run.err.read_text()
        told += re.findall(r"<stdout>:epoch (\d+): loss ([\d.]+)", run.out.read_text())
    assert [int(epoch) for epoch, _ in told] == [1, 2, 3, 4, 5]
    losses = [float(loss) for _, loss in told]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3


def test_the_script_of_lightning_md_trains_on_two_ranks(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(blocks(PAGES / "lightning.md", "python")[0])
    run = launch("-np", 2, sys.executable, path, env=ONE_THREAD)
    assert run.wait() == 0, run.err.read_text()
    told = re.findall(r"<stdout>:(\d) processes, loss ([\d.]+)", run.out.read_text())
    assert told == [("2", "0.0000")], run.out.read_text()
