# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Errors that passed through the C++ of `DistributedDataParallel`, which keeps only their text."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from farandole.common.exceptions import FarandoleInternalError

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


def restore_error_types(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function, so that a broken world raises `FarandoleInternalError`.

    Args:
        func: The training function.

    Returns:
        A function of the same arguments and result.
    """

    @functools.wraps(func)
    def run_restoring_types(*args: Any, **kwargs: Any) -> _Result:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            name = FarandoleInternalError.__name__
            if isinstance(error, FarandoleInternalError) or name not in str(error):
                raise
            raise FarandoleInternalError(str(error)) from error

    return run_restoring_types
