# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""HDFS as clusters have it: name nodes that change places, Kerberos, processes that fork."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

from farandole._native import store as native
from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import Store


def run(program, cluster, *arguments, **environment):
    """Returns the output of a program, a file or its text, in its own process."""
    env = {**os.environ, **cluster.environment, **environment}
    done = subprocess.run(
        [
            sys.executable,
            *([program] if isinstance(program, Path) else ["-c", program]),
            *arguments,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_and_writing_continue_while_name_nodes_change_places(
    name_service, prefix, monkeypatch
):
    monkeypatch.setenv("HADOOP_CONF_DIR", name_service.configuration)
    store = Store.create(f"{name_service.url}/{prefix}")
    rows = 40_000
    for part in range(4):
        table = pa.table({"x": np.arange(part * rows, (part + 1) * rows)})
        pq.write_table(
            table,
            f"{store.get_train_data_path()}/{part}.parquet",
            filesystem=store.fs,
            row_group_size=5000,
        )
    batches = iter(ParquetLoader(store.get_train_data_path(), 1000, byte_budget=8 << 20))
    seen = [next(batches)["x"]]
    with ThreadPoolExecutor(2) as pool:
        name_service.order("rest 0")
        rest = pool.submit(lambda: [batch["x"] for batch in batches])
        note = pool.submit(
            store.write_text, f"{store.prefix_path}/note", "written while nobody was in charge"
        )
        with pytest.raises(TimeoutError):
            note.result(timeout=1)
        name_service.order("lead 1")
        note.result(timeout=60)
        seen += rest.result(timeout=60)
    assert sorted(np.concatenate(seen).tolist()) == list(range(4 * rows))
    with ThreadPoolExecutor(1) as pool:
        name_service.order("kill 1")
        late = pool.submit(store.read, f"{store.prefix_path}/note")
        with pytest.raises(TimeoutError):
            late.result(timeout=1)
        name_service.order("lead 0")
        assert late.result(timeout=60) == b"written while nobody was in charge"
    with prepare_data(store.get_train_data_path(), store, label_cols=["x"]) as prepared:
        assert prepared.train_rows == 4 * rows, "the one that is left serves alone"


def test_a_name_service_can_come_as_storage_options(name_service, prefix):
    properties = (
        ET.parse(Path(name_service.configuration) / "core-site.xml").getroot().iter("property")
    )
    options = {one.findtext("name"): one.findtext("value") for one in properties}
    store = Store.create(f"{name_service.url}/{prefix}", storage_options=options)
    store.write_text(f"{store.prefix_path}/x", "text")
    assert store.read(f"{store.prefix_path}/x") == b"text"
    unknown = Store.create(f"{name_service.url}-unknown/{prefix}")
    with pytest.raises(OSError, match=f"{name_service.url}-unknown.*HADOOP_CONF_DIR"):
        unknown.exists(f"{unknown.prefix_path}/x")


def test_a_process_without_a_ticket_gets_an_error_at_once(kerberos):
    program = f"""
from farandole.spark.common import Store
store = Store.create("{kerberos.url}/of-alice/x")
try:
    store.check_writable()
except PermissionError as error:
    print(error)
"""
    told = run(program, kerberos, KRB5CCNAME="FILE:/nowhere/ticket")
    assert re.search(f"not allowed to write: {kerberos.url}/of-alice/x.*kinit", told)


def test_a_refusal_of_hdfs_is_a_permission_error_without_a_java_stack(kerberos, monkeypatch):
    for name, value in kerberos.environment.items():
        monkeypatch.setenv(name, value)
    store = Store.create(f"{kerberos.url}/of-others/x")
    with pytest.raises(PermissionError, match=f"{kerberos.url}/of-others/x.*user=alice") as told:
        store.check_writable()
    assert ".java:" not in str(told.value)


def test_training_processes_have_the_ticket_too(kerberos, prefix, monkeypatch):
    import torch

    from farandole.spark.common import LocalBackend
    from farandole.spark.torch import TorchEstimator

    for name, value in kerberos.environment.items():
        monkeypatch.setenv(name, value)
    store = Store.create(f"{kerberos.url}/of-alice/{prefix}")
    x = np.linspace(0, 1, 200, dtype="float32")
    network = torch.nn.Linear(1, 1)
    TorchEstimator(
        backend=LocalBackend(2),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=50,
        epochs=1,
        store=store,
        run_id="run",
        verbose=0,
    ).fit(pa.table({"x": x, "y": 2 * x}))
    assert store.exists(f"{store.get_run_path('run')}/checkpoint")


def test_the_next_preparation_deletes_the_remains_of_killed_uploads(hdfs, prefix):
    place = native.Store(f"{hdfs.url}/{prefix}")
    leavings = [".part-0.parquet.tmp.1", "inner/.part-1.parquet.tmp.1"]
    for name in (*leavings, "part-0.parquet", ".tmp", "x.tmp.1"):
        place.write(name, b"x")
    place.remove_partial_uploads()
    left = [name for name, _ in place.list()]
    assert left == [".tmp", leavings[1], "part-0.parquet", "x.tmp.1"], (
        "those directly in the directory"
    )


def test_forked_processes_are_refused_and_forkservers_read(hdfs, prefix):
    program = program_path(__file__, "read_in_processes")
    assert run(program, hdfs, f"{hdfs.url}/{prefix}").split("\n") == [
        "forkserver 1000",
        "fork True",
        "writes 0",
        "",
    ]
