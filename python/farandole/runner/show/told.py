# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Receivers of the reports of a run: the Spark plugin, the journal for the run viewer, the
output of a notebook.
"""

from __future__ import annotations

from typing import Any


class Told:
    """Receives nothing; each receiver derives from it."""

    def put(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Takes a row of a run, instead of the one of that name.

        Args:
            run: The run; empty for the application.
            key: The row's name.
            body: What it holds.
            logged: Whether an event log keeps it.
        """

    def gauge(self, name: str, value: float) -> None:
        """Takes a number of the whole run.

        Args:
            name: Its name.
            value: The number.
        """

    def line(self, rank: int, stream: str, text: str) -> None:
        """Takes a line that a rank has printed.

        Args:
            rank: Which.
            stream: `stdout` or `stderr`.
            text: Without its end.
        """

    def timeline(self, run: str, path: str) -> None:
        """Takes the file of this host with the timeline of all ranks.

        Args:
            run: The run.
            path: The file's.
        """
