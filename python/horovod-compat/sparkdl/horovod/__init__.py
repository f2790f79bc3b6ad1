# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`log_to_driver`: messages from a rank of a `HorovodRunner` to the output of the driver."""

from __future__ import annotations

MAX_MESSAGE_CHARACTERS = 4000
"""Longest message; a longer one is cut."""
MESSAGE_KIND = "log_to_driver"
"""Kind of the reports that carry messages."""

__all__ = ["log_to_driver"]


def log_to_driver(message: str) -> None:
    """Prints a message on the driver, in the output of the cell that called `HorovodRunner.run`.

    In a process that no `HorovodRunner` started, the message goes to this process's stdout.

    Args:
        message: The text. Only its first 4,000 characters are sent.
    """
    from farandole.spark import task  # noqa: PLC0415 - `import sparkdl` loads little

    text = str(message)
    if len(text) > MAX_MESSAGE_CHARACTERS:
        text = text[: MAX_MESSAGE_CHARACTERS - 3] + "..."
    if not task.report({"kind": MESSAGE_KIND, "text": text}):
        print(text, flush=True)  # noqa: T201 - there is no driver
