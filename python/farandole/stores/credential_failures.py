# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Warnings about credentials that a catalog refuses to renew. The native store calls the functions
that renew them, and shows only the type of an error, because its message may have a secret.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("farandole")

_FAILING_LABELS: Final[set[str]] = set()
"""Labels whose last request has failed in this process."""


@contextlib.contextmanager
def log_first_failure(label: str, describe: Callable[[Exception], str]) -> Iterator[None]:
    """Logs an error of a request for credentials as a warning, unless the request before it has
    failed, too.

    Args:
        label: Description of the credentials.
        describe: Returns a text about an error that has no secret.
    """
    try:
        yield
    except Exception as error:
        if label not in _FAILING_LABELS:
            _FAILING_LABELS.add(label)
            _log.warning("%s cannot be renewed: %s", label, describe(error))
        raise
    _FAILING_LABELS.discard(label)
