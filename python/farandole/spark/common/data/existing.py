# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Finds the rows of `fit_on_parquet`: in the store, or at paths that the user gives."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.data.datasets import is_place
from farandole.stores.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole.stores.store import AbstractFilesystemStore

    Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Existing:
    """Rows that exist before a fit, by path, pattern or directory, or by a list of these."""

    train: str | list[str]
    val: str | list[str] | None
    given: bool
    """Whether the user gave the paths."""

    @classmethod
    def in_store(cls, store: AbstractFilesystemStore, idx: int | None) -> Self:
        """Returns the data set of a number in a store.

        Args:
            store: where it is.
            idx: its number; `None` for the unnumbered one.
        """
        return cls(store.get_train_data_path(idx), store.get_val_data_path(idx), given=False)

    @classmethod
    def at(cls, path: Paths | None, val_path: Paths | None, idx: int | None) -> Self | None:
        """Returns the rows at the user's paths; `None` where none are given.

        Args:
            path: of the training rows.
            val_path: of the validation rows.
            idx: number of a data set in the store, which is another place.

        Raises:
            ValueError: arguments that contradict each other, or no path in a list.
        """
        if path is None:
            if val_path is not None:
                raise ValueError(
                    "val_path needs path: without it, training and validation rows are those of "
                    "the store"
                )
            return None
        if idx is not None:
            raise ValueError("at most one of path and dataset_idx may be specified")
        return cls(
            _texts("path", path),
            None if val_path is None else _texts("val_path", val_path),
            given=True,
        )


def _texts(name: str, paths: Paths) -> str | list[str]:
    if isinstance(paths, str | os.PathLike):
        return os.fspath(paths)
    if not paths:
        raise ValueError(f"{name} is an empty list")
    texts = [os.fspath(one) for one in paths]
    # a directory alone may be prepared data, or a table
    return texts[0] if len(texts) == 1 else texts


@contextlib.contextmanager
def in_use(where: Existing) -> Iterator[None]:
    """Shows that this process uses prepared data: inside the context it is neither deleted nor
    replaced.

    Data where this process cannot write goes without that.

    Args:
        where: the rows; other rows than prepared ones need nothing.

    Raises:
        OSError: another process deletes the data, or prepares other data there.
    """
    with contextlib.ExitStack() as held:
        for paths in (where.train, where.val):
            if isinstance(paths, str) and is_prepared(paths):
                try:
                    mark = NativeStore(paths).share()
                except OSError:  # the data is read-only
                    continue
                if mark is None:
                    raise OSError(
                        f"another process deletes the prepared data at {paths}, or prepares other "
                        "data there"
                    )
                held.callback(Mark(paths, mark).release)
        yield


def is_prepared(paths: str | list[str]) -> bool:
    """Returns whether Farandole prepared the rows.

    Args:
        paths: of the rows.
    """
    return isinstance(paths, str) and is_place(paths) and native.read_manifest(paths) is not None


def format_of(paths: str | list[str]) -> str | None:
    """Returns the format of files that are not prepared data; `None` if the place states it.

    Args:
        paths: of the files.
    """
    is_delta = (
        isinstance(paths, str) and is_place(paths) and NativeStore(paths).exists("_delta_log")
    )
    return None if is_delta else "parquet"
