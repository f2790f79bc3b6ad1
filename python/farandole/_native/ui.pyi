# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The run viewer."""

from pathlib import Path
from typing import final

@final
class Viewer:
    """A server on loopback that shows the runs of stores, until it is closed or collected.

    Args:
        stores: Stores, or directories of runs, as paths or URLs.
        page: Directory with the page's script and style.
        port: Port on loopback; 0 is any.

    Raises:
        ValueError: No store, or text that is none.
        OSError: The page is not installed, or the port is taken.
    """

    def __new__(cls, stores: list[str], page: Path | str, port: int) -> Viewer: ...
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
