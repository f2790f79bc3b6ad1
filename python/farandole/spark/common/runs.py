# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One driver trains a run at a time: two would write each other's checkpoints and history."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from farandole._native.store import Store
from farandole.data.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator


_LASTS = 600.0
"""Seconds after which a driver elsewhere that says nothing no longer holds its run: it was killed, or lost its host."""


class RunInUseError(RuntimeError):
    """Another driver trains the run."""


@contextlib.contextmanager
def alone(run_path: str | None, run_id: str) -> Iterator[None]:
    """Holds a run's directory for this process alone, by a lease in it.

    Args:
        run_path: URL of the directory; `None` where runs are not saved.
        run_id: name of the run, for messages.

    Raises:
        RunInUseError: another fit holds it, of this process or another one.
    """
    if run_path is None:
        yield
        return
    lease = Store(run_path).take(_LASTS)
    if lease is None:
        raise RunInUseError(
            f"run {run_id!r} is being trained by another fit, which holds {run_path}: choose another run_id. If the "
            f"driver of that fit was lost with its host, the run is free {_LASTS / 60:.0f} minutes later"
        )
    mark = Mark(run_path, lease, _LASTS)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the run's own outcome counts; a mark of the dead does not
            mark.release()
