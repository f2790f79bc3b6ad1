# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A model that an estimator has logged to MLflow comes back with all that predictions need."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.pages import blocks_of
from tests.single.training import estimator, write

from farandole.spark.common.runs.tracking import MLFLOW_PARAMS_FILE
from farandole.spark.common.saving.logged_models import collect_plain_params
from farandole.spark.lightning import TorchModel as LightningModel
from farandole.spark.torch import TorchModel
from farandole.stores.pickle_policy import PickleNotAllowedError
from farandole.stores.small_files import DamagedFileError

pytestmark = pytest.mark.timeout(600)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 2)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, a, word):
        return self.head(torch.cat([a, self.table(word[:, 0])], 1))


def fit_words(home):
    """A classifier of a number, which may be missing, and a word."""
    data = home / "data"
    write(
        data,
        a=np.array([0.5, np.nan, 2.5, 4.0] * 8, np.float32),
        word=np.array(["red", "green", "blue", "red"] * 8, dtype=object),
        y=np.array(["no", "yes", "no", "yes"] * 8, dtype=object),
    )
    fitting = estimator(
        home / "store",
        Network(),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["a", "word"],
        categories=["word", "y"],
        fill={"a": "mean"},
        thresholds=[0.7, 0.3],
        predictedLabelCol="answer",
        epochs=1,
        mlflow=True,
    )
    return fitting.fit_on_parquet(path=str(data))


def logged_uri(mlflow):
    client = mlflow.MlflowClient()
    (run,) = mlflow.search_runs(output_format="list")
    (logged,) = client.search_logged_models([run.info.experiment_id])
    return logged.model_uri


def test_a_model_comes_back_from_mlflow_with_its_parameters(mlflow, tmp_path):
    fitted = fit_words(tmp_path)
    uri = logged_uri(mlflow)
    names = {"uri": uri}
    exec(blocks_of("docs/spark/serving.md")[4].text, names)
    loaded = names["again"]
    for read in (
        TorchModel.getFeatureColumns,
        TorchModel.getLabelColumns,
        TorchModel.getCategories,
        TorchModel.getFill,
        TorchModel.getLearned,
        TorchModel.getSignature,
        TorchModel.getThresholds,
        TorchModel.getClasses,
        TorchModel.getPredictedLabelCol,
        TorchModel.getOutputForm,
        TorchModel.getInputDtypes,
        TorchModel.getRunId,
    ):
        assert read(loaded) == read(fitted), read.__name__
    assert loaded.getCategories()["word"] == ["blue", "green", "red"]
    assert loaded.getThresholds() == [0.7, 0.3]
    assert loaded.getOrDefault("outputs") == fitted.getOrDefault("outputs")
    assert loaded.explain() == fitted.explain()
    given = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int64)
    torch.testing.assert_close(loaded.getModel()(*given), fitted.getModel().eval()(*given))
    assert isinstance(LightningModel.from_mlflow(uri), LightningModel)
    with pytest.raises(PickleNotAllowedError):
        TorchModel.from_mlflow(uri, allow_pickle=False)


def test_a_model_that_something_else_has_logged_is_refused(mlflow):
    import mlflow.pytorch as flavor

    with mlflow.start_run():
        plain = flavor.log_model(torch.nn.Linear(2, 1), name="plain", serialization_format="pickle")
    with pytest.raises(ValueError, match=rf"has no file {MLFLOW_PARAMS_FILE}.*pytorch\.load_model"):
        TorchModel.from_mlflow(plain.model_uri)


def test_a_damaged_file_of_parameters_is_named_before_code_runs(mlflow, tmp_path, monkeypatch):
    import mlflow.pytorch as flavor

    (tmp_path / MLFLOW_PARAMS_FILE).write_text(json.dumps({"thresholds": "no numbers"}))
    with mlflow.start_run():
        logged = flavor.log_model(
            torch.nn.Linear(2, 1),
            name="damaged",
            serialization_format="pickle",
            extra_files=[str(tmp_path / MLFLOW_PARAMS_FILE)],
        )
    monkeypatch.setattr(flavor, "load_model", None)
    with pytest.raises(DamagedFileError, match=MLFLOW_PARAMS_FILE):
        TorchModel.from_mlflow(logged.model_uri)


def test_parameters_with_tuples_come_back_as_lists():
    model = TorchModel(
        model=torch.nn.Linear(2, 1),
        feature_columns=["a"],
        label_columns=["y"],
        input_shapes=[(-1, 2)],
        transformation_fn=len,
    )
    params = json.loads(json.dumps(collect_plain_params(model)))
    assert params["input_shapes"] == [[-1, 2]]
    assert not {"model", "transformation_fn"} & params.keys()


def test_a_model_of_text_names_the_way_that_keeps_its_tokenizer():
    from farandole.spark.transformers.model import TextModel

    with pytest.raises(ValueError, match=r"m-1 has no tokenizer.*TextModel\.load\(path\)"):
        TextModel.from_mlflow("models:/m-1")
