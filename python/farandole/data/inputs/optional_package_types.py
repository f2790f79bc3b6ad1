# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values of packages that may not be installed, known by the names of their classes."""

from __future__ import annotations

from typing import Any


def is_instance_by_name(value: Any, package: str, *names: str) -> bool:
    """Returns whether a value is an instance of a class of a package, which is not imported.

    Args:
        value: Anything.
        package: Top package of the class; its extension module may have a `_` before the name.
        names: Names of the class, without modules.
    """
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0].removeprefix("_") == package
        for kind in type(value).__mro__
    )
