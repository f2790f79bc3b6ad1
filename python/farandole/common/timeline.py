# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The timeline: what happened to every tensor, as a file for `chrome://tracing` or Perfetto."""

from __future__ import annotations

import os

from farandole._native import timeline


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Writes a timeline from now on; one that runs is completed first.

    Rank 0 writes, for it knows when every rank arrived; on other ranks this does nothing, unless the path contains
    `{rank}`, which stands for the rank's number: then every rank that calls it writes a file of its own. Works at any
    time, whether or not `FARANDOLE_TIMELINE` is set, and the ranks need not agree. The file is valid JSON from the
    moment this returns.

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
