# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores and files in volumes of Unity Catalog without their mount, on S3: their credentials
expire, and are revoked, while a fit uses them.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pages import blocks_of
from tests.storage.conftest import KEY_LIFE_SECONDS
from tests.ui.conftest import write_run
from tests.unity_catalog_server import TOKEN

import farandole.ui
from farandole._native import store as native
from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import LocalBackend, Store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.credential_front import CredentialFront
    from tests.unity_catalog_server import UnityCatalogServer

NAME = "main.default.files"
ROWS = 60


@pytest.fixture
def volume(catalog: UnityCatalogServer, prefix: str) -> str:
    """A volume; the URL of its directory."""
    catalog.add_volume(NAME, f"s3://bucket/{prefix}/volume")
    return f"s3://bucket/{prefix}/volume"


def training_rows() -> pa.Table:
    """Rows of a line."""
    numbers = np.arange(ROWS)
    return pa.table({"row": numbers, "x": numbers / ROWS, "y": 2.0 * numbers / ROWS})


@pytest.mark.parametrize(
    "path", [f"uc://{NAME}/runs/here", "/Volumes/main/default/files/runs/here/"]
)
def test_a_store_is_at_the_location_of_the_volume(
    volume: str, catalog: UnityCatalogServer, front: CredentialFront, path: str
) -> None:
    front.life = 3600.0
    store = Store.create(path)
    assert store.prefix_path == f"{volume}/runs/here"
    assert store.get_checkpoint_filename() == "checkpoint.tf", "as through the mount"
    store.check_writable()
    store.write_text(f"{store.prefix_path}/a.txt", "text")
    assert store.read(f"{store.prefix_path}/a.txt") == b"text"
    assert catalog.operations == ["WRITE_VOLUME"], "one grant for all of it"


def test_a_store_outlives_its_credentials_and_their_revocation(
    volume: str, catalog: UnityCatalogServer, front: CredentialFront
) -> None:
    store = native.Store(Store.create(f"uc://{NAME}/a").prefix_path)
    end, rounds = time.monotonic() + 3 * KEY_LIFE_SECONDS, 0
    while time.monotonic() < end:
        store.write("file", str(rounds).encode())
        assert store.read("file") == str(rounds).encode()
        rounds += 1
        time.sleep(0.05)
    assert front.granted >= 3
    front.life = 3600.0
    front.revoke_all()
    store.write("file", b"x")
    before = front.granted
    store.write("file", b"y")
    assert front.granted == before, "the keys are used while they are valid"
    front.revoke_all()
    store.write("file", b"z")
    assert front.granted > before


def test_another_process_needs_no_environment_and_no_text_shows_a_secret(
    volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"uc://{NAME}/a")
    assert "hidden" not in f"{store!r} {store.storage_options!r} {store.plain()}"
    data = pickle.dumps(store)
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name)
    program = (
        "import pickle, sys, time\n"
        "store = pickle.load(sys.stdin.buffer)\n"
        "store.write_text(f'{store.prefix_path}/x', 'first')\n"
        f"time.sleep({2 * KEY_LIFE_SECONDS})\n"
        "store.write_text(f'{store.prefix_path}/x', 'text')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert store.read(f"{store.prefix_path}/x") == b"text"


def test_a_fit_runs_in_a_volume_whose_credentials_are_revoked(
    volume: str,
    catalog: UnityCatalogServer,
    front: CredentialFront,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from farandole.spark.torch import TorchEstimator

    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "60")  # this process has the service, too
    front.life = 2.5
    front.requests_per_key = 7
    store = Store.create(f"uc://{NAME}/farandole")
    prepared = prepare_data(training_rows(), store, feature_cols=["x"], label_cols=["y"])
    model = torch.nn.Linear(1, 1)
    with prepared:
        fitted = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["x"],
            label_cols=["y"],
            batch_size=10,
            epochs=4,
            run_id="in-a-volume",
            transformation_fn=wait_and_return,
            backend=LocalBackend(2, verbose=0),
            store=store,
            verbose=0,
        ).fit_on_parquet(dataset_idx=prepared.index)
    assert len(fitted.getHistory()) == 4
    run = native.Store(store.get_run_path("in-a-volume"))
    assert run.exists("checkpoint.tf")
    names = [name for name, _ in native.Store(store.prefix_path).list()]
    data = b"".join(native.Store(store.prefix_path).read(name) for name in names)
    assert TOKEN.encode() not in data
    assert b"hidden" not in data, "no file of the store has a token or key"
    assert front.granted >= 6, "the driver and each rank have requested them several times"
    assert front.refused > 0, "keys were refused while they were in use"
    assert set(catalog.operations) == {"WRITE_VOLUME"}


def wait_and_return(row: Any) -> Any:
    """Makes an epoch last longer than the credentials."""
    time.sleep(0.1)
    return row


def test_files_of_a_volume_are_read_with_credentials_for_reading(
    volume: str,
    catalog: UnityCatalogServer,
    front: CredentialFront,
    s3_options: dict[str, str],
    tmp_path: Any,
) -> None:
    front.life = 3600.0
    name = volume.removeprefix("s3://bucket/")
    buffer = pa.BufferOutputStream()
    pq.write_table(training_rows(), buffer)
    client = boto3.client(
        "s3",
        aws_access_key_id="id",
        aws_secret_access_key="hidden",
        endpoint_url=s3_options["endpoint_url"],
        region_name="us-east-1",
    )
    client.put_object(
        Bucket="bucket", Key=f"{name}/raw/0.parquet", Body=buffer.getvalue().to_pybytes()
    )
    for path in (f"uc://{NAME}/raw", "/Volumes/main/default/files/raw"):
        catalog.operations.clear()
        assert sum(len(batch["row"]) for batch in ParquetLoader(path, 7)) == ROWS
        with prepare_data(f"{path}/*.parquet", str(tmp_path), label_cols=["y"]) as copy:
            assert copy.train_rows == ROWS
        assert catalog.operations == ["READ_VOLUME"] * 2, "one grant for each"


def test_data_in_a_store_of_this_process_is_read_with_the_credentials_of_the_store(
    volume: str, catalog: UnityCatalogServer, front: CredentialFront
) -> None:
    front.life = 3600.0
    store = Store.create(f"uc://{NAME}/farandole")
    with prepare_data(training_rows(), store, label_cols=["y"]) as data:
        inside = data.train_url.replace(volume, f"uc://{NAME}")
        assert sum(len(batch["row"]) for batch in ParquetLoader(inside, 7)) == ROWS
    assert catalog.operations == ["WRITE_VOLUME"]


def test_the_block_of_the_page_opens_a_store(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = blocks_of("docs/databricks.md")
    (block,) = [block for block in page if block.kind == "python" and NAME in block.text]
    exec(compile(block.text, str(block), "exec"), {})
    assert capsys.readouterr().out == f"{volume}/farandole\n"


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("uc://main.default", {}, r"is uc://catalog\.schema\.volume/path"),
        ("uc://main.default.files/../x", {}, "a path that a volume of Unity Catalog cannot have"),
        ("uc://main.default.files/a\nb", {}, "a path that a volume of Unity Catalog cannot have"),
        (f"uc://{NAME}/a", {"runs_path": "uc://main.default.other/a"}, "runs_path is not in the"),
        (f"uc://{NAME}/a", {"train_path": "s3://elsewhere/a"}, "train_path is not in the volume"),
    ],
)
def test_a_path_that_is_not_in_the_volume_is_refused(
    volume: str, catalog: UnityCatalogServer, path: str, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Store.create(path, **arguments)
    assert catalog.requests == []


def test_options_and_paths_of_a_store_are_those_of_its_volume(
    volume: str, front: CredentialFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": f"http://127.0.0.1:{front.port}"}
    paths = {"runs_path": f"uc://{NAME}/all-runs"}
    store = Store.create(f"uc://{NAME}", storage_options=options, **paths)
    assert store.get_runs_path() == f"{volume}/all-runs"
    store.check_writable()
    with pytest.raises(TypeError, match="'credentials' cannot be given for the volume main"):
        Store.create(f"uc://{NAME}", storage_options={"credentials": dict})


def test_a_volume_that_is_not_there_or_not_allowed_is_named(
    volume: str, catalog: UnityCatalogServer
) -> None:
    with pytest.raises(FileNotFoundError, match=r"the volume main\.default\.other of Unity"):
        Store.create("uc://main.default.other/a")
    found = catalog.credentials
    catalog.credentials = lambda _: {}
    with pytest.raises(ValueError, match="has no credentials of a kind that is known"):
        Store.create(f"uc://{NAME}/a")
    catalog.credentials = found
    catalog.volumes[NAME]["storage_location"] = "file:///etc/volume"
    with pytest.raises(ValueError, match="location that is not read: 'file:///etc/volume'"):
        Store.create(f"uc://{NAME}/a")


def test_the_commands_take_a_volume_by_name(
    volume: str, catalog: UnityCatalogServer, front: CredentialFront, tmp_path: Path
) -> None:
    front.life = 3600.0
    path = f"uc://{NAME}/farandole"
    write_run(tmp_path, "older", started=1000, ended=2000)
    write_run(tmp_path, "newest", state="failed", reason="rank 1 on b was lost")
    store = native.Store(Store.create(path).prefix_path)
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        store.write(str(file.relative_to(tmp_path)), file.read_bytes())
    program = [sys.executable, "-m", "farandole"]

    def run_command(*arguments: str) -> str:
        return subprocess.run(
            [*program, *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    lines = run_command("explain", path).splitlines()
    assert lines[0].startswith(f"run:     {path}/runs/newest (failed")
    assert lines[4].startswith(f"others:  {path}/runs/older (ended")
    assert run_command("explain", f"{path}/runs/older").startswith("verdict: ")
    assert "runs" in run_command("store", "ls", path)
    with subprocess.Popen([*program, "ui", path], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        link = command.stdout.readline().split()[4]
        assert run_names(link) == {"newest", "older"}
        command.send_signal(signal.SIGINT)
        command.wait(20)
    with farandole.ui.show(path) as viewer:
        assert run_names(viewer.url) == {"newest", "older"}
    refused = subprocess.run(
        [*program, "store", "ls", "uc://main.default.other/a"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1
    assert "the volume main.default.other of Unity" in refused.stderr
    options = ["--option", "access_key_id=x", "--option", "secret_access_key=env:DATABRICKS_TOKEN"]
    refused = subprocess.run(
        [*program, "explain", *options, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1
    assert f"cannot be given for the volume {NAME}" in refused.stderr
    assert TOKEN not in refused.stderr


def run_names(link: str) -> set[str]:
    """Returns the names of the runs that a viewer lists."""
    with urllib.request.urlopen(f"{link.partition('#')[0]}api/runs", timeout=10) as answer:
        return {run["name"] for run in json.load(answer)["runs"]}
