# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Small files that are damaged or hostile: each is named, and none takes the process down."""

from __future__ import annotations

import io
import json
import logging
import resource
import zipfile

import numpy as np
import pandas as pd
import pytest
from tests.single.test_checkpoint_safety import torch_fit
from tests.single.training import line, write

from farandole._native import store as native
from farandole.common.commits import pack_commit_archive, unpack_commit_archive
from farandole.data.prepare import prepare_data
from farandole.spark.common import LocalStore
from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
from farandole.stores import checkpoint_signatures, durable_writes, small_files
from farandole.stores.small_files import DamagedFileError

pytestmark = pytest.mark.timeout(300)
DAMAGED = {
    "empty": b"",
    "binary": bytes(range(256)),
    "half": b'{"version": 1, "checkpoints": {"check',
    "null": b"null",
    "number": b"1e999",
    "text": b'"text"',
    "list": b"[1, 2]",
    "wrong types": b'{"version": [], "checkpoints": 3, "events": 7, "parts": 9, "epoch": {}}',
    "inner types": b'{"checkpoints": {"checkpoint": 5}, "events": "ab", "parts": [null]}',
    "deep lists": b"[" * 100_000,
    "closed deep lists": b"[" * 900 + b"]" * 900,
    "deep objects": b'{"a":' * 100_000,
    "closed deep objects": b'{"a":' * 300 + b"1" + b"}" * 300,
    "many lists": b"[" + b"[]," * 6_000_000 + b"[]]",
    "many names": json.dumps({f"{number}": 1 for number in range(100_001)}).encode(),
    "large": b" " * (small_files.MAX_SMALL_FILE_BYTES + 1),
    "digits": b"1" * 10_000,
    "surrogate": b'"\\ud800"',
}
NO_JSON = {"empty", "binary", "null", "half", "deep lists", "deep objects", "closed deep lists",
           "closed deep objects", "many lists", "many names", "large", "digits"}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    store = native.Store(str(tmp_path))
    store.write("x.json", DAMAGED[name])
    if name in NO_JSON:
        with pytest.raises(DamagedFileError, match=rf"^damaged: file://{tmp_path}/x\.json"):
            small_files.read_json(store, "x.json")
    else:
        small_files.read_json(store, "x.json")


def test_a_whole_file_is_read_and_an_absent_one_is_none(tmp_path):
    store = native.Store(str(tmp_path))
    assert small_files.read_json(store, "x.json") is None
    content = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    store.write("x.json", json.dumps(content).encode())
    assert small_files.read_json(store, "x.json") == content
    store.write("lines", b'{"a": 1}\n\nhalf{\n[2]\n')
    lines, faults = small_files.read_json_lines(store, "lines")
    assert lines == [{"a": 1}, [2]]
    assert len(faults) == 1
    assert "lines, line 3" in faults[0]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize(
    "file", ["_run.json", "_record.json", "_fingerprint.json", "logs/steps.jsonl"]
)
def test_a_run_with_a_damaged_file_names_it_or_continues(data_store, caplog, name, file):
    path = data_store / "runs" / "r" / file
    before = path.read_bytes()
    path.write_bytes(DAMAGED[name])
    try:
        with caplog.at_level(logging.WARNING, "farandole"):
            torch_fit(data_store, "r", 1)
    except RunDiffersError as error:
        assert file == "_fingerprint.json"
        shown = str(error)
    else:
        shown = caplog.text
    finally:
        path.write_bytes(before)
    is_line = file.endswith("jsonl") and name in ("empty", "null", "large")  # no or blank lines
    assert f"damaged: file://{path}" in shown or name not in NO_JSON or is_line


@pytest.fixture(scope="module")
def data_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    x, y = line(rows=16)
    write(folder / "intermediate_train_data", x=x, y=y)
    torch_fit(folder, "r", 1)
    (folder / "runs/r/logs/steps.jsonl").write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("file", ["_statistics.json", "_encoding.json"])
def test_damaged_descriptions_of_data_are_named(tmp_path, name, file):
    from farandole.data import encoding_learning, statistics

    names = {statistics._STATISTICS_FILE, encoding_learning._ENCODING_FILE}
    chosen = next(one for one in names if file.removeprefix("_").split(".")[0][:6] in one)
    native.Store(str(tmp_path)).write(chosen, DAMAGED[name])
    read = statistics.read_statistics if "statis" in chosen else encoding_learning.read_encoding
    with pytest.raises(DamagedFileError, match=rf"damaged: .*{chosen}"):
        read(str(tmp_path))


def bomb(unpacked):
    """Returns a small archive of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        array = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            array, {"descr": "|u1", "fortran_order": False, "shape": (unpacked,)}
        )
        with out.open("plain.npy", "w", force_zip64=True) as part:
            part.write(array.getvalue())
            for _ in range(unpacked >> 20):
                part.write(bytes(1 << 20))
    return file.getvalue()


def test_an_archive_that_unpacks_to_more_than_it_has_is_refused_before_it_is_unpacked(tmp_path):
    data = bomb(1 << 30)
    assert len(data) < 2 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFileError, match=r"damaged: a commit: .*unpack to"):
        unpack_commit_archive(data)
    assert "unpack to" in (durable_writes.find_damage(data) or "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"
    arrays = [np.arange(5.0), np.zeros((2, 3), np.int8)]
    found, plain = unpack_commit_archive(pack_commit_archive(arrays, {"step": 3}))
    assert plain == {"step": 3}
    assert all(map(np.array_equal, found, arrays))


@pytest.mark.parametrize("kind", ["cut", "flipped", "text", "claims", "no plain", "objects"])
def test_a_damaged_commit_is_named(kind):
    data = pack_commit_archive([np.arange(100.0)], {"step": 3})
    file = io.BytesIO()
    if kind == "cut":
        data = data[:-20]
    elif kind == "flipped":
        data = data[:200] + bytes([data[200] ^ 255]) + data[201:]
    elif kind == "text":
        data = b"text"
    elif kind == "claims":
        array = io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
        np.lib.format.write_array_header_1_0(array, header)
        with zipfile.ZipFile(file, "w") as out:
            out.writestr("plain.npy", array.getvalue())
        data = file.getvalue()
    elif kind == "no plain":
        np.savez(file, **{"0": np.arange(3)})
        data = file.getvalue()
    else:
        np.savez(file, plain=np.array([{}], object))
        data = file.getvalue()
    with pytest.raises(DamagedFileError, match="damaged: a commit"):
        unpack_commit_archive(data)


def test_prepared_data_with_damaged_notes_is_prepared_again(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    store = LocalStore(str(tmp_path))
    with prepare_data(frame, store, label_cols=["y"]) as prepared:
        assert prepared.train_rows == 3
    for number, damaged in enumerate(DAMAGED.values()):
        (place,) = tmp_path.glob("intermediate_train_data*")
        for name in ("_preparation.json", "_used.json"):
            (place / name).write_bytes(damaged)
        with prepare_data(frame, store, label_cols=["y"]) as prepared:
            assert prepared.train_rows == 3, number


def test_a_marker_with_odd_entries_knows_the_others(tmp_path, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    from tests.single.test_checkpoint_safety import archive, text_of

    run = LocalStore(str(tmp_path)).to_remote("r")
    run.write_checkpoint("checkpoint", archive("1"))
    path = tmp_path / "runs" / "r" / checkpoint_signatures.MARKER_FILENAME
    marker = json.loads(path.read_bytes())
    odd = [None, 3, [], {"sha256": []}, {"sha256": None, "seal": {}}]
    marker["checkpoints"]["checkpoint"] += odd
    path.write_text(json.dumps(marker))
    assert text_of(run.read_checkpoint_to_resume()) == "1"
    run.write_checkpoint("checkpoint", archive("2"))
    assert text_of(run.read_checkpoint_to_resume()) == "2"
