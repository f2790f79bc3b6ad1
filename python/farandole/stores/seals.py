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

SECRET: Final = "FARANDOLE_STORE_SECRET"  # noqa: S105 - its name
"""Variable with the secret of the store's owner; only the driver needs it."""
MARKER: Final = "_run.json"
VERSION: Final = 1
"""The version of the marker's format. A marker of a newer version is refused."""
_KEPT: Final = 2
"""Contents of one name that are known beside the newest: the one of before, and one that a loss
of power kept back.
"""


def is_given() -> bool:
    """Returns whether this process has the secret."""
    return bool(os.environ.get(SECRET))


def run_key(run_id: str) -> bytes | None:
    """Returns the key that seals the checkpoints of one run; `None` without a secret.

    Args:
        run_id: name of the run.
    """
    secret = os.environ.get(SECRET)
    return (
        hmac.digest(secret.encode(), f"farandole run {run_id}".encode(), "sha256")
        if secret
        else None
    )


def note(run: native.Store, name: str, data: bytes, key: bytes | None) -> None:
    """Notes a checkpoint that will be written.

    Args:
        run: the run's directory.
        name: of the checkpoint.
        data: its content.
        key: of the run; `None` without a secret.

    Raises:
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _known(run)
    fresh = _entry(data, key)
    others = [one for one in known.get(name, []) if one.get("sha256") != fresh["sha256"]]
    if not others and run.exists(name) and key is None:
        others = [_entry(run.read(name), None)]  # of a version that left no marker
    known[name] = [fresh, *others[:_KEPT]]
    text = json.dumps({"version": VERSION, "run": run.url.rpartition("/")[2], "checkpoints": known})
    durable.write(run, MARKER, text.encode())


def fault(run: native.Store, name: str, data: bytes, key: bytes | None) -> str | None:
    """Returns the reason why a checkpoint does not belong to this run; `None` if it does.

    Args:
        run: the run's directory.
        name: of the checkpoint; the one before is known by the name of the last.
        data: its content.
        key: of the run; `None` without a secret.

    Raises:
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _known(run).get(name.removesuffix(durable.PREVIOUS), [])
    if not known and key is None:
        return None  # of a version that left no marker
    mine = _entry(data, key)
    same = [one for one in known if one.get("sha256") == mine["sha256"]]
    if key is not None:
        if not any(
            hmac.compare_digest(str(one.get("seal", "")), str(mine["seal"])) for one in same
        ):
            return f"no job of this run wrote it with this {SECRET}"
        return None
    if same:
        return None
    return (
        f"no job of this run wrote it: {MARKER} does not know it. If you put it there, delete "
        f"{MARKER}"
    )


def _entry(data: bytes, key: bytes | None) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    entry: dict[str, Any] = {"bytes": len(data), "sha256": digest}
    if key is not None:
        entry["seal"] = hmac.new(key, digest.encode(), "sha256").hexdigest()
    return entry


def _known(run: native.Store) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries of the marker; none where there is no marker that can be read. A newer
    format is an error.
    """
    if not run.exists(MARKER):
        return {}
    try:
        marker = json.loads(run.read(MARKER))
        version, told = marker.get("version", VERSION), marker["checkpoints"]
        newer = isinstance(version, int) and version > VERSION
        known = {
            name: [one for one in entries if isinstance(one, dict)]
            for name, entries in told.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    if newer:
        raise ValueError(
            f"{run.url}/{MARKER} has format {version}, and this version of Farandole knows up to "
            f"format {VERSION}: "
            "continue the run with the version that began it, or a newer one"
        )
    return known
