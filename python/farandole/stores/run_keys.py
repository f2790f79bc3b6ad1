# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The keys of runs that workers get from their driver.

The secret of a store's owner does not leave the driver. A worker that commits an elastic state
sends a record with the name of the run, and the driver publishes the key of that run at the
registrar. Both ways have TLS and the job's token. So neither Spark's closure nor the environment of
a process contains a key. A worker gets only the keys it asks for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables
from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.stores import checkpoint_signatures, run_lease

if TYPE_CHECKING:
    from farandole._native.registrar import Registrar

KEY_REQUEST_KIND: Final = "key-of-run"
"""Kind of the record by which a worker asks."""
KEYS_AT_DRIVER_VARIABLE: Final = variables.KEYS_AT_DRIVER
"""Variable of workers whose driver has the secret; agents set it."""
_UNREACHABLE_SUFFIX: Final = ":unreachable"
_MAX_RUN_NAME_BYTES: Final = 4096
"""Bytes of the longest name of a run."""
_KEY_REQUEST_INTERVAL: Final = 5.0
_KEY_REQUEST_TIMEOUT: Final = 60.0
_log = logging.getLogger("farandole")


def driver_keys_variable_value(ticket: str, *, reachable: bool) -> str:
    """Returns the variable's value for workers of a job whose driver has the secret.

    Args:
        ticket: Ticket of the job. Jobs that a worker starts have others, and their drivers do not
            answer.
        reachable: Whether a worker can ask the driver.
    """
    return f"{run_lease.job_fingerprint(ticket)}{'' if reachable else _UNREACHABLE_SUFFIX}"


def must_request_key_from_driver() -> bool:
    """Returns whether this worker must ask its driver for keys."""
    job = os.environ.get(KEYS_AT_DRIVER_VARIABLE, "").removesuffix(_UNREACHABLE_SUFFIX)
    return job != "" and job == str(run_lease.own_job_fingerprint())


def request_run_key(run_id: str) -> bytes:
    """Requests the key of a run from the driver of this worker.

    Args:
        run_id: Name of the run.

    Raises:
        FarandoleEnvironmentError: The driver does not answer.
    """
    from farandole._native import launcher, values  # noqa: PLC0415 - drivers do without

    if os.environ.get(KEYS_AT_DRIVER_VARIABLE, "").endswith(_UNREACHABLE_SUFFIX):
        raise FarandoleEnvironmentError(
            f"the driver has {checkpoint_signatures.SECRET_VARIABLE}, and the workers of this "
            f"job cannot ask it for the key of run {run_id!r}, "
            "because no task of Spark reaches the driver. Unsigned commits are neither written "
            "nor used: let tasks reach the driver (FARANDOLE_DRIVER_HOST, FARANDOLE_PORT_RANGE), "
            "or unset "
            f"{checkpoint_signatures.SECRET_VARIABLE} there"
        )
    deadline = time.monotonic() + _KEY_REQUEST_TIMEOUT
    while time.monotonic() < deadline:
        # Records may be dropped, and the values of a world end with it.
        launcher.report_record(KEY_REQUEST_KIND, run_id.encode())
        key = values.wait_for_value(_published_key_name(run_id), _KEY_REQUEST_INTERVAL)
        if key is not None:
            return bytes(key)
    raise FarandoleEnvironmentError(
        f"the driver has {checkpoint_signatures.SECRET_VARIABLE}, and did not give this worker "
        f"the key of run {run_id!r} "
        f"within {_KEY_REQUEST_TIMEOUT:.0f} s. Unsigned commits are neither written nor used"
    )


def publish_run_key(registrar: Registrar, run: bytes) -> None:
    """Publishes the key of a run for the worker that requested it.

    Args:
        registrar: The job's.
        run: Name of the run, as the record has it.
    """
    if len(run) > _MAX_RUN_NAME_BYTES:
        return
    try:
        run_id = run.decode()
    except UnicodeDecodeError:
        return
    key = checkpoint_signatures.run_signing_key(run_id)
    if key is None:
        return
    try:
        registrar.publish(_published_key_name(run_id), key)
    # such as a world that has just ended: the worker asks again
    except FarandoleEnvironmentError as error:
        _log.warning("the key of run %r could not be given to a worker: %s", run_id, error)


def _published_key_name(run_id: str) -> str:
    return f"farandole/{KEY_REQUEST_KIND}/{hashlib.sha256(run_id.encode()).hexdigest()}"
