# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TokenClassifier` on Spark: lists of words in, lists of labels out."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as sf
from tests.text_checkpoints import BAD_WORDS, GOOD_WORDS, OTHER_WORDS, write_checkpoint

from farandole.spark.transformers import TokenClassifier

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
TAGS = dict.fromkeys(GOOD_WORDS, "GOOD") | dict.fromkeys(BAD_WORDS, "BAD")
SCHEMA = "words array<string>, `the.tags` array<string>"


@pytest.fixture(scope="module")
def sentences(spark):
    draw, rows = np.random.default_rng(0), []
    for _ in range(96):
        words = draw.choice([*GOOD_WORDS, *BAD_WORDS, *OTHER_WORDS], draw.integers(1, 7)).tolist()
        tags = [None if word == "the" else TAGS.get(word, "O") for word in words]
        rows.append((words, tags))
    return spark.createDataFrame(rows, SCHEMA).repartition(2)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return TokenClassifier(
        checkpoint=write_checkpoint(tmp_path_factory.mktemp("checkpoint")), text_col="words",
        label_col="the.tags", epochs=12, batch_size=16, learning_rate=0.005, random_seed=1,
        num_proc=2, verbose=0, store=str(tmp_path_factory.mktemp("store")),
    )  # fmt: skip


def test_a_classifier_of_words_is_fitted_saved_in_a_pipeline_and_predicts(
    classifier, sentences, tmp_path
):
    model = Pipeline(stages=[classifier]).fit(sentences)
    rows = model.transform(sentences).collect()
    added = ["the.tags__predicted", "the.tags__probability"]
    assert rows[0].__fields__ == ["words", "the.tags", *added]
    pairs = [pair for row in rows for pair in zip(row[1], row[2], strict=True)]
    assert None in {label for label, _ in pairs}
    assert np.mean([label == predicted for label, predicted in pairs if label]) > 0.95
    assert all(len(row[3]) == len(row.words) and min(row[3]) > 1 / 3 for row in rows)
    model.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    assert [row[2] for row in loaded.transform(sentences).collect()] == [row[2] for row in rows]
    stage = loaded.stages[0]
    assert stage.getClasses() == ["BAD", "GOOD", "O"]
    joined = sentences.withColumn("words", sf.array_join("words", " "))
    with pytest.raises(ValueError, match="text column 'words' has type string: lists of words"):
        stage.transform(joined)
    with pytest.raises(ValueError, match=r"DataFrame already has an output column: the\.tags__pr"):
        model.transform(model.transform(sentences))


def test_columns_that_do_not_fit_are_named(classifier, sentences):
    joined = sentences.withColumn("words", sf.array_join("words", " "))
    with pytest.raises(ValueError, match="text column 'words' has type string: lists of words"):
        classifier.fit(joined)
    with pytest.raises(ValueError, match=r"label column 'the\.tags' has type string: lists of wo"):
        classifier.fit(sentences.withColumn("the.tags", sf.lit("O")))
    with pytest.raises(ValueError, match=r"label column 'the\.tags' is not in the DataFrame"):
        classifier.fit(sentences.drop("`the.tags`").drop("the.tags"))
    few = sentences.withColumn("the.tags", sf.expr("slice(`the.tags`, 1, 0)"))
    with pytest.raises(ValueError, match=r"label column 'the\.tags' has 0 classes"):
        classifier.fit(few)
