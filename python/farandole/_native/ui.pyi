# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The run viewer, and the timeline of all ranks."""

from pathlib import Path
from typing import final

@final
class ViewerServer:
    """A server on loopback that shows the runs of stores, until it is closed or collected.

    Args:
        stores: Stores, or directories of runs, as paths or URLs.
        page: Directory with the page's script and style.
        port: Port on loopback; 0 is any.

    Raises:
        ValueError: No store, or text that is none.
        OSError: The page is not installed, or the port is taken.
    """

    def __new__(cls, stores: list[str], page: Path | str, port: int) -> ViewerServer: ...
    @property
    def url(self) -> str:
        """The link, with its token."""

    @property
    def path(self) -> str:
        """The link's path, which proxies put behind a prefix of theirs."""

    @property
    def port(self) -> int:
        """The port."""

    def close(self) -> None:
        """Ends the server; nothing is answered when this returns."""

def explain_verdict(location: str, /) -> str:
    """Returns the limit of a run's speed, as the first line of `farandole explain` says it.

    Args:
        location: Directory of a run, or a store, whose newest run counts.

    Raises:
        ValueError: There is no record of a run.
        OSError: The store or the record cannot be read.
    """

def merge_timelines(inputs: list[str] | list[Path], output: str | Path, /) -> tuple[str, list[str]]:
    """Merges timelines of ranks into one trace.

    Args:
        inputs: Files, and folders with files that end in `.json`.
        output: File for the trace.

    Returns:
        The summary as JSON, and as lines for people.

    Raises:
        OSError: A file is no timeline, or cannot be read or written.
    """

@final
class TimelineMerger:
    """Timelines that come from agents in pieces, in a temporary folder that goes with this.

    Raises:
        OSError: There is no room for the folder.
    """

    def __new__(cls) -> TimelineMerger: ...
    def add_piece(self, task: int, piece: bytes) -> None:
        """Takes a piece of the timeline of a task's worker.

        Raises:
            OSError: It cannot be written.
        """

    def merge_pieces(self, output: str | Path, /) -> tuple[str, list[str]]:
        """Merges what has come, as `merge_timelines`."""
