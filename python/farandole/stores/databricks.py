# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores on Databricks, through its local file API."""

from __future__ import annotations

import re

from farandole.stores.store import FilesystemStore


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks, through its local file API: `dbfs:/x`, `/dbfs/x`, `file:///dbfs/x`,
    `/Volumes/...`.

    The variable `FARANDOLE_DBFS_ROOT` names a directory that stands in for `/dbfs` outside
    Databricks.
    """

    CHECKPOINT = "checkpoint.tf"
    DBFS_PATH_FORMAT_ERROR = (
        "not a path of Databricks (dbfs:/x, /dbfs/x, file:///dbfs/x, /Volumes/x): {}"
    )
    _FORMS = re.compile(r"^(dbfs:/(?!/)|(file:(//)?)?/dbfs(/|$)|(file:(//)?)?/Volumes/)")

    @classmethod
    def matches(cls, path: str) -> bool:
        """Returns whether a path has one of the forms of Databricks."""
        return cls._FORMS.match(path) is not None

    def check_path(self, path: str) -> None:
        """Refuses other forms."""
        if not self.matches(path):
            raise ValueError(self.DBFS_PATH_FORMAT_ERROR.format(path))

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Like `matches`."""
        return cls.matches(path)

    @staticmethod
    def normalize_path(path: str) -> str:
        """Returns a path of Databricks as a local one: `/dbfs/...` or `/Volumes/...`.

        Raises:
            ValueError: When it is none.
        """
        if not DBFSLocalStore.matches(path):
            raise ValueError(DBFSLocalStore.DBFS_PATH_FORMAT_ERROR.format(path))
        if path.startswith("dbfs:"):
            return "/dbfs" + path.removeprefix("dbfs:")
        return path.removeprefix("file:").removeprefix("//")
