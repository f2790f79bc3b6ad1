# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tells kind reviews from unkind ones by their tokens: lists of different lengths, without Spark.

Each list of integers is a row of its own length. `Pad` keeps 64 tokens of it, and pads each batch
to the shortest of four lengths that holds its longest row.

It reaches a validation accuracy of at least 0.85, which it prints at the end.
"""

import random

import pyarrow as pa
import torch

from farandole.data import Pad
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

WORDS, KIND, UNKIND = 500, range(1, 21), range(21, 41)


def reviews(count: int = 3000) -> pa.Table:
    """Reviews of 3 to 80 tokens; a few of them are kind or unkind words, and more of one sort
    than of the other.
    """
    draw = random.Random(1)  # noqa: S311 - made-up reviews
    tokens, kind = [], []
    for _ in range(count):
        label = draw.random() < 0.5
        telling = [
            draw.choice(KIND if (draw.random() < 0.9) == label else UNKIND)
            for _ in range(draw.randint(2, 6))
        ]
        words = telling + [draw.randrange(41, WORDS) for _ in range(draw.randint(1, 74))]
        draw.shuffle(words)
        tokens.append(words)
        kind.append(int(label))
    return pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32())), "kind": kind})


class Reviews(torch.nn.Module):
    """Embeddings of tokens, weighed by attention; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 16, padding_idx=0)
        self.weight = torch.nn.Linear(16, 1)
        self.last = torch.nn.Linear(16, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        weights = (
            self.weight(embedded)
            .masked_fill((tokens == 0).unsqueeze(-1), float("-inf"))
            .softmax(dim=1)
        )
        return self.last((embedded * weights).sum(dim=1))


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Reviews()
    fitted = TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[accuracy],
        feature_cols=["tokens"],
        label_cols=["kind"],
        ragged={"tokens": Pad(value=0, max_length=64, buckets=4)},
        validation=0.2,
        validation_stratify="kind",
        batch_size=32,
        epochs=6,
        random_seed=1,
        store=LocalStore("farandole-sequences"),
        backend=LocalBackend(2),
    ).fit(reviews())
    history = fitted.history_frame()
    print(history[["epoch", "loss", "val_loss", "val_accuracy"]].to_string(index=False))
    print(f"validation accuracy {history['val_accuracy'].iloc[-1]:.4f}")
