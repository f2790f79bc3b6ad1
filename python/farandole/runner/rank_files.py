# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Output of the workers in files: `rank.<N>/stdout` and `rank.<N>/stderr` of a folder, as Horovod writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path


class RankFiles:
    """The files of one job; `N` has as many digits as the highest rank.

    Args:
        folder: Where to write; made where it is not there.
        size: Number of ranks.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, size: int) -> None:
        width = len(str(size - 1))
        self._files: dict[tuple[int, str], TextIO] = {}
        for rank in range(size):
            own = folder / f"rank.{rank:0{width}d}"
            own.mkdir(parents=True, exist_ok=True)
            for stream in ("stdout", "stderr"):
                self._files[rank, stream] = (own / stream).open("w", encoding="utf-8")

    def write(self, rank: int, stream: str | None, text: str) -> None:
        """Writes one line, which is in the file when this returns."""
        file = self._files.get((rank, stream or ""))
        if file is not None:
            file.write(f"{text}\n")
            file.flush()

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
