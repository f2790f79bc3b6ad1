# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Requests to a Databricks workspace: where the token goes, how long a request lasts, forks, and
answers of a workspace that is broken.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.train_job_operator import write_certificate
from tests.unity_catalog_server import CLIENT, TOKEN, running_catalog

from farandole.data.inputs.unity_catalog import CatalogTable
from farandole.stores import catalog_requests
from farandole.stores.catalog_requests import CatalogSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unity_catalog_server import UnityCatalogServer

NAME = "main.sales.clicks"
LABEL = f"the table {NAME} of Unity Catalog at "
SHORT_SECONDS = 0.6


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnityCatalogServer]:
    """A catalog with one table, and an environment with its host and a token."""
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    with running_catalog() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        server.add_table(NAME, "s3://bucket/tables/clicks")
        yield server


@pytest.fixture
def client(catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch) -> UnityCatalogServer:
    """The catalog, and an environment with a client instead of the token."""
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", CLIENT[0])
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", CLIENT[1])
    return catalog


def find_table() -> CatalogTable:
    """The table, as the environment finds it."""
    return CatalogTable.find_table(CatalogSession.from_environment(f"the table {NAME}"), NAME)


@contextlib.contextmanager
def listening_server(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """A server whose connections are answered by a function; its port."""
    has_ended, connections = threading.Event(), []

    def accept_connections() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                with contextlib.suppress(OSError):
                    answer(connections[-1], has_ended)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept_connections)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            has_ended.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("token", ["hidden\n tail", "hidden-“quote”", "hidden token"])
def test_a_token_that_no_header_can_have_is_named_without_its_value(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("DATABRICKS_TOKEN", token)
    with pytest.raises(ValueError, match=r"needs a token in DATABRICKS_TOKEN: its value") as raised:
        find_table()
    assert "hidden" not in str(raised.value)
    assert catalog.requests == []


def test_an_end_of_line_after_a_token_is_no_part_of_it(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_TOKEN", f"{TOKEN}\n")
    assert find_table().name == NAME


def test_a_token_of_a_client_that_no_header_can_have_is_refused(
    client: UnityCatalogServer,
) -> None:
    client.answers = [(200, b'{"access_token": "hidden\\ntail", "expires_in": 60}', {})]
    with pytest.raises(ValueError, match="no usable field access_token") as raised:
        find_table()
    assert "hidden" not in str(raised.value)


def test_the_pair_of_a_client_is_in_no_message(client: UnityCatalogServer) -> None:
    pair = base64.b64encode(":".join(CLIENT).encode()).decode()
    echo = json.dumps({"error_description": f"no such client: Basic {pair}"}).encode()
    client.answers = [(401, echo, {})]
    with pytest.raises(PermissionError, match=r"no such client: Basic \*\*\*") as raised:
        find_table()
    assert pair not in str(raised.value)


@pytest.mark.parametrize("host", ["https://:hidden@a.com", "https://u:hidden@a.com", "https://["])
def test_a_host_with_a_password_is_refused(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", host)
    with pytest.raises(ValueError, match="in the form https://") as raised:
        find_table()
    assert "hidden" not in str(raised.value)


def test_a_token_for_loopback_goes_to_no_proxy(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bytes] = []

    def note_request(connection: socket.socket, _: threading.Event) -> None:
        requests.append(connection.recv(4096))
        connection.sendall(b"HTTP/1.1 404 none\r\nContent-Length: 0\r\n\r\n")

    with listening_server(note_request) as port:
        for name in ("http_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert find_table().name == NAME
    assert requests == []


@pytest.mark.timing
@pytest.mark.parametrize(
    "begin",
    [b"HTTP/1.1 200 OK\r\nA: ", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"],
)
def test_an_answer_that_drips_ends_in_bounded_time(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    def drip_bytes(connection: socket.socket, has_ended: threading.Event) -> None:
        connection.recv(4096)
        connection.sendall(begin)
        end = time.monotonic() + 4 * SHORT_SECONDS
        while time.monotonic() < end and not has_ended.wait(SHORT_SECONDS / 6):
            connection.sendall(b"a")

    monkeypatch.setattr(catalog_requests, "_REQUEST_SECONDS", SHORT_SECONDS)
    with listening_server(drip_bytes) as port:
        monkeypatch.setenv("DATABRICKS_HOST", f"http://127.0.0.1:{port}")
        start = time.monotonic()
        with pytest.raises(OSError, match="no answer: timed out") as raised:
            find_table()
        assert time.monotonic() - start < 3 * SHORT_SECONDS
    assert LABEL in str(raised.value)


def test_https_is_used_with_a_known_certificate_alone(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*write_certificate(tmp_path, tmp_path / "ca.crt"))
    catalog.socket = context.wrap_socket(catalog.socket, server_side=True)
    monkeypatch.setenv("DATABRICKS_HOST", f"https://localhost:{catalog.server_port}")
    monkeypatch.setattr(catalog_requests, "_MAX_ATTEMPTS", 1)
    with pytest.raises(OSError, match=r"no answer: .*certificate"):
        find_table()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    assert find_table().name == NAME


def test_a_fork_during_a_sign_in_can_sign_in(client: UnityCatalogServer) -> None:
    session, table = CatalogSession.from_environment(f"the table {NAME}"), find_table()
    is_asked, is_forked = threading.Event(), threading.Event()
    client.credentials = lambda _: {"gcp_oauth_token": {"oauth_token": "g"}, "expiration_time": 1}
    catalog_requests._OAUTH_TOKENS.clear()

    def wait_for_fork() -> None:
        is_asked.set()
        is_forked.wait(20)

    client.before_sign_in = wait_for_fork
    thread = threading.Thread(target=CatalogTable.find_table, args=[session, NAME])
    thread.start()
    assert is_asked.wait(20)
    client.before_sign_in = lambda: None
    child = os.fork()
    if child == 0:
        try:
            table.credentials.request_grant()
            os._exit(0)
        finally:  # this process must not go on with the tests
            os._exit(1)
    try:
        end, status = time.monotonic() + 20, (0, 1)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        if status[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert status == (child, 0)
    finally:
        is_forked.set()
        thread.join()


def test_a_token_that_the_workspace_has_withdrawn_is_replaced_at_once(
    client: UnityCatalogServer,
) -> None:
    find_table()
    client.sign_ins += 1  # only the last token of a client is valid
    find_table()
    assert client.sign_ins == 3
    refusal = (401, b'{"message": "no"}', {})
    client.answers = [refusal, (200, b'{"access_token": "hidden-b"}', {}), refusal]
    with pytest.raises(PermissionError, match="DATABRICKS_CLIENT_SECRET") as raised:
        find_table()
    assert "SELECT" not in str(raised.value)


@pytest.mark.parametrize("life", ["Infinity", "1" + "0" * 400, "NaN", "true", '"soon"', "-5"])
def test_a_token_is_used_for_an_hour_at_most(
    client: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, life: str
) -> None:
    answer = f'{{"access_token": "hidden-oauth-0", "expires_in": {life}}}'
    client.answers = [(200, answer.encode(), {})]
    find_table()
    clock = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    find_table()
    assert client.sign_ins == 1


DEEP = b'{"message": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ((200, DEEP, {}), ValueError, "no JSON object"),
        ((403, DEEP, {}), PermissionError, "HTTP status 403. The user of the token"),
        ((302, b"", {"Location": "http://["}), OSError, "redirection is not followed"),
    ],
)
def test_a_broken_answer_is_named(
    catalog: UnityCatalogServer, answer: Any, error: type[Exception], text: str
) -> None:
    catalog.answers = [answer]
    with pytest.raises(error, match=text) as raised:
        find_table()
    assert LABEL in str(raised.value)


@pytest.mark.parametrize("expiry", [10**18, -1, True, 1e3])
def test_an_expiry_that_is_no_time_is_named(catalog: UnityCatalogServer, expiry: Any) -> None:
    catalog.credentials = lambda _: {
        "gcp_oauth_token": {"oauth_token": "g"},
        "expiration_time": expiry,
    }
    with pytest.raises(ValueError, match="without the time of their expiry") as raised:
        find_table().credentials.request_grant()
    assert LABEL in str(raised.value)


def test_a_workspace_says_how_long_it_is_busy(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    catalog.answers = [(429, b"", {"Retry-After": "4"}), (503, b"", {"Retry-After": "9" * 900})]
    find_table()
    assert 2.0 <= pauses[0] <= 4.0
    assert 2.0 < pauses[1] <= 5.0
