# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A server for tests with the requests of a Databricks workspace by which tables and volumes of
Unity Catalog are used: tables, volumes, temporary credentials, the REST catalog of Iceberg, sign-in
of clients.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN = "hidden-token-of-a-user"
CLIENT = ("client", "hidden-secret-of-a-client")
API = "/api/2.1/unity-catalog"


class UnityCatalogServer(ThreadingHTTPServer):
    """Answers until it is closed.

    Attributes:
        tables: answers of the catalog by the names of tables.
        volumes: answers of the catalog by the names of volumes.
        iceberg_tables: answers of the REST catalog of Iceberg by the names of tables; without
            credentials.
        iceberg_path: path of the REST catalog of Iceberg.
        has_storage_credentials: whether an Iceberg table has them in a list by prefixes.
        iceberg_credentials: returns the properties with credentials of an Iceberg table.
        credentials: returns the answer to a request for the credentials of a table or volume.
        operations: operations for which credentials were given out.
        refused_operations: operations for which the user of the token has no permission.
        answers: status and body of the next answers, instead of the right ones.
        requests: methods and paths of all requests.
        sign_ins: number of tokens that clients got.
        token_life: seconds that a client's token is valid, as the server says.
        before_sign_in: is called before a client gets a token.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CatalogRequest)
        self.tables: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.iceberg_tables: dict[str, dict[str, Any]] = {}
        self.iceberg_path = f"{API}/iceberg-rest"
        self.iceberg_credentials: Callable[[], dict[str, str]] = dict
        self.has_storage_credentials = False
        self.operations: list[str] = []
        self.refused_operations: set[str] = set()
        self.credentials: Callable[[str], dict[str, Any]] = lambda _: {}
        self.answers: list[tuple[int, bytes, dict[str, str]]] = []
        self.requests: list[str] = []
        self.sign_ins, self.token_life = 0, 3600.0
        self.before_sign_in: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        """The host, as `DATABRICKS_HOST` has it."""
        return f"http://127.0.0.1:{self.server_port}"

    def add_table(self, name: str, location: str, form: str = "DELTA", **fields: Any) -> None:
        """Adds a table."""
        number = f"00000000-0000-0000-0000-{next(self._numbers):012}"
        self.tables[name] = {
            "full_name": name,
            "table_id": number,
            "table_type": "EXTERNAL",
            "data_source_format": form,
            "storage_location": location,
            **fields,
        }

    def add_volume(self, name: str, location: str) -> None:
        """Adds a volume."""
        number = f"00000000-0000-0000-0001-{next(self._numbers):012}"
        self.volumes[name] = {
            "full_name": name,
            "volume_id": number,
            "volume_type": "MANAGED",
            "storage_location": location,
        }

    def valid_tokens(self) -> set[str]:
        """The tokens with which requests are answered: of a client, only the last one."""
        return {TOKEN, f"hidden-oauth-{self.sign_ins}"}


class _CatalogRequest(BaseHTTPRequestHandler):
    server: UnityCatalogServer

    def do_GET(self) -> None:
        """Answers a request without a body."""
        self._answer(b"")

    def do_POST(self) -> None:
        """Answers a request with a body."""
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        server = self.server
        server.requests.append(f"{self.command} {self.path}")
        headers: dict[str, str] = {}
        if server.answers:
            status, data, headers = server.answers.pop(0)
        else:
            status, found = self._find_answer(body)
            data = json.dumps(found).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)

    def _find_answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        authorization = self.headers.get("Authorization", "")
        if self.path == "/oidc/v1/token":
            return self._sign_in(authorization, body)
        if authorization.removeprefix("Bearer ") not in self.server.valid_tokens():
            return 401, {"message": f"not a valid token: {authorization}"}
        return self._find_table_answer(body)

    def _sign_in(self, authorization: str, body: bytes) -> tuple[int, dict[str, Any]]:
        pair = base64.b64encode(":".join(CLIENT).encode()).decode()
        asked = parse_qs(body.decode())
        if authorization != f"Basic {pair}" or asked["grant_type"] != ["client_credentials"]:
            return 401, {"error_description": f"no such client: {authorization}"}
        self.server.before_sign_in()
        self.server.sign_ins += 1
        token = f"hidden-oauth-{self.server.sign_ins}"
        return 200, {"access_token": token, "expires_in": self.server.token_life}

    def _find_table_answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        server = self.server
        for kind, known in (("tables", server.tables), ("volumes", server.volumes)):
            if self.path.startswith(f"{API}/{kind}/"):
                name = unquote(self.path.removeprefix(f"{API}/{kind}/"))
                missing = {"message": f"{kind[:-1].title()} '{name}' does not exist."}
                return (200, known[name]) if name in known else (404, missing)
        if self.path == f"{API}/metastore_summary":
            return 200, {"cloud": "aws", "region": "eu-west-1"}
        if self.path.startswith(f"{server.iceberg_path}/"):
            return self._find_iceberg_answer(self.path.removeprefix(server.iceberg_path))
        if self.path == f"{API}/temporary-table-credentials":
            return self._give_credentials(body, "table_id", server.tables, ("READ",))
        if self.path == f"{API}/temporary-volume-credentials":
            operations = ("READ_VOLUME", "WRITE_VOLUME")
            return self._give_credentials(body, "volume_id", server.volumes, operations)
        return 404, {"message": "no such path"}

    def _give_credentials(
        self, body: bytes, field: str, known: dict[str, Any], operations: tuple[str, ...]
    ) -> tuple[int, dict[str, Any]]:
        asked = json.loads(body)
        names = [name for name, found in known.items() if found[field] == asked[field]]
        if not names or asked["operation"] not in operations:
            return 404, {"message": f"nothing has this {field}"}
        if asked["operation"] in self.server.refused_operations:
            return 403, {"message": f"User does not have {asked['operation']}"}
        self.server.operations.append(asked["operation"])
        return 200, self.server.credentials(names[0])

    def _find_iceberg_answer(self, path: str) -> tuple[int, dict[str, Any]]:
        path, _, query = path.partition("?")
        if path == "/v1/config":
            warehouse = parse_qs(query)["warehouse"][0]
            return 200, {"defaults": {}, "overrides": {"prefix": f"catalogs/{warehouse}"}}
        found = re.fullmatch("/v1/catalogs/([^/]+)/namespaces/([^/]+)/tables/([^/]+)", path)
        answer = self.server.iceberg_tables.get(".".join(found.groups())) if found else None
        if answer is None:
            message = f"no such path, with {self.headers.get('Authorization')}: {path}"
            return 404, {"error": {"message": message, "type": "NoSuchTable", "code": 404}}
        is_vended = self.headers.get("X-Iceberg-Access-Delegation") == "vended-credentials"
        config = self.server.iceberg_credentials() if is_vended else {}
        if not self.server.has_storage_credentials:
            return 200, {**answer, "config": config}
        wrong = dict.fromkeys(config, "wrong")
        given = [(answer["metadata"]["location"], config), ("s3://", wrong), ("s3://b/x", wrong)]
        listed = [{"prefix": prefix, "config": properties} for prefix, properties in given]
        return 200, {**answer, "config": {}, "storage-credentials": listed}

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def running_catalog() -> Iterator[UnityCatalogServer]:
    """A server that runs while the context lasts."""
    server = UnityCatalogServer()
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
