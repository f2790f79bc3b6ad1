# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Farandole: data-parallel training on Spark, on plain hosts and in notebooks.

Importing this module loads no framework and starts no thread; `farandole.torch` and
`farandole.spark` load theirs.
"""

from __future__ import annotations

from farandole.common.exceptions import (
    FarandoleBugError,
    FarandoleEnvironmentError,
    FarandoleInternalError,
    HorovodInternalError,
)

# type checkers take it for true; to import `typing` would take most of the time of this import
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from farandole.runner import run

__version__ = "0.1.0"
"""The version of the package and of the extension."""

__all__ = [
    "FarandoleBugError",
    "FarandoleEnvironmentError",
    "FarandoleInternalError",
    "HorovodInternalError",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "run":
        from farandole.runner import run  # noqa: PLC0415 - only programs that launch jobs need the launcher

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
