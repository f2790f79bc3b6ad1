# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The engine's events, for a thread of the interpreter that takes them."""

from typing import final

@final
class EngineLogRecord:
    """One event."""

    @property
    def time(self) -> float: ...
    @property
    def level(self) -> int: ...
    @property
    def logger(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def thread(self) -> str | None: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...

def log_settings() -> tuple[int, bool, bool]:
    """The configured level, whether it was requested, and whether lines go without the time.

    Raises:
        ValueError: When a variable cannot be read.
    """

def start_log_capture(number: int, hide_time: bool, /) -> bool:
    """Keeps events from a level on; whether the caller is to begin taking them."""

def take_log_records(seconds: int, /) -> tuple[list[EngineLogRecord], int] | None:
    """Waits for events; those that came, and how many were lost before them. `None` after `end`."""

def end_log_capture() -> None:
    """Lets the last `take` return; later events go to stderr."""
