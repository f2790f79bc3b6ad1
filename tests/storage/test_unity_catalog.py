# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables of Unity Catalog by name, on S3: their credentials expire, and are revoked, while the
tables are read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pages import blocks_of
from tests.storage.conftest import KEY_LIFE_SECONDS as LIFE

from farandole._native import store as native
from farandole.data import ParquetLoader, open_table, prepare_data
from farandole.stores.filesystem import StoreFileSystem
from farandole.stores.store_options import StorageOptions

if TYPE_CHECKING:
    from tests.storage.credential_front import CredentialFront
    from tests.unity_catalog_server import UnityCatalogServer

ROWS, FILES = 60, 6
NAME = "main.sales.clicks"


@pytest.fixture
def rows() -> pa.Table:
    numbers = np.arange(ROWS)
    return pa.table({"row": numbers, "x": numbers / ROWS, "y": 2.0 * numbers / ROWS})


@pytest.fixture
def table(
    request: pytest.FixtureRequest,
    catalog: UnityCatalogServer,
    s3_options: dict[str, str],
    prefix: str,
    rows: pa.Table,
    tmp_path: Any,
) -> str:
    """The name of a table of several files in the format of the test."""
    form, location = request.param, f"s3://bucket/{prefix}/clicks"
    StorageOptions((f"s3://bucket/{prefix}",), s3_options).apply_to_process()
    size = ROWS // FILES
    parts = [rows.slice(number * size, size) for number in range(FILES)]
    if form == "DELTA":
        deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
        for part in parts:
            deltalake.write_deltalake(str(tmp_path / "clicks"), part, mode="append")
        StoreFileSystem().put(f"{tmp_path}/clicks", location, recursive=True)
    else:
        for number, part in enumerate(parts):
            with StoreFileSystem().open(f"{location}/{number}.parquet", "wb") as file:
                pq.write_table(part, file)
    native.configure_options(f"s3://bucket/{prefix}", {})
    catalog.add_table(NAME, location, form)
    return f"uc://{NAME}"


def epoch_in_new_process(loader: bytes, seconds: float) -> list[int]:
    """Rows of an epoch of a pickled loader, in a process that has waited since it has opened it."""
    program = (
        "import pickle, sys, time, numpy\n"
        "loader = pickle.load(sys.stdin.buffer)\n"
        f"time.sleep({seconds})\n"
        "print(*sorted(numpy.concatenate([batch['row'] for batch in loader])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=loader, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return [int(row) for row in done.stdout.split()]


both_formats = pytest.mark.parametrize("table", ["PARQUET", "DELTA"], indirect=True)


def read_for(loader: ParquetLoader, seconds: float) -> int:
    """Reads epochs for some time; their number."""
    epochs, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        found = np.concatenate([batch["row"] for batch in loader])
        assert sorted(found) == list(range(ROWS))
        epochs += 1
        time.sleep(0.05)
    return epochs


@both_formats
def test_a_loader_reads_a_table_by_its_name_and_renews_its_credentials(
    table: str, catalog: UnityCatalogServer, front: CredentialFront
) -> None:
    loader = ParquetLoader(table, 7, seed=1)
    before = front.granted
    assert read_for(loader, 3 * LIFE) > 1
    assert 2 <= front.granted - before <= 10, "each of them is used for a while"
    assert catalog.requests.count(f"GET /api/2.1/unity-catalog/tables/{NAME}") == 1


@both_formats
def test_other_options_of_the_location_may_be_given(
    table: str, front: CredentialFront, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    options = {"endpoint_url": f"http://127.0.0.1:{front.port}", "region": "us-east-1"}
    assert read_for(ParquetLoader(table, 7, storage_options=options), 0.2) > 0
    given: dict[str, Any] = {"label_cols": ["y"], "storage_options": options}
    with prepare_data(table, str(tmp_path / "store"), **given) as data:
        assert data.train_rows == ROWS
    query = "SELECT x, y FROM clicks WHERE row < 10"
    with prepare_data({"clicks": table}, str(tmp_path / "store"), sql=query, **given) as data:
        assert data.train_rows == 10


@both_formats
def test_a_table_is_opened_with_one_grant(
    table: str, catalog: UnityCatalogServer, front: CredentialFront, tmp_path: Any
) -> None:
    front.life = 3600.0
    list(ParquetLoader(table, 7))
    assert catalog.operations == ["READ"]
    with prepare_data(table, str(tmp_path / "store"), label_cols=["y"]) as data:
        assert data.train_rows == ROWS
    assert catalog.operations == ["READ"] * 2


@pytest.mark.parametrize("table", ["PARQUET"], indirect=True)
def test_credentials_that_were_revoked_are_replaced(table: str, front: CredentialFront) -> None:
    front.life = 3600.0
    loader = ParquetLoader(table, 7, seed=1)
    read_for(loader, 0.2)
    before = front.granted
    read_for(loader, 0.2)
    assert front.granted == before, "the keys are not renewed for their age"
    front.revoke_all()
    read_for(loader, 0.2)
    assert front.granted > before


@pytest.mark.parametrize("table", ["DELTA"], indirect=True)
@pytest.mark.parametrize("directory", ["local", "store"])
def test_a_table_with_a_file_elsewhere_is_refused(
    table: str,
    catalog: UnityCatalogServer,
    s3_options: dict[str, str],
    prefix: str,
    tmp_path: Any,
    directory: str,
) -> None:
    location = catalog.tables[NAME]["storage_location"]
    pq.write_table(pa.table({"row": [7], "x": [0.0], "y": [0.0]}), tmp_path / "own.parquet")
    size = (tmp_path / "own.parquet").stat().st_size
    path = {"local": f"file://{tmp_path}", "store": f"s3://bucket/{prefix}/other"}[directory]
    action = {
        "path": f"{path}/own.parquet",
        "partitionValues": {},
        "size": size,
        "modificationTime": 0,
        "dataChange": True,
    }
    StorageOptions((location,), s3_options).apply_to_process()
    with StoreFileSystem().open(f"{location}/_delta_log/{FILES:020}.json", "wb") as file:
        file.write(json.dumps({"add": action}).encode())
    for read in (lambda: ParquetLoader(table, 7), lambda: open_table(table)):
        with pytest.raises(ValueError, match=r"own\.parquet") as raised:
            read()
        assert f"the table {NAME}" in str(raised.value) or "of this host" in str(raised.value)


@pytest.mark.parametrize("table", ["PARQUET", "DELTA"], indirect=True)
def test_a_directory_in_another_format_than_in_the_catalog_is_refused(
    table: str, catalog: UnityCatalogServer
) -> None:
    actual = catalog.tables[NAME]["data_source_format"]
    other = {"PARQUET": "DELTA", "DELTA": "PARQUET"}[actual]
    catalog.tables[NAME]["data_source_format"] = other
    for read in (lambda: ParquetLoader(table, 7), lambda: open_table(table)):
        with pytest.raises(ValueError, match=f"has the format {other} in the catalog, and"):
            read()


@both_formats
def test_a_name_without_its_scheme_is_prepared(
    table: str, front: CredentialFront, tmp_path: Any
) -> None:
    with prepare_data(
        table.removeprefix("uc://"), str(tmp_path / "store"), label_cols=["y"], validation=0.2
    ) as data:
        assert data.train_rows + data.val_rows == ROWS


@both_formats
def test_the_block_of_the_page_reads_a_table(
    table: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = blocks_of("docs/databricks.md")
    (block,) = [block for block in page if block.kind == "python" and table in block.text]
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {})
    *batches, rows = capsys.readouterr().out.splitlines()
    assert sum(int(line.split()[0]) for line in batches) == ROWS
    assert sum(map(int, rows.split())) == ROWS


@both_formats
def test_a_pickled_loader_needs_no_environment(
    table: str, catalog: UnityCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = cloudpickle.dumps(ParquetLoader(table, 7, seed=1))
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name)
    assert epoch_in_new_process(data, 2 * LIFE) == list(range(ROWS))


@pytest.mark.parametrize("table", ["DELTA"], indirect=True)
def test_a_table_may_be_opened_at_a_version(table: str, front: CredentialFront) -> None:
    options = {"endpoint_url": f"http://127.0.0.1:{front.port}"}
    old = open_table(table, version=1, storage_options=options)
    with pytest.raises(TypeError, match="storage_options are for paths and names of tables, and"):
        open_table(old, storage_options=options)
    assert old.open_dataset().rows == 2 * ROWS // FILES
    assert open_table(table).open_dataset().rows == ROWS


@both_formats
def test_the_ranks_of_a_fit_renew_the_credentials(
    table: str, front: CredentialFront, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from farandole.spark.common import LocalBackend, Store
    from farandole.spark.torch import TorchEstimator

    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=10,
        epochs=4,
        transformation_fn=wait_and_return,
        backend=LocalBackend(2, verbose=0),
        store=Store.create(str(tmp_path / "store")),
        verbose=0,
    )
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": f"http://127.0.0.1:{front.port}"}
    fitted = estimator.fit_on_parquet(path=table, storage_options=options)
    assert len(fitted.getHistory()) == 4
    assert front.granted >= 6, "each rank has requested them several times"


def wait_and_return(row: Any) -> Any:
    """Makes an epoch last longer than the credentials."""
    time.sleep(0.1)
    return row
