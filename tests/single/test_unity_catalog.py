# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables of Unity Catalog by name: requests to the workspace, and answers that are not trusted.
`tests/storage/test_unity_catalog.py` reads the files.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.unity_catalog_server import CLIENT, TOKEN, running_catalog

from farandole.data import ParquetLoader, open_table, prepare_data
from farandole.data.inputs.catalog_names import resolve_source_options, table_name_of_path
from farandole.data.inputs.table_snapshot import TableFile, refuse_files_elsewhere
from farandole.data.inputs.unity_catalog import CatalogTable
from farandole.stores import catalog_requests
from farandole.stores.catalog_requests import CatalogSession
from farandole.stores.vended_credentials import vended_storage_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unity_catalog_server import UnityCatalogServer

NAME = "main.sales.clicks"
EXPIRY = 4_000_000_000_000
AWS_FIELDS = {"access_key_id": "id", "secret_access_key": "hidden-key", "session_token": "hidden-t"}
AWS_CREDENTIALS = {"aws_temp_credentials": AWS_FIELDS, "expiration_time": EXPIRY}


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnityCatalogServer]:
    """A catalog with one table, and an environment with its host and a token."""
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    with running_catalog() as server:
        monkeypatch.setenv("DATABRICKS_HOST", f"{server.url}/")
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        server.add_table(NAME, "s3://bucket/tables/clicks/")
        server.credentials = lambda _: AWS_CREDENTIALS
        yield server


def opened_table() -> CatalogTable:
    """The table, as the environment finds it."""
    return CatalogTable.find_table(CatalogSession.from_environment(f"the table {NAME}"), NAME)


def test_a_name_is_one_with_the_scheme_or_in_the_environment_of_databricks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABRICKS_HOST", raising=False)
    assert table_name_of_path(f"uc://{NAME}") == NAME
    assert table_name_of_path(NAME) is None
    monkeypatch.setenv("DATABRICKS_HOST", "https://a.cloud.databricks.com")
    assert table_name_of_path(NAME) == NAME
    for path in (
        "a.b",
        "a.b.c.d",
        "/a.b.c",
        "a/b.c.d",
        "data.2024.parquet",
        "a.b.*",
        "s3://a.b.c",
        "uc://a.b.c/d",
    ):
        assert table_name_of_path(path) is None, path
    (tmp_path / NAME).mkdir()
    assert table_name_of_path(NAME) is None, "a directory has this name"
    for path in ("uc://a.b", "uc://", "uc://a.b/c", "uc://a.b.c d", "uc://a..c"):
        with pytest.raises(ValueError, match=r"is uc://catalog\.schema\.table"):
            table_name_of_path(path)


def test_a_table_has_the_location_and_the_credentials_of_the_catalog(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    table = opened_table()
    assert table.location == "s3://bucket/tables/clicks"
    options = vended_storage_options(table.credentials, table.location, {})
    assert options["region"] == "eu-west-1", "of the metastore"
    expected = {"key": "id", "secret": "hidden-key", "token": "hidden-t", "expires": EXPIRY / 1000}
    assert options["credentials"]() == expected
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    options = vended_storage_options(table.credentials, table.location, {})
    assert set(options) == {"credentials"}
    assert [request.split("/")[-1] for request in catalog.requests] == [
        NAME,
        "metastore_summary",
        "temporary-table-credentials",
    ]
    assert resolve_source_options([f"uc://{NAME}"]) == [table.location]


@pytest.mark.parametrize("sources", [["uc://m.s.a", "uc://m.s.b"], ["/data", "m.s.a"]])
def test_a_table_among_other_sources_is_refused(
    catalog: UnityCatalogServer, sources: list[str]
) -> None:
    for read in (lambda: ParquetLoader(sources, 4), lambda: prepare_data(sources, "store")):
        with pytest.raises(ValueError, match=r"must be the only source: (uc://)?m\.s\.a$"):
            read()
    assert catalog.requests == []


@pytest.mark.parametrize(
    ("path", "is_below"),
    [
        ("s3://b/t/x=1/a.parquet", True),
        ("s3a://b/t/a.parquet", True),
        ("s3://b/t2/a.parquet", False),
        ("s3://c/t/a.parquet", False),
        ("s3://b/t/../u/a.parquet", False),
        ("/b/t/a.parquet", False),
    ],
)
def test_files_of_a_table_are_below_its_location(path: str, is_below: bool) -> None:
    files = [TableFile(path, {}, None)]
    if is_below:
        refuse_files_elsewhere("the table", "s3://b/t", files)
        return
    with pytest.raises(ValueError, match="the table has a file that is not below its location"):
        refuse_files_elsewhere("the table", "s3://b/t", files)


def test_a_name_without_its_scheme_that_is_no_table_may_be_a_missing_file(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"No file has the name train\.v1\.parquett: because"
    ):
        resolve_source_options("train.v1.parquett")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    with pytest.raises(ValueError, match=r"No file has the name train\.v1\.parquett: because"):
        resolve_source_options("train.v1.parquett")
    long_name = ".".join(["a" * 200] * 3)
    assert table_name_of_path(long_name) == long_name, "too long for a file"


def test_the_first_failure_of_several_to_renew_credentials_is_logged(
    catalog: UnityCatalogServer, caplog: pytest.LogCaptureFixture
) -> None:
    function = opened_table().credentials
    refusal = (403, f'{{"message": "{TOKEN} lost SELECT"}}'.encode(), {})
    for is_refused in (True, True, False, True):
        catalog.answers = [refusal] if is_refused else []
        if is_refused:
            with pytest.raises(PermissionError):
                function()
        else:
            function()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one for each series of failures"
    assert f"the table {NAME} of Unity Catalog at {catalog.url} cannot be renewed" in warnings[0]
    assert "*** lost SELECT" in warnings[0]
    assert "hidden" not in "".join(warnings)


def test_credentials_that_the_workspace_refuses_are_named_before_a_file_is_opened(
    catalog: UnityCatalogServer,
) -> None:
    table = catalog.tables[NAME]
    catalog.answers = [
        (200, json.dumps(table).encode(), {}),
        (403, b'{"message": "no EXTERNAL USE SCHEMA"}', {}),
    ]
    with pytest.raises(PermissionError, match="EXTERNAL USE SCHEMA on its schema") as raised:
        ParquetLoader(f"uc://{NAME}", 4)
    assert f"the table {NAME} of Unity Catalog at {catalog.url}" in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"azure_user_delegation_sas": {"sas_token": "sig=a"}}, {"sas_token": "sig=a"}),
        ({"azure_aad": {"aad_token": "a"}}, {"token": "a"}),
        ({"gcp_oauth_token": {"oauth_token": "g"}}, {"token": "g"}),
    ],
)
def test_credentials_of_other_clouds_have_the_names_of_storage_options(
    catalog: UnityCatalogServer, answer: dict[str, Any], expected: dict[str, str]
) -> None:
    catalog.credentials = lambda _: {**answer, "expiration_time": EXPIRY}
    assert opened_table().credentials() == {**expected, "expires": EXPIRY / 1000}


def test_another_process_needs_no_environment_and_no_text_shows_a_secret(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = opened_table().credentials
    assert TOKEN not in repr(function)
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    assert pickle.loads(pickle.dumps(function))()["key"] == "id"


def test_a_client_signs_in_again_before_its_token_expires(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", CLIENT[0])
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", CLIENT[1])
    monkeypatch.setattr(catalog_requests, "_MIN_TOKEN_SECONDS", 0.0)
    function = opened_table().credentials
    function()
    assert catalog.sign_ins == 1
    catalog_requests._OAUTH_TOKENS.clear()
    catalog.token_life = 0.05
    function()
    time.sleep(0.1)
    function()
    assert catalog.sign_ins == 3
    assert not any(secret in repr(function) for secret in ("hidden-oauth", CLIENT[1]))
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", "hidden-wrong")
    with pytest.raises(PermissionError, match="DATABRICKS_CLIENT_SECRET") as raised:
        opened_table()
    assert "hidden" not in str(raised.value)


LARGE = b'{"a": "' + b"x" * (5 << 20) + b'"}'


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ((403, b'{"message": "User lacks EXTERNAL USE SCHEMA"}', {}), PermissionError,
         r"User lacks EXTERNAL USE SCHEMA\. The user of the token needs SELECT"),
        ((401, b'{"message": "bad hidden-token-of-a-user"}', {}), PermissionError,
         r"bad \*\*\*\. Check DATABRICKS_TOKEN"),
        ((404, b'{"message": "no table"}', {}), FileNotFoundError, "no table. Check the name"),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), OSError, "redirection is not followed"),
        ((200, LARGE, {}), ValueError, "more than 4 MiB"),
        ((200, b"[1]", {}), ValueError, "no JSON object"),
        ((200, b"<html>", {}), ValueError, "no JSON object"),
        ((400, b"<html>" * 1000, {}), OSError, "HTTP status 400$"),
        ((200, b'{"table_type": "VIEW"}', {}), ValueError, "type is 'VIEW', and its format None"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_names_the_table_and_the_host(
    catalog: UnityCatalogServer, answer: Any, error: type[Exception], text: str
) -> None:
    catalog.answers = [answer]
    with pytest.raises(error, match=text) as raised:
        ParquetLoader(f"uc://{NAME}", 4)
    assert f"the table {NAME} of Unity Catalog at {catalog.url}" in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"storage_location": "file:///etc"}, "location that is not read: 'file:///etc'"),
        ({"storage_location": "/etc"}, "location that is not read"),
        ({"storage_location": "s3://bucket"}, "location that is not read"),
        ({"storage_location": "s3://bucket/../other"}, "location that is not read"),
        ({"storage_location": "s3://bucket/a\nb"}, "location that is not read"),
        ({"storage_location": "s3://bucket/a*"}, "location that is not read"),
        ({"storage_location": "s3://bucket/[a]"}, "location that is not read"),
        ({"storage_location": "s3://bucket//a"}, "location that is not read"),
        ({"storage_location": "s3://bucket/" + "a" * 3000}, "location that is not read"),
        ({"storage_location": None}, "no usable field storage_location"),
        ({"table_id": 7}, "no usable field table_id"),
        ({"data_source_format": "AVRO"}, "its format 'AVRO'"),
        ({"row_filter": {"function_name": "f"}}, "row filter or column masks"),
        ({"columns": [{"name": "a", "mask": {"function_name": "f"}}]}, "row filter or column"),
    ],
)
def test_a_table_that_is_not_read_is_refused_before_a_file_is_opened(
    catalog: UnityCatalogServer, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    catalog.tables[NAME] |= fields
    for read in (open_table, lambda source: prepare_data(source, str(tmp_path))):
        with pytest.raises(ValueError, match=text):
            read(f"uc://{NAME}")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({}, "no credentials of a kind that is known"),
        ({"aws_temp_credentials": AWS_FIELDS}, "without the time of their expiry"),
        ({**AWS_CREDENTIALS, "expiration_time": "soon"}, "without the time of their expiry"),
        ({**AWS_CREDENTIALS, "aws_temp_credentials": {"access_key_id": "id"}}, "secret_access_key"),
    ],
)
def test_credentials_that_cannot_be_used_are_named(
    catalog: UnityCatalogServer, answer: dict[str, Any], text: str
) -> None:
    catalog.credentials = lambda _: answer
    with pytest.raises(ValueError, match=text) as raised:
        opened_table().credentials()
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"DATABRICKS_TOKEN": ""}, "needs DATABRICKS_HOST, and DATABRICKS_TOKEN or"),
        ({"DATABRICKS_HOST": ""}, "needs DATABRICKS_HOST, and DATABRICKS_TOKEN or"),
        ({"DATABRICKS_HOST": "http://a.cloud.databricks.com"}, "in the form https://"),
        ({"DATABRICKS_HOST": "https://a.cloud.databricks.com/x"}, "in the form https://"),
        ({"DATABRICKS_HOST": "https://user@a.cloud.databricks.com"}, "in the form https://"),
    ],
)
def test_an_environment_that_cannot_sign_in_is_named(
    catalog: UnityCatalogServer,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text):
        open_table(f"uc://{NAME}")
    assert catalog.requests == []


def test_a_busy_workspace_is_asked_again_and_a_silent_one_is_named(
    catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_requests, "_MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(catalog_requests, "_REQUEST_SECONDS", 0.3)
    catalog.answers = [(429, b"", {}), (503, b"", {})]
    assert opened_table().location == "s3://bucket/tables/clicks"
    catalog.answers = [(503, json.dumps({"message": "busy"}).encode(), {})] * 3
    with pytest.raises(OSError, match="HTTP status 503: busy"):
        opened_table()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DATABRICKS_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(OSError, match="no answer: timed out"):
            opened_table()
