# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Finds the rows of `fit_on_parquet`: in the store, or at paths that the user gives."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.data.datasets import is_directory_path
from farandole.data.inputs.catalog_names import resolve_source_options
from farandole.data.inputs.tables import is_table, open_if_table, open_table
from farandole.data.loader_arguments import native_reader_types
from farandole.stores.lease_files import LeaseFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from farandole.data.inputs.table_snapshot import TableSnapshot
    from farandole.stores.store import AbstractFilesystemStore

    Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | TableSnapshot


@dataclass(frozen=True)
class ExistingDataPaths:
    """Rows that exist before a fit, by path, pattern or directory, or by a list of these. A table
    is at the version that the whole fit reads.
    """

    train: str | list[str] | TableSnapshot
    val: str | list[str] | TableSnapshot | None
    given: bool
    """Whether the user gave the paths."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Types of columns of names of directories."""

    @classmethod
    def from_store(cls, store: AbstractFilesystemStore, idx: int | None) -> Self:
        """Returns a numbered data set of a store.

        Args:
            store: the store.
            idx: number of the data set; `None` for the data set without a number.
        """
        return cls(store.get_train_data_path(idx), store.get_val_data_path(idx), given=False)

    @classmethod
    def from_paths(
        cls,
        path: Paths | None,
        val_path: Paths | None,
        idx: int | None,
        types: Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self | None:
        """Returns the rows at the user's paths; `None` without paths.

        Args:
            path: path of the training rows.
            val_path: path of the validation rows.
            idx: number of a data set in the store, which cannot be used together with paths.
            types: types of columns of names of directories.
            storage_options: options of the paths.

        Raises:
            ValueError: arguments that contradict each other, or no path in a list.
        """
        if path is None:
            if types:
                raise ValueError(
                    "types needs path: it gives the types of values in names of directories, and "
                    "data of the store has types"
                )
            if storage_options:
                raise ValueError("storage_options needs path: the store has options of its own")
            if val_path is not None:
                raise ValueError(
                    "val_path needs path: without it, training and validation rows are those of "
                    "the store"
                )
            return None
        if idx is not None:
            raise ValueError("at most one of path and dataset_idx may be specified")
        return cls(
            _resolve_row_location("path", path, storage_options),
            None
            if val_path is None
            else _resolve_row_location("val_path", val_path, storage_options),
            given=True,
            types=native_reader_types(types),
        )


def _resolve_row_location(
    name: str, rows: Any, storage_options: Mapping[str, Any] | None
) -> str | list[str] | TableSnapshot:
    if is_table(rows):
        return open_table(rows, storage_options=storage_options)
    texts = resolve_source_options(_path_texts(name, rows), storage_options)
    return open_if_table(texts) or texts


def _path_texts(name: str, paths: Any) -> str | list[str]:
    if isinstance(paths, str | os.PathLike):
        return os.fspath(paths)
    if not paths:
        raise ValueError(f"{name} is an empty list")
    texts = [os.fspath(one) for one in paths]
    # a directory alone may be prepared data, or a table
    return texts[0] if len(texts) == 1 else texts


@contextlib.contextmanager
def hold_prepared_data_leases(where: ExistingDataPaths) -> Iterator[None]:
    """Marks prepared data as used by this process: inside the context, no process deletes or
    replaces the data.

    If this process cannot write to the directory of the data, the data is not marked.

    Args:
        where: paths of the rows. Rows that were not prepared are not marked.

    Raises:
        OSError: another process deletes the data, or prepares other data in the directory; or the
            directory cannot be written for another reason than a missing permission.
    """
    with contextlib.ExitStack() as held:
        for paths in (where.train, where.val):
            if isinstance(paths, str) and is_prepared_by_farandole(paths):
                try:
                    file_name = NativeStore(paths).mark_in_use()
                except PermissionError:  # the data is read-only
                    continue
                if file_name is None:
                    raise OSError(
                        f"another process deletes the prepared data at {paths}, or prepares other "
                        "data there"
                    )
                held.callback(LeaseFile(paths, file_name).delete_if_held)
        yield


def is_prepared_by_farandole(paths: str | list[str] | TableSnapshot) -> bool:
    """Returns whether Farandole prepared the rows.

    Args:
        paths: paths of the rows.
    """
    return (
        isinstance(paths, str)
        and is_directory_path(paths)
        and native.read_manifest(paths) is not None
    )
