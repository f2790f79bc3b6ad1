# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Delta tables and volumes of Unity Catalog on Google Cloud Storage: their tokens expire while they
are used.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
import time
import uuid
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from tests.storage.test_google_azure_credentials import TokenFront
from tests.storage.test_unity_catalog import epoch_in_new_process
from tests.unity_catalog_server import TOKEN, running_catalog

from farandole._native import store as native
from farandole.data import ParquetLoader, open_table
from farandole.data.inputs.delta_log_copies import hold_log_copy
from farandole.spark.common import Store
from farandole.stores.store_options import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")

NAME = "main.sales.clicks"
VOLUME = "main.default.files"
ROWS, FILES = 60, 6
LIFE_SECONDS = 1.5
DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Z85 = str.maketrans(
    f"{DIGITS}{LETTERS.upper()}{LETTERS}!#$%&()*+-;<=>?@^_`{{|}}~",
    f"{DIGITS}{LETTERS}{LETTERS.upper()}.-:+=^!/*?&<>()[]{{}}@%$#",
)
"""From the letters of `base64.b85encode` to those of Z85, which Delta uses."""


@pytest.fixture
def options(
    gcs_options: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Options of a table that a workspace has at a location in Google Cloud Storage."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "DATABRICKS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "4")
    front = TokenFront(urlsplit(gcs_options["endpoint_url"]).netloc)
    numbers = itertools.count()

    def give_credentials(_: str) -> dict[str, Any]:
        token, expires = f"hidden-{next(numbers)}", time.time() + LIFE_SECONDS
        front.grant(token, expires)
        return {
            "gcp_oauth_token": {"oauth_token": token},
            "expiration_time": int(expires * 1000),
        }

    try:
        with running_catalog() as server:
            monkeypatch.setenv("DATABRICKS_HOST", server.url)
            monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
            server.credentials = give_credentials
            server.add_table(NAME, f"gs://bucket/{prefix}/clicks")
            server.add_volume(VOLUME, f"gs://bucket/{prefix}/volume")
            yield {"endpoint_url": f"http://127.0.0.1:{front.port}"}
    finally:
        front.close()


@pytest.fixture
def written(gcs_options: dict[str, str], prefix: str, tmp_path: Path) -> Any:
    """A Delta table of several versions at the location; the local copy of it."""
    numbers = np.arange(ROWS)
    rows = pa.table({"row": numbers, "x": numbers / ROWS})
    for number in range(FILES):
        part = rows.slice(number * ROWS // FILES, ROWS // FILES)
        deltalake.write_deltalake(str(tmp_path / "clicks"), part, mode="append")
        if number == FILES // 2:
            deltalake.DeltaTable(str(tmp_path / "clicks")).create_checkpoint()
        time.sleep(0.01)
    upload(tmp_path / "clicks", f"gs://bucket/{prefix}", gcs_options)
    return tmp_path / "clicks"


def upload(directory: Path, parent: str, options: dict[str, str]) -> None:
    """Copies a table to its location, with the options of the service itself."""
    StorageOptions((parent,), options).apply_to_process()
    store = native.Store(f"{parent}/clicks")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.write(path.relative_to(directory).as_posix(), path.read_bytes())
    native.configure_options(parent, {})


def delete_rows(directory: Path, rows: list[int]) -> None:
    """Deletes rows of the only file of a table by a deletion vector in a file, as Delta's protocol
    describes it.
    """
    body = struct.pack("<II", 12346, 1) + struct.pack("<HH", 0, len(rows) - 1)
    body += struct.pack("<I", 16) + b"".join(struct.pack("<H", row) for row in rows)
    data = struct.pack("<IQI", 1681511377, 1, 0) + body
    identity = uuid.uuid4()
    file = b"\1" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (directory / "ab").mkdir()
    (directory / "ab" / f"deletion_vector_{identity}.bin").write_bytes(file)
    log = directory / "_delta_log" / "00000000000000000000.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    features = ["deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= {"readerFeatures": features, "writerFeatures": features}
    for action in actions:
        if "protocol" in action:
            action["protocol"] = protocol
        if "add" in action:
            action["add"]["deletionVector"] = {
                "storageType": "u",
                "pathOrInlineDv": "ab" + base64.b85encode(identity.bytes).decode().translate(Z85),
                "offset": 1,
                "sizeInBytes": len(data),
                "cardinality": len(rows),
            }
    log.write_text("\n".join(map(json.dumps, actions)))


def test_deleted_rows_of_a_table_are_not_read(
    options: dict[str, str], gcs_options: dict[str, str], prefix: str, tmp_path: Path
) -> None:
    deltalake.write_deltalake(str(tmp_path / "clicks"), pa.table({"row": np.arange(ROWS)}))
    delete_rows(tmp_path / "clicks", [3, 7])
    upload(tmp_path / "clicks", f"gs://bucket/{prefix}", gcs_options)
    loader = ParquetLoader(f"uc://{NAME}", 7, storage_options=options)
    found = np.concatenate([batch["row"] for batch in loader])
    assert sorted(found) == sorted(set(range(ROWS)) - {3, 7})


def test_a_table_is_read_with_tokens_that_expire(
    written: Path, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ParquetLoader(f"uc://{NAME}", 7, seed=1, storage_options=options)
    end = time.monotonic() + 2 * LIFE_SECONDS
    while time.monotonic() < end:
        assert sorted(np.concatenate([batch["row"] for batch in loader])) == list(range(ROWS))
        time.sleep(0.05)
    data = cloudpickle.dumps(loader)
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name)
    assert epoch_in_new_process(data, 2 * LIFE_SECONDS) == list(range(ROWS))


def test_a_store_in_a_volume_outlives_its_token(options: dict[str, str], prefix: str) -> None:
    store: Any = Store.create(f"uc://{VOLUME}/a", storage_options=options)
    assert store.prefix_path == f"gs://bucket/{prefix}/volume/a"
    store.check_writable()
    for number in range(3):
        store.write_text(f"{store.prefix_path}/{number}", "text")
        time.sleep(LIFE_SECONDS)
        assert store.read(f"{store.prefix_path}/{number}") == b"text"


def test_a_table_is_opened_at_versions_before_and_after_its_checkpoint(
    written: Path, options: dict[str, str]
) -> None:
    for version in range(FILES):
        old = open_table(f"uc://{NAME}", version, storage_options=options)
        assert old.open_dataset().rows == (version + 1) * ROWS // FILES
        assert old.location.startswith("gs://bucket/")
    newest = open_table(f"uc://{NAME}", storage_options=options)
    with hold_log_copy(newest.location, whole=False) as copy:
        found = {path.name: path.stat().st_mtime for path in (copy / "_delta_log").glob("0*")}
    listed = native.Store(newest.location).list_directory("_delta_log")
    modified = {name: seconds for name, _, seconds, _ in listed}
    assert found == pytest.approx({name: modified[name] for name in found})
    assert len(found) == FILES // 2 + 1, "the checkpoint, its version, and those after it"
    with pytest.raises(ValueError, match="clicks cannot be read"):
        open_table(f"uc://{NAME}", FILES, storage_options=options)
