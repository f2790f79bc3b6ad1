# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Two processes fine-tune a checkpoint as one process does, and as a plain loop does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.text_checkpoints import make_reviews, make_tokenizer, write_checkpoint

from farandole.spark.transformers import TextClassifier

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
ROWS, STEP_ROWS, EPOCHS, RATE = 23, 8, 2, 0.05
TOLERANCE = 1e-5


def fit_reviews(checkpoint, gangs, store, processes, **options):
    return TextClassifier(
        checkpoint=checkpoint,
        text_col="review",
        label_col="mood",
        optimizer=partial(torch.optim.SGD, lr=RATE / processes, momentum=0.9),
        batch_size=STEP_ROWS // processes,
        epochs=EPOCHS,
        shuffle=False,
        random_seed=1,
        verbose=0,
        backend=gangs(processes),
        store=str(store),
        **options,
    ).fit(make_reviews(ROWS))


def largest_difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": 2},
        {"length_multiple": 1, "max_length": 6},
        {"class_weight": {"sad": 3.0}},
        {"inmemory_cache_all": True},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_two_processes_train_what_one_trains(tmp_path, gangs, options):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    fitted = [
        fit_reviews(checkpoint, gangs, tmp_path / f"store{size}", size, **options)
        for size in (1, 2)
    ]
    single, double = (dict(model.getModel().state_dict()) for model in fitted)
    assert largest_difference(double, single) < TOLERANCE
    losses = [model.getHistory()[-1]["train"]["loss"] for model in fitted]
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)


def test_a_plain_loop_trains_the_same(tmp_path, gangs):
    checkpoint, rows = write_checkpoint(tmp_path / "checkpoint"), make_reviews(ROWS).to_pydict()
    fitted = fit_reviews(checkpoint, gangs, tmp_path / "store", 2)
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    network = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    optimizer, tokenizer = (
        torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9),
        make_tokenizer(),
    )
    network.train()
    for _ in range(EPOCHS):
        for start in range(0, ROWS, STEP_ROWS):
            texts = rows["review"][start : start + STEP_ROWS]
            moods = rows["mood"][start : start + STEP_ROWS]
            labels = torch.tensor([["happy", "sad"].index(mood) for mood in moods])
            logits = network(**tokenizer(texts, return_tensors="pt", padding=True)).logits
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
    found = dict(fitted.getModel().network.state_dict())
    assert largest_difference(found, dict(network.state_dict())) < TOLERANCE
