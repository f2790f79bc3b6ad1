# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver and the fingerprint of a run: one driver at a time, and always the same data, model
and parameters.

Two drivers would overwrite each other's checkpoints and history. A fit that continues from a
checkpoint of other data or parameters would return a wrong model, so `_fingerprint.json` in the
run's directory describes the start of the run.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from farandole._native.store import Store
from farandole.spark.common.runs.fingerprint import Fingerprint
from farandole.stores import durable
from farandole.stores.marks import Mark
from farandole.stores.tenure import RunInUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from farandole.stores.remote_store import RemoteStore

FINGERPRINT: Final = "_fingerprint.json"
_SUFFIX: Final = 8
_TUNERS: Final = "pyspark.ml.tuning"
_MAPPED: ContextVar[bool] = ContextVar("farandole_mapped", default=False)

_LASTS = 600.0
"""Seconds after which a driver elsewhere that says nothing no longer holds its run: it was
killed, or lost its host.
"""


class RunDiffersError(ValueError):
    """A run has a checkpoint of other data, another model or other parameters."""


@contextlib.contextmanager
def mapped(given: bool) -> Iterator[None]:
    """Notes that a fit has parameters of a map, which make a run of their own.

    Args:
        given: whether it has.
    """
    token = _MAPPED.set(given or _MAPPED.get())
    try:
        yield
    finally:
        _MAPPED.reset(token)


def name_of(run_id: str, fingerprint: Fingerprint) -> str:
    """Returns the run of one fit: the user's name, with a suffix in a tuner or with a map of
    parameters.

    Args:
        run_id: the user's name.
        fingerprint: of the fit.
    """
    if _MAPPED.get() or _is_tuned(sys._getframe()):  # noqa: SLF001 - a pipeline hands its stages no word of the tuner
        return f"{run_id}-{fingerprint.digest[:_SUFFIX]}"
    return run_id


def _is_tuned(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == _TUNERS:
            return True
        frame = frame.f_back
    return False


def begin(
    remote: RemoteStore,
    run_id: str,
    fingerprint: Fingerprint,
    epochs: int,
    *,
    force: bool,
    tell: Callable[[str], None],
) -> None:
    """Checks that a run continues with its original arguments; a new run stores them. The run is
    held.

    Args:
        remote: the run's paths.
        run_id: its name, for messages.
        fingerprint: of the fit.
        epochs: that it asks for.
        force: whether a run of something else is gone on with.
        tell: gets what the user should know.

    Raises:
        RunDiffersError: the checkpoint is of other data, another model or other parameters; naming
            each.
    """
    if remote.run_path is None:
        return
    run, name = Store(remote.run_path), remote.checkpoint_filename
    if run.exists(name) or run.exists(f"{name}{durable.PREVIOUS}"):
        text = remote.read(FINGERPRINT)
        before = None if text is None else Fingerprint.of_json(text)
        if before is None:
            tell(
                f"run {run_id} has no record of its data and parameters; it continues with the "
                "present ones"
            )
        else:
            check(before, fingerprint, run_id, force=force, tell=tell)
        _tell_of_epochs(remote, run_id, epochs)
    remote.write(FINGERPRINT, fingerprint.to_json().encode())


def check(
    before: Fingerprint, now: Fingerprint, run_id: str, *, force: bool, tell: Callable[[str], None]
) -> None:
    """Refuses to continue with something else than a run was started with.

    Args:
        before: what it was started with.
        now: what a fit wants to continue with.
        run_id: its name, for messages.
        force: whether that is wanted.
        tell: gets what the user should know.

    Raises:
        RunDiffersError: naming each part that differs.
    """
    different = "; ".join(map(str, before.compare(now)))
    if different and not force:
        raise RunDiffersError(
            f"run {run_id!r} was started with something else, so its checkpoint does not belong "
            f"to this fit: {different}."
            ' Choose another run_id to start a new run, or set resume="force" to continue from '
            "the checkpoint anyway"
        )
    if different:
        tell(f"run {run_id} continues although it was started with something else: {different}")
    if before.has_other_weights(now):
        tell(
            f"the model of run {run_id} had other initial weights; the weights of its checkpoint "
            "are used"
        )


def _tell_of_epochs(remote: RemoteStore, run_id: str, epochs: int) -> None:
    history = remote.read(f"{remote.logs_subdir}/history.jsonl")
    done = 0 if history is None else history.count(b"\n")
    if done > epochs:
        warnings.warn(
            f"run {run_id!r} has trained {done} epochs already, more than epochs={epochs}: "
            f"nothing is trained, the model is the one of {done} epochs",
            stacklevel=2,
        )


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
            f"run {run_id!r} is being trained by another fit, which holds {run_path}: choose "
            "another run_id. If the driver of that fit was lost with its host, the run is free "
            f"{_LASTS / 60:.0f} minutes later"
        )
    mark = Mark(run_path, lease, _LASTS)
    try:
        yield
    finally:
        # the run's own outcome counts; a mark of the dead does not
        with contextlib.suppress(OSError):
            mark.release()
