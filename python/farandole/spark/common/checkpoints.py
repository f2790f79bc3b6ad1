# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The last two checkpoints of a run, of which one is whole whatever happened while the other was written.

    <runs>/<run_id>/checkpoint             the last
    <runs>/<run_id>/checkpoint.previous    the one before
    <runs>/<run_id>/checkpoint.json        size and SHA-256 of both, and a seal where there is a secret

A store's write is seen whole or not at all, and on a local file system it outlasts a loss of power when it returns. So
the order of three writes is enough: the one before is copied, the record names the next one beside it, the next one is
written. A checkpoint that the record does not know is damaged: it is named in a warning, and the one before is taken.

The seal is an HMAC-SHA256 of run and content, keyed by the variable `FARANDOLE_STORE_SECRET` of the driver. With it a
checkpoint that somebody else put there is refused. A training process gets a key that is good for its run alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.spark.common.store import RemoteStore

SECRET: Final = "FARANDOLE_STORE_SECRET"  # noqa: S105 - its name
"""Variable with the secret of the store's owner; only the driver needs it."""

_PREVIOUS: Final = ".previous"
_RECORD: Final = ".json"
_log = logging.getLogger("farandole")


def run_key(run_path: str) -> bytes | None:
    """The key that seals the checkpoints of one run; `None` without a secret.

    Args:
        run_path: the run's directory.
    """
    secret = os.environ.get(SECRET)
    return hmac.digest(secret.encode(), f"farandole run {run_path}".encode(), "sha256") if secret else None


def write(store: RemoteStore, data: bytes) -> None:
    """Keeps a checkpoint as the last one, and the last one as the one before.

    Args:
        store: of the run.
        data: the checkpoint.
    """
    name = store.checkpoint_filename
    known = _record(store)
    last = store.read(name)
    kept = known
    if last is not None:
        digest = hashlib.sha256(last).hexdigest()
        same = [one for one in known if one.get("sha256") == digest]
        if not known and store.seal_key is None:
            same = [_entry(store, last)]  # of before there were records
        if same:  # else it is damaged or somebody else's, and must not take the place of a good one
            store.write(name + _PREVIOUS, last)
            kept = same[:1]
    entries = [_entry(store, data), *kept]
    store.write(name + _RECORD, json.dumps({"version": 1, "checkpoints": entries}).encode())
    store.write(name, data)


def read(store: RemoteStore, sound: Callable[[bytes], Any] | None = None) -> bytes | None:
    """The last checkpoint that is whole, or `None` when there is none at all.

    Args:
        store: of the run.
        sound: raises for bytes that are none; asked only where no record tells, as of runs before there was one.

    Raises:
        ValueError: there are checkpoints, and none of them is whole; or none is sealed with the secret that was given.
    """
    name = store.checkpoint_filename
    known = _record(store)
    reasons = []
    for one in (name, name + _PREVIOUS):
        data = store.read(one)
        if data is None:
            continue
        reason = _fault(store, data, known, sound)
        if reason is None:
            if reasons:
                _log.warning("%s; the run goes on from %s/%s, the one before", "; ".join(reasons), store.run_path, one)
            return data
        reasons.append(f"the checkpoint {store.run_path}/{one} {reason}")
    if reasons:
        raise ValueError(f"{'; '.join(reasons)}: choose another run_id, or delete {store.run_path}")
    return None


def _fault(
    store: RemoteStore, data: bytes, known: list[dict[str, Any]], sound: Callable[[bytes], Any] | None
) -> str | None:
    """Why a checkpoint cannot be used."""
    if store.seal_key is not None and not any(_is_sealed(store, data, one) for one in known):
        return f"was not written by a run with this {SECRET}"
    if known:
        found = _entry(store, data)
        if not any(one.get("sha256") == found["sha256"] for one in known):
            sizes = " or ".join(str(one.get("size")) for one in known)
            return f"is damaged: its {len(data)} bytes are not the {sizes} that were written"
        return None
    try:
        if sound is not None:
            sound(data)
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes a reader raise
        return f"is damaged: {error}"
    return None


def _entry(store: RemoteStore, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    entry: dict[str, Any] = {"size": len(data), "sha256": digest}
    if store.seal_key is not None:
        entry["seal"] = hmac.new(store.seal_key, digest.encode(), "sha256").hexdigest()
    return entry


def _is_sealed(store: RemoteStore, data: bytes, entry: dict[str, Any]) -> bool:
    return hmac.compare_digest(str(entry.get("seal", "")), str(_entry(store, data)["seal"]))


def _record(store: RemoteStore) -> list[dict[str, Any]]:
    """What was noted of the checkpoints; nothing where there is no record that can be read."""
    found = store.read(store.checkpoint_filename + _RECORD)
    if found is None:
        return []
    try:
        told = json.loads(found)["checkpoints"]
        return [one for one in told if isinstance(one, dict)]
    except (ValueError, KeyError, TypeError):
        _log.warning("%s/%s%s is damaged", store.run_path, store.checkpoint_filename, _RECORD)
        return []
