# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Volumes of Unity Catalog without their mount: `uc://catalog.schema.volume/path`.

name --REST--> location and ID of the volume --REST--> credentials for its files, which the native
store requests again before they expire
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from farandole.stores.catalog_requests import (
    HOST_VARIABLE,
    CatalogSession,
    SignInError,
    read_text_field,
)
from farandole.stores.durable_writes import is_path_present
from farandole.stores.store_options import (
    StorageOptions,
    apply_options_covering_url,
)
from farandole.stores.vended_credentials import (
    API_PATH,
    VendedCredentials,
    check_location,
    refuse_static_credentials,
    vended_storage_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.stores.service_stores import ObjectStore

NAME_SCHEME: Final = "uc://"
_NAME_PART: Final = r"[^./\\:*?\[\s\x00-\x1f\x7f]{1,255}"
NAME_PATTERN: Final = re.compile(rf"{_NAME_PART}(\.{_NAME_PART}){{2}}")
_MOUNT_PATTERN: Final = re.compile(
    rf"(?:dbfs:|file:(?://)?)?/Volumes/({_NAME_PART})/({_NAME_PART})/({_NAME_PART})(?:/(.*))?"
)
_ANY_SCHEME_PATTERN: Final = re.compile("uc:/", re.IGNORECASE)
"""Pattern of the scheme, also as `pathlib` changes it."""
_MAX_PATH_CHARACTERS: Final = 1024
_ADVICE: Final = (
    "the user of the token needs READ VOLUME and, for a store, WRITE VOLUME on the volume and "
    "EXTERNAL USE SCHEMA on its schema, and the metastore must allow external data access"
)
_STORE_PATH_ARGUMENTS: Final = ("train_path", "val_path", "test_path", "runs_path")

_log = logging.getLogger("farandole")


@dataclass(frozen=True)
class VolumePath:
    """A path in a volume.

    Attributes:
        volume: `catalog.schema.volume`.
        path: parts below the volume, without a slash at the ends; empty for the volume itself.
    """

    volume: str
    path: str

    @property
    def subject(self) -> str:
        """The volume, for messages."""
        return f"the volume {self.volume}"

    @classmethod
    def parse(cls, path: str) -> VolumePath | None:
        """Returns the path in a volume that is used without a mount; `None` for other paths.

        Args:
            path: `uc://catalog.schema.volume/path`; or `/Volumes/catalog/schema/volume/path`, if
                `DATABRICKS_HOST` is set and the volume is not mounted on this host.

        Raises:
            ValueError: A name after `uc://` without three parts, or a path that no store can have.
        """
        if _ANY_SCHEME_PATTERN.match(path) is not None:
            name, _, below = path.removeprefix(NAME_SCHEME).partition("/")
            if not path.startswith(NAME_SCHEME) or NAME_PATTERN.fullmatch(name) is None:
                raise ValueError(
                    "a path in a volume of Unity Catalog is uc://catalog.schema.volume/path: "
                    f"{path}"
                )
            return cls(name, _checked_path(below, path))
        found = _MOUNT_PATTERN.fullmatch(path) if os.environ.get(HOST_VARIABLE) else None
        if found is None or is_path_present(Path("/Volumes", *found.groups()[:3])):
            return None
        return cls(".".join(found.groups()[:3]), _checked_path(found[4] or "", path))


@dataclass(frozen=True)
class CatalogVolume:
    """A volume of a catalog.

    Attributes:
        session: the catalog.
        name: `catalog.schema.volume`.
        volume_id: the catalog's UUID of the volume.
        location: URL of its directory.
    """

    session: CatalogSession
    name: str
    volume_id: str
    location: str

    @classmethod
    def find_volume(cls, where: VolumePath) -> CatalogVolume:
        """Asks the catalog of the environment for a volume.

        Args:
            where: A path in the volume.

        Raises:
            ValueError: No token or secret, or a volume at a location that is not used.
            OSError: The catalog refuses the request, or does not answer.
        """
        session = CatalogSession.from_environment(where.subject)
        label = session.label_subject(where.subject)
        request_path = f"{API_PATH}/volumes/{quote(where.volume, safe='')}"
        found = session.request_json(request_path, None, label, _ADVICE)
        volume_id = read_text_field(found, "volume_id", label)
        location = read_text_field(found, "storage_location", label)
        return cls(session, where.volume, volume_id, check_location(location, label))

    def credentials(self, operation: str) -> VendedCredentials:
        """Returns the function that requests credentials.

        Args:
            operation: `READ_VOLUME` or `WRITE_VOLUME`.
        """
        body = (("volume_id", self.volume_id), ("operation", operation))
        path = f"{API_PATH}/temporary-volume-credentials"
        return VendedCredentials(self.session, f"the volume {self.name}", path, body, _ADVICE)

    def url_of_path(self, path: str) -> str:
        """Returns the URL of a path in the volume.

        Args:
            path: Parts below the volume; empty for the volume itself.
        """
        return f"{self.location}/{path}" if path else self.location


def open_volume_store(
    prefix: VolumePath, storage_options: Mapping[str, Any] | None = None, **arguments: Any
) -> ObjectStore:
    """Asks the catalog of the environment for a volume, and returns a store in it: at its location,
    with credentials that are renewed. Other processes get these with the store, and need no
    environment.

    Args:
        prefix: Prefix of all paths of the store.
        storage_options: Further options, such as an endpoint or a region.
        **arguments: Further arguments of `AbstractFilesystemStore`. Paths are in the same volume.

    Raises:
        TypeError: Options with credentials.
        ValueError: No token or secret, a volume at a location that is not used, or a path outside
            of the volume.
        OSError: The catalog refuses a request, or does not answer.
    """
    from farandole.stores.databricks import DBFSLocalStore  # noqa: PLC0415 - derives from Store
    from farandole.stores.service_stores import ObjectStore  # noqa: PLC0415

    inside: dict[str, VolumePath] = {}
    for name in _STORE_PATH_ARGUMENTS:
        path = arguments.get(name)
        if path is not None:
            where = VolumePath.parse(path)
            if where is None or where.volume != prefix.volume:
                raise ValueError(
                    f"{name} is not in {prefix.subject}, and the credentials of the store hold for "
                    f"this volume alone: {path}"
                )
            inside[name] = where
    refuse_static_credentials(prefix.subject, storage_options or {})
    volume = CatalogVolume.find_volume(prefix)
    credentials = _request_store_credentials(volume)
    options = vended_storage_options(credentials, volume.location, dict(storage_options or {}))
    urls = {name: volume.url_of_path(where.path) for name, where in inside.items()}
    # As through the mount of the volume.
    filename = arguments.get("checkpoint_filename") or DBFSLocalStore.CHECKPOINT
    named = {**arguments, **urls, "checkpoint_filename": filename}
    return ObjectStore(volume.url_of_path(prefix.path), storage_options=options, **named)


def open_volume_url(path: str, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Finds a volume without a mount, and sets the credentials of its files for this process.

    Args:
        path: As for `VolumePath.parse`.
        storage_options: Further options, such as an endpoint or a region.

    Returns:
        The URL of the path at the volume's location; `None` for other paths.

    Raises:
        TypeError: As for `open_volume_store`.
        ValueError: As for `open_volume_store`.
        OSError: As for `open_volume_store`.
    """
    where = VolumePath.parse(path)
    return None if where is None else open_volume_store(where, storage_options).prefix_path


def _request_store_credentials(volume: CatalogVolume) -> VendedCredentials:
    """Returns the function that requests credentials to write, or, if the user may not write, to
    read. It has been called: here an error has all its words, and of an error in a renewal, the
    native store shows the type.
    """
    writing, reading = volume.credentials("WRITE_VOLUME"), volume.credentials("READ_VOLUME")
    try:
        writing.request_grant()
    except SignInError:
        raise
    except PermissionError as refusal:
        try:
            reading.request_grant()
        except PermissionError:
            raise refusal from None
        _log.warning("the volume %s can be read, and not written: %s", volume.name, refusal)
        return reading
    return writing


class VolumeReader:
    """Registers credentials in this process to read files of volumes: once for each volume.

    Args:
        storage_options: As for `open_volume_store`.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None) -> None:
        self._storage_options = dict(storage_options or {})
        self._volumes: dict[str, CatalogVolume] = {}
        self._registered: set[str] = set()

    def register_path(self, where: VolumePath) -> str:
        """Asks the catalog of the environment for a volume, registers credentials to read its
        files, and returns the URL of a path in it.

        Args:
            where: The path.

        Raises:
            TypeError: Options with credentials.
            ValueError: As for `open_volume_store`.
            OSError: As for `open_volume_store`.
        """
        refuse_static_credentials(where.subject, self._storage_options)
        volume = self._volumes.get(where.volume) or CatalogVolume.find_volume(where)
        self._volumes[where.volume] = volume
        url = volume.url_of_path(where.path)
        apply_options_covering_url(url)
        in_force: Any = StorageOptions.function_for_url(url)
        if not self._storage_options and in_force == volume.credentials("WRITE_VOLUME"):
            return url  # of a store of this process
        if where.volume not in self._registered:
            credentials = volume.credentials("READ_VOLUME")
            credentials.request_grant()
            options = vended_storage_options(credentials, volume.location, self._storage_options)
            # Options of the volume: the options of a store below it have precedence.
            StorageOptions((volume.location,), options).apply_to_process()
            self._registered.add(where.volume)
        return url


def _checked_path(below: str, path: str) -> str:
    """Returns a path below a volume without slashes at its ends.

    Raises:
        ValueError: It has parts that lead out of the volume, or characters that are not printable.
    """
    parts = [part for part in below.split("/") if part]
    is_plain = below.isprintable() and len(below) <= _MAX_PATH_CHARACTERS
    if not is_plain or any(part in (".", "..") for part in parts):
        raise ValueError(f"a path that a volume of Unity Catalog cannot have: {path!r}")
    return "/".join(parts)
