# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The timeline: what happened to every tensor, as a file for `chrome://tracing` or Perfetto."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from farandole._native import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Writes a timeline from now on; one that runs is completed first.

    Rank 0 writes, for it knows when every rank arrived; on other ranks this does nothing, unless
    the path contains `{rank}`, which stands for the rank's number: then every rank that calls it
    writes a separate file. Works at any time, whether or not `FARANDOLE_TIMELINE` is set, and the
    ranks need not agree. The file is valid JSON from the moment this returns.

    Args:
        file_path: The file, which is created or emptied.
        mark_cycles: Whether every negotiation round has a `CYCLE_START` mark.

    Raises:
        ValueError: Before `init`, or when the file cannot be written.
    """
    timeline.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Completes the timeline's file. Does nothing when none runs; leaving the world does it too.

    Raises:
        ValueError: Before `init`, or when the file could not be written to its end.
    """
    timeline.stop_timeline()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Shows a part of a training step in this rank's timeline, inside of the phase that is under
    way.

    Does nothing where no timeline is written. Estimators mark steps, their waits for data, forward
    and backward passes and reductions by themselves.

    Args:
        name: Name of the part, such as `augment`.
    """
    timeline.enter_step_phase(name)
    try:
        yield
    finally:
        timeline.leave_step_phase()
