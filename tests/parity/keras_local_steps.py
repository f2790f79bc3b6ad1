# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of `KerasEstimator` with `sync_every`, next to a loop that trains each process's rows apart
and averages. Run as a script, because a process has one backend of Keras.
"""

from __future__ import annotations

import json
import tempfile

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.spark.keras import KerasEstimator

ROWS, BATCH_SIZE, EPOCHS, PROCESSES, SYNC_EVERY = 37, 4, 2, 2, 3


def network():
    generator = np.random.default_rng(3)
    model = keras.Sequential(
        [keras.layers.Input((3,), name="x"), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
    )
    model.set_weights([generator.normal(size=w.shape) * 0.3 for w in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    return model


def average(models):
    weights = [model.get_weights() for model in models]
    for model in models:
        model.set_weights([np.mean(same, axis=0) for same in zip(*weights, strict=True)])


def train_apart(x, y):
    """Trains a model per process on its part of each step's rows, and averages weights."""
    models = [network() for _ in range(PROCESSES)]
    step_rows = BATCH_SIZE * PROCESSES
    for _ in range(EPOCHS):
        for step, start in enumerate(range(0, len(x), step_rows), 1):
            for rank, model in enumerate(models):
                rows = slice(start + rank, start + step_rows, PROCESSES)
                model.train_on_batch(x[rows], y[rows])
            if step % SYNC_EVERY == 0 or start + step_rows >= len(x):
                average(models)
        first = [np.array(keras.ops.convert_to_numpy(v)) for v in models[0].optimizer.variables]
        for model in models[1:]:  # an epoch ends with the momentum of the first process
            for variable, value in zip(model.optimizer.variables, first, strict=True):
                variable.assign(value)
    return models[0]


def fit(gang, folder, path, **options):
    known = {"sync_every": SYNC_EVERY, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    return KerasEstimator(
        model=network(),
        feature_cols=["x"],
        label_cols=["y"],
        shuffle=False,
        verbose=0,
        backend=gang,
        store=folder,
        **known | options,
    ).fit_on_parquet(path=path, val_path=path)


def refused_words(gang, folder, path, **options):
    try:
        fit(gang, folder, path, **options)
    except ValueError as error:
        return str(error)
    return ""


def main():
    from tests.parity.gang import StandingGang

    x = np.random.default_rng(5).normal(size=(ROWS, 3)).astype("float32")
    y = x.sum(1)
    gang = StandingGang(PROCESSES)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/train.parquet"
        pq.write_table(pa.table({"x": list(x), "y": y}), path)
        wanted = train_apart(x, y.reshape(-1, 1))
        fitted = fit(gang, f"{folder}/whole", path)
        synchronous = fit(gang, f"{folder}/each", path, sync_every=1)
        fit(gang, f"{folder}/parts", path, epochs=1, run_id="local")
        resumed = fit(gang, f"{folder}/parts", path, run_id="local")
        expected_loss = float(np.mean((wanted.predict_on_batch(x).reshape(-1) - y) ** 2))
        refusals = {
            "gradient_compression": {"gradient_compression": compression()},
            "backward_passes_per_step=2": {"backward_passes_per_step": 2},
            "use_ema": {"optimizer": keras.optimizers.SGD(0.1, use_ema=True)},
        }
        report = {
            "fitted": difference(wanted, fitted.getModel()),
            "synchronous": difference(wanted, synchronous.getModel()),
            "resumed": difference(wanted, resumed.getModel()),
            "losses": [expected_loss, fitted.getHistory()["val_loss"][-1]],
            "refused": {
                words: refused_words(gang, f"{folder}/refused", path, **options)
                for words, options in refusals.items()
            },
        }
    gang.close()
    print(json.dumps(report))


def compression():
    import farandole.keras as hvd

    return hvd.Compression.fp16


def difference(expected, found):
    pairs = zip(expected.get_weights(), found.get_weights(), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


if __name__ == "__main__":
    main()
