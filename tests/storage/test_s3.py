# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""S3: options travel to training processes, secrets stay hidden, failures are distinguished."""

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole._native import store as native
from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import LocalBackend, ObjectStore, Store


def test_an_estimator_trains_from_a_bucket_and_leaves_its_checkpoint_there(s3_options, prefix):
    import torch

    from farandole.spark.torch import TorchEstimator

    store = Store.create(f"s3://bucket/{prefix}", storage_options=s3_options)
    assert isinstance(store, ObjectStore)
    x = np.linspace(0, 1, 400, dtype="float32")
    table = pa.table({"x": x, "y": 2 * x})
    for part in range(2):
        pq.write_table(
            table, f"{store.get_train_data_path()}/part-{part}.parquet", filesystem=store.fs
        )
    network = torch.nn.Linear(1, 1)
    model = TorchEstimator(
        backend=LocalBackend(2),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=50,
        epochs=2,
        store=store,
        run_id="run",
        verbose=0,
    ).fit_on_parquet()
    assert len(model.getHistory()) == 2
    assert store.exists(f"{store.get_run_path('run')}/checkpoint")


def test_secrets_are_in_no_text(s3_options, prefix):
    store = Store.create(f"s3://bucket/{prefix}", storage_options=s3_options)
    assert "hidden" not in repr(store) + repr(store.storage_options) + repr(
        store.to_remote("r")
    ) + str(vars(store.fs))
    with pytest.raises(ValueError, match="sekret") as refused:
        Store.create("s3://other/x", storage_options={"sekret": "hidden"})
    assert "hidden" not in str(refused.value)


def test_an_error_of_a_bucket_names_the_whole_path(s3_options, prefix):
    store = Store.create(f"s3://no-such-bucket/{prefix}", storage_options=s3_options)
    with pytest.raises(OSError, match=f"s3://no-such-bucket/{prefix}"):
        store.check_writable()


def test_a_forked_process_talks_to_the_bucket_by_itself(s3_options):
    # Spark's daemon forks its workers; connections and threads do not survive that.
    program = f"""
import os
from farandole.spark.common import Store
store = Store.create("s3://bucket/forked", storage_options={s3_options!r})
store.write_text(store.prefix_path + "/parent", "x")
child = os.fork()
if child == 0:
    store.write_text(store.prefix_path + "/child", "y")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.read(store.prefix_path + "/child") == b"y"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_large_files_go_in_parts(s3_options, prefix):
    store = native.Store(f"s3://bucket/{prefix}")
    native.configure_options(
        f"s3://bucket/{prefix}", {key: str(value) for key, value in s3_options.items()}
    )
    store = native.Store(f"s3://bucket/{prefix}")
    data = np.random.default_rng(0).bytes(20 << 20)
    store.write("large", data)
    assert store.size("large") == len(data)
    assert store.read_range("large", 10 << 20, (10 << 20) + 16) == data[10 << 20 : (10 << 20) + 16]


def test_a_delta_table_in_a_bucket_is_opened_by_the_same_options(s3_options, prefix, monkeypatch):
    deltalake = pytest.importorskip("deltalake")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    store = Store.create(f"s3://bucket/{prefix}", storage_options=s3_options)
    url = f"{store.prefix_path}/table"
    deltalake.write_deltalake(
        url, pa.table({"x": np.arange(100)}), storage_options=native.object_store_options(url)
    )
    deltalake.DeltaTable(url, storage_options=native.object_store_options(url)).delete("x >= 50")
    rows = np.concatenate([batch["x"] for batch in ParquetLoader(url, 20)])
    assert sorted(rows.tolist()) == list(range(50))
    with prepare_data(url, store, label_cols=["x"]) as prepared:
        assert prepared.train_rows == 50


def test_a_loader_reads_by_the_options_it_was_given_and_takes_them_along(
    s3_options, prefix, tmp_path
):
    store = Store.create(f"s3://bucket/{prefix}/of-the-test", storage_options=s3_options)
    pq.write_table(
        pa.table({"x": np.arange(100)}), f"{store.prefix_path}/0.parquet", filesystem=store.fs
    )
    program = """
import pickle, sys
from farandole.data import ParquetLoader
if len(sys.argv) > 3:
    loader = ParquetLoader(sys.argv[2], 10,
        storage_options=pickle.loads(bytes.fromhex(sys.argv[3])))
    open(sys.argv[1], "wb").write(pickle.dumps(loader))
else:
    loader = pickle.load(open(sys.argv[1], "rb"))
print(sum(len(batch["x"]) for batch in loader))
"""
    given = [store.prefix_path, pickle.dumps(s3_options).hex()]
    for arguments in ([tmp_path / "loader", *given], [tmp_path / "loader"]):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "100\n", done.stderr
        assert "hidden" not in done.stderr
