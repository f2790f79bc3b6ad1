# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A deadline that says what it was for."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818 - Horovod's name
    """A deadline has passed.

    Args:
        message: What was waited for.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A deadline.

    Args:
        timeout: Seconds from now.
        message: What is said when it has passed; `{activity}` in it stands for what was under way.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Returns whether it has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Does nothing until the deadline has passed.

        Raises:
            TimeoutException: It has passed.
        """
        if self.timed_out():
            told = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{told}. Timeout after {self._timeout} seconds.")
