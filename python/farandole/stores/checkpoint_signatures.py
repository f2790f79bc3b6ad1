# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The marker in a run's directory, which ties the checkpoints there to the jobs that wrote them.

`_run.json` contains the name of the run, and size and SHA-256 of the last contents of every
checkpoint. A checkpoint that it does not contain was not written by a job of this run, and is not
used. The marker is written before the checkpoint, so it contains every checkpoint that can remain
after a loss of power.

Anybody who can write to the store can write a marker, too. To prevent that, the owner of the store
sets a secret in the variable `FARANDOLE_STORE_SECRET` of the driver. Then every entry has a seal,
an HMAC-SHA256 of the run and the content, and a checkpoint without a seal is refused. The workers
of a fit get a key that is valid for their run only. Workers that commit elastic states ask the
driver for the key of their run (`keys`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import TYPE_CHECKING, Any, Final

from farandole.stores import durable

if TYPE_CHECKING:
    from farandole._native import store as native

SECRET_VARIABLE: Final = "FARANDOLE_STORE_SECRET"  # noqa: S105 - its name
"""Variable with the secret of the store's owner; only the driver needs it."""
MARKER_FILENAME: Final = "_run.json"
MARKER_VERSION: Final = 1
"""The version of the marker's format. A marker of a newer version is refused."""
_MAX_OLDER_ENTRIES: Final = 2
"""Number of older contents of a file name that are recorded beside the newest content: the
previous content, and a content that a loss of power restored.
"""


def has_signing_secret() -> bool:
    """Returns whether this process has the secret."""
    return bool(os.environ.get(SECRET_VARIABLE))


def run_key(run_id: str) -> bytes | None:
    """Returns the key that seals the checkpoints of one run; `None` without a secret.

    Args:
        run_id: name of the run.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    return (
        hmac.digest(secret.encode(), f"farandole run {run_id}".encode(), "sha256")
        if secret
        else None
    )


def record_checkpoint(run: native.Store, name: str, data: bytes, key: bytes | None) -> None:
    """Notes a checkpoint that will be written.

    Args:
        run: the run's directory.
        name: of the checkpoint.
        data: its content.
        key: of the run; `None` without a secret.

    Raises:
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _read_marker(run)
    fresh = _marker_entry(data, key)
    others = [one for one in known.get(name, []) if one.get("sha256") != fresh["sha256"]]
    if not others and run.exists(name) and key is None:
        others = [_marker_entry(run.read(name), None)]  # of a version that left no marker
    known[name] = [fresh, *others[:_MAX_OLDER_ENTRIES]]
    text = json.dumps(
        {"version": MARKER_VERSION, "run": run.url.rpartition("/")[2], "checkpoints": known}
    )
    durable.write_durably(run, MARKER_FILENAME, text.encode())


def find_mismatch(run: native.Store, name: str, data: bytes, key: bytes | None) -> str | None:
    """Returns the reason why a checkpoint does not belong to this run; `None` if it does.

    Args:
        run: the run's directory.
        name: of the checkpoint; the one before is known by the name of the last.
        data: its content.
        key: of the run; `None` without a secret.

    Raises:
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _read_marker(run).get(name.removesuffix(durable.PREVIOUS_SUFFIX), [])
    if not known and key is None:
        return None  # of a version that left no marker
    mine = _marker_entry(data, key)
    same = [one for one in known if one.get("sha256") == mine["sha256"]]
    if key is not None:
        if not any(
            hmac.compare_digest(str(one.get("seal", "")), str(mine["seal"])) for one in same
        ):
            return f"no job of this run wrote it with this {SECRET_VARIABLE}"
        return None
    if same:
        return None
    return (
        f"no job of this run wrote it: {MARKER_FILENAME} does not know it. If you put it there, "
        f"delete "
        f"{MARKER_FILENAME}"
    )


def _marker_entry(data: bytes, key: bytes | None) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    entry: dict[str, Any] = {"bytes": len(data), "sha256": digest}
    if key is not None:
        entry["seal"] = hmac.new(key, digest.encode(), "sha256").hexdigest()
    return entry


def _read_marker(run: native.Store) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries of the marker; none where there is no marker that can be read. A newer
    format is an error.
    """
    if not run.exists(MARKER_FILENAME):
        return {}
    try:
        marker = json.loads(run.read(MARKER_FILENAME))
        version, told = marker.get("version", MARKER_VERSION), marker["checkpoints"]
        newer = isinstance(version, int) and version > MARKER_VERSION
        known = {
            name: [one for one in entries if isinstance(one, dict)]
            for name, entries in told.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    if newer:
        raise ValueError(
            f"{run.url}/{MARKER_FILENAME} has format {version}, and this version of Farandole "
            f"knows up to "
            f"format {MARKER_VERSION}: "
            "continue the run with the version that began it, or a newer one"
        )
    return known
