# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every file that a run, its data and its model leave in a store, in turn, is made to hold code:
none of it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.single.test_checkpoint_safety import Line, keras_fit, lightning_fit, torch_fit
from tests.single.training import estimator, line, linear, write

from farandole.common import elastic
from farandole.data.prepare import prepare_data
from farandole.spark.common import LocalStore
from farandole.spark.common.saving.save_directory import SaveDirectory
from farandole.spark.lightning import LightningEstimator
from farandole.spark.lightning import TorchModel as LightningModel
from farandole.spark.torch import TorchEstimator, TorchModel
from farandole.stores import checkpoint_signatures

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
    ),
]


class Poison:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def plain(executed_file):
    """A pickle."""
    return pickle.dumps(Poison(executed_file))


def of_torch(executed_file):
    """Like `torch.save` has it."""
    file = io.BytesIO()
    torch.save(
        {
            "model": Poison(executed_file),
            "state_dict": Poison(executed_file),
            "history": Poison(executed_file),
        },
        file,
    )
    return file.getvalue()


def of_keras(executed_file):
    """An archive by the name of a `.keras` file, whose parts are pickles."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name in ("config.json", "metadata.json", "model.weights.h5", "state.json"):
            out.writestr(name, plain(executed_file))
    return file.getvalue()


def of_numpy(executed_file):
    """An archive of NumPy, whose arrays hold objects."""
    file = io.BytesIO()
    held = np.empty(1, object)
    held[0] = Poison(executed_file)
    np.savez(file, **{"plain": held, "0": held, "1": held})
    return file.getvalue()


def of_lambda(executed_file):
    """A model of Keras whose layer touches the file when it is built."""
    import keras

    # Keras saves the code of a lambda, and of other functions the name.
    name = str(executed_file)
    layer = keras.layers.Lambda(
        lambda x: (__import__("pathlib").Path(name).touch(), x)[1], output_shape=(2,)
    )
    path = executed_file.with_name("lambda.keras")
    keras.Sequential([keras.Input((2,)), layer]).save(path)
    executed_file.unlink(missing_ok=True)
    return path.read_bytes()


POISONS = [
    pytest.param(plain, marks=pytest.mark.slow),
    of_torch,
    pytest.param(of_keras, marks=pytest.mark.slow),
]


@pytest.fixture
def executed_file(tmp_path):
    return tmp_path / "it ran"


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def each_poisoned(folder, executed_file, read, poison):
    """Poisons each file in turn, in a copy, and reads it; returns the files."""
    names = files_of(folder)
    for index, name in enumerate(names):
        copy = folder.with_name(f"copy-{index}")
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(poison(executed_file))
        # That it is refused is as good as that it is not read.
        with contextlib.suppress(Exception):
            read(copy)
        assert not executed_file.exists(), name
        if name.startswith("runs/") and checkpoint_signatures.MARKER_FILENAME not in name:
            # A writer of that place can remove the marker, too.
            (copy / "runs" / "r" / checkpoint_signatures.MARKER_FILENAME).unlink()
            with contextlib.suppress(Exception):
                read(copy)
            assert not executed_file.exists(), name
        shutil.rmtree(copy)
    return names


def test_the_poisons_work(executed_file):
    pickle.loads(plain(executed_file))
    assert executed_file.exists()
    executed_file.unlink()
    torch.load(io.BytesIO(of_torch(executed_file)), weights_only=False)
    assert executed_file.exists()
    executed_file.unlink()
    np.load(io.BytesIO(of_numpy(executed_file)), allow_pickle=True)["plain"]
    assert executed_file.exists()


@pytest.mark.slow
def test_the_poison_of_keras_works(executed_file):
    keras = pytest.importorskip("keras")
    of_lambda(executed_file)
    keras.saving.load_model(executed_file.with_name("lambda.keras"), safe_mode=False)(
        np.ones((1, 2))
    )
    assert executed_file.exists()


@pytest.mark.parametrize("poison", [*POISONS, pytest.param(of_lambda, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fitted", [torch_fit, lightning_fit, pytest.param(keras_fit, marks=pytest.mark.slow)]
)
def test_no_file_of_a_run_or_of_its_data_has_its_code_run(tmp_path, executed_file, fitted, poison):
    folder = tmp_path / "store"
    x, y = line(rows=32)
    write(folder / "intermediate_train_data", x=x, y=y)
    fitted(folder, "r", 1)
    fitted(folder, "r", 2)
    names = each_poisoned(folder, executed_file, lambda copy: fitted(copy, "r", 3), poison)
    assert {
        "runs/r/checkpoint",
        "runs/r/checkpoint.previous",
        f"runs/r/{checkpoint_signatures.MARKER_FILENAME}",
    } <= set(names)
    assert any(name.endswith(".parquet") for name in names)


@pytest.mark.parametrize("poison", POISONS)
def test_no_best_checkpoint_has_its_code_run(tmp_path, executed_file, poison):
    folder = tmp_path / "store"
    x, y = line(rows=32)
    write(folder / "intermediate_train_data", x=x, y=y)

    def best(copy, epochs=3):
        return estimator(
            copy, linear(), epochs=epochs, run_id="r", best_checkpoint="loss"
        ).fit_on_parquet()

    best(folder, 2)
    names = each_poisoned(folder, executed_file, best, poison)
    assert "runs/r/checkpoint.best" in names


@pytest.mark.parametrize("poison", POISONS)
def test_no_file_of_prepared_data_has_its_code_run(tmp_path, executed_file, poison):
    folder = tmp_path / "store"
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]})

    def prepared(copy):
        return prepare_data(frame, LocalStore(str(copy)), label_cols=["y"])

    prepared(folder)
    assert any(
        name.endswith("_manifest.json")
        for name in each_poisoned(folder, executed_file, prepared, poison)
    )


def plain_state(hvd):
    """A state of numbers and names, and how it is trained by a step."""
    return hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, seen=[])


def torch_state(hvd):
    """A state of a model and its optimizer."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def keras_state(_):
    """A state of a model of Keras."""
    keras = pytest.importorskip("keras")
    import farandole.keras as hvd

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return hvd.elastic.KerasState(model, step=0)


@pytest.mark.parametrize("poison", [*POISONS, of_numpy])
@pytest.mark.parametrize(
    "made", [plain_state, torch_state, pytest.param(keras_state, marks=pytest.mark.slow)]
)
def test_no_file_of_an_elastic_states_run_has_its_code_run(tmp_path, executed_file, made, poison):
    import farandole.torch as hvd

    folder = tmp_path / "store"

    def trained(copy):
        state = made(hvd)
        state.save_to(str(copy), "r")

        def loop(state):
            state.step += 1
            state.commit()
            return state.step

        return elastic.run_fn(loop, lambda: None)(state)

    hvd.init()
    try:
        assert [trained(folder) for _ in range(2)] == [1, 2], "a run goes on from its commit"
        names = each_poisoned(folder, executed_file, trained, poison)
    finally:
        hvd.shutdown()
    assert set(names) == {
        "runs/r/checkpoint",
        "runs/r/checkpoint.previous",
        f"runs/r/{checkpoint_signatures.MARKER_FILENAME}",
    }


def torch_model():
    """A model, and the ways to read it without code."""

    def load(path):
        TorchModel.read().model(linear()).load(path)
        TorchModel.read().allow_pickle(False).load(path)

    return TorchModel(model=linear(), feature_columns=["x"], label_columns=["y"]), load


def lightning_model():
    """A model of Lightning's estimator, and the ways to read it without code."""

    def load(path):
        LightningModel.read().model(Line()).load(path)
        LightningModel.read().allow_pickle(False).load(path)

    return LightningModel(model=Line(), feature_columns=["x"], label_columns=["y"]), load


def keras_model():
    """A model with a class of the user, and the ways to read it without the code that was saved."""
    keras = pytest.importorskip("keras")
    from farandole.spark.keras import KerasModel

    class Double(keras.layers.Layer):
        """Twice its inputs."""

        def call(self, inputs):
            return 2 * inputs

    def load(path):
        for reader in (
            KerasModel.read().allow_pickle(False),
            KerasModel.read().safe_mode(True),
            KerasModel.read().custom_objects({"Double": Double}),
        ):
            with contextlib.suppress(Exception):
                reader.load(path).getModel()(np.ones((1, 2)))

    model = keras.Sequential([keras.Input((2,)), Double()])
    return KerasModel(
        model=model, custom_objects={"Double": Double}, feature_columns=["x"], label_columns=["y"]
    ), load


def torch_estimator():
    """An estimator, which is a pickle in parts."""
    model = linear()
    made = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
    )
    return made, lambda path: TorchEstimator.read().allow_pickle(False).load(path)


def lightning_estimator():
    """An estimator of a `LightningModule`."""
    made = LightningEstimator(model=Line(), feature_cols=["x"], label_cols=["y"])
    return made, lambda path: LightningEstimator.read().allow_pickle(False).load(path)


def keras_estimator():
    """An estimator with a class of the user."""
    from farandole.spark.keras import KerasEstimator

    model, _ = keras_model()
    made = KerasEstimator(
        model=model.getModel(),
        custom_objects=model.getCustomObjects(),
        optimizer="sgd",
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
    )
    return made, lambda path: KerasEstimator.read().allow_pickle(False).load(path)


SAVED = [
    torch_model,
    lightning_model,
    keras_model,
    torch_estimator,
    lightning_estimator,
    keras_estimator,
]


@pytest.mark.slow
def test_every_class_that_can_be_saved_has_a_row():
    pytest.importorskip("keras")
    packages = [
        importlib.import_module(f"farandole.spark.{name}")
        for name in ("torch", "lightning", "keras")
    ]
    public = {getattr(package, name) for package in packages for name in package.__all__}
    assert {type(made()[0]) for made in SAVED} == public


@pytest.mark.parametrize("poison", [*POISONS, pytest.param(of_lambda, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "made", [SAVED[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SAVED[1:])]
)
def test_no_file_of_a_saved_object_has_its_code_run_where_that_was_asked_for(
    tmp_path, executed_file, made, poison, spark
):
    assert spark
    folder = tmp_path / "saved"
    saved, load = made()
    saved.write().overwrite().save(str(folder))
    names = each_poisoned(folder, executed_file, lambda copy: load(str(copy)), poison)
    assert any(name.endswith(".parquet") for name in names)
    # A file of parts that is whole, and whose parts are poisoned.
    reader = SaveDirectory(str(folder), spark)
    metadata = reader.read_metadata()
    parts = reader.read_parts(metadata)
    for name in parts:
        SaveDirectory(str(folder), spark).write_object_version(
            metadata, parts | {name: poison(executed_file)}, overwrite=True
        )
        with contextlib.suppress(Exception):
            load(str(folder))
        assert not executed_file.exists(), name
