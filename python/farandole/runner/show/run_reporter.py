# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Receivers of the reports of a run: the Spark plugin, the journal for the run viewer, the
output of a notebook.
"""

from __future__ import annotations

from typing import Any


class RunReportReceiver:
    """Receives nothing; each receiver derives from it."""

    def put_row(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Takes a row of a run, which replaces the row of the same name.

        Args:
            run: The run; empty for the application.
            key: The row's name.
            body: Content of the row.
            logged: Whether an event log keeps it.
        """

    def set_gauge(self, name: str, value: float) -> None:
        """Takes a number of the whole run.

        Args:
            name: Its name.
            value: The number.
        """

    def write_line(self, rank: int, stream: str, text: str) -> None:
        """Takes a line that a rank has printed.

        Args:
            rank: Number of the rank.
            stream: `stdout` or `stderr`.
            text: Without its end.
        """

    def publish_timeline(self, run: str, path: str) -> None:
        """Takes the file of this host with the timeline of all ranks.

        Args:
            run: The run.
            path: Path of the file.
        """
