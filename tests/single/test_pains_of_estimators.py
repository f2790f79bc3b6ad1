# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Problems that users of Horovod's estimators reported, one a test; those about running are in
tests/spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from tests.single.training import Here, fit, line, linear, weights, write

from farandole.spark.common import HDFSStore, LocalBackend, Store
from farandole.stores.local_paths import unshared_path_warning

pytestmark = pytest.mark.timeout(300)
SEEN = []


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y, row=np.arange(len(y)))
    return tmp_path


def test_01_estimators_cannot_use_an_object_store_for_intermediate_data(request):
    store = Store.create(f"memory://bucket/{request.node.name}")
    x, y = line()
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 2), "y": y})
    pq.write_table(table, f"{store.get_train_data_path()}/part-0.parquet", filesystem=store.fs)
    fitted = fit(None, linear(), store=store, epochs=1, run_id="r")
    assert store.exists(fitted.getPaths()["checkpoint"])


def test_02_hdfs_connect_has_an_unexpected_argument_driver():
    store = HDFSStore(
        "/user/x", host="node", port=8020, user="me", driver="libhdfs3", extra_conf={}
    )
    assert store.get_train_data_path() == "hdfs://node:8020/user/x/intermediate_train_data"


def test_03_no_such_path_on_a_worker_that_does_not_see_the_store(data):
    class Elsewhere(Here):
        """A host with another disk."""

        def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
            (data / "intermediate_train_data").rename(data / "gone")
            return super().run(fn, args, kwargs, env, on_progress)

    told = (
        r"cannot read the training data that the driver sees at file://.*: the store is a local "
        r"path, .* other hosts"
    )
    with pytest.raises(FileNotFoundError, match=told):
        fit(data, linear(), backend=Elsewhere(), epochs=1)


def test_04_a_cluster_trains_with_a_store_in_tmp_and_nobody_says_so():
    told = unshared_path_warning("file:///tmp/store", ["driver", "worker-1", "worker-2"])
    assert told is not None
    assert "the store file:///tmp/store is a local path" in told
    assert "(driver, worker-1, worker-2)" in told
    assert unshared_path_warning("file:///tmp/store", ["driver", "driver"]) is None
    assert unshared_path_warning("s3://bucket/store", ["driver", "worker"]) is None


def test_05_a_checkpoint_cannot_be_written_where_files_are_only_written_whole(data):
    written = []

    class Whole(Here):
        """Notes what is written, and how."""

        def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
            from farandole.spark.common.store import RemoteStore

            write_whole = RemoteStore.write_checkpoint

            def noted(remote, name, content):
                written.append((name, len(content)))
                write_whole(remote, name, content)

            RemoteStore.write_checkpoint = noted
            try:
                return super().run(fn, args, kwargs, env, on_progress)
            finally:
                RemoteStore.write_checkpoint = write_whole

    fit(data, linear(), backend=Whole(), epochs=2, run_id="r")
    assert [name for name, _ in written].count("checkpoint") == 2
    assert (data / "runs" / "r" / "checkpoint").stat().st_size == dict(written)["checkpoint"]


def test_06_resuming_by_run_id_starts_from_scratch_or_with_another_learning_rate(data):
    def momentum(model, **params):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return fit(data, model, optimizer=optimizer, backend=LocalBackend(2), **params)

    whole = momentum(linear(), epochs=2, run_id="whole")
    momentum(linear(), epochs=1, run_id="parts")
    parts = momentum(linear(seed=5), epochs=2, run_id="parts")
    assert torch.allclose(weights(parts), weights(whole), atol=1e-6)
    assert len(parts.getHistory()) == 2


def test_07_feature_column_count_must_equal_model_inputs_count_and_nobody_can_tell_how(
    tmp_path, capfd
):
    x, y = line()
    write(tmp_path / "intermediate_train_data", a=x[:, 0], b=x[:, 1], y=y)
    with pytest.raises(
        ValueError, match=r"does not take its 2 feature columns as \(a \(2, 1\), b \(2, 1\)\)"
    ):
        fit(tmp_path, linear(), feature_cols=["a", "b"])
    fit(tmp_path, linear(), feature_cols=[["a", "b"]], epochs=1, verbose=1)
    assert (
        "the model gets [a, b] -> float32 (rows, 2); it returns (rows, 1)" in capfd.readouterr().err
    )


def note_rows(row):
    SEEN.append(int(row["row"]))
    return row


def test_08_samples_are_seen_twice_or_never_in_an_epoch(data):
    SEEN.clear()
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(
        data,
        model,
        optimizer=optimizer,
        feature_cols=["x", "row"],
        transformation_fn=note_rows,
        epochs=2,
        batch_size=36,
    )
    # The driver tries two rows; what fills up the last batch never comes to the function.
    first, second = SEEN[2:98], SEEN[98:]
    for epoch in (first, second):
        assert sorted(epoch) == list(range(96))
    assert first != second


class Both(torch.nn.Module):
    """Looks at the first input alone."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x, _row):
        return self.inner(x)


def test_09_data_is_shuffled_though_shuffle_is_off(data):
    SEEN.clear()
    model = Both()
    fit(
        data, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        feature_cols=["x", "row"], shuffle=False,
        transformation_fn=note_rows, epochs=2,
    )  # fmt: skip
    assert SEEN[2:98] == list(range(96)) == SEEN[98:]


def test_10_a_reader_outlives_the_epoch_and_reads_after_it_was_stopped(data):
    def threads():
        return os.listdir("/proc/self/task")

    fit(data, linear(), epochs=1)
    before, alive = len(threads()), threading.active_count()
    for _ in range(3):
        fit(data, linear(), train_steps_per_epoch=1, epochs=2)
    assert len(threads()) <= before
    assert threading.active_count() <= alive


def test_11_every_release_of_pyarrow_pandas_or_numpy_breaks_the_reader(data):
    program = (
        "import warnings; warnings.simplefilter('error', DeprecationWarning); "
        "warnings.simplefilter('error', FutureWarning); warnings.filterwarnings('default', "
        "module='torch');from tests.single.training import fit, linear; from pathlib import Path;"
        f"fit(Path({str(data)!r}), linear(), epochs=1);"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)

    def note_modules(_state):
        from pathlib import Path

        Path(os.environ["NOTED"]).write_text("\n".join(sorted(sys.modules)))

    backend = LocalBackend(1, env={"NOTED": str(data / "modules")}, warm=False)
    fit(data, linear(), epochs=1, backend=backend, callbacks=[note_modules])
    modules = set((data / "modules").read_text().split())
    assert "farandole.spark.torch.remote" in modules
    # What took longest was torch's compiler, which every optimizer imports though nothing is
    # compiled.
    assert (
        not {"petastorm", "pandas", "pyarrow", "pyspark", "scipy", "torch._dynamo.convert_frame"}
        & modules
    )
