# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Uploads objects that are too large for a message of Spark Connect, as files of the session.

Classic Spark broadcasts large closures by itself. A Connect client puts them into the plan, and a
plan of more than 128 MiB is refused. So a large object is uploaded once per session under the hash
of its content, and the plan contains the hash. Each executor fetches the file once. Its content is
unpickled, so it is used only if it has the hash in the plan.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.common import scratch_directories
from farandole.spark.job.session_adapter import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_PLAN_OBJECT_BYTES: Final = 16 << 20
"""Largest number of bytes that are sent within a plan."""

_SENT_FILES_BY_SESSION: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PrestagedFile:
    """A file that was sent to executors before the tasks that read it.

    Attributes:
        name: SHA-256 of its content, which is its file's name, too.
    """

    name: str

    def read_payload(self) -> bytes:
        """Returns the content; called in a task.

        Raises:
            ValueError: The file is not the one that was sent.
        """
        from pyspark import SparkFiles  # noqa: PLC0415 - runs in Spark's task

        data = (Path(SparkFiles.getRootDirectory()) / self.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.name:
            raise ValueError(
                f"Spark's file {self.name} differs from the file that the driver sent: "
                f"{len(data)} bytes"
            )
        return data


def prestage_if_large(session: SparkSession, data: bytes) -> bytes | PrestagedFile:
    """Sends data before the tasks start, if the data is too large for the session's plans.

    Args:
        session: A session, of classic Spark or Connect.
        data: Data for the tasks.

    Returns:
        `data` itself, or the file in which tasks find it.
    """
    if len(data) <= MAX_PLAN_OBJECT_BYTES or not is_connect(session):
        return data
    found = PrestagedFile(hashlib.sha256(data).hexdigest())
    before = _SENT_FILES_BY_SESSION.setdefault(session, set())
    if found.name not in before:
        with scratch_directories.temporary_directory() as folder:
            path = folder / found.name
            path.write_bytes(data)
            session.addArtifacts(str(path), file=True)
        before.add(found.name)
    return found


def load_prestaged(data: bytes | PrestagedFile) -> bytes:
    """Returns the uploaded object, in a task.

    Args:
        data: As `prestage_if_large` returned it.
    """
    return data.read_payload() if isinstance(data, PrestagedFile) else data
