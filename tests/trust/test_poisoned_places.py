# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every file that a run, its data and its model leave in a store, in turn, is made to hold code: none of it runs."""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import zipfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.single.test_checkpoint_safety import lightning_fit, torch_fit
from tests.single.training import estimator, line, linear, write

from farandole.data.prepare import prepare_data
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchModel
from farandole.stores import seals

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"),
]


class Poison:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def plain(mark):
    """A pickle."""
    return pickle.dumps(Poison(mark))


def of_torch(mark):
    """As `torch.save` has it."""
    file = io.BytesIO()
    torch.save({"model": Poison(mark), "state_dict": Poison(mark), "history": Poison(mark)}, file)
    return file.getvalue()


def of_keras(mark):
    """An archive by the name of a `.keras` file, whose parts are pickles."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name in ("config.json", "metadata.json", "model.weights.h5", "state.json"):
            out.writestr(name, plain(mark))
    return file.getvalue()


POISONS = [pytest.param(plain, marks=pytest.mark.slow), of_torch, pytest.param(of_keras, marks=pytest.mark.slow)]


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "it ran"


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def each_poisoned(folder, mark, read, poison):
    """Has each file be poisoned in turn, in a copy, and read; says which files there were."""
    names = files_of(folder)
    for index, name in enumerate(names):
        copy = folder.with_name(f"copy-{index}")
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(poison(mark))
        # That it is refused is as good as that it is not read.
        with contextlib.suppress(Exception):
            read(copy)
        assert not mark.exists(), name
        if name.startswith("runs/") and seals.MARKER not in name:
            # Who can write there can take the marker away, too.
            (copy / "runs" / "r" / seals.MARKER).unlink()
            with contextlib.suppress(Exception):
                read(copy)
            assert not mark.exists(), name
        shutil.rmtree(copy)
    return names


def test_the_poisons_work(mark):
    pickle.loads(plain(mark))
    assert mark.exists()
    mark.unlink()
    torch.load(io.BytesIO(of_torch(mark)), weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("fitted", [torch_fit, lightning_fit])
def test_no_file_of_a_run_or_of_its_data_has_its_code_run(tmp_path, mark, fitted, poison):
    folder = tmp_path / "store"
    x, y = line(rows=32)
    write(folder / "intermediate_train_data", x=x, y=y)
    fitted(folder, "r", 1)
    fitted(folder, "r", 2)
    names = each_poisoned(folder, mark, lambda copy: fitted(copy, "r", 3), poison)
    assert {"runs/r/checkpoint", "runs/r/checkpoint.previous", f"runs/r/{seals.MARKER}"} <= set(names)
    assert any(name.endswith(".parquet") for name in names)


@pytest.mark.parametrize("poison", POISONS)
def test_no_best_checkpoint_has_its_code_run(tmp_path, mark, poison):
    folder = tmp_path / "store"
    x, y = line(rows=32)
    write(folder / "intermediate_train_data", x=x, y=y)

    def best(copy, epochs=3):
        return estimator(copy, linear(), epochs=epochs, run_id="r", best_checkpoint="loss").fit_on_parquet()

    best(folder, 2)
    names = each_poisoned(folder, mark, best, poison)
    assert "runs/r/checkpoint.best" in names


@pytest.mark.parametrize("poison", POISONS)
def test_no_file_of_prepared_data_has_its_code_run(tmp_path, mark, poison):
    folder = tmp_path / "store"
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]})

    def prepared(copy):
        return prepare_data(frame, LocalStore(str(copy)), label_cols=["y"])

    prepared(folder)
    assert any(name.endswith("_manifest.json") for name in each_poisoned(folder, mark, prepared, poison))


@pytest.mark.parametrize("poison", POISONS)
def test_no_file_of_a_saved_model_has_its_code_run_where_that_was_asked_for(tmp_path, mark, poison, spark):
    assert spark
    folder = tmp_path / "model"
    saved = TorchModel(model=linear(), feature_columns=["x"], label_columns=["y"])
    saved.write().overwrite().save(str(folder))

    def load(copy):
        TorchModel.read().model(linear()).load(str(copy))
        TorchModel.read().allow_pickle(False).load(str(copy))

    names = each_poisoned(folder, mark, load, poison)
    assert any(name.endswith(".parquet") for name in names)
