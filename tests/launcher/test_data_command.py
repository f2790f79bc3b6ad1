# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole data` and `farandole store`."""

import json
import os
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(60)


def farandole(*words, status=0):
    command = [sys.executable, "-m", "farandole", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr + done.stdout


@pytest.fixture
def source(tmp_path):
    table = pa.table(
        {"id": range(100), "x": [value / 4 for value in range(100)], "label": [1, 0] * 50}
    )
    path = tmp_path / "rows;1.csv"
    pa.csv.write_csv(table, path, pa.csv.WriteOptions(delimiter=";"))
    return path


def test_data_is_prepared_inspected_and_shown(tmp_path, source):
    store = tmp_path / "store"
    words = (
        "data",
        "prepare",
        source,
        "--to",
        store,
        "--labels",
        "label",
        "--validation",
        "0.25",
        "--csv",
        "delimiter=;",
    )
    told = json.loads(farandole(*words, "--type", "x=float32", "--json"))
    assert (told["index"], told["train_rows"] + told["val_rows"], told["reused"]) == (0, 100, False)
    assert "prepared before" in farandole(*words, "--type", "x=float32")
    shown = farandole("data", "inspect", told["train_url"], "--verify")
    assert f"{told['train_rows']} rows, prepared, data-" in shown
    assert ["x", "float32"] in [line.split()[:2] for line in shown.splitlines()]
    assert "verified 1 file: 0 damaged" in shown
    rows = [
        json.loads(line)
        for line in farandole("data", "head", told["train_url"], "-n", 3, "--json").splitlines()
    ]
    assert len(rows) == 3
    assert all(row["x"] == row["id"] / 4 for row in rows)
    assert farandole("data", "head", told["train_url"], "-n", 2).splitlines()[0].split() == [
        "id",
        "x",
        "label",
    ]


def test_a_flipped_bit_has_status_one(tmp_path, source):
    told = json.loads(
        farandole("data", "prepare", source, "--to", tmp_path, "--csv", "delimiter=;", "--json")
    )
    (file,) = (tmp_path / "intermediate_train_data.0").glob("*.parquet")
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    assert "is damaged: its checksum" in farandole(
        "data", "inspect", told["train_url"], "--verify", status=1
    )


def test_vectors_and_foreign_files_are_shown_too(tmp_path):
    pq.write_table(
        pa.table({"v": [[1.0, 2.0], [3.0, 4.0]], "t": ["a", "b"]}), tmp_path / "f.parquet"
    )
    assert "2 rows, not prepared" in farandole("data", "inspect", tmp_path)
    farandole("data", "prepare", tmp_path / "f.parquet", "--to", tmp_path / "s")
    prepared = tmp_path / "s" / "intermediate_train_data.0"
    assert farandole("data", "head", prepared).splitlines()[1:] == ["[1, 2]  a", "[3, 4]  b"]


def test_words_lists_and_sides_are_prepared_as_asked(tmp_path):
    words, tokens = (
        ["red", "green", "red", "blue"] * 25,
        [[1] * (1 + row % 7) for row in range(100)],
    )
    table = pa.table(
        {
            "word": words,
            "tokens": tokens,
            "day": range(100),
            "label": [row % 2 for row in range(100)],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    command = [
        "data",
        "prepare",
        tmp_path / "rows.parquet",
        "--to",
        tmp_path / "store",
        "--labels",
        "label",
        "--json",
    ]
    options = [
        "--categories",
        "word=2",
        "--ragged",
        "tokens=max_length:4,value:-1",
        "--validation",
        "0.2",
    ]
    told = json.loads(farandole(*command, *options, "--time", "day"))
    assert (told["train_rows"], told["val_rows"]) == (80, 20)
    rows = [
        json.loads(line)
        for line in farandole("data", "head", told["val_url"], "-n", 9, "--json").splitlines()
    ]
    assert all(row["day"] >= 80 for row in rows)
    assert all(row["word"] in (1, 2, 3) for row in rows)
    assert {tuple(row["tokens"]) for row in rows} == {(1,) * length for length in (1, 2, 3, 4)}
    again = json.loads(farandole(*command, *options, "--stratify", "label"))
    assert (again["train_rows"], again["val_rows"]) == (80, 20)
    wrong = farandole(*command, "--ragged", "tokens=length:4", status=1)
    assert "--ragged takes COLUMN=OPTION:VALUE" in wrong
    assert "--categories takes COLUMN or COLUMN=COUNT" in farandole(
        *command, "--categories", "word=x", status=1
    )


def test_an_error_is_one_line(tmp_path):
    assert farandole("data", "prepare", tmp_path / "no.csv", "--to", tmp_path, status=1).startswith(
        f"farandole: no such file or directory: {tmp_path}/no.csv"
    )
    assert "farandole: no Parquet files" in farandole("data", "head", tmp_path, status=1)
    assert "--to <STORE>" in farandole("data", "prepare", "x.csv", status=2)
    assert "there is nothing here" in farandole("store", "ls", tmp_path / "nowhere", status=1)
    assert "no store for the scheme ftp" in farandole("store", "du", "ftp://x/y", status=1)


def test_a_store_is_listed_summed_up_and_tidied(tmp_path, source):
    store = tmp_path / "store"
    farandole("data", "prepare", source, "--to", store, "--csv", "delimiter=;")
    (store / "runs" / "r1").mkdir(parents=True)
    (store / "runs" / "r1" / "checkpoint").write_bytes(b"x" * 2048)
    (store / "runs" / "r2" / "logs").mkdir(parents=True)
    for name in ("checkpoint", "logs/events"):
        (store / "runs" / "r2" / name).write_bytes(b"xyz")
    assert farandole("store", "ls", store).split()[-1] == "runs/"
    sums = [json.loads(line) for line in farandole("store", "du", store, "--json").splitlines()]
    told = {one["path"]: (one["bytes"], one["note"]) for one in sums}
    assert told["runs/r1/"] == (2048, "")
    assert told["runs/r2/"] == (6, "")
    assert told["intermediate_train_data.0/"][1] == "complete"
    assert told["total"][0] == sum(size for path, (size, _) in told.items() if path != "total")
    assert farandole("store", "gc", store) == ""
    old = time.time() - 3600
    for file in (store / "intermediate_train_data.0").iterdir():
        os.utime(file, (old, old))
    assert "would go" in farandole("store", "gc", store, "--older-than", "30m", "--dry-run")
    assert (store / "intermediate_train_data.0").exists()
    assert "deleted" in farandole("store", "gc", store, "--older-than", "30m")
    assert sorted(os.listdir(store)) == ["runs"]
    assert "an age needs a unit" in farandole("store", "gc", store, "--older-than", "30", status=2)


def test_a_store_is_tidied_by_size(tmp_path, source):
    store = tmp_path / "store"
    for kind in ("float32", "float64"):
        farandole(
            "data", "prepare", source, "--to", store, "--csv", "delimiter=;", "--type", f"x={kind}"
        )
    first, second = sorted(store.iterdir())
    old = time.time() - 3600
    for file in first.iterdir():
        os.utime(file, (old, old))
    size = sum(file.stat().st_size for file in second.iterdir())
    assert farandole("store", "gc", store, "--max-size", "1GiB") == ""
    dry = farandole("store", "gc", store, "--max-size", f"{size}B", "--dry-run")
    assert first.name in dry
    assert second.name not in dry
    assert farandole("store", "gc", store, "--older-than", "30d", "--max-size", "1GiB") == ""
    assert first.name in farandole("store", "gc", store, "--max-size", f"{size}B")
    assert [path.name for path in store.iterdir()] == [second.name]
    assert "a size needs a unit" in farandole("store", "gc", store, "--max-size", "30", status=2)


def test_data_in_use_is_not_deleted(tmp_path, source):
    code = f"""
import sys
from farandole.data import prepare_data
done = prepare_data({str(source)!r}, {str(tmp_path)!r}, options={{"delimiter": ";"}})
print("ready", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as user:
        assert user.stdout.readline() == "ready\n"
        assert "complete, in use" in farandole("store", "du", tmp_path)
        assert farandole("store", "gc", tmp_path, "--older-than", "0s") == ""
        user.stdin.close()
        user.wait(timeout=30)
    assert "intermediate_train_data.0" in farandole("store", "gc", tmp_path, "--older-than", "0s")
