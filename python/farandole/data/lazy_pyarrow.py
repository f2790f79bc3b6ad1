# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Modules of pyarrow, each imported at its first use: a process that only trains needs none. And
kinds of its types.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is imported when one of its attributes is used."""

    def __init__(self, name: str) -> None:
        """Imports nothing yet.

        Args:
            name: Full name of the module.
        """
        self._name, self._module = name, None

    def __getattr__(self, attribute: str) -> Any:
        """Returns an attribute of the module.

        Args:
            attribute: Name of the attribute.

        Raises:
            ImportError: pyarrow is not installed.
        """
        if attribute.startswith("__"):  # pickle and inspect look for them in any object
            raise AttributeError(attribute)
        if self._module is None:
            try:
                self._module = import_module(self._name)
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"this needs {error.name}, which is not installed: "
                    "pip install 'farandole[data]'"
                ) from error
        return getattr(self._module, attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        """Functions of Spark tasks refer to it, and are pickled by value."""
        return LazyModule, (self._name,)


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    pc: Any  # the stubs lack most functions of pyarrow.compute
else:
    pa, pc, ds, pq = (
        LazyModule(name)
        for name in ("pyarrow", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet")
    )


def is_number_type(kind: pa.DataType) -> bool:
    """Returns whether values are integers, floats or decimals."""
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def is_text_type(kind: pa.DataType) -> bool:
    """Returns whether values are texts, in any of Arrow's layouts."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_list_type(kind: pa.DataType) -> bool:
    """Returns whether values are lists, of different lengths or of one."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def decode_dictionary(column: Any) -> Any:
    """Returns the values of an array with a dictionary; other arrays as they are."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
