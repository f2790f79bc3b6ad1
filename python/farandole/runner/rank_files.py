# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Output of the workers in files: `rank.<N>/stdout` and `rank.<N>/stderr` of a folder, as
Horovod writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from pathlib import Path


class RankOutputFiles:
    """The files of one job; `N` has as many digits as the highest rank.

    Args:
        folder: Folder to write to; created if it does not exist.
        size: Number of ranks.
        append: Whether lines that are there stay.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, size: int, *, append: bool = False) -> None:
        self._folder = folder
        self._mode: Literal["a", "w"] = "a" if append else "w"
        self._width = len(str(size - 1))
        self._files: dict[tuple[int, str], TextIO] = {}
        for rank in range(size):
            self._open_files(rank)

    def write_line(self, rank: int, stream: str | None, text: str) -> None:
        """Writes one line, which is in the file when this returns."""
        if (rank, stream or "") not in self._files:
            self._open_files(rank)  # an elastic job may grow
        file = self._files[rank, stream or ""]
        file.write(f"{text}\n")
        file.flush()

    def _open_files(self, rank: int) -> None:
        own = self._folder / f"rank.{rank:0{self._width}d}"
        own.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            self._files[rank, stream] = (own / stream).open(self._mode, encoding="utf-8")

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
