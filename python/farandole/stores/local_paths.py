# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks that every process sees the files that another one wrote to a store.

The error is raised before a fit if possible, otherwise in the process that does not see the files.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARED_MOUNT_PREFIXES = ("/dbfs/", "/Volumes/", "/mnt/")
"""Usual mount points of shared file systems."""


def unshared_path_warning(url: str, hosts: list[str]) -> str | None:
    """Returns the warning about a store on a local path when processes run on several hosts.

    Args:
        url: URL of the store.
        hosts: hosts of the processes.
    """
    path = native.Store(url).local_path
    if path is None or len(set(hosts)) < 2 or path.startswith(_SHARED_MOUNT_PREFIXES):  # noqa: PLR2004 - this host and another
        return None
    some = ", ".join(sorted(set(hosts))[:4])
    return (
        f"the store {url} is a local path and Spark has executors on several hosts ({some}): all "
        "of them and the "
        "driver must see the same directory there, or training cannot read the prepared data"
    )


def executor_hosts(context: Any) -> list[str]:
    """Returns the hosts of a classic session's driver and executors; empty if they are unknown.

    Args:
        context: its `SparkContext`, or `None`.
    """
    if context is None:
        return []
    try:
        status = context._jsc.sc().getExecutorMemoryStatus()  # noqa: SLF001 - the public API shows no hosts
        return [one.rpartition(":")[0] for one in status.keySet().mkString(",").split(",")]
    except Exception:  # noqa: BLE001 - a JVM that does not show it
        return []


@contextlib.contextmanager
def explain_unreadable_data(url: str) -> Iterator[None]:
    """Names this host and the URL when the data there cannot be read.

    Args:
        url: URL of prepared data.

    Raises:
        FileNotFoundError: nothing is there for this process.
        OSError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        local = native.Store(url).local_path is not None
        advice = (
            ": the store is a local path, training processes on other hosts need one that they see"
            if local
            else ""
        )
        message = (
            f"{socket.gethostname()} cannot read the training data that the driver sees at "
            f"{url}{advice}: {error}"
        )
        raise (FileNotFoundError if isinstance(error, FileNotFoundError) else OSError)(
            message
        ) from error
