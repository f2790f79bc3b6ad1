# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The marker in a run's directory, which ties the checkpoints there to the jobs that wrote them.

`_run.json` contains the name of the run, and size and SHA-256 of the contents of every checkpoint
that may be there. A checkpoint that it does not contain was not written by a job of this run, and
is not used.

The marker is written twice for a checkpoint. Before the checkpoint is written, its entry is added
and no entry is removed, because a write may fail at any step: on a full disk, or if the process is
stopped. After the checkpoint was written, its entry is marked as written, and the entries of
contents that were replaced are removed. So the marker contains every content that lies there, after
any number of failed writes and after a loss of power.

Anybody who can write to the store can write a marker, too. To prevent that, the owner of the store
sets a secret in the variable `FARANDOLE_STORE_SECRET` of the driver. Then every entry has a seal,
an HMAC-SHA256 of the run and the content, and an unsigned checkpoint is refused. The workers of a
fit get a key that is valid for their run only. Workers that commit elastic states ask the
driver for the key of their run (`run_keys`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from farandole import _variables as variables
from farandole.stores import durable_writes, small_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole._native import store as native

    Entry = dict[str, Any]

SECRET_VARIABLE: Final = variables.STORE_SECRET
"""Variable with the secret of the store's owner; only the driver needs it."""
MARKER_FILENAME: Final = "_run.json"
MARKER_VERSION: Final = 1
"""The version of the marker's format. A marker of a newer version is refused."""
_WRITTEN_KEY: Final = "written"
"""Key of an entry whose write succeeded. An entry without it may be there or not."""
_MAX_OLDER_WRITTEN_ENTRIES: Final = 2
"""Number of older written contents of a file name that are recorded beside the newest content: the
previous content, and a content that a loss of power restored.
"""
_MAX_UNCONFIRMED_ENTRIES: Final = 64
"""Number of entries of a file name whose writes failed. If there are more, the contents that are
there are read, and the entries of contents that are not there are removed.
"""
_NEWEST_UNCONFIRMED_ENTRIES: Final = 8
"""Number of such entries that stay in any case, because a store may still carry out a request that
got no answer.
"""
_log = logging.getLogger("farandole")


def _signing_secret() -> str | None:
    # Not `read_setting`, which trims text: each character of the secret counts.
    alias = SECRET_VARIABLE.replace("FARANDOLE_", "HOROVOD_")
    return os.environ.get(SECRET_VARIABLE) or os.environ.get(alias)


def has_signing_secret() -> bool:
    """Returns whether this process has the secret."""
    return bool(_signing_secret())


def run_signing_key(run_id: str) -> bytes | None:
    """Returns the key that seals the checkpoints of one run; `None` without a secret.

    Args:
        run_id: name of the run.
    """
    secret = _signing_secret()
    return (
        hmac.digest(secret.encode(), f"farandole run {run_id}".encode(), "sha256")
        if secret
        else None
    )


@contextlib.contextmanager
def record_checkpoint_write(
    run: native.Store, name: str, data: bytes, key: bytes | None
) -> Iterator[None]:
    """Records a checkpoint while the caller writes it.

    Args:
        run: the run's directory.
        name: name of the checkpoint.
        data: its content.
        key: key of the run; `None` without a secret.

    Raises:
        OSError: The marker cannot be written. Then the caller must not write the checkpoint.
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _read_marker(run)
    entry = _content_digest_entry(data, key)
    same = [one for one in known.get(name, []) if one.get("sha256") == entry["sha256"]]
    others = [entry for entry in known.get(name, []) if entry not in same]
    if not others and key is None:
        others = _entries_of_present_files(run, name, entry)  # of a version that left no marker
    # The same content may have a seal, which a process without the key cannot make again.
    entry = {**(same[0] if same else {}), **entry}
    entry.pop(_WRITTEN_KEY, None)
    known[name] = [entry, *_limit_unconfirmed_entries(run, name, others)]
    _write_marker(run, known)
    yield
    entry[_WRITTEN_KEY] = True
    known[name] = _drop_replaced_entries(known[name])
    try:
        _write_marker(run, known)
    except OSError as error:
        # The marker has all entries, and some that the next write removes.
        _log.warning("%s/%s could not be shortened: %s", run.url, MARKER_FILENAME, error)


def foreign_checkpoint_reason(
    run: native.Store, name: str, data: bytes, key: bytes | None
) -> str | None:
    """Returns the reason why a checkpoint does not belong to this run; `None` if it does.

    Args:
        run: the run's directory.
        name: name of the checkpoint; it also names the previous checkpoint.
        data: its content.
        key: key of the run; `None` without a secret.

    Raises:
        ValueError: A newer version of Farandole wrote the marker.
    """
    known = _read_marker(run).get(name.removesuffix(durable_writes.PREVIOUS_SUFFIX), [])
    if not known and key is None:
        return None  # of a version that left no marker
    mine = _content_digest_entry(data, key)
    same = [entry for entry in known if entry.get("sha256") == mine["sha256"]]
    if key is not None:
        if not any(
            hmac.compare_digest(str(entry.get("seal", "")), str(mine["seal"])) for entry in same
        ):
            return f"no job of this run wrote it with this {SECRET_VARIABLE}"
        return None
    if same:
        return None
    return (
        f"no job of this run wrote it: {MARKER_FILENAME} does not know it. If you put it there, "
        f"rename {MARKER_FILENAME}"
    )


def _drop_replaced_entries(entries: list[Entry]) -> list[Entry]:
    """Returns the entries of contents that may still be there, after the first one was written."""
    remaining, written = [], 0
    for entry in entries:
        remaining.append(entry)
        written += bool(entry.get(_WRITTEN_KEY))
        if written > _MAX_OLDER_WRITTEN_ENTRIES:
            break
    return remaining


def _limit_unconfirmed_entries(run: native.Store, name: str, entries: list[Entry]) -> list[Entry]:
    """Removes entries of contents that are not there, if very many writes have failed."""
    unconfirmed = [entry for entry in entries if not entry.get(_WRITTEN_KEY)]
    if len(unconfirmed) <= _MAX_UNCONFIRMED_ENTRIES:
        return entries
    newest = unconfirmed[:_NEWEST_UNCONFIRMED_ENTRIES]
    present = {entry["sha256"] for entry in _entries_of_present_files(run, name)}
    return [
        entry
        for entry in entries
        if entry.get(_WRITTEN_KEY) or entry in newest or entry.get("sha256") in present
    ]


def _entries_of_present_files(
    run: native.Store, name: str, besides: Entry | None = None
) -> list[Entry]:
    """Returns entries without seals of the contents that a name and its previous file have now,
    except one.
    """
    contents = (
        durable_writes.read_if_present(run, content_name)
        for content_name in durable_writes.checkpoint_and_previous_names(name)
    )
    entries = [_content_digest_entry(data, None) for data in contents if data is not None]
    return [entry for entry in entries if besides is None or entry["sha256"] != besides["sha256"]]


def _content_digest_entry(data: bytes, key: bytes | None) -> Entry:
    digest = hashlib.sha256(data).hexdigest()
    entry: Entry = {"bytes": len(data), "sha256": digest}
    if key is not None:
        entry["seal"] = hmac.new(key, digest.encode(), "sha256").hexdigest()
    return entry


def _write_marker(run: native.Store, known: dict[str, list[Entry]]) -> None:
    text = json.dumps(
        {"version": MARKER_VERSION, "run": run.url.rpartition("/")[2], "checkpoints": known}
    )
    durable_writes.write_durably(run, MARKER_FILENAME, text.encode())


def _read_marker(run: native.Store) -> dict[str, list[Entry]]:
    """Returns the entries of the marker; none where there is no marker that can be read. A newer
    format is an error.
    """
    try:
        marker = small_files.read_json(run, MARKER_FILENAME, small_files.MAX_TABLE_FILE_BYTES)
        if marker is None:
            return {}
        with small_files.raise_as_damaged_file(f"{run.url}/{MARKER_FILENAME}"):
            version, entries_by_name = marker.get("version", MARKER_VERSION), marker["checkpoints"]
            newer = isinstance(version, int) and version > MARKER_VERSION
            known = {
                name: [entry for entry in entries if isinstance(entry, dict)]
                for name, entries in entries_by_name.items()
            }
    except small_files.DamagedFileError as error:
        _log.warning("%s", error)
        return {}
    if newer:
        raise ValueError(
            f"{run.url}/{MARKER_FILENAME} has format {version}, and this version of Farandole "
            f"knows up to format {MARKER_VERSION}: "
            "continue the run with the version that began it, or a newer one"
        )
    return known
