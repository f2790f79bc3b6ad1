# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Credentials that a REST catalog of Iceberg sends: connections, forks, failures and properties.
`tests/storage/test_iceberg_catalog.py` reads files.
"""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from farandole._native import store as native
from farandole.data.inputs import iceberg_credentials
from farandole.data.inputs.iceberg_credentials import IcebergCredentials, use_vended_credentials
from farandole.stores.store_options import request_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("pyiceberg", reason="pyiceberg is not installed")

TOKEN = "hidden-token-of-a-user"


class TableServer(ThreadingHTTPServer):
    """Has every table, with keys that have the table's name.

    Attributes:
        connections: addresses of clients, by the tables that they have loaded.
        metadata: of each table.
        answer_seconds: time before an answer.
        status: of answers with tables.
        expiry: of the keys, in milliseconds since 1970.
    """

    daemon_threads = True

    def __init__(self, metadata: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _TableRequest)
        self.metadata, self.answer_seconds, self.status = metadata, 0.0, 200
        self.connections: dict[str, set[Any]] = {}
        self.expiry = "4000000000000"

    def answer(self, table: str) -> dict[str, Any]:
        """The answer to a request."""
        keys = ("s3.access-key-id", "s3.secret-access-key", "s3.session-token")
        config: dict[str, str] = dict.fromkeys(keys, f"{table}-key")
        config["s3.session-token-expires-at-ms"] = self.expiry
        place = f"{self.metadata['location']}/m.json"
        return {"metadata-location": place, "metadata": self.metadata, "config": config}


class _TableRequest(BaseHTTPRequestHandler):
    server: TableServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers a request, and keeps its connection."""
        table, server = self.path.rpartition("/")[2].partition("?")[0], self.server
        server.connections.setdefault(table, set()).add(self.client_address)
        is_config = table == "config"
        found = {"defaults": {}, "overrides": {}} if is_config else server.answer(table)
        if not is_config and server.status != 200:
            authorization = self.headers["Authorization"]
            found = {"error": {"message": authorization, "type": "a", "code": server.status}}
        time.sleep(server.answer_seconds)
        data = json.dumps(found).encode()
        self.send_response(200 if is_config else server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TableServer]:
    """A server that runs during the test."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("w", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("sales")
    table = catalog.create_table("sales.clicks", pa.table({"a": [1]}).schema)
    metadata = json.loads(table.metadata.model_dump_json())
    catalog.close()
    made = TableServer({**metadata, "location": "s3://bucket/clicks"})
    thread = threading.Thread(target=made.serve_forever, args=[0.05])
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def properties_of(server: TableServer) -> dict[str, Any]:
    """The properties of a catalog at a server."""
    uri = f"http://127.0.0.1:{server.server_port}"
    return {"type": "rest", "uri": uri, "token": TOKEN}


def credentials_of(server: TableServer, table: str) -> IcebergCredentials:
    """The function for the credentials of a table."""
    return IcebergCredentials("prod", properties_of(server), ("sales", table))


def test_a_forked_process_uses_no_connection_of_its_parent(server: TableServer) -> None:
    assert credentials_of(server, "clicks")()["key"] == "clicks-key"
    function = credentials_of(server, "visits")
    child = os.fork()
    if child == 0:
        os._exit(0 if function()["key"] == "visits-key" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not server.connections["clicks"] & server.connections["visits"]


def test_a_silent_catalog_is_left_after_some_time(
    server: TableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = credentials_of(server, "visits")
    monkeypatch.setattr(iceberg_credentials, "_ANSWER_SECONDS", 0.2)
    server.answer_seconds = 2.0
    with pytest.raises(OSError, match="timed out"):
        function()


def test_the_first_failure_of_several_is_logged_without_a_secret(
    server: TableServer, caplog: pytest.LogCaptureFixture
) -> None:
    function = credentials_of(server, "clicks")
    for status in (403, 403, 200, 403):
        server.status = status
        if status == 200:
            function()
            continue
        with pytest.raises(Exception, match=TOKEN):
            function()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one for each series of failures"
    assert "the Iceberg table sales.clicks of the catalog prod" in warnings[0]
    assert "ForbiddenError" in warnings[0]
    assert TOKEN not in "".join(warnings)


def test_properties_of_a_catalog_reach_it_unchanged(server: TableServer) -> None:
    from pyiceberg.catalog.rest import RestCatalog

    given = {**properties_of(server), "ssl": {"cabundle": "/etc/ssl/certs/ca-certificates.crt"}}
    table = RestCatalog("prod", **given).load_table("sales.clicks")
    use_vended_credentials(table, table.location())
    try:
        assert request_credentials("s3://bucket/clicks")["key"] == "clicks-key"
    finally:
        native.configure_options("s3://bucket/clicks", {})


def test_credentials_for_a_table_do_not_hold_for_a_whole_bucket(
    server: TableServer, caplog: pytest.LogCaptureFixture
) -> None:
    from pyiceberg.catalog.rest import RestCatalog

    server.metadata["location"] = "s3://bucket"
    table = RestCatalog("prod", **properties_of(server)).load_table("sales.clicks")
    try:
        use_vended_credentials(table, table.location())
        assert native.configured_options("s3://bucket/store") == {}
        assert "s3://bucket is a whole bucket" in caplog.text
    finally:
        native.configure_options("s3://bucket", {})


@pytest.mark.parametrize("expiry", ["9" * 18, "9" * 5000, "soon"])
def test_an_expiry_that_is_no_time_is_none(server: TableServer, expiry: str) -> None:
    server.expiry = expiry
    assert "expires" not in credentials_of(server, "clicks")()
