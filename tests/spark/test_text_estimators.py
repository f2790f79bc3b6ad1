# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators of text on Spark: a column of texts in, classes, probabilities and vectors out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as sf
from tests.pages import blocks_of
from tests.text_checkpoints import make_network, make_reviews, make_tokenizer, write_checkpoint
from transformers import AutoModelForSequenceClassification

from farandole.spark.transformers import TextClassifier, TextEmbedder, TextRegressor

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
ADDED = ["mood__output", "mood__probability", "mood__predicted"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reviews(spark):
    return spark.createDataFrame(make_reviews(128).to_pandas()).repartition(2)


def logits_of(network, texts):
    tokens = make_tokenizer()(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        return network.eval()(**tokens).logits


@pytest.mark.parametrize("lora", [None, 4])
def test_a_classifier_is_fitted_saved_in_a_pipeline_and_predicts(
    checkpoint, reviews, tmp_path, lora
):
    classifier = TextClassifier(
        checkpoint=checkpoint, text_col="review", label_col="mood", epochs=12, batch_size=16,
        learning_rate=0.02 if lora else 0.003,  # higher rates ruin the whole network
        random_seed=1, num_proc=2, verbose=0, lora=lora,
        store=str(tmp_path / "store"),
    )  # fmt: skip
    pipeline = Pipeline(stages=[classifier])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    model = Pipeline.load(str(tmp_path / "pipeline")).fit(reviews)
    predicted = model.transform(reviews)
    assert predicted.columns == ["review", "mood", "stars", *ADDED]
    rows = predicted.collect()
    assert np.mean([row.mood == row.mood__predicted for row in rows]) > 0.95
    assert model.stages[0].evaluate(reviews)["accuracy"] > 0.95
    model.stages[0].save_pretrained(tmp_path / "plain")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    logits = logits_of(network, [row.review for row in rows])
    found = torch.tensor(np.array([row.mood__output.toArray() for row in rows]))
    assert torch.allclose(found.float(), logits, atol=1e-4)
    shares = torch.tensor(np.array([row.mood__probability.toArray() for row in rows]))
    assert torch.allclose(shares.float(), logits.softmax(dim=1), atol=1e-4)
    model.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    again = loaded.transform(reviews).collect()
    assert [row.mood__predicted for row in again] == [row.mood__predicted for row in rows]
    same = torch.tensor(np.array([row.mood__output.toArray() for row in again]))
    assert torch.allclose(same, found, atol=1e-4)
    assert loaded.stages[0].getClasses() == ["happy", "sad"]


def test_saved_models_hold_no_pickle(checkpoint, reviews, tmp_path, monkeypatch):
    fitted = TextRegressor(
        checkpoint=checkpoint, text_col="review", label_col="stars", num_proc=1, verbose=0,
        random_seed=1, store=str(tmp_path / "store"),
    ).fit(reviews)  # fmt: skip
    fitted.write().overwrite().save(str(tmp_path / "saved"))
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")
    loaded = type(fitted).load(str(tmp_path / "saved"))
    rows = [row.stars__output for row in loaded.transform(reviews).collect()]
    wanted = [row.stars__output for row in fitted.transform(reviews).collect()]
    assert rows == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ValueError, match="write it with save_pretrained"):
        loaded.to_onnx(str(tmp_path / "model.onnx"))


def test_an_embedder_adds_vectors_and_is_saved(checkpoint, reviews, tmp_path):
    embedder = TextEmbedder(checkpoint=checkpoint, text_col="review")
    rows = embedder.transform(reviews).collect()
    vectors = np.array([row.embedding.toArray() for row in rows])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(rows)), abs=1e-5)
    tokens = make_tokenizer()([row.review for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        states = make_network().bert.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][:, :, None]
    means = (states * mask).sum(dim=1) / mask.sum(dim=1)
    wanted = torch.nn.functional.normalize(means, dim=1)
    assert torch.allclose(torch.tensor(vectors).float(), wanted, atol=1e-4)
    embedder.setPooling("first").setNormalize(False).setEmbeddingCol("vector")
    first = [row.vector.toArray() for row in embedder.transform(reviews).collect()]
    assert torch.allclose(torch.tensor(np.array(first)).float(), states[:, 0], atol=1e-4)
    embedder.write().overwrite().save(str(tmp_path / "saved"))
    again = TextEmbedder.load(str(tmp_path / "saved")).transform(reviews).collect()
    assert np.allclose([row.vector.toArray() for row in again], first, atol=1e-5)


def test_the_examples_of_the_page_run(spark, checkpoint, reviews, tmp_path):
    script = "\n".join(
        block.text
        for block in blocks_of("docs/spark/transformers.md")
        if block.kind == "python" and block.why_not is None and "/models/bert" in block.text
    )
    script = script.replace('"/models/bert"', repr(checkpoint))
    for path in ("/data/farandole", "/models/reviews"):
        script = script.replace(f'"{path}"', repr(str(tmp_path / path[1:])))
    frame = reviews.select("review", sf.col("stars").cast("int").alias("stars"))
    sentences = spark.createDataFrame(
        [(["good", "film"], ["GOOD", "O"])] * 8, "words array<string>, tags array<string>"
    )
    names = {"df": frame, "sentences": sentences}
    exec(script, names)
    assert names["tagged"].columns[2:] == ["tags__predicted", "tags__probability"]
    assert names["predicted"].columns[2:] == [
        "stars__output",
        "stars__probability",
        "stars__predicted",
    ]
    assert {row.stars__predicted for row in names["predicted"].collect()} <= {"1", "5"}
    assert names["vectors"].columns[2:] == ["embedding"]
    assert (tmp_path / "models" / "reviews" / "model.safetensors").exists()


def test_rows_and_files_that_do_not_fit_are_named(spark, checkpoint, reviews, tmp_path):
    options = {"text_col": "review", "label_col": "mood", "num_proc": 1, "verbose": 0}
    classifier = TextClassifier(checkpoint=checkpoint, store=str(tmp_path / "store"), **options)
    nulls = spark.createDataFrame([(None, "sad"), ("good", "happy")], "review string, mood string")
    with pytest.raises(Exception, match="column review has nulls in 1 of 1 rows"):
        classifier.fit(nulls)
    with pytest.raises(ValueError, match="feature column 'review' is not in the DataFrame"):
        classifier.fit(reviews.drop("review"))
    with pytest.raises(FileNotFoundError, match="the checkpoint does not exist: /no/such"):
        TextEmbedder(checkpoint="/no/such", text_col="review").transform(reviews)
    with pytest.raises(ValueError, match="text_col is required"):
        TextEmbedder(checkpoint=checkpoint).transform(reviews)
    with pytest.raises(Exception, match="column 'review' has nulls"):
        TextEmbedder(checkpoint=checkpoint, text_col="review").transform(nulls).collect()
    filled = TextEmbedder(checkpoint=checkpoint, text_col="review", fill={"review": "good"})
    vectors = [row.embedding.toArray() for row in filled.transform(nulls).collect()]
    assert np.allclose(vectors[0], vectors[1])
