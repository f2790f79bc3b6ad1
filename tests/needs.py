# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Requirements of tests: root, programs, loop devices, namespaces. Elsewhere they are skipped.

In CI as root nothing may be missing, because nobody reads there which tests were skipped.
"""

from __future__ import annotations

import os

import pytest


def is_an_error() -> bool:
    """Returns whether a missing requirement is an error: in CI with root, which the nightly jobs
    have.
    """
    return bool(os.environ.get("CI")) and os.geteuid() == 0


def skip_without(reason: str | None) -> None:
    """Skips the test that calls this if something is missing.

    Args:
        reason: What is missing; `None` if nothing is.
    """
    if reason is None:
        return
    if is_an_error():
        pytest.fail(f"in CI, tests that need root may not be skipped: {reason}")
    pytest.skip(reason)


def skipped_without(reason: str | None) -> pytest.MarkDecorator:
    """A mark for tests that are skipped if something is missing.

    Args:
        reason: What is missing; `None` if nothing is.

    Raises:
        RuntimeError: It is an error here.
    """
    if reason is not None and is_an_error():
        raise RuntimeError(f"in CI, tests that need root may not be skipped: {reason}")
    return pytest.mark.skipif(reason is not None, reason=str(reason))
