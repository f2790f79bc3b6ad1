# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Modules of pyarrow, each imported at its first use: a process that only trains needs none."""

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
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Returns an attribute of the module.

        Args:
            attribute: Name of the attribute.

        Raises:
            ImportError: pyarrow is not installed.
        """
        if attribute.startswith("__"):  # asked for by pickle and inspect, of any object
            raise AttributeError(attribute)
        try:
            module = import_module(self._name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"this needs {error.name}, which is not installed: pip install 'farandole[data]'"
            ) from error
        value = getattr(module, attribute)
        setattr(self, attribute, value)  # found without this function the next time
        return value

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

__all__ = ["ds", "pa", "pc", "pq"]
