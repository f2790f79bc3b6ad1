# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The keys of runs that workers get from their driver.

The secret of a store's owner does not leave the driver. A worker that commits an elastic state sends a record with the
name of the run, and the driver publishes the key of that run at the registrar. Both ways have TLS and the job's token.
So neither Spark's closure nor the environment of a process contains a key. A worker gets only the keys it asks for.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING, Final

from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.stores import seals

if TYPE_CHECKING:
    from farandole._native.registrar import Registrar

KIND: Final = "key-of-run"
"""Kind of the record by which a worker asks."""
AT_DRIVER: Final = "FARANDOLE_KEYS_AT_DRIVER"
"""Variable of workers whose driver has the secret; agents set it."""
_LONGEST: Final = 4096
"""Bytes of the longest name of a run."""
_ASKS_EVERY: Final = 5.0
_PATIENCE: Final = 60.0


def are_at_the_driver() -> bool:
    """Returns whether this worker must ask its driver for keys."""
    return AT_DRIVER in os.environ


def asked_for(run_id: str) -> bytes:
    """The key of a run, from the driver of this worker.

    Args:
        run_id: Name of the run.

    Raises:
        FarandoleEnvironmentError: The driver does not answer.
    """
    from farandole._native import launcher, values  # noqa: PLC0415 - drivers do without

    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        # Records may be dropped, and the values of a world end with it.
        launcher.report(KIND, run_id.encode())
        key = values.find(_name(run_id), _ASKS_EVERY)
        if key is not None:
            return bytes(key)
    raise FarandoleEnvironmentError(
        f"the driver has {seals.SECRET}, and did not give this worker the key of run {run_id!r} within "
        f"{_PATIENCE:.0f} s. Commits without a seal are neither written nor used"
    )


def answer(registrar: Registrar, run: bytes) -> None:
    """Publishes the key of a run for the worker that has asked.

    Args:
        registrar: The job's.
        run: Name of the run, as the record has it.
    """
    if len(run) > _LONGEST:
        return
    try:
        run_id = run.decode()
    except UnicodeDecodeError:
        return
    key = seals.run_key(run_id)
    if key is not None:
        registrar.publish(_name(run_id), key)


def _name(run_id: str) -> str:
    return f"farandole/{KIND}/{hashlib.sha256(run_id.encode()).hexdigest()}"
