# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models that return a loss of their own when they get labels."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
import transformers
from tests.single.training import Here, estimator, line, weights, write
from torch.nn import functional

from farandole.data.columns import PreparedColumn
from farandole.spark.common import LocalBackend
from farandole.spark.common.data.training_data import PROBE_PART_ROWS, ProbePart
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.columns.model_losses import own_loss_arguments
from farandole.spark.torch.job import TorchInput, TorchLabel
from farandole.spark.torch.model_trial import TriedModel
from farandole.spark.torch.own_loss_trial import find_own_loss, try_own_loss

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance|tensorboard).*"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
WORDS, LENGTH, IGNORED = 12, 5, -100
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": LENGTH,
}


class OwnLoss(torch.nn.Module):
    """A classifier of each word, or of each row, whose loss is computed by a function."""

    def __init__(self, loss, returns=dict, per_row=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(WORDS, 3)
        self.loss, self.returns, self.per_row = loss, returns, per_row

    def forward(self, ids, labels=None):
        logits = self.table(ids)
        logits = logits.mean(dim=1) if self.per_row else logits
        loss = None if labels is None else self.loss(logits.reshape(-1, 3), labels.reshape(-1))
        if self.returns is tuple:
            return logits, loss
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


def square(logits, labels):
    return functional.mse_loss(logits[:, 0], labels.float())


def total(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="sum")


def root(logits, labels):
    return functional.cross_entropy(logits, labels).sqrt()


def tried_model(*names):
    inputs = (TorchInput(("ids",), (-1, LENGTH), "int64"),)
    call = ModelCall(arguments=((),), labels=names, label_arguments=("labels",))
    return TriedModel(inputs, call)


def label(dtype="int64", shape=(LENGTH,), value_range=None):
    return TorchLabel(PreparedColumn("y", dtype, shape), dtype, None, value_range=value_range)


def probe_data(labels):
    """Data with the parts on which losses are tried."""
    generator = torch.Generator().manual_seed(1)
    count = sum(PROBE_PART_ROWS)
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    y = {
        "words": ids % 3,
        "rows": ids[:, 0] % 3,
        "numbers": ids[:, 0].float(),
        "texts": ids,
    }[labels]
    ends = np.cumsum(PROBE_PART_ROWS)
    bounds = [(0, count), *zip([0, *ends[:-1]], ends, strict=True)]
    parts = [ProbePart({"ids": ids[a:b], "y": y[a:b]}, int(b - a)) for a, b in bounds]
    return SimpleNamespace(read_probe_parts=lambda *_: parts)


def language_model():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, use_cache=False
        )
    )


def bert(kind=transformers.BertForSequenceClassification, labels=3):
    torch.manual_seed(0)
    return kind(transformers.BertConfig(num_labels=labels, **SIZES))


@pytest.mark.parametrize(
    ("model", "labels", "spec", "counted_from"),
    [
        (lambda: OwnLoss(functional.cross_entropy), "words", label(), 0),
        (lambda: bert(transformers.BertForTokenClassification), "words", label(), 0),
        (language_model, "texts", label(), 1),
        (bert, "rows", label(shape=()), 0),
        (bert, "rows", label(shape=(), value_range=(0, 2)), None),
        (lambda: OwnLoss(square, per_row=True), "rows", label(shape=()), None),
        (lambda: bert(labels=1), "numbers", label("float32", ()), None),
    ],
    ids=["words", "tokens", "language", "rows", "known rows", "squares", "numbers"],
)
def test_a_trial_finds_what_divides_the_loss(model, labels, spec, counted_from):
    found = find_own_loss(tried_model("y"), [spec], model(), probe_data(labels), None)
    assert found.counted_from == counted_from


@pytest.mark.parametrize(
    ("loss", "told"), [(total, "is a sum over rows: of 23 rows"), (root, "is no mean over rows")]
)
def test_a_loss_that_is_no_mean_is_refused(loss, told):
    with pytest.raises(ValueError, match="the model's own loss " + told):
        find_own_loss(tried_model("y"), [label()], OwnLoss(loss), probe_data("words"), None)


@pytest.mark.parametrize(
    ("classes", "values", "dtype", "made", "form"),
    [
        (3, [0, 2], "int64", "int64", "logits"),
        (3, [0.0, 2.0], "float32", "int64", "logits"),
        (1, [0.5, 2.0], "float32", "float32", "values"),
        (1, [1, 2], "int64", "int64", "values"),
    ],
)
def test_labels_get_the_type_that_the_model_takes(classes, values, dtype, made, form):
    model = bert(labels=classes)
    rows = {"ids": torch.ones(2, LENGTH, dtype=torch.int64), "y": torch.tensor(values)}
    found = try_own_loss(tried_model("y"), [label(dtype, ())], model, rows)
    assert [one.dtype for one in found.labels] == [made]
    assert found.output_form == form
    assert model.config.problem_type is None, "the trial has changed the user's model"


@pytest.mark.parametrize("returns", [dict, tuple])
def test_the_loss_is_taken_from_dicts_and_tuples(returns):
    call = tried_model("y").call
    model = OwnLoss(functional.cross_entropy, returns)
    ids, y = torch.ones(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, dtype=torch.int64)
    loss, rest = call.split_own_loss(call.call_model(model, [ids], [y]))
    (output,) = call.output_tensors(rest)
    assert torch.equal(loss, functional.cross_entropy(output.reshape(-1, 3), y.reshape(-1)))
    with pytest.raises(ValueError, match="returns no loss: it returns dict with the fields logits"):
        call.split_own_loss({"logits": output})


def test_arguments_of_labels_have_the_name_of_the_column_or_are_called_labels():
    model = OwnLoss(None)
    assert own_loss_arguments(model, ["stars"], [()]) == ("labels",)
    answers = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES))
    positions = ["start_positions", "end_positions"]
    assert own_loss_arguments(answers, positions, [("input_ids",)]) == tuple(positions)
    with pytest.raises(ValueError, match=r"loss is required: Linear\.forward has no argument"):
        own_loss_arguments(torch.nn.Linear(2, 1), ["y"], [()])
    with pytest.raises(ValueError, match="loss is required"):
        own_loss_arguments(model, ["y"], [("ids",), ("labels",)])


@pytest.mark.parametrize(
    "option",
    [{"loss_weights": [1.0]}, {"sample_weight_col": "w"}, {"train_minibatch_fn": print}],
    ids=lambda option: next(iter(option)),
)
def test_options_of_losses_are_refused(tmp_path, option):
    x, y = line(8)
    write(tmp_path / "intermediate_train_data", ids=x, y=y, w=y)
    made = estimator(
        tmp_path, OwnLoss(functional.cross_entropy), loss=None, feature_cols=["ids"], **option
    )
    with pytest.raises(ValueError, match=f"{next(iter(option))} needs the parameter loss"):
        made.fit_on_parquet()


@pytest.fixture
def words(tmp_path):
    """Rows with different numbers of ignored labels; the last step of two processes has rows on one
    process only.
    """
    generator = np.random.default_rng(0)
    ids = generator.integers(0, WORDS, size=(33, LENGTH)).astype(np.int32)
    y = (ids % 3).astype(np.int64)
    y[np.arange(33) % 4 == 0] = IGNORED
    y[5, 1:] = IGNORED
    write(tmp_path / "intermediate_train_data", ids=ids, y=y)
    write(tmp_path / "intermediate_val_data", ids=ids[:7], y=y[:7])
    return tmp_path


def fit_words(directory, kind=None, **params):
    model = OwnLoss(functional.cross_entropy)
    made = estimator(
        directory,
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=params.pop("lr", 0.4)),
        loss=None,
        feature_cols=["ids"],
        epochs=2,
        shuffle=False,
        **params,
    )
    if kind is not None:
        made = kind(**{param.name: value for param, value in made._paramMap.items()})
    return made.fit_on_parquet()


@pytest.mark.parametrize("kind", [None, LightningEstimator], ids=["torch", "lightning"])
def test_two_processes_train_what_one_process_trains(words, kind):
    """The loss of a step is the mean over all labels that are not ignored, wherever they are."""
    rate = {"lr": 0.2} if kind is None else {}  # which is multiplied by the processes
    known = {"backward_passes_per_step": 2, "batch_size": 4}
    one = fit_words(words, kind, run_id="one", backend=Here(), **known)
    known = {"backward_passes_per_step": 1, "batch_size": 4}
    two = fit_words(words, kind, run_id="two", backend=LocalBackend(2), **known, **rate)
    assert torch.allclose(weights(one), weights(two), atol=1e-5)
    for before, after in zip(one.getHistory(), two.getHistory(), strict=True):
        for side in ("train", "validation"):
            assert before[side]["loss"] == pytest.approx(after[side]["loss"], rel=1e-4)
