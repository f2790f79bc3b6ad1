# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TokenClassifier` without Spark: labels of words become labels of tokens, and the other way."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import peft
import pyarrow as pa
import pytest
import torch
from tests.parity.gang import StandingGang
from tests.text_checkpoints import (
    BAD_WORDS,
    GOOD_WORDS,
    LENGTH,
    OTHER_WORDS,
    make_tokenizer,
    write_checkpoint,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForTokenClassification

from farandole.spark.common import LocalBackend
from farandole.spark.common.model import column_function
from farandole.spark.transformers import TokenClassifier, TokenClassifierModel
from farandole.spark.transformers.tokenization import PADDING_TOKEN
from farandole.spark.transformers.word_tokenization import WordTokenization, mark_word_beginnings

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
GANGS = {size: StandingGang(size) for size in (1, 2)}
TAGS = dict.fromkeys(GOOD_WORDS, "GOOD") | dict.fromkeys(BAD_WORDS, "BAD")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", autouse=True)
def standing_processes():
    yield
    for gang in GANGS.values():
        gang.close()


def make_sentences(count, *, longest=6):
    draw = np.random.default_rng(0)
    words = [
        draw.choice([*GOOD_WORDS, *BAD_WORDS, *OTHER_WORDS], draw.integers(1, longest + 1)).tolist()
        for _ in range(count)
    ]
    tags = [[TAGS.get(word, "O") for word in row] for row in words]
    return pa.table({"words": words, "tags": tags})


def make_token_classifier(checkpoint, store, processes=1, **options):
    known = {
        "text_col": "words", "label_col": "tags", "learning_rate": 0.01, "batch_size": 16,
        "random_seed": 1, "verbose": 0, "backend": GANGS[processes],
    }  # fmt: skip
    return TokenClassifier(checkpoint=checkpoint, store=str(store), **known | options)


def make_tokenization(**options):
    known = {
        "text_col": "words", "label_col": "tags", "classes": ("BAD", "GOOD", "O"),
        "tokenizer": make_tokenizer().backend_tokenizer.to_str(), "max_length": LENGTH,
        "length_multiple": 4,
    }  # fmt: skip
    return WordTokenization(**known | options)


def make_batch(words, tags=None):
    columns = {"words": words} | ({} if tags is None else {"tags": tags})
    return {
        name: np.array([json.dumps(row) for row in rows], dtype=object)
        for name, rows in columns.items()
    }


def predict_labels(fitted, words):
    frame = SimpleNamespace(columns=["0", "words"], sparkSession=None)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(len(words))), pa.array(words, pa.list_(pa.string()))], names=["0", "1"]
    )
    return fitted._create_predictor(frame).predict_words(batch)


def test_the_first_token_of_a_word_has_its_label_and_others_are_ignored():
    words = [["good-bad", "film"], [], ["the"]]  # a word of three tokens
    made = make_tokenization()(make_batch(words, [["GOOD", "O"], [], [None]]))
    assert made["words"].tolist() == [
        [2, 5, 1, 9, 13, 3, PADDING_TOKEN, PADDING_TOKEN],
        [2, 3, *[PADDING_TOKEN] * 6],
        [2, 16, 3, *[PADDING_TOKEN] * 5],
    ]
    assert made["tags"].tolist() == [
        [-100, 1, -100, -100, 2, -100, -100, -100],
        [-100] * 8,
        [-100] * 8,
    ]


@pytest.mark.parametrize(("side", "used"), [("right", ["GOOD", "O"]), ("left", ["O", "BAD"])])
def test_words_beyond_the_length_are_counted_and_have_no_label(side, used):
    tokenization = make_tokenization(max_length=4, truncation_side=side)
    made = tokenization(make_batch([["good", "film", "bad"]], [["GOOD", "O", "BAD"]]))
    numbers = [tokenization.classes.index(name) for name in used]
    assert made["tags"].tolist() == [[-100, *numbers, -100]]
    assert (tokenization.counts.texts, tokenization.counts.truncated) == (3, 1)


@pytest.mark.parametrize(("side", "used"), [("right", 0), ("left", -100)])
def test_a_cut_word_counts_if_its_first_token_is_used(side, used):
    tokenization = make_tokenization(max_length=4, truncation_side=side)
    made = tokenization(make_batch([["bad-good"]], [["BAD"]]))  # three tokens, two are used
    assert made["tags"].tolist() == [[-100, used, -100, -100]]
    assert tokenization.counts.truncated == (used < 0)


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        ([["good", "film"]], [["O"]], "has 1 label in a row with 2 words in column 'words'"),
        ([["good"]], [["OTHER"]], "has the label 'OTHER', which is no class: categories has BAD"),
        ([["good", None]], [["O", "O"]], "text column 'words' has a null among its words"),
        ([["good", 3]], [["O", "O"]], "text column 'words' has words of type int"),
    ],
)
def test_rows_that_do_not_fit_are_named(words, tags, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_tokenization()(make_batch(words, tags))


def test_a_byte_level_tokenizer_takes_a_word_like_a_word_after_a_space():
    backend = Tokenizer(models.BPE({"Ġ": 0, "a": 1, "Ġa": 2, "b": 3}, [("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert backend.encode(["a", "b"], is_pretokenized=True).ids == [1, 3]
    marked = Tokenizer.from_str(mark_word_beginnings(backend.to_str()))
    assert marked.encode(["a", "b"], is_pretokenized=True).ids == [2, 0, 3]
    assert marked.encode("b a").ids == [0, 3, 2]


@pytest.mark.parametrize("lora", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_classifier_of_words_learns_and_transformers_reads_it(checkpoint, tmp_path, lora):
    rows = make_sentences(192)
    fitted = make_token_classifier(
        checkpoint, tmp_path / "store", processes=2, epochs=24, lora=lora,
        learning_rate=0.03 if lora else 0.01,
    ).fit(rows)  # fmt: skip
    assert fitted.getClasses() == ["BAD", "GOOD", "O"]
    words = [["the", "film", "is", "awful"], ["nice", "book"], []]
    labels, shares = predict_labels(fitted, words)
    assert labels == [["O", "O", "O", "BAD"], ["GOOD", "O"], []]
    fitted.save_pretrained(tmp_path / "saved")
    network = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved").eval()
    assert network.config.id2label == {0: "BAD", 1: "GOOD", 2: "O"}
    tokens = make_tokenizer()(words[0], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        wanted = network(**tokens).logits.softmax(dim=2)[0, 1:-1].amax(dim=1)
    assert shares[0] == pytest.approx(wanted.tolist(), abs=1e-5)
    values = {param.name: value for param, value in fitted._paramMap.items() if value is not None}
    plain, parts = fitted.write().split_plain_and_packed(values)
    loaded = TokenClassifierModel(**{name: plain[name] for name in plain if name != "outputs"})
    TokenClassifierModel.read().restore_packed_parts(loaded, parts, "saved")
    assert predict_labels(loaded, words)[0] == labels
    if lora:
        fitted.save_adapter(tmp_path / "adapter")
        config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        assert config.task_type == "TOKEN_CLS"


def test_a_model_of_words_is_a_function_of_columns(checkpoint, tmp_path, monkeypatch):
    fitted = make_token_classifier(checkpoint, tmp_path).fit(make_sentences(32))
    found = {}
    session = SimpleNamespace(udf=SimpleNamespace(register=found.__setitem__))
    monkeypatch.setattr(column_function, "make_column_function", lambda *made: made)
    words = [["good", "film"], ["awful"]]
    labels, shares = predict_labels(fitted, words)
    fitted.register(session, "tag")
    (prediction, kinds), column = found["tag"], pa.array(words)
    assert [kind.simpleString() for kind in kinds] == ["array<string>", "array<float>"]
    tagged = prediction.predict_arrays(column)
    assert tagged.field("tags__predicted").to_pylist() == labels
    assert tagged.field("tags__probability").to_pylist() == shares
    fitted.register(session, "label", "tags__predicted")
    assert found["label"][0].predict_arrays(column).to_pylist() == labels
    with pytest.raises(ValueError, match="the model has no output column 'tags__output': tags__pr"):
        fitted.register(session, "label", "tags__output")


def test_two_processes_train_what_one_trains(checkpoint, tmp_path):
    rows, found = make_sentences(52), {}
    for processes, size, rate in ((1, 16, 0.01), (2, 8, 0.005)):
        fitted = make_token_classifier(
            checkpoint, tmp_path / str(processes), processes=processes, batch_size=size,
            learning_rate=rate, epochs=2,
        ).fit(rows)  # fmt: skip
        found[processes] = fitted.getHistory()[-1]["train"]["loss"]
    assert found[1] == pytest.approx(found[2], rel=1e-4)


def test_integers_and_named_classes_are_labels(checkpoint, tmp_path):
    rows = make_sentences(32)
    numbers = [[3 * (tag == "BAD") if tag != "GOOD" else -100 for tag in row]
               for row in rows["tags"].to_pylist()]  # fmt: skip
    integers = rows.set_column(1, "tags", pa.array(numbers))
    fitted = make_token_classifier(checkpoint, tmp_path / "integers").fit(integers)
    assert fitted.getClasses() == ["0", "3"]
    classes = ["O", "GOOD", "BAD", "UGLY"]
    classifier = make_token_classifier(checkpoint, tmp_path, categories={"tags": classes})
    assert classifier.fit(rows.to_pandas()).getClasses() == classes


def test_cut_words_are_said_once_and_predicted_as_null(checkpoint, tmp_path, capsys):
    rows = make_sentences(40, longest=2 * LENGTH)
    counts = [len(row) for row in rows["words"].to_pylist()]
    options = {"backend": LocalBackend(2, verbose=0), "epochs": 2, "verbose": 1}
    fitted = make_token_classifier(checkpoint, tmp_path, max_length=8, **options).fit(rows)
    said = [line for line in capsys.readouterr().err.splitlines() if "max_length" in line]
    cut = sum(max(0, count - 6) for count in counts)
    assert len(said) == 1
    assert said[0].startswith(f"{cut} of {sum(counts)} words are not within max_length=8 tokens")
    labels, shares = predict_labels(fitted, [["the"] * 7, ["film"]])
    assert [label is None for label in labels[0]] == [False] * 6 + [True]
    assert shares[0][6] is None
    assert len(labels[1]) == 1


def change_words(rows):
    return rows.set_column(0, "words", pa.array(["good film"] * len(rows)))


def encode_words(rows):
    texts = pa.array(["good film"] * len(rows)).dictionary_encode()
    return rows.set_column(0, "words", texts)


def change_labels(rows, label):
    labels = [[label] * len(row) for row in rows["words"].to_pylist()]
    return rows.set_column(1, "tags", pa.array(labels))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (change_words, {}, "text column 'words' has type string: lists of words are needed"),
        (lambda rows: change_labels(rows, 0.5), {}, "label column 'tags' has type list<"),
        (lambda rows: change_labels(rows, "O"), {}, "label column 'tags' has 1 class, O"),
        (encode_words, {}, "text column 'words' has type dictionary<"),
        (lambda rows: rows.drop_columns("tags"), {}, "label column 'tags' is not in the table"),
        (lambda rows: [rows], {}, "fit takes a Spark DataFrame, or a pyarrow"),
        (lambda rows: rows, {"class_weight": "balanced"}, "class_weight cannot be set"),
        (lambda rows: rows, {"text_col": None}, "text_col is required"),
        (lambda rows: rows, {"categories": {"tags": ["BAD", "O"]}}, "'GOOD', which is no class"),
    ],
)
def test_tables_that_do_not_fit_are_named(checkpoint, tmp_path, change, options, message):
    classifier = make_token_classifier(checkpoint, tmp_path / "store", **options)
    with pytest.raises((ValueError, TypeError), match=message):
        classifier.fit(change(make_sentences(16)))


def test_calls_without_meaning_for_words_are_refused(checkpoint, tmp_path):
    classifier = make_token_classifier(checkpoint, tmp_path)
    with pytest.raises(ValueError, match="fit_on_parquet does not read lists of words"):
        classifier.fit_on_parquet(path=os.devnull)
    with pytest.raises(ValueError, match="a row has many labels: compare"):
        TokenClassifierModel().evaluate(None)


@pytest.mark.parametrize("lora", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_like_an_uninterrupted_one(checkpoint, tmp_path, lora):
    rows, found = make_sentences(40), {}
    for name, lengths in (("at once", [2]), ("resumed", [1, 2])):
        for epochs in lengths:
            fitted = make_token_classifier(
                checkpoint, tmp_path / name, lora=lora, run_id="run", epochs=epochs
            ).fit(rows)
        found[name] = dict(fitted.getModel().state_dict())
    for name, value in found["at once"].items():
        assert torch.equal(value, found["resumed"][name]), name
