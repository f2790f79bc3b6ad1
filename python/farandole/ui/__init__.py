# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The run viewer: a page in the browser with the runs of stores.

`farandole ui STORE` shows it from a terminal, `show(STORE)` from Python and notebooks. The page is
served on loopback by a thread of this process. Its link has a token, and requests without the token
get no answer.
"""

from __future__ import annotations

import atexit
import html
import os
import sys
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from farandole._native import ui as native
from farandole.common.notebook import in_notebook
from farandole.stores.unity_volumes import open_volume_url

__all__ = ["PAGE", "Viewer", "announce", "proxied", "show"]

PAGE: Final = Path(__file__).parent
"""Directory with the page's script and style, which `make` builds."""

_OPEN_VIEWERS: dict[tuple[int, tuple[str, ...], int], Viewer] = {}


class Viewer:
    """A viewer that runs. Notebooks show it as a link.

    Args:
        stores: Stores, or directories of runs, as paths or URLs.
        port: Port on loopback; 0 is any.
        run: The run that the link opens; default: the list of runs.

    Raises:
        ValueError: No store, or text that is none.
        OSError: The page is not installed, or the port is taken.
    """

    def __init__(self, stores: tuple[str, ...], port: int = 0, run: str | None = None) -> None:
        self.stores = stores
        self._server = native.ViewerServer(list(stores), PAGE, port)
        self._run = run

    def at(self, run: str | None) -> Self:
        """Returns the same viewer with a link to a run.

        Args:
            run: Name of the run in the first store; `None` is the list of runs.
        """
        other = object.__new__(type(self))
        other.stores, other._server, other._run = self.stores, self._server, run
        return other

    @property
    def url(self) -> str:
        """The link as the browser of this host opens it."""
        return self._server.url + self._url_fragment

    @property
    def link(self) -> str:
        """The link as a notebook's browser opens it: by the proxy of JupyterHub or Databricks
        where there is one.
        """
        return proxied(self._server.port, self._server.path) + self._url_fragment

    @property
    def _url_fragment(self) -> str:
        return "" if self._run is None else f"#/run/{quote(f'0/{self._run}', safe='')}"

    def close(self) -> None:
        """Ends the viewer."""
        self._server.close()
        for key, viewer in list(_OPEN_VIEWERS.items()):
            if viewer._server is self._server:  # noqa: SLF001 - of the same class
                del _OPEN_VIEWERS[key]

    def __enter__(self) -> Self:
        """Returns the viewer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the viewer."""
        self.close()

    def __repr__(self) -> str:
        """Returns the link."""
        return self.url

    def _repr_html_(self) -> str:
        stores = ", ".join(self.stores)
        text = f"Runs of {stores}" if self._run is None else f"Run {self._run} of {stores}"
        link = f'<a href="{html.escape(self.link)}" target="_blank" rel="noopener noreferrer">'
        return f"{link}{html.escape(text)}</a>"


def show(*stores: Any, port: int = 0, run: str | None = None) -> Viewer:
    """Opens a viewer, or returns the one that shows the same stores already.

    Args:
        *stores: Stores, as paths, URLs or objects such as `LocalStore`.
        port: Port on loopback; 0 is any.
        run: Name of the run in the first store that the link opens; default: the list of runs.

    Returns:
        The viewer; it ends with this process, or by `close()`.

    Raises:
        ValueError: No store, or text that is none.
        OSError: The page is not installed, or the port is taken.
    """
    names = tuple(_runs_path(store) for store in stores)
    key = (os.getpid(), names, port)
    if key not in _OPEN_VIEWERS:
        _OPEN_VIEWERS[key] = Viewer(names, port)
    return _OPEN_VIEWERS[key].at(run)


def announce(viewer: Viewer, introduction: str) -> None:
    """Shows the address of the page: a link in a notebook, elsewhere a line on stderr.

    Args:
        viewer: The viewer.
        introduction: The words before the address, such as `the run is at`.
    """
    if in_notebook():
        # It exists in notebooks.
        from IPython.display import display  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        display(viewer)
        return
    sys.stderr.write(f"farandole: {introduction} {viewer.link}\n")
    sys.stderr.flush()


def _runs_path(store: Any) -> str:
    if isinstance(store, str | os.PathLike):
        path = os.fspath(store)
        return open_volume_url(path) or (
            path if "://" in path or path.startswith("dbfs:") else str(Path(path).absolute())
        )
    return store.get_runs_path()


def proxied(port: int, path: str) -> str:
    """Returns the URL of a path of a server on loopback, as a notebook's browser opens it.

    Args:
        port: Port of the server.
        path: It begins with `/`.
    """
    prefix = _proxy_prefix(port)
    return f"http://127.0.0.1:{port}{path}" if prefix is None else f"{prefix}{path.lstrip('/')}"


def _proxy_prefix(port: int) -> str | None:
    """Returns the prefix of a notebook's proxy for the path of a port of this host."""
    hub = os.environ.get("JUPYTERHUB_SERVICE_PREFIX")
    if hub:
        return f"{hub.rstrip('/')}/proxy/{port}/"
    session = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    active = (
        session.getActiveSession()
        if session is not None and "DATABRICKS_RUNTIME_VERSION" in os.environ
        else None
    )
    if active is None:
        return None
    tags = "spark.databricks.clusterUsageTags."
    owner, cluster = (
        active.conf.get(tags + name, "") for name in ("clusterOwnerOrgId", "clusterId")
    )
    return f"/driver-proxy/o/{owner}/{cluster}/{port}/" if owner and cluster else None


@atexit.register
def _close_viewers() -> None:
    for (pid, _, _), viewer in list(_OPEN_VIEWERS.items()):
        if pid == os.getpid():
            viewer.close()
