# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files in a store that hold code: none of it runs without consent."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.single.test_checkpoint_safety import lightning_fit, torch_fit
from tests.single.training import line, write

from farandole._native import store as native
from farandole.spark.common.runs.stop_request import StopCheck
from farandole.spark.lightning.run_recorder import LightningRunRecorder
from farandole.spark.torch import TorchEstimator, TorchModel
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReader,
    TorchModelReader,
    TorchModelWriter,
)
from farandole.stores.checkpoint_signatures import MARKER_FILENAME
from farandole.stores.pickle_policy import (
    ALLOW_PICKLE_PARAMETER,
    ALLOW_PICKLE_VARIABLE,
    PickleNotAllowedError,
    pickle_decision_from_env,
)

pytestmark = pytest.mark.timeout(300)


class Poison:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def executed_file(tmp_path):
    return tmp_path / "it ran"


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_the_poison_works(executed_file):
    pickle.loads(pickle.dumps(Poison(executed_file)))
    assert executed_file.exists()


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
@pytest.mark.parametrize("fitted", [torch_fit, lightning_fit])
def test_a_poisoned_checkpoint_ends_the_run_that_would_continue_from_it(
    data, executed_file, fitted
):
    fitted(data, "r", 1)
    path = data / "runs" / "r" / "checkpoint"
    state = torch.load(path, weights_only=True)
    path.write_bytes(
        saved(
            state | {"history": Poison(executed_file), "farandole_history": Poison(executed_file)}
        )
    )
    path.with_name(MARKER_FILENAME).unlink()  # who can write there can also take the marker away
    with pytest.raises(PickleNotAllowedError, match="of run 'r' contains more"):
        fitted(data, "r", 2)
    assert not executed_file.exists()


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
@pytest.mark.parametrize("by", ["variable", "parameter"])
def test_a_checkpoint_of_lightning_with_code_is_resumed_where_that_is_allowed(
    data, executed_file, monkeypatch, by
):
    lightning_fit(data, "r", 1)
    path = data / "runs" / "r" / "checkpoint"
    path.write_bytes(saved(torch.load(path, weights_only=True) | {"more": Poison(executed_file)}))
    path.with_name(MARKER_FILENAME).unlink()
    if by == "parameter":  # it has priority, in both directions
        monkeypatch.setenv(ALLOW_PICKLE_VARIABLE, "1")
    consent = {ALLOW_PICKLE_PARAMETER: False} if by == "parameter" else {}
    with pytest.raises(
        PickleNotAllowedError,
        match=f"run 'r' contains more.*{ALLOW_PICKLE_PARAMETER}=True or {ALLOW_PICKLE_VARIABLE}=1",
    ):
        lightning_fit(data, "r", 2, **consent)
    assert not executed_file.exists()
    monkeypatch.setenv(ALLOW_PICKLE_VARIABLE, "0" if by == "parameter" else "1")
    consent = {ALLOW_PICKLE_PARAMETER: True} if by == "parameter" else {}
    assert len(lightning_fit(data, "r", 2, **consent).getHistory()) == 2
    assert executed_file.exists()


@pytest.mark.parametrize("allowed", [None, False, True])
def test_a_poisoned_best_checkpoint_runs_with_consent_only(tmp_path, executed_file, allowed):
    native.Store(str(tmp_path)).write(
        "checkpoint.best", saved({"state_dict": Poison(executed_file)})
    )
    store = SimpleNamespace(
        checkpoint_filename="checkpoint",
        read_checkpoint=lambda name: native.Store(str(tmp_path)).read(name),
    )
    job = SimpleNamespace(
        store=store, loop=SimpleNamespace(best_checkpoint=True, epochs=2), allow_pickle=allowed
    )
    watch = LightningRunRecorder(job, tmp_path, [], 0, 1, StopCheck(store))
    with contextlib.nullcontext() if allowed else pytest.raises(pickle.UnpicklingError):
        watch.result_weights(SimpleNamespace(checkpoint_callback=None), torch.nn.Linear(1, 1))
    assert executed_file.exists() == bool(allowed)


def test_models_and_estimators_with_code_are_refused_where_that_was_asked_for(
    executed_file, monkeypatch
):
    linear = torch.nn.Linear(1, 1)
    _, parts = TorchModelWriter(TorchModel(model=linear)).split_plain_and_packed({"model": linear})
    poisoned = parts | {"objects": pickle.dumps(Poison(executed_file))}
    with pytest.raises(PickleNotAllowedError, match="the object saved at here holds pickled code"):
        TorchModelReader(TorchModel).allow_pickle(False).restore_packed_parts(
            TorchModel(), poisoned, "here"
        )
    monkeypatch.setenv(ALLOW_PICKLE_VARIABLE, "0")
    for reader, kind in (
        (TorchModelReader, TorchModel),
        (TorchEstimatorParamsReader, TorchEstimator),
    ):
        with pytest.raises(PickleNotAllowedError):
            reader(kind).restore_packed_parts(kind(), poisoned, "here")
    loaded = TorchModel()
    TorchModelReader(TorchModel).model(torch.nn.Linear(1, 1)).restore_packed_parts(
        loaded, poisoned, "here"
    )
    assert torch.equal(loaded.getModel().weight, linear.weight)
    assert not executed_file.exists()
    monkeypatch.setenv(ALLOW_PICKLE_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="ALLOW_PICKLE must be a boolean"):
        pickle_decision_from_env()


def test_safe_mode_of_keras_refuses_pickled_classes_before_they_run(executed_file):
    pytest.importorskip("keras")
    from farandole.spark.keras import KerasModel
    from farandole.spark.keras.saving.persistence import KerasModelReader

    parts = {"model": b"", "custom_objects": pickle.dumps(Poison(executed_file))}
    with pytest.raises(PickleNotAllowedError, match="custom_objects"):
        KerasModelReader(KerasModel).safe_mode(True).restore_packed_parts(
            KerasModel(), parts, "here"
        )
    assert not executed_file.exists()
