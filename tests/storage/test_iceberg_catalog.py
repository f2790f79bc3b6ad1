# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Iceberg tables of a REST catalog that gives out credentials, on S3: they expire while a table is
read.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from tests.storage.credential_front import CredentialFront
from tests.storage.test_unity_catalog import epoch_in_new_process

from farandole._native import store as native
from farandole.data import ParquetLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("pyiceberg", reason="pyiceberg is not installed")

ROWS = 60
LIFE = 1.5
"""Seconds that a key is valid."""
TOKEN = "hidden-token-of-a-user"


class IcebergRestServer(ThreadingHTTPServer):
    """Has one table, and gives out keys with it."""

    daemon_threads = True

    def __init__(self, metadata_location: str, metadata: str, front: CredentialFront) -> None:
        super().__init__(("127.0.0.1", 0), _RestRequest)
        self.metadata_location, self.metadata = metadata_location, json.loads(metadata)
        self.front = front

    def answer(self, path: str) -> dict[str, Any]:
        """The answer to a request."""
        if path.startswith("/v1/config"):
            return {"defaults": {}, "overrides": {}}
        assert path.split("?", maxsplit=1)[0] == "/v1/namespaces/sales/tables/clicks", path
        keys = self.front.grant()
        config = {
            "s3.access-key-id": keys["AccessKeyId"],
            "s3.secret-access-key": keys["SecretAccessKey"],
            "s3.session-token": keys["SessionToken"],
            "s3.session-token-expires-at-ms": str(int((time.time() + LIFE) * 1000)),
            "s3.endpoint": f"http://127.0.0.1:{self.front.port}",
            "s3.region": "us-east-1",
        }
        return {
            "metadata-location": self.metadata_location,
            "metadata": self.metadata,
            "config": config,
        }


class _RestRequest(BaseHTTPRequestHandler):
    server: IcebergRestServer

    def do_GET(self) -> None:
        """Answers a request with the token."""
        is_right = self.headers["Authorization"] == f"Bearer {TOKEN}"
        data = json.dumps(self.server.answer(self.path) if is_right else {}).encode()
        self.send_response(200 if is_right else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def running(server: IcebergRestServer) -> Iterator[IcebergRestServer]:
    """Runs a server while the context lasts."""
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def table(
    s3_options: dict[str, str], prefix: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A table of a REST catalog, in an environment without keys."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.sql import SqlCatalog

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "3")
    writer = SqlCatalog(
        "writer",
        uri=f"sqlite:///{tmp_path}/catalog.db",
        warehouse=f"s3://bucket/{prefix}",
        **{
            "s3.endpoint": s3_options["endpoint_url"],
            "s3.access-key-id": "id",
            "s3.secret-access-key": "hidden",
            "s3.region": "us-east-1",
        },
    )
    writer.create_namespace("sales")
    rows = pa.table({"row": np.arange(ROWS), "x": np.arange(ROWS) / ROWS})
    written = writer.create_table("sales.clicks", rows.schema)
    for start in range(0, ROWS, ROWS // 3):
        written.append(rows.slice(start, ROWS // 3))
    metadata = written.io.new_input(written.metadata_location).open().read().decode()
    writer.close()
    front = CredentialFront(urlsplit(s3_options["endpoint_url"]).netloc, LIFE)
    server = IcebergRestServer(written.metadata_location, metadata, front)
    try:
        with running(server):
            uri = f"http://127.0.0.1:{server.server_port}"
            yield load_catalog("prod", type="rest", uri=uri, token=TOKEN).load_table("sales.clicks")
    finally:
        front.close()


def read_for(loader: ParquetLoader, seconds: float) -> int:
    """Reads epochs for some time; their number."""
    epochs, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        assert sorted(np.concatenate([batch["row"] for batch in loader])) == list(range(ROWS))
        epochs += 1
        time.sleep(0.05)
    return epochs


def test_the_credentials_of_the_catalog_are_used_and_renewed(table: Any) -> None:
    loader = ParquetLoader(table, 7, seed=1)
    assert read_for(loader, 3 * LIFE) > 1
    function = native.configured_options(loader.dataset.url)["credentials"]
    assert "hidden" not in function


def test_another_process_renews_them_too(table: Any) -> None:
    data = cloudpickle.dumps(ParquetLoader(table, 7, seed=1))
    assert epoch_in_new_process(data, 2 * LIFE) == list(range(ROWS))
