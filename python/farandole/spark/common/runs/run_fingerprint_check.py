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
from farandole.common.counted_noun import format_counted_noun
from farandole.spark.common.runs.fingerprint import Fingerprint
from farandole.stores import durable_writes, small_files
from farandole.stores.lease_files import LeaseFile
from farandole.stores.run_lease import RunInUseError
from farandole.stores.small_files import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from farandole.stores.remote_store import RemoteStore

FINGERPRINT_FILE: Final = "_fingerprint.json"
_SUFFIX_CHARACTERS: Final = 8
_TUNING_MODULE: Final = "pyspark.ml.tuning"
_IN_PARAM_MAP_FIT: ContextVar[bool] = ContextVar("farandole_mapped", default=False)

_LEASE_DURATION_SECONDS = 600.0
"""Seconds after which a lease that its driver has not renewed expires: the driver was killed, or
its host was lost.
"""


class RunDiffersError(ValueError):
    """A run has a checkpoint of other data, another model or other parameters."""


@contextlib.contextmanager
def mark_param_map_fit(given: bool) -> Iterator[None]:
    """Notes that a fit has parameters of a map, which make a run of their own.

    Args:
        given: whether it has.
    """
    token = _IN_PARAM_MAP_FIT.set(given or _IN_PARAM_MAP_FIT.get())
    try:
        yield
    finally:
        _IN_PARAM_MAP_FIT.reset(token)


def run_id_of_fit(run_id: str, fingerprint: Fingerprint) -> str:
    """Returns the run of one fit: the user's name, with a suffix in a tuner or with a map of
    parameters.

    Args:
        run_id: the user's name.
        fingerprint: of the fit.
    """
    if _IN_PARAM_MAP_FIT.get() or _is_called_by_tuner(sys._getframe()):  # noqa: SLF001 - a pipeline hands its stages no word of the tuner
        return f"{run_id}-{fingerprint.digest[:_SUFFIX_CHARACTERS]}"
    return run_id


def _is_called_by_tuner(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == _TUNING_MODULE:
            return True
        frame = frame.f_back
    return False


def check_or_store_fingerprint(
    remote: RemoteStore,
    run_id: str,
    fingerprint: Fingerprint,
    epochs: int,
    *,
    force: bool,
    tell: Callable[[str], None],
) -> None:
    """Checks that a run continues with its original arguments; a new run stores them. The caller
    holds the run's lease.

    Args:
        remote: the run's paths.
        run_id: name of the run, for messages.
        fingerprint: fingerprint of the fit.
        epochs: epochs that the fit requests.
        force: whether to continue a run with another fingerprint.
        tell: receives messages for the user.

    Raises:
        RunDiffersError: the checkpoint has other data, another model or other parameters; the
            message names each difference. Or the record of them is damaged.
        OSError: the store cannot be read.
    """
    if remote.run_path is None:
        return
    run, name = Store(remote.run_path), remote.checkpoint_filename
    if any(run.exists(one) for one in durable_writes.checkpoint_and_previous_names(name)):
        try:
            before = _read_fingerprint(run)
        except DamagedFileError as error:
            if not force:
                raise RunDiffersError(
                    f"{error}. So it is unknown whether run {run_id!r} belongs to this fit. Choose "
                    'another run_id, or set resume="force" to continue from the checkpoint anyway'
                ) from error
            before = None
        if before is None:
            tell(
                f"run {run_id} has no record of its data and parameters; it continues with the "
                "present ones"
            )
        else:
            check_fingerprint(before, fingerprint, run_id, force=force, tell=tell)
        _warn_of_trained_epochs(remote, run_id, epochs)
    remote.write(FINGERPRINT_FILE, fingerprint.to_json().encode())


def _read_fingerprint(run: Store) -> Fingerprint | None:
    """Returns the fingerprint in the directory of a run; `None` if there is none, or if another
    version wrote it.

    Raises:
        DamagedFileError: the file is damaged.
        OSError: the file cannot be read. It may exist.
    """
    text = small_files.read_small_file(run, FINGERPRINT_FILE)
    place = f"{run.url}/{FINGERPRINT_FILE}"
    return None if text is None else Fingerprint.from_json(text, place)


def check_fingerprint(
    before: Fingerprint, now: Fingerprint, run_id: str, *, force: bool, tell: Callable[[str], None]
) -> None:
    """Raises an error if the fingerprint of a fit differs from the fingerprint of its run.

    Args:
        before: fingerprint with which the run was started.
        now: fingerprint of the fit that continues the run.
        run_id: name of the run, for messages.
        force: whether to continue in spite of differences.
        tell: receives messages for the user.

    Raises:
        RunDiffersError: the fingerprints differ; the message names each different part.
    """
    different = "; ".join(map(str, before.differences_to(now)))
    if different and not force:
        raise RunDiffersError(
            f"run {run_id!r} was started with something else, so its checkpoint does not belong "
            f"to this fit: {different}."
            ' Choose another run_id to start a new run, or set resume="force" to continue from '
            "the checkpoint anyway"
        )
    if different:
        tell(f"run {run_id} continues although it was started with something else: {different}")
    if before.has_other_initial_weights(now):
        tell(
            f"the model of run {run_id} had other initial weights; the weights of its checkpoint "
            "are used"
        )


def _warn_of_trained_epochs(remote: RemoteStore, run_id: str, epochs: int) -> None:
    history = remote.read(f"{remote.logs_subdir}/history.jsonl")
    done = 0 if history is None else history.count(b"\n")
    if done > epochs:
        warnings.warn(
            f"run {run_id!r} has trained "
            f"{format_counted_noun(done, 'epoch')} already, more than epochs={epochs}: "
            f"nothing is trained, the model is the one of {done} epochs",
            stacklevel=2,
        )


@contextlib.contextmanager
def hold_run_lease(run_path: str | None, run_id: str) -> Iterator[str | None]:
    """Holds a run's directory for this process alone, by a lease in it. Gives the name of the
    lease; `None` where runs are not saved.

    Args:
        run_path: URL of the directory; `None` where runs are not saved.
        run_id: name of the run, for messages.

    Raises:
        RunInUseError: another fit holds it, of this process or another one.
    """
    if run_path is None:
        yield None
        return
    lease = Store(run_path).acquire_lease(_LEASE_DURATION_SECONDS)
    if lease is None:
        raise RunInUseError(
            f"run {run_id!r} is being trained by another fit, which holds {run_path}: choose "
            "another run_id. If the driver of that fit was lost with its host, the run is free "
            f"{_LEASE_DURATION_SECONDS / 60:.0f} minutes later"
        )
    mark = LeaseFile(run_path, lease, _LEASE_DURATION_SECONDS)
    try:
        yield lease
    finally:
        # Ignore a failure here: the outcome of the run matters, and the lease expires by itself.
        with contextlib.suppress(OSError):
            mark.delete_if_held()
