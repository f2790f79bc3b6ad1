# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The stop button of a fit in a notebook.

While a cell runs, its kernel handles no messages of widgets: the main thread is in the fit. So the
button reaches the fit on one of two other ways:

- a widget of ipywidgets whose clicks are handled by the thread that receives the kernel's messages
  (ipykernel 7.4 and later);
- otherwise, a button in HTML that sends a request to a server on loopback. The path of the request
  contains a token of this fit. The request passes through the proxy of JupyterHub or Databricks, if
  there is one.

If neither works, the page says so, and says how to interrupt the kernel.
"""

# ruff: noqa: PLC0415 - IPython and ipywidgets are there where a notebook is

from __future__ import annotations

import contextlib
import html
import json
import logging
import secrets
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.spark.common.runs.stop_request import StopRequest

STOP_LABEL: Final = "Stop"
END_AT_ONCE_LABEL: Final = "End at once"

_MAX_STOP_CONNECTIONS: Final = 16
"""Connections to one button's server at the same time."""
_STOPPING_TEXT = "stopping: fit returns the model as it is then"
_ENDING_TEXT = "ending with KeyboardInterrupt"
_INTERRUPT_HINT = "interrupt the kernel to end fit at once"
_LOG = logging.getLogger("farandole")

# The second click of a double click does not count, so the button waits. Lines are joined: no
# comments of a line.
_BUTTON_SCRIPT = """
var button = this, text = this.nextElementSibling, what = this.dataset.what;
button.disabled = true;
fetch(LINK + what, {method: 'POST'}).then(function (answer) {
  if (answer.status !== 204) { throw answer.status; }
  text.textContent = what === 'stop' && IN_ORDER ? STOPPING : ENDING;
  if (what === 'stop' && IN_ORDER) {
    button.dataset.what = 'end';
    button.textContent = AT_ONCE;
    setTimeout(function () { button.disabled = false; }, 2000);
  }
}).catch(function () {
  button.disabled = false;
  text.textContent = UNREACHED;
});
"""


class StopEndpoint:
    """A server on loopback that stops one fit.

    Attributes:
        port: Port on which the server listens.
        path: Its path, which contains a token.

    Args:
        stop: Stops the fit.

    Raises:
        OSError: There is no port.
    """

    def __init__(self, stop: StopRequest) -> None:
        self.path = f"/{secrets.token_hex(16)}/"
        actions = {
            f"{self.path}stop": stop.request_stop,
            f"{self.path}end": stop.end_unless_double_click,
        }
        self._server = _StopServer(("127.0.0.1", 0), _create_handler(actions))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def browser_url(self) -> str:
        """Its URL as the notebook's browser reaches it."""
        from farandole.ui import proxied

        return proxied(self.port, self.path)

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _StopServer(socketserver.ThreadingTCPServer):
    """A server on loopback. Unlike Python's own server for HTTP, it makes no DNS query for its name
    and prints no tracebacks.

    Every user of the host can connect. If all places are taken, the oldest connection is closed, so
    connections that send nothing keep no click out.
    """

    daemon_threads = True
    request_queue_size = _MAX_STOP_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: dict[socket.socket, None] = {}
        self._connections_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread, after closing the oldest one if there are too many."""
        with self._connections_lock:
            full = len(self._connections) >= _MAX_STOP_CONNECTIONS
            oldest = next(iter(self._connections)) if full else None
            if oldest is not None:
                del self._connections[oldest]
            self._connections[request] = None
        if oldest is not None:
            # Ends the thread that reads it.
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, and frees its place."""
        with self._connections_lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an error of a client, which has closed the connection."""


def _create_handler(actions: dict[str, Callable[[], object]]) -> type[BaseHTTPRequestHandler]:
    class StopRequestHandler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_POST(self) -> None:
            # The whole path is compared, in constant time: it contains the token.
            asked = self.path.encode()
            found = [
                act for path, act in actions.items() if secrets.compare_digest(asked, path.encode())
            ]
            if not found:
                self._send_status(404)
                return
            try:
                found[0]()
            except Exception as error:  # noqa: BLE001 - the button says that it does not work
                _LOG.warning("the fit cannot be stopped: %s", error)
                self._send_status(503)
            else:
                self._send_status(204)

        def _send_status(self, status: int) -> None:
            self.send_response(status)
            # the notebook's page has another port
            self.send_header("Access-Control-Allow-Origin", "*")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - Python's name
            pass

    return StopRequestHandler


def button_html(link: str, *, in_order: bool) -> str:
    """Returns the button in HTML, without any library.

    Args:
        link: Address of the server.
        in_order: Whether the fit can end in order.
    """
    values_by_placeholder = {
        "LINK": link,
        "IN_ORDER": in_order,
        "STOPPING": _STOPPING_TEXT,
        "ENDING": _ENDING_TEXT,
        "AT_ONCE": END_AT_ONCE_LABEL,
        "UNREACHED": f"this browser cannot reach the kernel's host: {_INTERRUPT_HINT}",
    }
    script = _BUTTON_SCRIPT
    for name, value in values_by_placeholder.items():
        script = script.replace(name, json.dumps(value))
    return (
        '<div class="farandole-stop">'
        f'<button type="button" data-what="stop" onclick="{html.escape(" ".join(script.split()))}">'
        f"{STOP_LABEL if in_order else END_AT_ONCE_LABEL}</button> <span></span></div>"
    )


@contextlib.contextmanager
def show_stop_button(stop: StopRequest) -> Iterator[None]:
    """Shows the button while the fit runs inside. An error is one line in the log and never fails a
    fit.

    Args:
        stop: Stops the fit.
    """
    remove: Callable[[], None] | None = None
    try:
        remove = _show_widget_button(stop) or _show_html_button(stop)
    except Exception as error:  # noqa: BLE001 - the fit continues without a button
        _LOG.warning("there is no stop button: %s; %s", error, _INTERRUPT_HINT)
    try:
        yield
    finally:
        if remove is not None:
            with contextlib.suppress(Exception):  # the front end is gone
                remove()


def _show_html_button(stop: StopRequest) -> Callable[[], None]:
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    endpoint = StopEndpoint(stop)
    try:
        handle: Any = display(
            HTML(button_html(endpoint.browser_url, in_order=stop.in_order)), display_id=True
        )
    except BaseException:
        endpoint.close()
        raise

    def remove_button() -> None:
        endpoint.close()
        if handle is not None:
            handle.update(HTML(""))

    return remove_button


def _show_widget_button(stop: StopRequest) -> Callable[[], None] | None:
    """Shows the widget, if its clicks arrive while a cell runs; else returns `None`."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(getattr(shell, "kernel", None), "shell_channel_thread", None) is None:
        return None
    try:
        import ipywidgets  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    shown: Any = ipywidgets.Button(description=STOP_LABEL if stop.in_order else END_AT_ONCE_LABEL)
    if not _handle_clicks_immediately(shown, stop):
        shown.close()
        return None
    display(shown)
    return shown.close


def _handle_clicks_immediately(shown: Any, stop: StopRequest) -> bool:
    """Handles clicks when they arrive; IPython would handle them after the cell, which is too late.

    ipykernel asks the widget's channel which thread must handle a message. ipykernel asks on the
    thread that receives messages.
    """
    route = getattr(getattr(shown, "comm", None), "_reply_subshell_for", None)
    if route is None:
        return False

    def handle_click() -> None:
        if stop.asked or not stop.in_order:
            shown.disabled = stop.end_unless_double_click()
            return
        try:
            stop.request_stop()
        except Exception as error:  # noqa: BLE001 - as above
            _LOG.warning("the fit cannot be stopped: %s", error)
        else:
            shown.description = END_AT_ONCE_LABEL

    def route_click_message(data: Any, default: Any) -> Any:
        if isinstance(data, dict) and data.get("content") == {"event": "click"}:
            # others' messages do not wait for the store
            threading.Thread(target=handle_click, daemon=True).start()
        return route(data, default)

    shown.comm._reply_subshell_for = route_click_message  # noqa: SLF001 - there is no public API
    return True
