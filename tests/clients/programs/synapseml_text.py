# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SynapseML's DeepTextClassifier on a tiny BERT with random weights: fit, transform, save, load."""

import sys
from pathlib import Path

import torch
from horovod.spark.common.store import LocalStore
from pyspark.sql import SparkSession
from synapse.ml.dl import DeepTextClassifier, DeepTextModel
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

NUMBERS = [f"n{number}" for number in range(12)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "film", "good", "bad", *NUMBERS]

MAX_WRONG_TEXTS = 6


def make_checkpoint(folder):
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(vocab_file=str(folder / "words.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def predictions(frame):
    rows = frame.select("text", "label", "prediction").collect()
    return sorted((row.text, row.label, row.prediction) for row in rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    # All rows differ, because the rows of the validation are chosen by their values.
    texts = [
        (f"{article} {word} film {number}", label)
        for article in ("a", "the")
        for label, word in enumerate(("bad", "good"))
        for number in NUMBERS
    ]
    frame = spark.createDataFrame(texts, ["text", "label"])
    classifier = DeepTextClassifier(
        checkpoint=make_checkpoint(folder / "tiny"),
        num_classes=2,
        max_token_len=8,
        learning_rate=0.02,
        num_proc=2,
        use_gpu=False,
        store=LocalStore(str(folder / "store")),
        batch_size=8,
        epochs=15,
        validation=0.25,
        verbose=0,
    )
    # A saved estimator cannot be loaded, also with Horovod: its class needs arguments.
    classifier.write().overwrite().save(str(folder / "classifier"))
    fitted = classifier.fit(frame)
    assert type(fitted) is DeepTextModel
    found = predictions(fitted.transform(frame))
    wrong = [row for row in found if row[1] != row[2]]
    # The order of rows is random, so a few may be wrong. Guesses would be right for 24.
    assert len(wrong) <= MAX_WRONG_TEXTS, wrong
    fitted.write().overwrite().save(str(folder / "model"))
    assert predictions(DeepTextModel.load(str(folder / "model")).transform(frame)) == found
    print(f"at least {len(found) - MAX_WRONG_TEXTS} of {len(found)} texts are right")
    spark.stop()
