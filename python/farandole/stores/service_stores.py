# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores that are services: object stores, and HDFS."""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import TYPE_CHECKING, Any

from farandole._native import store as native
from farandole.stores.store import AbstractFilesystemStore, url_scheme
from farandole.stores.store_options import HADOOP_USER_OPTION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ObjectStore(AbstractFilesystemStore):
    """A store in a bucket or container: `s3://`, `gs://`, `abfss://` or `az://`; or in this
    process: `memory://`.
    """

    SCHEMES = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"})

    def check_path(self, path: str) -> None:
        """Refuses a path that is not in an object store."""
        if url_scheme(path) not in self.SCHEMES:
            known = ", ".join(sorted(self.SCHEMES))
            raise ValueError(
                f"not a URL of an object store (its scheme is one of {known}): {path!r}"
            )

    def check_writable(self) -> None:
        """Writes and deletes small files, one of them twice: leases need a service that creates a
        file once.

        Raises:
            OSError: nothing can be written there, or the service lets two processes create one
                file; the message names the path.
        """
        super().check_writable()
        store, name = native.Store(self.prefix_path), f"_created_{uuid.uuid4().hex}"
        message = (
            f"{self.prefix_path} does not support conditional creation (If-None-Match), which "
            "leases need: use a newer version of the service, or another store"
        )
        try:
            once, twice = store.create_if_absent(name, b""), store.create_if_absent(name, b"")
        except (OSError, ValueError) as error:
            raise OSError(f"{message}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                store.delete(name)
        if not once or twice:
            raise OSError(message)


class HDFSStore(AbstractFilesystemStore):
    """A store in HDFS, without libhdfs: `hdfs://node:8020/x`, `hdfs:///x`, or `/x` below the host
    given.

    Name services, high availability and Kerberos come from the Hadoop configuration
    (`HADOOP_CONF_DIR`).

    Args:
        prefix_path: prefix of all paths of the store.
        host: name node or name service of paths that name none; default: the Hadoop
            configuration's.
        port: its port.
        user: the user name, if the cluster does not use Kerberos; default: `HADOOP_USER_NAME`.
        kerb_ticket: not used; Kerberos uses the ticket of its standard cache (`KRB5CCNAME`).
        driver: not used; there is one driver.
        extra_conf: Hadoop settings, besides `storage_options`.
        *args: as `AbstractFilesystemStore`, after the prefix.
        **kwargs: as `AbstractFilesystemStore`.
    """

    SCHEMES = frozenset({"hdfs", "viewfs"})
    FS_PREFIX = "hdfs://"
    URL_PATTERN = r"^(?:(.+://))?(?:([^/:]+))?(?:[:]([0-9]+))?(?:(.+))?$"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kind = url_scheme(prefix_path) or "hdfs"
        authority = (
            prefix_path.partition("://")[2].partition("/")[0] if "://" in prefix_path else ""
        )
        if not authority and host not in (None, "default"):
            authority = f"{host}:{port}" if port else str(host)
        self._root = f"{kind}://{authority}"
        options = {**(extra_conf or {}), **(kwargs.pop("storage_options", None) or {})}
        if user is not None:
            options[HADOOP_USER_OPTION] = user
        super().__init__(prefix_path, *args, storage_options=options or None, **kwargs)
        hadoop = {
            "host": host,
            "port": port,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "driver": driver,
        }
        self._arguments |= hadoop

    @classmethod
    def matches(cls, path: str) -> bool:
        """Returns whether a path is a URL of HDFS."""
        return url_scheme(path) in cls.SCHEMES

    def parse_url(self, url: str) -> tuple[str | None, str | None, int | None, str | None, int]:
        """Returns the parts of a URL: prefix, host, port, path, and the position of the path."""
        found = re.search(self.URL_PATTERN, url)
        if found is None:
            raise ValueError(f"not a path in HDFS: {url}")
        return (
            found[1],
            found[2],
            None if found[3] is None else int(found[3]),
            found[4],
            found.start(4),
        )

    def check_path(self, path: str) -> None:
        """Refuses another scheme, and a URL without a path."""
        if url_scheme(path) not in (None, *self.SCHEMES):
            raise ValueError(f"not a path in HDFS: {path}")
        if not self.get_localized_path(path).strip("/"):
            raise ValueError(f"a store in HDFS needs a path below the root: {path!r}")

    def get_full_path(self, path: str) -> str:
        """Returns the path with this store's scheme and name node in front."""
        return path if url_scheme(path) else f"{self._root}/{path.lstrip('/')}"

    def get_localized_path(self, path: str) -> str:
        """Returns the path in the form that the name node uses."""
        return native.localized_path(self.get_full_path(path))

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Returns `get_full_path` as a function that can be sent to executors."""
        root = self._root
        return lambda path: path if url_scheme(path) else f"{root}/{path.lstrip('/')}"
