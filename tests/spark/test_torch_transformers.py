# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A model of transformers on Spark, as a user brings it."""

from __future__ import annotations

import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.sql import functions as sf
from transformers import BertConfig, BertForSequenceClassification

from farandole.spark.torch import TorchEstimator

pytestmark = pytest.mark.timeout(600)
WORDS, LENGTH = 30, 4


@pytest.mark.slow
def test_a_classifier_of_transformers_is_fitted_saved_and_predicts(spark, tmp_path):
    word = (sf.col("id") * 7 % (WORDS - 2) + 2).cast("int")
    rows = spark.range(256, numPartitions=2).select(
        sf.array(*[(word + place) % WORDS for place in range(LENGTH)]).alias("ids"),
        sf.array(*[sf.lit(1)] * LENGTH).alias("mask"),
        (word >= WORDS // 2).cast("int").alias("stars"),
    )
    torch.manual_seed(0)
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
        )
    )
    fitted = TorchEstimator(
        model=bert,
        optimizer=torch.optim.Adam(bert.parameters(), lr=0.005),
        feature_cols={"input_ids": "ids", "attention_mask": "mask"},
        label_cols=["stars"],
        num_proc=2,
        epochs=8,
        batch_size=16,
        random_seed=1,
        verbose=0,
        store=str(tmp_path / "store"),
    ).fit(rows)
    assert fitted.getInputDtypes() == ["int64", "float32"]
    measured = fitted.evaluate(rows)
    assert measured["accuracy"] > 0.9
    fitted.setPredictionCol("prediction")
    predicted = fitted.transform(rows).select("ids", "stars__output", "prediction").collect()
    with torch.no_grad():
        known = fitted.getModel().eval()(torch.tensor([row.ids for row in predicted])).logits
    assert torch.allclose(
        known, torch.tensor([row.stars__output.toArray() for row in predicted]).float(), atol=1e-4
    )
    assert [row.prediction for row in predicted] == known.argmax(dim=1).tolist()
    PipelineModel(stages=[fitted]).write().overwrite().save(str(tmp_path / "saved"))
    again = PipelineModel.load(str(tmp_path / "saved"))
    assert again.stages[0].getFeatureColumns() == {"input_ids": "ids", "attention_mask": "mask"}
    assert again.transform(rows).select("ids", "stars__output", "prediction").collect() == predicted
