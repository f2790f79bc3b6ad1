# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of volumes of Unity Catalog, and the permissions and options with which they are opened.
`tests/storage/test_unity_volumes.py` reads and writes files.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unity_catalog_server import TOKEN, running_catalog

from farandole._native import store as native
from farandole.data.inputs.catalog_names import resolve_source_options, table_at_location
from farandole.spark.common import Store
from farandole.stores.catalog_requests import SignInError
from farandole.stores.unity_volumes import VolumePath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unity_catalog_server import UnityCatalogServer

VOLUME = "main.default.files"
TABLE = "main.sales.clicks"
LOCATION = "s3://bucket/volumes/files"
CREDENTIALS = {
    "aws_temp_credentials": {
        "access_key_id": "id",
        "secret_access_key": "hidden-key",
        "session_token": "hidden-t",
    },
    "expiration_time": 4_000_000_000_000,
}


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnityCatalogServer]:
    """A catalog with a volume and a table, and an environment with its host and a token."""
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    with running_catalog() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        server.add_volume(VOLUME, LOCATION)
        server.add_table(TABLE, "s3://bucket/tables/clicks", "PARQUET")
        server.credentials = lambda _: CREDENTIALS
        yield server


@pytest.mark.parametrize(
    "options",
    [
        {"key": "a", "secret": "hidden-b"},
        {"aws_session_token": "hidden-b"},
        {"client_kwargs": {"aws_secret_access_key": "hidden-b"}},
        {"sas_token": "hidden-b"},
        {"azure_storage_account_key": "hidden-b"},
        {"google_service_account_key": "hidden-b"},
        {"profile": "hidden-b"},
        {"anon": True},
        {"credentials": dict},
    ],
)
def test_credentials_beside_a_name_are_refused(
    catalog: UnityCatalogServer, options: dict[str, Any]
) -> None:
    for read in (
        lambda: Store.create(f"uc://{VOLUME}/a", storage_options=options),
        lambda: resolve_source_options(f"uc://{VOLUME}/a", options),
        lambda: resolve_source_options(f"uc://{TABLE}", options),
    ):
        with pytest.raises(TypeError, match=r"cannot be given for the (volume|table) main") as told:
            read()
        assert "hidden" not in str(told.value)


def test_other_options_beside_a_name_are_taken(catalog: UnityCatalogServer) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "anon": False, "secret": None}
    options |= {"aws_sse_kms_key_id": "a", "aws_server_side_encryption": "aws:kms"}
    store = Store.create(f"uc://{VOLUME}/a", storage_options=options)
    assert store.get_runs_path() == f"{LOCATION}/a/runs"


def test_a_store_that_may_only_be_read_is_opened_with_a_warning(
    catalog: UnityCatalogServer, caplog: pytest.LogCaptureFixture
) -> None:
    catalog.refused_operations = {"WRITE_VOLUME"}
    with caplog.at_level(logging.WARNING, "farandole"):
        store = Store.create(f"uc://{VOLUME}/a")
    assert store.get_runs_path() == f"{LOCATION}/a/runs"
    assert catalog.operations == ["READ_VOLUME"]
    (record,) = caplog.records
    text = record.getMessage()
    assert f"the volume {VOLUME} can be read, and not written" in text
    assert "User does not have WRITE_VOLUME" in text
    assert TOKEN not in text


def test_a_store_without_any_permission_is_refused_for_the_lack_of_the_first(
    catalog: UnityCatalogServer, caplog: pytest.LogCaptureFixture
) -> None:
    catalog.refused_operations = {"READ_VOLUME", "WRITE_VOLUME"}
    with pytest.raises(PermissionError, match="User does not have WRITE_VOLUME"):
        Store.create(f"uc://{VOLUME}/a")
    catalog.answers = [(200, b'{"volume_id": "1", "storage_location": "s3://b/c"}', {})]
    catalog.answers.append((401, b'{"message": "expired"}', {}))
    with pytest.raises(SignInError, match="expired"):
        Store.create(f"uc://{VOLUME}/a")
    assert not caplog.records


def test_all_forms_of_a_mount_that_is_absent_are_the_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "https://a.cloud.databricks.com")
    for scheme in ("", "file:", "file://", "dbfs:"):
        where = VolumePath.parse(f"{scheme}/Volumes/main/default/files/a/b")
        assert where == VolumePath(VOLUME, "a/b"), scheme
        with pytest.raises(ValueError, match="cannot have"):
            VolumePath.parse(f"{scheme}/Volumes/main/default/files/../other")
    monkeypatch.setattr("farandole.stores.unity_volumes.is_path_present", lambda _: True)
    for scheme in ("", "file:", "file://", "dbfs:"):
        assert VolumePath.parse(f"{scheme}/Volumes/main/default/files/a") is None, "it is mounted"


@pytest.mark.parametrize("path", [Path(f"uc://{VOLUME}/a"), f"UC://{VOLUME}/a", f"uc:/{TABLE}"])
def test_a_name_with_a_damaged_scheme_is_explained(path: Any) -> None:
    for read in (lambda: Store.create(os.fspath(path)), lambda: resolve_source_options(path)):
        with pytest.raises(ValueError, match=r"uc://catalog\.schema\.volume/path"):
            read()


def test_many_files_of_a_volume_take_one_grant(catalog: UnityCatalogServer) -> None:
    paths = [f"uc://{VOLUME}/raw/{number}.parquet" for number in range(9)]
    found = resolve_source_options(paths)
    assert found == [f"{LOCATION}/raw/{number}.parquet" for number in range(9)]
    assert len(catalog.requests) == 2
    assert catalog.operations == ["READ_VOLUME"]


def test_a_store_takes_the_arguments_of_its_class_by_position(catalog: UnityCatalogServer) -> None:
    runs = f"uc://{VOLUME}/all-runs"
    store = Store.create(f"uc://{VOLUME}/a", None, None, None, runs, False)
    assert (store.get_runs_path(), store.saving_runs()) == (f"{LOCATION}/all-runs", False)
    with pytest.raises(TypeError, match="takes at most"):
        Store.create(f"uc://{VOLUME}/a", None, None, None, None, True, None, None, "more")
    with pytest.raises(TypeError, match="multiple values"):
        Store.create(f"uc://{VOLUME}/a", None, None, None, runs, runs_path=runs)


def test_a_location_is_that_of_the_table_until_it_is_read_by_itself(
    catalog: UnityCatalogServer,
) -> None:
    location = resolve_source_options(f"uc://{TABLE}")
    noted = table_at_location(location)
    assert noted is not None
    assert noted.data_format == "PARQUET"
    assert resolve_source_options([f"{location}/"]) == [f"{location}/"]
    assert table_at_location(location) is None
    native.configure_options(location, {})
