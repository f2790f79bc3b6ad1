# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One driver trains a run at a time: two would write each other's checkpoints and history."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from farandole._native.store import Store
from farandole.data.places import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    lease = Store(run_path).take()
    if lease is None:
        raise RunInUseError(
            f"run {run_id!r} is being trained by another fit: choose another run_id. If that fit ran on a host that "
            f"was lost, delete {run_path}/_lease-*.json"
        )
    mark = Mark(run_path, lease)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the run's own outcome counts; a mark of the dead does not
            mark.release()
