# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models as users bring them: inputs by keyword, results with names, embeddings of integers."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, NamedTuple

import cloudpickle
import lightning
import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
import transformers
from tests.single.training import Here, estimator, line, write

from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchModel
from farandole.spark.torch.columns.model_calls import ModelCall, inputs_by_key, tensors_of_batch
from farandole.spark.torch.job import TorchInput
from farandole.spark.torch.model_trial import find_lookup_inputs, hold_evaluation_mode
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.saving.state_bytes import pickle_with_tensors

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance|tensorboard).*"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LENGTH, WORDS = 6, 40


@dataclasses.dataclass
class Scores:
    """A result with names."""

    hidden: Any
    logits: Any


class ScorePair(NamedTuple):
    """A result with names that is a tuple, too."""

    hidden: Any
    logits: Any


STRUCTURES = {
    "dict": dict,
    "dataclass": Scores,
    "named tuple": ScorePair,
    "ModelOutput": transformers.utils.ModelOutput,
}


class Structured(torch.nn.Module):
    """A line whose result is a structure with two tensors."""

    def __init__(self, structure):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.structure = torch.nn.Linear(2, 1), structure

    def forward(self, x):
        return STRUCTURES[self.structure](hidden=x * 2, logits=self.inner(x))


@pytest.fixture
def data(tmp_path):
    x, y = line(48)
    write(tmp_path / "intermediate_train_data", x=x, y=y, z=-y)
    write(tmp_path / "intermediate_val_data", x=x[:16], y=y[:16], z=-y[:16])
    return tmp_path


@pytest.fixture
def texts(tmp_path):
    """Rows of words, whose class is the parity of the first word."""
    generator = np.random.default_rng(0)
    ids = generator.integers(2, WORDS, size=(64, LENGTH)).astype(np.int32)
    columns = {
        "ids": ids,
        "mask": np.ones_like(ids),
        "stars": (ids[:, 0] % 2).astype(np.int64),
    }
    write(tmp_path / "intermediate_train_data", **columns)
    write(tmp_path / "intermediate_val_data", **{name: one[:16] for name, one in columns.items()})
    return tmp_path


def bert(labels=2, **options):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            num_labels=labels,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **options,
        )
    )


def fit(directory, model, kind=None, **params):
    made = estimator(directory, model, **{"epochs": 2} | params)
    if kind is not None:
        named = {param.name: value for param, value in made._paramMap.items()}
        made = kind(**named)
    return made.fit_on_parquet()


KINDS = pytest.mark.parametrize("kind", [None, LightningEstimator], ids=["torch", "lightning"])


@KINDS
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_named_output_trains_like_the_tensor_alone(data, structure, kind):
    plain = torch.nn.Linear(2, 1)
    model = Structured(structure)
    plain.load_state_dict(model.inner.state_dict())
    expected = fit(data, plain, kind, run_id="plain")
    found = fit(data, model, kind, output="logits", run_id="named")
    assert torch.equal(found.getModel().inner.weight, expected.getModel().weight)
    assert [one["train"] for one in found.getHistory()] == [
        one["train"] for one in expected.getHistory()
    ]
    assert found.getOutput() == ["logits"]


@KINDS
@pytest.mark.parametrize("structure", STRUCTURES)
def test_several_outputs_are_those_that_the_user_names(data, structure, kind):
    def fitted(fields, run):
        return fit(
            data,
            Structured(structure),
            kind,
            output=fields,
            label_cols=["y", "z"],
            loss=first_column_loss,
            run_id=run,
        )

    one, other = fitted(["logits", "hidden"], "a"), fitted(["hidden", "logits"], "b")
    assert one.getOutput() == ["logits", "hidden"]
    assert not torch.equal(one.getModel().inner.weight, other.getModel().inner.weight)


def first_column_loss(output, label):
    return ((output[:, 0] - label.reshape(-1)) ** 2).mean()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_unclear_output_names_the_fields_and_the_parameter(data, structure):
    with pytest.raises(ValueError, match=r"hidden \(2, 2\), logits \(2, 1\)") as refused:
        fit(data, Structured(structure))
    assert 'output="hidden"' in str(refused.value)
    assert "'y'" in str(refused.value)


@pytest.mark.parametrize(
    ("output", "model", "told"),
    [
        ("scores", Structured("dict"), r"without a tensor scores; its fields are hidden"),
        ("logits", torch.nn.Linear(2, 1), "returns Tensor, which has none: leave output out"),
        (["logits", "hidden"], Structured("dict"), "one field per label column 1"),
    ],
)
def test_a_wrong_output_is_refused_with_the_fields(data, output, model, told):
    with pytest.raises(ValueError, match=told):
        fit(data, model, output=output)


def test_outputs_are_found_by_the_names_of_labels_or_if_there_is_only_one():
    call = ModelCall(arguments=((),), labels=("b", "a"))
    a, b, loss = torch.zeros(3, 1), torch.ones(3, 2), torch.tensor(1.0)
    assert call.output_fields({"a": a, "b": b, "c": a}) == ("b", "a")
    alone = ModelCall(arguments=((),), labels=("y",))
    assert alone.output_fields({"loss": loss, "logits": a, "cache": object()}) == ("logits",)
    assert alone.output_tensors({"loss": loss, "logits": a})[0] is a
    assert alone.output_fields(a) == ()
    pair = ModelCall(arguments=((),), labels=("x", "y"))
    assert pair.output_tensors(ScorePair(a, b)) == [a, b]


def test_another_output_is_another_run(data):
    model = Structured("dict")
    fit(data, model, output="logits", run_id="r")
    with pytest.raises(RunDiffersError, match="output was"):
        fit(
            data,
            Structured("dict"),
            output="hidden",
            loss=first_column_loss,
            run_id="r",
            epochs=3,
        )


TEXTS = {"input_ids": "ids", "attention_mask": "mask"}


def fit_texts(directory, model, kind=None, **params):
    known = {"feature_cols": TEXTS, "label_cols": ["stars"], "batch_size": 16, "loss": None}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fit(directory, model, kind, **known | {"optimizer": optimizer} | params)


@KINDS
def test_a_model_of_transformers_is_fitted_as_it_is(texts, kind, capsys):
    model = bert()
    expected = fit_texts(
        texts,
        bert(),
        kind,
        loss=torch.nn.CrossEntropyLoss(),
        output="logits",
        input_dtypes=["int64", "float32"],
        run_id="a",
    )
    found = fit_texts(texts, model, kind, run_id="b", verbose=1)
    said = capsys.readouterr()
    assert "the model does not take float32: int64 is used for input_ids\n" in said.out + said.err
    assert (
        "the model gets input_ids=ids -> int64 (rows, 6), attention_mask=mask -> float32 (rows, 6)"
        in said.out + said.err
    ) == (kind is None)
    assert found.getInputDtypes() == ["int64", "float32"]
    assert found.getOutput() == ["logits"]
    assert found.getOutputForm() == expected.getOutputForm() == "logits"
    losses = [one["train"]["loss"] for one in found.getHistory()]
    assert losses == pytest.approx([one["train"]["loss"] for one in expected.getHistory()])
    for one, other in zip(
        found.getModel().parameters(), expected.getModel().parameters(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)


def test_inputs_by_keyword_may_be_nested_and_several_columns(data):
    fitted = fit(
        data, Nested(), feature_cols={"given": {"x": "x"}, "more": ["y"]}, label_cols=["z"]
    )
    assert fitted.getSignature()[0]["argument"] == ["given", "x"]
    plain = fit(data, ByPosition(), feature_cols=["x", "y"], label_cols=["z"])
    assert torch.equal(fitted.getModel().inner.weight, plain.getModel().inner.weight)


class Nested(torch.nn.Module):
    """Takes a dict and a tensor, by keyword only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 1)

    def forward(self, *, more, given):
        return self.inner(torch.cat([given["x"], more], dim=1))


class ByPosition(Nested):
    """Takes the same tensors by position."""

    def forward(self, x, more):
        return super().forward(more=more, given={"x": x})


def test_batches_have_inputs_by_argument():
    inputs = [TorchInput(("a",), (-1, 1), "float32", ("t", "ids")), TorchInput(("b",), (-1, 1))]
    tensors = [torch.zeros(2, 1), torch.ones(2, 1)]
    batch = inputs_by_key(inputs, tensors)
    assert batch == {"t": {"ids": tensors[0]}, "b": tensors[1]}
    assert tensors_of_batch(inputs, batch | {"y": 0}) == tensors


class ByName(lightning.LightningModule):
    """Learns z from a dict of tensors, and returns a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Nested()

    def forward(self, given, more):
        return {"scores": self.inner(given=given, more=more), "given": given["x"]}

    def training_step(self, batch, _index):
        assert set(batch) == {"given", "more", "z"}
        target = batch.pop("z")
        return torch.nn.functional.mse_loss(self(**batch)["scores"][:, 0], target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit_by_name(directory, **params):
    features = {"given": {"x": "x"}, "more": "y"}
    return LightningEstimator(
        model=ByName(),
        feature_cols=features,
        **{"label_cols": ["z"]} | params,
        epochs=1,
        verbose=0,
        store=str(directory),
        backend=Here(),
    ).fit_on_parquet()


def test_batches_of_a_lightning_module_have_its_names(data):
    fitted = fit_by_name(data, output="scores")
    assert fitted.getFeatureColumns() == {"given": {"x": "x"}, "more": "y"}
    assert fitted.getOutput() == ["scores"]
    with pytest.raises(ValueError, match=r"rename the column.*: more"):
        fit_by_name(data, label_cols=["more"])


def test_a_minibatch_function_gets_inputs_by_name(data):
    def train(model, optimizer, transform, loss, inputs, labels):
        assert set(inputs) == {"given", "more"}
        optimizer.zero_grad()
        outputs, labels = transform(model(**inputs), labels)
        found = loss(outputs, labels)
        found.backward()
        optimizer.step()
        return outputs, found

    known = {"feature_cols": {"given": {"x": "x"}, "more": "y"}, "label_cols": ["z"]}
    own = fit(data, Nested(), train_minibatch_fn=train, run_id="a", **known)
    built_in = fit(data, Nested(), run_id="b", **known)
    assert torch.allclose(own.getModel().inner.weight, built_in.getModel().inner.weight)


@pytest.mark.slow
def test_names_are_in_an_exported_file(data):
    fitted = fit(data, Structured("ModelOutput"), feature_cols={"x": "x"}, output="logits")
    fitted.to_onnx(data / "model.onnx")
    session = onnxruntime.InferenceSession(str(data / "model.onnx"))
    rows = line(5)[0]
    (found,) = session.run(None, {"x": rows})
    with torch.no_grad():
        known = fitted.getModel().inner(torch.from_numpy(rows))
    np.testing.assert_allclose(found, known, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "at least one column"),
        ({"x": {}}, "at least one column"),
        ({"x": "a", "y": "a"}, "column twice: a"),
        ({1: "a"}, "names of the model's arguments"),
        ({"x": 1}, "list of column names"),
    ],
)
def test_a_wrong_mapping_of_features_is_refused(tmp_path, value, told):
    with pytest.raises((ValueError, TypeError), match=told):
        estimator(tmp_path, torch.nn.Linear(2, 1), feature_cols=value)


def test_another_mapping_is_another_run(data):
    model = ByPosition()
    fit(data, model, feature_cols={"x": "x", "more": "y"}, label_cols=["z"], run_id="r")
    with pytest.raises(RunDiffersError, match="feature_cols was"):
        fit(data, ByPosition(), feature_cols=["x", "y"], label_cols=["z"], run_id="r", epochs=3)


class Tabular(torch.nn.Module):
    """Two embeddings and a number, which are all integers in the data."""

    def __init__(self, embedding=torch.nn.Embedding):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = embedding(8, 3), embedding(8, 3)
        self.scale, self.inner = torch.nn.Linear(1, 1), torch.nn.Linear(7, 1)

    def forward(self, city, age, code):
        first, second = self.first(city), self.second(code + 1)
        age = self.scale(age)
        found = torch.cat([first.reshape(len(age), -1), second.reshape(len(age), -1), age], dim=1)
        return self.inner(found)


@pytest.fixture
def tabular(tmp_path):
    generator = np.random.default_rng(0)
    columns = {
        name: generator.integers(0, 6, 32).astype(dtype)
        for name, dtype in (("city", "int32"), ("age", "int64"), ("code", "int8"), ("d", "float64"))
    }
    write(tmp_path / "intermediate_train_data", **columns, y=columns["age"].astype(np.float32))
    return tmp_path


@KINDS
@pytest.mark.parametrize("embedding", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_only_indices_of_embeddings_stay_integers(tabular, embedding, kind):
    fitted = fit(
        tabular, Tabular(embedding), kind, feature_cols=["city", "age", "code"], label_cols=["y"]
    )
    assert fitted.getInputDtypes() == ["int64", "float32", "int64"]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_the_error_of_a_wrong_type_has_the_value_to_write(tabular, dtype):
    wanted = r'set input_dtypes=\["int64", "float32", "int64"\]'
    with pytest.raises(ValueError, match=wanted):
        fit(
            tabular,
            Tabular(),
            feature_cols=["city", "age", "code"],
            label_cols=["y"],
            input_dtypes=[dtype] * 3,
        )


def test_numbers_with_fractions_are_not_cut_without_being_asked(tabular):
    with pytest.raises(ValueError, match=r'input_dtypes=\["int64", "float32", "int64"\]'):
        fit(tabular, Tabular(), feature_cols=["d", "age", "code"], label_cols=["y"])


def test_a_trial_keeps_the_modes_of_layers_and_random_numbers():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval(), torch.nn.Dropout())
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    with hold_evaluation_mode(model):
        assert not model.training
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [one.training for one in model.modules()] == [True, False, True]


def test_lookups_are_found_through_other_operations():
    class Model(torch.nn.Module):
        def forward(self, a, b, c):
            table = torch.ones(9, 2)
            picked = torch.nn.functional.embedding((a * 2).reshape(-1) + b, table)
            return picked.sum() + torch.nn.functional.one_hot(c).sum() + torch.embedding(table, b)

    call = ModelCall(arguments=((), (), ()), labels=("y",))
    numbers = [torch.ones(2), torch.ones(2), torch.ones(2)]
    assert find_lookup_inputs(call, Model(), numbers) == {0, 1, 2}


def test_a_fitted_model_predicts_by_name_in_tasks_also_when_it_was_saved(texts):
    fitted = fit_texts(texts, bert(), epochs=1)
    values = {param.name: value for param, value in fitted._paramMap.items()}
    plain = {
        name: values[name] for name in ("feature_columns", "input_dtypes", "output", "output_form")
    }
    again = TorchModel(
        model=fitted.getModel(), label_columns=["stars"], **json.loads(json.dumps(plain))
    )
    predictor = TorchPredictor(
        model=pickle_with_tensors(again.getModel()),
        columns=("ids", "mask"),
        groups=tuple(tuple(group) for group in again._input_columns()),
        labels=("stars",),
        batch_size=3,
        shapes=None,
        dtypes=again.getInputDtypes(),
        call=again._model_call(),
        use_gpu=False,
    )
    ids = np.arange(4 * LENGTH, dtype=np.int32).reshape(4, LENGTH)
    columns = [pa.array(one.tolist(), pa.list_(pa.int32())) for one in (ids, np.ones_like(ids))]
    batch = pa.RecordBatch.from_arrays(columns, names=["column0", "column1"])
    (found,) = predictor.predict_outputs(batch)
    with torch.no_grad():
        known = fitted.getModel().eval()(torch.from_numpy(ids).long()).logits
    np.testing.assert_allclose(found, known, atol=1e-5)
    wrong = dataclasses.replace(predictor, dtypes=["float32", "float32"])
    with pytest.raises(ValueError, match=r'set input_dtypes=\["int64", "float32"\]'):
        wrong.predict_outputs(batch)
