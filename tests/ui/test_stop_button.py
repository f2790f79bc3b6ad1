# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The stop button of a fit, clicked in a browser."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from farandole.spark.common.show.stop_button import StopEndpoint
from farandole.spark.common.show.stop_button import button_html as button_page

if TYPE_CHECKING:
    from collections.abc import Iterator


class Fake:
    """A backend that records the calls of the button's server."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def request_stop(self) -> None:
        self.calls.append("ask")

    def end_unless_double_click(self) -> None:
        self.calls.append("interrupt")


@pytest.fixture
def notebook() -> Iterator[Any]:
    """A server with another port than the button's, as that of Jupyter: `show` returns the URL
    of a page.
    """
    content: list[bytes] = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content[0])

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - Python's name
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()

    def show(text: str) -> str:
        content[0] = f"<!DOCTYPE html><link rel=icon href='data:,'>{text}".encode()
        return f"http://127.0.0.1:{server.server_port}/"

    yield show
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_first_click_stops_and_the_second_ends_at_once_also_after_a_reload(page, notebook):
    stop: Any = Fake()
    endpoint = StopEndpoint(stop)
    try:
        page.goto(notebook(button_page(endpoint.browser_url, in_order=True)))
        page.reload()
        button = page.locator(".farandole-stop button")
        assert button.inner_text() == "Stop"
        button.click()
        page.wait_for_selector(".farandole-stop button:has-text('End at once'):enabled")
        assert stop.calls == ["ask"]
        assert "fit returns the model" in page.locator(".farandole-stop span").inner_text()
        button.click()
        page.wait_for_selector(".farandole-stop span:has-text('ending with KeyboardInterrupt')")
        assert stop.calls == ["ask", "interrupt"]
        assert button.is_disabled()
    finally:
        endpoint.close()


def test_a_browser_that_does_not_reach_the_kernel_says_how_to_end_the_fit(page, notebook, errors):
    endpoint = StopEndpoint(Fake())  # pyright: ignore[reportArgumentType]
    page.goto(notebook(button_page(endpoint.browser_url, in_order=True)))
    endpoint.close()
    page.click(".farandole-stop button")
    page.wait_for_selector(
        ".farandole-stop span:has-text('interrupt the kernel to end fit at once')"
    )
    assert page.locator(".farandole-stop button").is_enabled()
    assert all("ERR_CONNECTION_REFUSED" in error for error in errors)
    errors.clear()
