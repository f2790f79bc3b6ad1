# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Iceberg tables of Unity Catalog by name, on S3: their credentials expire, and are revoked, while
the tables are read.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from tests.storage.conftest import KEY_LIFE_SECONDS
from tests.storage.test_unity_catalog import epoch_in_new_process, read_for
from tests.unity_catalog_server import API, CLIENT, TOKEN

from farandole.data import ParquetLoader, open_table, prepare_data

if TYPE_CHECKING:
    from tests.storage.credential_front import CredentialFront
    from tests.unity_catalog_server import UnityCatalogServer

pytest.importorskip("pyiceberg", reason="pyiceberg is not installed")

NAME = "main.sales.visits"
TABLE = f"uc://{NAME}"
ROWS = 60


@pytest.fixture
def server(
    catalog: UnityCatalogServer,
    front: CredentialFront,
    s3_options: dict[str, str],
    prefix: str,
    tmp_path: Any,
) -> UnityCatalogServer:
    """A workspace with a table of three snapshots."""
    from pyiceberg.catalog.sql import SqlCatalog

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
    written = writer.create_table("sales.visits", rows.schema)
    for start in range(0, ROWS, ROWS // 3):
        written.append(rows.slice(start, ROWS // 3))
    metadata = json.loads(written.io.new_input(written.metadata_location).open().read())
    writer.close()
    catalog.add_table(NAME, written.location(), "ICEBERG")
    catalog.iceberg_tables[NAME] = {
        "metadata-location": written.metadata_location,
        "metadata": metadata,
    }

    def give_properties() -> dict[str, str]:
        keys = front.grant()
        return {
            "s3.access-key-id": keys["AccessKeyId"],
            "s3.secret-access-key": keys["SecretAccessKey"],
            "s3.session-token": keys["SessionToken"],
            "s3.session-token-expires-at-ms": str(int((time.time() + front.life) * 1000)),
            "s3.endpoint": f"http://127.0.0.1:{front.port}",
            "client.region": "us-east-1",
            "py-io-impl": "builtins.eval",
        }

    catalog.iceberg_credentials = give_properties
    return catalog


@pytest.mark.parametrize("path", ["iceberg-rest", "iceberg"])
def test_a_loader_reads_a_table_and_renews_its_credentials(
    server: UnityCatalogServer,
    front: CredentialFront,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    server.iceberg_path = f"{API}/{path}"
    server.has_storage_credentials = path == "iceberg"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    loader = ParquetLoader(TABLE, 7, seed=1)
    assert read_for(loader, 2 * KEY_LIFE_SECONDS) > 1
    assert front.granted >= 2
    front.revoke_all()
    read_for(loader, 0.2)
    data = cloudpickle.dumps(loader)
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name)
    assert epoch_in_new_process(data, 2 * KEY_LIFE_SECONDS) == list(range(ROWS))


def test_a_table_is_opened_with_one_grant_and_at_a_snapshot(
    server: UnityCatalogServer, front: CredentialFront, tmp_path: Any
) -> None:
    front.life = 3600.0
    newest = open_table(TABLE)
    assert newest.open_dataset().rows == ROWS
    assert front.granted == 1
    first = server.iceberg_tables[NAME]["metadata"]["snapshots"][0]["snapshot-id"]
    assert open_table(TABLE, version=first).open_dataset().rows == ROWS // 3
    with prepare_data(TABLE, str(tmp_path / "store"), label_cols=["x"]) as data:
        assert data.train_rows == ROWS


def test_a_client_of_the_workspace_reads_a_table(
    server: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", CLIENT[0])
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", CLIENT[1])
    assert open_table(TABLE).open_dataset().rows == ROWS


def test_an_endpoint_may_be_given(
    server: UnityCatalogServer, front: CredentialFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    give = server.iceberg_credentials
    server.iceberg_credentials = lambda: {
        name: value
        for name, value in give().items()
        if name not in ("s3.endpoint", "client.region")
    }
    options = {"endpoint_url": f"http://127.0.0.1:{front.port}", "region": "us-east-1"}
    assert open_table(TABLE, storage_options=options).open_dataset().rows == ROWS
    options = {"aws_endpoint_url": options["endpoint_url"], "aws_region": "us-east-1"}
    wrong = {"s3.endpoint": "http://127.0.0.1:9", "client.region": "xx-wrong-1"}
    server.iceberg_credentials = lambda: give() | wrong
    assert open_table(TABLE, storage_options=options).open_dataset().rows == ROWS
    with pytest.raises(ValueError, match="the storage option 'timeout' is not known: endpoint_url"):
        open_table(TABLE, storage_options={"timeout": "x"})


def test_a_manifest_of_this_host_is_not_read(server: UnityCatalogServer, tmp_path: Any) -> None:
    for snapshot in server.iceberg_tables[NAME]["metadata"]["snapshots"]:
        snapshot["manifest-list"] = f"file://{tmp_path}/list.avro"
    with pytest.raises(ValueError, match=r"has a file that is not below its location: file.*list"):
        open_table(TABLE)


@pytest.mark.parametrize("content", ["POSITION_DELETES", "EQUALITY_DELETES"])
@pytest.mark.parametrize("elsewhere", ["file:///etc/deletes", "s3://elsewhere/deletes"])
def test_a_delete_file_elsewhere_is_refused_before_it_is_read(
    server: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch, content: str, elsewhere: str
) -> None:
    from pyiceberg.manifest import DataFile, DataFileContent, ManifestEntry, ManifestFile

    fetch = ManifestFile.fetch_manifest_entry

    def add_delete_file(manifest: Any, *args: Any, **options: Any) -> Any:
        entries = fetch(manifest, *args, **options)
        data = entries[0].data_file
        deletes = DataFile.from_args(
            content=DataFileContent[content],
            file_path=f"{elsewhere}.parquet",
            file_format=data.file_format,
            partition=data.partition,
            record_count=1,
            file_size_in_bytes=100,
            equality_ids=[1],
        )
        deletes.spec_id = data.spec_id
        added = ManifestEntry.from_args(
            status=entries[0].status,
            snapshot_id=entries[0].snapshot_id,
            sequence_number=entries[0].sequence_number,
            file_sequence_number=entries[0].sequence_number,
            data_file=deletes,
        )
        return [*entries, added]

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", add_delete_file)
    reads: list[str] = []
    monkeypatch.setattr(
        "farandole.data.inputs.iceberg_deletes._read_parquet", lambda path, _: reads.append(path)
    )
    with pytest.raises(ValueError, match=r"not below its location: |a file of this host"):
        open_table(TABLE)
    assert reads == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"location": "s3://bucket/other"}}, "not below its location: s3://bucket/ot"),
        ({"metadata": {"location": "file:///etc"}}, "location that is not read: 'file:///etc'"),
        ({"metadata": {"format-version": 9}}, "has metadata that cannot be read"),
        ({"metadata-location": None}, "no usable field metadata-location"),
    ],
)
def test_a_table_that_is_not_read_is_refused(
    server: UnityCatalogServer, change: dict[str, Any], message: str
) -> None:
    answer = server.iceberg_tables[NAME]
    changed = {**answer["metadata"], **change.pop("metadata", {})}
    server.iceberg_tables[NAME] = {**answer, "metadata": changed, **change}
    with pytest.raises(ValueError, match=message) as raised:
        open_table(TABLE)
    assert f"the table {NAME} of Unity Catalog at {server.url}" in str(raised.value)


def test_a_table_without_credentials_or_that_is_refused_is_named_without_a_secret(
    server: UnityCatalogServer,
) -> None:
    server.iceberg_credentials = dict
    with pytest.raises(ValueError, match="comes without temporary credentials for S3"):
        ParquetLoader(TABLE, 7)
    server.iceberg_tables.clear()
    with pytest.raises(FileNotFoundError, match=r"no such path, with Bearer \*\*\*") as raised:
        ParquetLoader(TABLE, 7)
    assert TOKEN not in str(raised.value)
