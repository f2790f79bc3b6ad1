# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The metadata of everything that is saved is fuzzed: to load it changes no storage option, no
environment variable and no log setting of the process.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import sys
import uuid

import pandas as pd
import pytest
from tests.single.test_checkpoint_safety import torch_fit
from tests.single.training import line, write
from tests.trust.test_poisoned_places import SAVED

from farandole._native import store as native
from farandole.data.prepare import prepare_data
from farandole.spark.common import HDFSStore, LocalBackend, LocalStore, ObjectStore, Store
from farandole.stores.store_options import StorageOptions

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
    ),
]
OPTIONS = {"endpoint_url": "http://127.0.0.1:9", "key": "hostile", "secret": "hostile"}
HOSTILE_VALUES = (
    None, True, -1, 10**30, 1e308, "", "x", "/", "s3://", "s3:///", "s3://bucket", "../../x",
    "hdfs:///", [], {}, [[]], {"": {}}, OPTIONS, "\0", "DEBUG", "farandole",
)  # fmt: skip
HOSTILE_ARGUMENTS = {
    "storage_options": OPTIONS,
    "extra_conf": {"hadoop.user.name": "hostile", **OPTIONS},
    "user": "hostile",
    "host": "hostile",
    "env": {"PATH": "hostile", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    "pass_env": ["*"],
    "stdout": "/dev/null",
    "executable": "/bin/false",
    "output_folder": "/",
    "verbose": 10**9,
}
WATCHED_URLS = [
    f"{root}{path}"
    for root in ("s3://victim", "s3a://victim", "s3://bucket", "gs://victim", "az://victim")
    for path in ("", "/private/weights")
]


def attacks():
    """Yields complete stores and backends of a hostile file."""
    for prefix in ("s3://", "s3:///", "s3://victim", "gs://", "az://", "hdfs:///", "hdfs://x/y"):
        kind = "HDFSStore" if prefix.startswith("hdfs") else "ObjectStore"
        for name, value in HOSTILE_ARGUMENTS.items():
            arguments = {"prefix_path": prefix, name: value}
            yield {"store": {"class": kind, "arguments": arguments}}
        yield {"store": {"class": kind, "arguments": {"prefix_path": prefix}}}
    for name, value in HOSTILE_ARGUMENTS.items():
        for kind in ("LocalBackend", "SparkBackend"):
            yield {"backend": {"class": kind, "arguments": {"num_proc": 1, name: value}}}


def mutate(metadata, chance):
    """Returns a copy of JSON with some values, names or types changed."""
    made = copy.deepcopy(metadata)
    for _ in range(chance.randrange(1, 4)):
        nodes = [made]
        for node in nodes:
            if isinstance(node, dict | list):
                inner = node.values() if isinstance(node, dict) else node
                nodes.extend(one for one in inner if isinstance(one, dict | list))
        node = chance.choice(nodes)
        if isinstance(node, list):
            node.append(copy.deepcopy(chance.choice(HOSTILE_VALUES)))
            continue
        name = chance.choice([*node, *HOSTILE_ARGUMENTS])
        kind = chance.choice(("replace", "replace", "add", "remove"))
        if kind == "remove":
            node.pop(name, None)
        elif kind == "add":
            name = chance.choice(list(HOSTILE_ARGUMENTS))
            node[name] = copy.deepcopy(HOSTILE_ARGUMENTS[name])
        else:
            node[name] = copy.deepcopy(chance.choice(HOSTILE_VALUES))
    return made


def settings():
    """Returns everything that a file must not change."""
    options = {}
    for url in WATCHED_URLS:
        # Azure needs an account, which a hostile file may bring.
        with contextlib.suppress(ValueError):
            options[url] = native.object_store_options(url)
    loggers = [logging.getLogger(), *map(logging.getLogger, ("farandole", "py4j", "pyspark"))]
    return {
        "options": options,
        "environment": dict(os.environ),
        "logs": [(one.level, one.disabled, tuple(one.handlers)) for one in loggers],
        "disabled": logging.root.manager.disable,
        "path": list(sys.path),
        "directory": os.getcwd(),
        "streams": (sys.stdout, sys.stderr),
    }


def check_unchanged(before, what):
    after = settings()
    for name, value in before.items():
        assert after[name] == value, (name, what)


@pytest.mark.parametrize(
    "made",
    [
        SAVED[3],
        *(pytest.param(one, marks=pytest.mark.slow) for one in SAVED if one is not SAVED[3]),
    ],
)
def test_loading_changes_no_setting(made, spark):
    assert spark
    saved, _ = made()

    def load(path):
        # The parts are our own. Those of a hostile file need no code to get as far as these.
        return type(saved).read().allow_pickle(True).load(path)

    if hasattr(saved, "setStore"):
        saved.setStore(ObjectStore("s3://bucket/team", runs_path="s3://bucket/runs"))
        saved.setBackend(LocalBackend(1))
    place = f"memory://hostile/{uuid.uuid4().hex}"
    saved.write().save(place)
    store = native.Store(place)
    (name,) = (name for name, _ in store.list() if name.startswith("metadata/"))
    metadata = json.loads(store.read(name))
    chance = random.Random(7)
    cases = [metadata | {"places": places} for places in attacks()]
    cases += [mutate(metadata, chance) for _ in range(100)]
    load(place)
    before, loaded = settings(), 0
    for case in cases:
        store.write(name, json.dumps(case).encode())
        with contextlib.suppress(Exception):
            load(place)
            loaded += 1
        check_unchanged(before, case)
    assert loaded > len(cases) / 3, "most of them get far"


def test_files_of_runs_and_data_change_no_setting(tmp_path):
    x, y = line(rows=32)
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    torch_fit(tmp_path, "r", 1)
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    data = tmp_path / "data"
    prepare_data(frame, LocalStore(str(data)), label_cols=["y"])
    files = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    assert {path.name for path in files} >= {"_manifest.json", "_run.json", "_fingerprint.json"}
    chance, before = random.Random(8), settings()
    for path in files:
        text = path.read_text()
        for _ in range(3):
            path.write_text(json.dumps(mutate(json.loads(text), chance)))
            with contextlib.suppress(Exception):
                if data in path.parents:
                    prepare_data(frame, LocalStore(str(data)), label_cols=["y"])
                else:
                    torch_fit(tmp_path, "r", 2)
            check_unchanged(before, path)
        path.write_text(text)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ObjectStore, {"prefix_path": "s3://constructed/x", "storage_options": OPTIONS}),
        (HDFSStore, {"prefix_path": "hdfs://constructed/x", "user": "hostile"}),
    ],
)
def test_a_constructor_changes_no_setting(kind, arguments, monkeypatch):
    monkeypatch.delenv("HADOOP_USER_NAME", raising=False)
    url, before = f"{arguments['prefix_path']}/below", settings()
    made = kind(**arguments)
    check_unchanged(before, kind)
    assert (native.object_store_options(url) == {}) or kind is HDFSStore
    repr(made)
    made.plain()
    check_unchanged(before, kind)
    made.get_train_data_path()
    if kind is ObjectStore:
        assert native.object_store_options(url)["aws_access_key_id"] == "hostile"
        assert native.object_store_options("s3://constructed-not/x") == {}
    else:
        assert os.environ.pop("HADOOP_USER_NAME") == "hostile"


def test_a_loader_uses_the_options_of_a_store_of_this_process(monkeypatch):
    store = Store.create("s3://in-a-loader/x", storage_options=OPTIONS)
    applied = []
    monkeypatch.setattr(StorageOptions, "apply_to_process", lambda self: applied.append(repr(self)))
    from farandole.data import loader

    monkeypatch.setattr(loader, "open_if_table", lambda *_: 1 / 0)
    for url, count in (("s3://in-a-loader/x/data", 1), ("s3://in-a-loader/xy", 0)):
        applied.clear()
        with pytest.raises(ZeroDivisionError):
            loader.ParquetLoader(url, 1)
        assert len(applied) == count, url
    assert store.has_options()


@pytest.mark.parametrize("place", ["s3://", "s3:///", "gs:///x", "az://", "hdfs://", "hdfs:///"])
def test_options_need_a_bucket(place):
    before = settings()
    with pytest.raises(ValueError, match=r"missing|needs a path"):
        Store.create(place, storage_options=OPTIONS)
    with pytest.raises(ValueError, match="missing"):
        StorageOptions((place,), OPTIONS)
    check_unchanged(before, place)
