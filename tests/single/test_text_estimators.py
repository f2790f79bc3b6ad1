# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators of text without Spark: checkpoints, tokens, adapters, errors before work starts."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from pyspark.ml.param import Params
from tests.parity.gang import StandingGang
from tests.text_checkpoints import (
    BAD_WORDS,
    GOOD_WORDS,
    LENGTH,
    make_network,
    make_reviews,
    make_tokenizer,
    write_checkpoint,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
)

from farandole._native.store import Store as NativeStore
from farandole.spark.common import LocalBackend
from farandole.spark.torch.callbacks import Callback
from farandole.spark.torch.saving.state_bytes import unpack_state
from farandole.spark.transformers import TextClassifier, TextClassifierModel, TextRegressor
from farandole.spark.transformers.tokenization import PADDING_TOKEN, TextTokenization
from farandole.stores.pickle_policy import PickleNotAllowedError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
GANGS = {size: StandingGang(size) for size in (1, 2)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", autouse=True)
def standing_processes():
    yield
    for gang in GANGS.values():
        gang.close()


def make_classifier(checkpoint, store, processes=1, **options):
    known = {
        "text_col": "review",
        "label_col": "mood",
        "learning_rate": 0.01,
        "batch_size": 16,
        "random_seed": 1,
        "verbose": 0,
        "backend": GANGS[processes],
    }
    return TextClassifier(checkpoint=checkpoint, store=str(store), **known | options)


def predict_classes(network, texts):
    tokens = make_tokenizer()(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = network.eval()(**tokens).logits
    return [network.config.id2label[index] for index in logits.argmax(dim=1).tolist()]


def test_a_classifier_learns_words_and_transformers_reads_what_it_saves(checkpoint, tmp_path):
    fitted = make_classifier(checkpoint, tmp_path, epochs=8, processes=2).fit(make_reviews(128))
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.1
    fitted.save_pretrained(tmp_path / "saved")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert network.config.label2id == {"happy": 0, "sad": 1}
    texts = [f"{word} film" for word in (*GOOD_WORDS, *BAD_WORDS)]
    assert predict_classes(network, texts) == ["happy"] * 4 + ["sad"] * 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer(texts)["input_ids"] == make_tokenizer()(texts)["input_ids"]
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert set(saved) >= {"config.json", "model.safetensors", "tokenizer.json"}
    for content in saved.values():  # no pickle
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(content)
        assert not zipfile.is_zipfile(io.BytesIO(content))


def test_a_model_in_memory_and_one_on_a_store_train_like_a_directory(checkpoint, tmp_path):
    url, rows = f"memory://text-{os.getpid()}/bert", make_reviews(32)
    store, shards = NativeStore(url), tmp_path / "shards"
    make_network().save_pretrained(shards, max_shard_size="4KB")
    make_tokenizer().save_pretrained(shards)
    assert len(list(shards.glob("model-*.safetensors"))) > 1
    for path in shards.iterdir():
        store.write(path.name, path.read_bytes())
    store.write("optimizer.pt", b"not fetched")
    given = {"directory": checkpoint, "store": url, "memory": (make_network(), make_tokenizer())}
    losses = {
        name: make_classifier(value, tmp_path / name).fit(rows).getHistory()[-1]["train"]["loss"]
        for name, value in given.items()
    }
    store.delete_all()
    assert losses["store"] == losses["memory"] == losses["directory"]


def test_a_regressor_learns_numbers(checkpoint, tmp_path):
    fitted = TextRegressor(
        checkpoint=checkpoint, text_col="review", label_col="stars", learning_rate=0.003, epochs=25,
        random_seed=1, verbose=0, batch_size=16, backend=GANGS[1],
        store=str(tmp_path / "store"),
    ).fit(make_reviews(128))  # fmt: skip
    assert fitted.getHistory()[-1]["train"]["loss"] < 1 < fitted.getHistory()[0]["train"]["loss"]
    fitted.save_pretrained(tmp_path / "saved")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert network.config.num_labels == 1
    assert network.config.id2label == {0: "stars"}


def test_adapters_alone_are_trained_and_checkpointed(checkpoint, tmp_path):
    classifier = make_classifier(
        checkpoint,
        tmp_path / "store",
        processes=2,
        epochs=16,
        learning_rate=0.03,
        lora=4,
        run_id="adapters",
    )
    fitted = classifier.fit(make_reviews(128))
    state = unpack_state((tmp_path / "store" / "runs" / "adapters" / "checkpoint").read_bytes())
    parts = {name.rpartition(".")[0].rpartition(".")[2] for name in state["model"]}
    assert all("lora_" in name or ".modules_to_save." in name for name in state["model"]), parts
    before = safetensors.torch.load_file(Path(checkpoint) / "model.safetensors")
    network = fitted.getModel().network.get_base_model()
    assert torch.equal(
        network.bert.embeddings.word_embeddings.weight.cpu(),
        before["bert.embeddings.word_embeddings.weight"],
    )
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.3
    tokens = torch.tensor([[2, 5, 13, 3, PADDING_TOKEN], [2, 9, 13, 14, 3]])
    with torch.no_grad():
        apart = fitted.getModel().eval()(tokens)
        fitted.save_pretrained(tmp_path / "saved")  # merges a copy
        fitted.save_adapter(tmp_path / "adapter")
        assert fitted.getModel().has_adapter
        merged = fitted.merge_adapter().getModel()(tokens)
    assert torch.allclose(apart, merged, atol=1e-5)
    texts = [f"{word} book" for word in (*GOOD_WORDS, *BAD_WORDS)]
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert predict_classes(network, texts) == ["happy"] * 4 + ["sad"] * 4
    base = BertForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        again = loaded(tokens.clamp(min=0), (tokens != PADDING_TOKEN).long()).logits
    assert torch.allclose(apart, again, atol=1e-5)
    with pytest.raises(ValueError, match="the model has no adapters: fit with lora"):
        fitted.save_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_resumed_run_ends_like_an_uninterrupted_one(checkpoint, tmp_path, lora, is_in_memory):
    rows, found = make_reviews(40), {}
    checkpoint = (make_network(), make_tokenizer()) if is_in_memory else checkpoint
    for name, lengths in (("at once", [2]), ("resumed", [1, 2])):
        for epochs in lengths:
            fitted = make_classifier(
                checkpoint, tmp_path / name, lora=lora, run_id="run", epochs=epochs
            ).fit(rows)
        found[name] = dict(fitted.getModel().state_dict())
        assert [entry["epoch"] for entry in fitted.getHistory()] == [0, 1]
    for name, value in found["at once"].items():
        assert torch.equal(value, found["resumed"][name]), name


def test_a_run_with_adapters_does_not_continue_on_other_frozen_weights(checkpoint, tmp_path):
    rows, options = make_reviews(16), {"lora": 1, "run_id": "run"}
    make_classifier(checkpoint, tmp_path, **options).fit(rows)
    network = make_network()
    with torch.no_grad():
        network.bert.embeddings.word_embeddings.weight.mul_(2)
    other = (network, make_tokenizer())
    with pytest.raises(ValueError, match=r"frozen weights"):
        make_classifier(other, tmp_path, epochs=2, **options).fit(rows)


class WorkerLoss(Callback):
    """Kills rank 1 once, in the second epoch, and lets the other process wait for the next one.

    Args:
        marker: file that shows that it has happened.
    """

    def __init__(self, marker):
        self.marker = marker

    def on_batch_end(self, state):
        if (state.epoch, state.step, state.rank) == (1, 3, 1) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.size == 1:
            time.sleep(0.5)


def test_averaged_adapters_are_in_elastic_fits(checkpoint, tmp_path):
    backend = LocalBackend(1, verbose=0, min_num_proc=1, max_num_proc=1)
    options = {"lora": 2, "ema_decay": 0.5, "epochs": 2, "backend": backend}
    fitted = make_classifier(checkpoint, tmp_path, **options).fit(make_reviews(32))
    history = fitted.getHistory()
    assert history[1]["train"]["loss"] < history[0]["train"]["loss"]


def test_a_run_does_not_continue_with_other_adapters(checkpoint, tmp_path):
    rows, options = make_reviews(16), {"run_id": "run"}
    first = peft.LoraConfig(r=2, lora_alpha=4)
    make_classifier(checkpoint, tmp_path, lora=first, **options).fit(rows)
    make_classifier(checkpoint, tmp_path, lora=2, epochs=2, **options).fit(rows)  # the same
    other = peft.LoraConfig(r=2, lora_alpha=64)
    with pytest.raises(ValueError, match=r"\blora\b"):
        make_classifier(checkpoint, tmp_path, lora=other, epochs=3, **options).fit(rows)


@pytest.mark.slow
def test_adapters_survive_the_loss_of_a_worker(checkpoint, tmp_path):
    callback = WorkerLoss(tmp_path / "killed")
    fitted = make_classifier(
        checkpoint, tmp_path / "store", lora=4, epochs=6, batch_size=8, learning_rate=0.03,
        callbacks=[callback], backend=LocalBackend(2, min_num_proc=1, verbose=0),
    ).fit(make_reviews(128))  # fmt: skip
    assert callback.marker.exists()
    history = fitted.getHistory()
    assert [(entry["epoch"], entry["rows"]) for entry in history] == [(n, 128) for n in range(6)]
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    before = make_network().bert.state_dict()["encoder.layer.0.attention.self.query.weight"]
    layer = fitted.getModel().network.get_base_model().bert.encoder.layer[0]
    assert torch.equal(layer.attention.self.query.base_layer.weight, before)


def test_truncated_texts_are_counted_and_said_once(checkpoint, tmp_path, capsys):
    rows = make_reviews(40, longest=2 * LENGTH)
    lengths = [len(text.as_py().split()) for text in rows["review"]]
    options = {"backend": LocalBackend(2, verbose=0), "epochs": 2, "verbose": 1}
    make_classifier(checkpoint, tmp_path, max_length=8, **options).fit(rows)
    said = [line for line in capsys.readouterr().err.splitlines() if "max_length" in line]
    truncated = sum(length + 2 > 8 for length in lengths)
    assert said == [
        f"{truncated} of 40 texts have more than max_length=8 tokens: the rest of them is not used"
    ]


def test_weights_that_begin_at_random_are_named(checkpoint, tmp_path, capsys):
    make_classifier(checkpoint, tmp_path, verbose=1, lora=1).fit(make_reviews(16))
    said = capsys.readouterr().err
    assert "the checkpoint has no weights of bert.pooler.dense, classifier: they are random" in said
    assert "parameters are trained (" in said


def test_a_batch_is_padded_to_a_multiple_and_an_empty_text_has_tokens():
    tokenization = TextTokenization(
        text_col="review",
        tokenizer=make_tokenizer().backend_tokenizer.to_str(),
        max_length=LENGTH,
        length_multiple=4,
    )
    texts = np.array(["good film", "", "the film is bad and dull"], dtype=object)
    columns = tokenization({"review": texts, "mood": np.arange(3)})
    assert columns["review"].dtype == np.int64
    assert columns["review"].shape == (3, 8)
    assert columns["review"][0].tolist() == [2, 5, 13, 3, *[PADDING_TOKEN] * 4]
    assert columns["review"][1].tolist() == [2, 3, *[PADDING_TOKEN] * 6]
    assert columns["mood"].tolist() == [0, 1, 2]
    assert (tokenization.counts.texts, tokenization.counts.truncated) == (3, 0)


def test_files_are_fitted_as_they_are_and_a_missing_text_is_filled(checkpoint, tmp_path):
    rows = make_reviews(40)
    texts = pa.array([None, *rows["review"].to_pylist()[1:]])
    pq.write_table(rows.set_column(0, "review", texts), tmp_path / "rows.parquet")
    classifier = make_classifier(checkpoint, tmp_path / "store", epochs=2)
    with pytest.raises(Exception, match="column review has nulls"):
        classifier.fit_on_parquet(path=str(tmp_path / "rows.parquet"))
    classifier.setFill({"review": ""})
    path = str(tmp_path / "rows.parquet")
    fitted = classifier.fit_on_parquet(path=path, val_path=path)
    assert fitted.getClasses() == ["happy", "sad"]
    assert fitted.getHistory()[-1]["rows"] == 40
    assert "validation" in fitted.getHistory()[-1]


def test_rows_in_memory_have_one_length(checkpoint, tmp_path):
    classifier = make_classifier(checkpoint, tmp_path, inmemory_cache_all=True, epochs=3)
    fitted = classifier.fit(make_reviews(64))
    history = fitted.getHistory()
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    tokens = fitted.getTransformationFn().tokenize_texts(["good film"])
    assert tokens.shape == (1, 8)  # a prediction is as long as its texts


def test_balanced_classes_count_words(checkpoint, tmp_path):
    rows = make_reviews(64)
    happy = [index for index, mood in enumerate(rows["mood"].to_pylist()) if mood == "happy"]
    few = rows.take([*happy[:4], *(index for index in range(64) if index not in happy)])
    fitted = make_classifier(checkpoint, tmp_path, class_weight="balanced").fit(few)
    plain = make_classifier(checkpoint, tmp_path / "plain").fit(few)
    weights = {"happy": len(few) / 2 / 4, "sad": len(few) / 2 / (len(few) - 4)}
    given = make_classifier(checkpoint, tmp_path / "given", class_weight=weights).fit(few)
    loss, plain_loss, given_loss = (
        one.getHistory()[0]["train"]["loss"] for one in (fitted, plain, given)
    )
    assert loss == pytest.approx(given_loss, rel=1e-5)
    assert loss != pytest.approx(plain_loss, rel=1e-3)


def remove_file(directory, name):
    (directory / name).unlink()


def pickle_weights(directory):
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    torch.save(weights, directory / "pytorch_model.bin")
    remove_file(directory, "model.safetensors")


def damage_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "no tokenizer": (
        lambda directory: remove_file(directory, "tokenizer.json"),
        FileNotFoundError,
        r"the checkpoint \S+ has no tokenizer.json, which tokenizer.save_pretrained writes",
    ),
    "no configuration": (
        lambda directory: remove_file(directory, "config.json"),
        FileNotFoundError,
        r"the checkpoint \S+ has no config.json",
    ),
    "no weights": (
        lambda directory: remove_file(directory, "model.safetensors"),
        FileNotFoundError,
        r"the checkpoint \S+ has no weights: no model.safetensors",
    ),
    "pickled weights": (
        pickle_weights,
        PickleNotAllowedError,
        r"the weights of the checkpoint \S+ are a pickle, pytorch_model.bin",
    ),
    "damaged weights": (
        damage_weights,
        ValueError,
        r"model.safetensors of the checkpoint \S+ is damaged",
    ),
    "damaged tokenizer": (
        lambda directory: (directory / "tokenizer.json").write_text("{"),
        ValueError,
        r"config.json or tokenizer.json of the checkpoint \S+ is not understood",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_usable_is_named_before_rows_are_written(damage, tmp_path):
    change, kind, message = DAMAGES[damage]
    directory = Path(write_checkpoint(tmp_path / "checkpoint"))
    change(directory)
    with pytest.raises(kind, match=message):
        make_classifier(str(directory), tmp_path / "store").fit(make_reviews(8))
    assert not (tmp_path / "store").exists()


def test_pickled_weights_are_read_with_consent(tmp_path, monkeypatch):
    directory = Path(write_checkpoint(tmp_path / "checkpoint"))
    wanted = make_classifier(str(directory), tmp_path / "safe").fit(make_reviews(8)).getHistory()
    pickle_weights(directory)
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "1")
    found = make_classifier(str(directory), tmp_path / "store").fit(make_reviews(8)).getHistory()
    assert found[0]["train"] == wanted[0]["train"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "/no/such/directory"}, "the checkpoint does not exist: /no/such/directory"),
        ({"text_col": "reviews"}, "feature column 'reviews' is not in the table"),
        ({"text_col": "stars"}, "text column 'stars' has values of type float, which are no"),
        ({"label_col": "smile"}, "label column 'smile' is not in the table"),
        ({"max_length": LENGTH + 1}, f"max_length={LENGTH + 1} is more than the checkpoint"),
        ({"model": torch.nn.Linear(1, 1)}, "model cannot be set: it follows from checkpoint"),
        ({"loss": lambda output, _label: output.sum()}, "the form of this loss is unknown"),
        ({"learning_rate": 0.1, "optimizer": torch.optim.SGD}, "at most one of learning_rate"),
    ],
)
def test_options_that_do_not_fit_are_named_before_work(checkpoint, tmp_path, options, message):
    known = {"checkpoint": checkpoint} | options
    classifier = make_classifier(store=tmp_path / "store", **known)
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        classifier.fit(make_reviews(8))
    assert not (tmp_path / "store" / "runs").exists()


def test_values_that_cannot_be_are_named():
    with pytest.raises(TypeError, match="checkpoint must be the path of a directory"):
        TextClassifier(checkpoint=3)
    with pytest.raises(TypeError, match="lora must be a rank, such as 8, or a LoraConfig"):
        TextClassifier(lora="8")
    with pytest.raises(ValueError, match=r"lora must be .*: 0"):
        TextClassifier(lora=0)
    with pytest.raises(TypeError, match="optimizer must be a function of the trainable"):
        TextClassifier(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def test_rows_that_do_not_fit_are_named(checkpoint, tmp_path):
    rows = make_reviews(8)
    texts = pa.array([None, *rows["review"].to_pylist()[1:]])
    with pytest.raises(ValueError, match="column review has nulls"):
        make_classifier(checkpoint, tmp_path / "null").fit(rows.set_column(0, "review", texts))
    labels = pa.array(["sad"] * 8)
    with pytest.raises(ValueError, match="label column 'mood' has one class, sad"):
        make_classifier(checkpoint, tmp_path / "one").fit(rows.set_column(1, "mood", labels))


def test_a_label_that_only_validation_has_is_named(checkpoint, tmp_path):
    rows = make_reviews(9)
    moods = [*rows["mood"].to_pylist()[:8], "angry"]
    held = pa.array([*[False] * 8, True])
    rows = rows.set_column(1, "mood", pa.array(moods)).append_column("held", held)
    with pytest.raises(ValueError, match=r"mood.*angry"):
        make_classifier(checkpoint, tmp_path, validation="held").fit(rows)


def test_the_parameters_of_the_user_stay_as_they_are(checkpoint, tmp_path):
    classifier = make_classifier(checkpoint, tmp_path)
    before = {param.name: value for param, value in classifier._paramMap.items()}
    classifier.fit(make_reviews(8))
    assert {param.name: value for param, value in classifier._paramMap.items()} == before
    assert isinstance(classifier, Params)


@pytest.mark.parametrize("lora", [None, 2])
def test_a_model_predicts_texts_and_its_saved_parts_do_the_same(checkpoint, tmp_path, lora):
    rows = make_reviews(24)
    fitted = make_classifier(checkpoint, tmp_path, lora=lora, epochs=2).fit(rows)
    assert fitted.getBatchSize() == 64
    names = fitted.getProbabilityCol(), fitted.getPredictedLabelCol()
    assert names == ("mood__probability", "mood__predicted")
    frame = SimpleNamespace(columns=["0", "review"], sparkSession=None)
    batch = pa.RecordBatch.from_arrays([pa.array(range(24)), rows["review"].combine_chunks()],
                                       names=["0", "1"])  # fmt: skip
    (found,) = fitted._create_predictor(frame).predict_outputs(batch)
    fitted.save_pretrained(tmp_path / "plain")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    tokens = make_tokenizer()(rows["review"].to_pylist(), return_tensors="pt", padding=True)
    with torch.no_grad():
        wanted = network.eval()(**tokens).logits.numpy()
    assert found == pytest.approx(wanted, abs=1e-5)
    values = {param.name: value for param, value in fitted._paramMap.items() if value is not None}
    plain, parts = fitted.write().split_plain_and_packed(values)
    assert set(parts) == {path.name for path in (tmp_path / "plain").iterdir()}
    loaded = TextClassifierModel(**{name: plain[name] for name in plain if name != "outputs"})
    TextClassifierModel.read().restore_packed_parts(loaded, parts, "saved")
    (again,) = loaded._create_predictor(frame).predict_outputs(batch)
    assert again == pytest.approx(found, abs=1e-5)
    nulls = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([None], pa.string())], ["0", "1"])
    predictor = loaded._create_predictor(frame)
    with pytest.raises(ValueError, match="column 'review' has nulls: 1 of 1 rows"):
        predictor.predict_outputs(nulls)
    empty = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([""])], ["0", "1"])
    (wanted,) = predictor.predict_outputs(empty)
    (filled,) = loaded.setFill({"review": ""})._create_predictor(frame).predict_outputs(nulls)
    assert filled == pytest.approx(wanted, abs=1e-6)
