# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of `KerasEstimator` beside Keras's own `fit` on one process; run as a program, because a
process has one backend of Keras. One line adds a loss.

Prints one JSON object: the differences of each cell, and the cells that were refused.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 3
GLOBAL_BATCH_ROWS = 12
EPOCHS = 2

LABELS: dict[str, Callable[[Any, int], Any]] = {
    "number": lambda draw, rows: draw.normal(size=(rows, CLASSES)),
    "positive": lambda draw, rows: draw.uniform(0.2, 2.0, (rows, CLASSES)),
    "bit": lambda draw, rows: draw.integers(0, 2, (rows, CLASSES)).astype(float),
    "shares": lambda draw, rows: draw.dirichlet(np.ones(CLASSES), rows),
    "class": lambda draw, rows: draw.integers(0, CLASSES, rows),
    "mask": lambda draw, rows: draw.normal(size=(rows, 4)),
    "sequence": lambda draw, rows: draw.integers(1, CLASSES, (rows, 2)),
}
"""Kinds of labels."""
MEANS = {
    "MeanSquaredError": ("number", "linear"),
    "MeanAbsoluteError": ("number", "linear"),
    "MeanAbsolutePercentageError": ("positive", "softplus"),
    "MeanSquaredLogarithmicError": ("positive", "softplus"),
    "Huber": ("number", "linear"),
    "LogCosh": ("number", "linear"),
    "Poisson": ("positive", "softplus"),
    "KLDivergence": ("shares", "softmax"),
    "BinaryCrossentropy": ("bit", "sigmoid"),
    "BinaryFocalCrossentropy": ("bit", "sigmoid"),
    "CategoricalCrossentropy": ("shares", "softmax"),
    "CategoricalFocalCrossentropy": ("shares", "softmax"),
    "SparseCategoricalCrossentropy": ("class", "softmax"),
    "Hinge": ("bit", "linear"),
    "SquaredHinge": ("bit", "linear"),
    "CategoricalHinge": ("shares", "softmax"),
    "CosineSimilarity": ("number", "linear"),
    "CategoricalGeneralizedCrossEntropy": ("class", "softmax"),
    "CTC": ("sequence", "sequence"),
}
"""Losses that are means over rows, with the label and the end of the model."""
REFUSED = {"Circle": "class", "Dice": "bit", "Tversky": "bit"}
"""Losses of Keras that compare or divide sums of the rows of a batch, with the label."""
FORMS: dict[str, dict[str, Any]] = {
    "ignore_class": {"losses": ["SparseCategoricalCrossentropy"]},
    "weighted ignore_class": {"losses": ["SparseCategoricalCrossentropy"], "weighted": True},
    "mean_with_sample_weight": {"losses": ["Huber"], "weighted": True},
    "weighted mean of ignore_class": {
        "losses": ["SparseCategoricalCrossentropy"],
        "weighted": True,
    },
    "mask": {"losses": ["MeanSquaredError"]},
    "added sum": {"losses": ["MeanSquaredError"]},
    "added mean": {"losses": ["MeanSquaredError"]},
    "sum and mean": {"losses": ["MeanSquaredError", "SparseCategoricalCrossentropy"]},
    "kernel_regularizer": {"losses": ["MeanSquaredError"]},
    "kernel_regularizer beside a sum": {"losses": ["MeanSquaredError"], "reduction": "sum"},
    "activity_regularizer": {"losses": ["MeanSquaredError"]},
    "activity_regularizer beside a sum": {"losses": ["MeanSquaredError"], "reduction": "sum"},
    "added mean beside a sum": {"losses": ["MeanSquaredError"], "reduction": "sum"},
    "kernel_regularizer beside a sum of one's own": {
        "losses": ["MeanSquaredError"],
        "reduction": "sum",
        "own_loss": True,
    },
}
"""Losses that divide by more than rows, or are sums beside means."""


def make_loss(name: str, cell: dict[str, Any]) -> Any:
    import keras

    if cell["own_loss"]:
        return lambda label, output: keras.ops.sum(keras.ops.mean((label - output) ** 2, axis=-1))
    options: dict[str, Any] = {"reduction": cell["reduction"]}
    if "ignore_class" in cell["form"]:
        options["ignore_class"] = 1
    if "mean" in cell["form"] and cell["weighted"]:
        options["reduction"] = "mean_with_sample_weight"
    if cell["form"] == "sum and mean" and name == "MeanSquaredError":
        options["reduction"] = "sum"
    return getattr(keras.losses, name)(**options)


def make_optimizer(cell: dict[str, Any], scale: float = 1.0) -> Any:
    import keras

    if cell["optimizer"] == "adam":
        return keras.optimizers.Adam(0.02 * scale, epsilon=1e-2)
    momentum = 0.9 if cell["optimizer"] == "momentum" else 0.0
    return keras.optimizers.SGD(0.02 * scale, momentum=momentum)


def make_added_loss(reduce: str) -> Any:
    """Returns a layer that adds a loss."""
    import keras

    class AddedLoss(keras.layers.Layer):
        def call(self, given: Any) -> Any:
            self.add_loss(0.01 * getattr(keras.ops, reduce)(given**2))
            return given

    return AddedLoss()


def make_data(rows: int, kinds: list[str]) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    data = {"x": draw.normal(size=(rows, 4)).astype("float32")}
    for index, kind in enumerate(kinds):
        label = LABELS[kind](draw, rows)
        data[f"y{index}"] = label if kind == "class" else label.astype("float32")
    data["w"] = draw.uniform(0.2, 2.0, rows).astype("float32")
    return data


def make_model(ends: list[str], cell: dict[str, Any]) -> Any:
    import keras

    random.seed(0)  # seeds of initializers; `set_random_seed` would import each installed backend
    given = keras.Input((4,), name="x")
    if cell["form"] == "mask":
        table = keras.layers.Embedding(5, 3, mask_zero=True)(given)
        return keras.Model(given, keras.layers.Dense(1, name="y0")(table))
    outputs = []
    form = cell["form"].split(" beside")[0]
    options = {form: keras.regularizers.L2(0.05)} if form.endswith("regularizer") else {}
    for index, end in enumerate(ends):
        if end == "sequence":
            wide = keras.layers.Dense(5 * CLASSES)(given)
            outputs.append(keras.layers.Reshape((5, CLASSES), name=f"y{index}")(wide))
        else:
            layer = keras.layers.Dense(CLASSES, activation=end, name=f"y{index}", **options)
            outputs.append(layer(given))
    if form.startswith("added"):
        outputs[0] = make_added_loss(form.removeprefix("added "))(outputs[0])
    kind = own_step_model() if cell["own_step"] else keras.Model
    return kind(given, outputs if len(outputs) > 1 else outputs[0])


def own_step_model(change_loss: Callable[[Any], Any] = lambda loss: loss) -> Any:
    """Returns a class of models with a `train_step` that never calls `scale_loss`.

    Args:
        change_loss: makes the loss of the step from the loss that the model was compiled with.
    """
    import keras

    def torch_step(self, data):
        import torch

        x, y = data[:2]
        self.zero_grad()
        loss = change_loss(self.compute_loss(x=x, y=y, y_pred=self(x, training=True)))
        loss.backward()
        variables = self.trainable_variables
        grads = [one.value.grad for one in variables]
        with torch.no_grad():
            self.optimizer.apply(grads, variables)
        return {"loss": loss}

    def tensorflow_step(self, data):
        import tensorflow as tf

        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = change_loss(self.compute_loss(x=x, y=y, y_pred=self(x, training=True)))
        variables = self.trainable_variables
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}

    def jax_step(self, state, data):
        import jax

        x, y = data[:2]
        trained, others, slots, metrics = state

        def loss_of(trained, others):
            output, others = self.stateless_call(trained, others, x, training=True)
            return change_loss(self.compute_loss(x=x, y=y, y_pred=output)), others

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, others)
        trained, slots = self.optimizer.stateless_apply(slots, grads, trained)
        return {"loss": loss}, (trained, others, slots, metrics)

    steps = {"torch": torch_step, "tensorflow": tensorflow_step, "jax": jax_step}
    return type("OwnStep", (keras.Model,), {"train_step": steps[keras.backend.backend()]})


def own_update_model() -> Any:
    """Returns a class of models with a `train_step` that needs no optimizer."""
    import keras

    def train_step(self, *state_and_data):
        del self
        *state, _data = state_and_data
        return ({}, *state) if state else {}

    return type("OwnUpdate", (keras.Model,), {"train_step": train_step})


def run_cell(cell: dict[str, Any], gangs: Any) -> dict[str, float]:
    """Returns the differences between a fit of several processes and Keras's own on one."""
    import keras

    from farandole.spark.keras import KerasEstimator

    kinds, ends = zip(*(MEANS[name] for name in cell["losses"]), strict=True)
    is_masked = cell["form"] == "mask"
    data = make_data(cell["rows"], ["mask"] if is_masked else list(kinds))
    if is_masked:
        data["x"] = np.random.default_rng(1).integers(0, 4, (cell["rows"], 4)).astype("float32")
        data["x"][24:27] = 0  # a process whose rows are all left out
        data["y0"] = data["y0"].reshape(-1, 4, 1)
    if "ignore_class" in cell["form"]:
        data["y0"][24:27] = 1
    losses = [make_loss(name, cell) for name in cell["losses"]]
    plain = make_model(list(ends), cell)
    plain.compile(optimizer=make_optimizer(cell), loss=losses)
    labels = [data[f"y{index}"] for index in range(len(kinds))]
    says_sum = cell["own_loss"] or (cell["own_step"] and cell["reduction"] == "sum")
    # Two rows leave the last of three processes without any.
    held = 2 if cell["rows"] % 2 and cell["size"] == 3 and cell["rows"] < 29 else cell["rows"]
    held_labels = [label[:held] for label in labels]
    validation = (data["x"][:held], held_labels if len(labels) > 1 else held_labels[0])
    if cell["weighted"]:
        validation = (*validation, data["w"][:held])
    kept = plain.fit(
        data["x"],
        labels if len(labels) > 1 else labels[0],
        sample_weight=data["w"] if cell["weighted"] else None,
        validation_data=validation,
        validation_batch_size=cell["rows"],
        batch_size=GLOBAL_BATCH_ROWS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    ).history
    if keras.backend.backend() == "tensorflow" and len(kinds) > 1:
        # Keras does not weigh the losses of outputs by rows there, but each of them alone.
        kept = {"loss": kept["loss"], "val_loss": kept["val_loss"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        flat = {n: v.reshape(len(v), -1) if v.ndim > 1 else v for n, v in data.items()}
        columns = {n: pa.array(list(v)) if v.ndim > 1 else v for n, v in flat.items()}
        pq.write_table(pa.table(columns), path)
        pq.write_table(pa.table(columns).slice(0, held), Path(folder) / "held.parquet")

        def fit(size: int, epochs: int) -> Any:
            return KerasEstimator(
                model=make_model(list(ends), cell),
                optimizer=make_optimizer(cell, 1 if cell["global"] else 1 / size),
                loss=losses,
                feature_cols=["x"],
                label_cols=[f"y{index}" for index in range(len(kinds))],
                label_shapes=[[-1, 4, 1]] if is_masked else None,
                sample_weight_col="w" if cell["weighted"] else None,
                backward_passes_per_step=cell["passes"],
                **(
                    {"global_batch_size": GLOBAL_BATCH_ROWS}
                    if cell["global"]
                    else {"batch_size": GLOBAL_BATCH_ROWS // (size * cell["passes"])}
                ),
                val_batch_size=cell["rows"],
                epochs=epochs,
                run_id="cell",
                shuffle=False,
                verbose=0,
                backend=gangs(size),
                store=f"{folder}/store",
                **({"loss_reduction": "sum"} if says_sum else {}),
            ).fit_on_parquet(path=str(path), val_path=f"{folder}/held.parquet")

        if cell["before"] is not None:
            fit(cell["before"], 1)  # the rest of the run continues from its checkpoint
        fitted = fit(cell["size"], EPOCHS)
    found = fitted.getHistory()
    weights = zip(plain.get_weights(), fitted.getModel().get_weights(), strict=True)
    differences = {"weights": max(float(np.abs(one - other).max()) for one, other in weights)}
    if cell["reduction"] != "sum" and not cell["own_step"]:
        for name, values in kept.items():
            scale = max(1e-3, *map(abs, values))
            differences[name] = max(
                abs(one - other) / scale for one, other in zip(values, found[name], strict=True)
            )
    return differences


def make_cells(short: bool) -> list[dict[str, Any]]:
    base = {"reduction": "sum_over_batch_size", "weighted": False, "own_step": False, "rows": 29}
    base |= {"form": "plain", "optimizer": "sgd", "before": None, "own_loss": False, "passes": 1}
    base |= {"global": False}
    sizes = (2,) if short else (1, 2, 3)
    names = list(MEANS)[:: 9 if short else 1]
    cells = [base | {"losses": [name], "size": size} for name in names for size in sizes]
    pairs = [["MeanSquaredError", "SparseCategoricalCrossentropy"]]
    cells += [base | {"losses": pair, "size": size} for pair in pairs for size in (*sizes, 3)]
    cells += [
        base | {"losses": ["MeanSquaredError"], "size": size, "reduction": "sum", "rows": rows}
        for size in (*sizes, 3)
        for rows in (25, 29)
    ]
    cells += [
        base | options | {"form": form, "size": size, "rows": rows}
        for form, options in FORMS.items()
        for size, rows in (((2, 29),) if short else ((1, 29), (2, 25), (2, 29), (3, 25), (3, 29)))
    ]
    cells += [
        base | {"losses": ["Huber"], "optimizer": optimizer, "before": before, "size": size}
        for optimizer in (("adam",) if short else ("momentum", "adam"))
        for before, size in (((1, 2),) if short else ((1, 3), (3, 1), (2, 3), (2, 2)))
    ]
    cells += [base | {"losses": ["Huber"], "size": size, "weighted": True} for size in (*sizes, 3)]
    own = {"losses": ["MeanSquaredError"], "own_step": True}
    own_reductions = (None,) if short else (None, "sum")
    cells += [
        base | own | {"size": size, "rows": rows} | ({"reduction": word} if word else {})
        for size in sizes
        for rows in (25, 29)
        for word in own_reductions
    ]
    passes = {"losses": ["MeanSquaredError"], "passes": 2, "rows": 24}
    cells += [
        base | passes | {"size": size, "form": form, "reduction": reduction}
        for size in ((2,) if short else (1, 2, 3))
        for reduction in ("sum_over_batch_size", "sum")
        for form in ("plain", "kernel_regularizer", "added sum")
    ]
    deals = {"losses": ["MeanSquaredError"], "global": True, "size": 3, "rows": 24}
    cells += [  # 3 processes have 2, 1 and 1 of the 4 rows of a pass
        base | deals | {"passes": 3, "reduction": reduction}
        for reduction in ("sum_over_batch_size", *(() if short else ("sum",)))
    ]
    cells += [base | deals | {"size": 2, "rows": 29, "optimizer": "adam", "before": 3}]
    if not short:
        cells += [base | deals | {"size": 5, "rows": rows} for rows in (25, 29)]
    return cells


def run_refused(gangs: Any) -> dict[str, str]:
    """Returns the errors of fits that two processes must refuse."""
    import keras

    from farandole.spark.keras import KerasEstimator

    def plain() -> Any:
        given = keras.Input((4,), name="x")
        return keras.Model(given, keras.layers.Dense(CLASSES, activation="softmax")(given))

    def root(label: Any, output: Any) -> Any:
        return keras.ops.sqrt(keras.ops.mean((label - output) ** 2))

    def added_root() -> Any:
        given = keras.Input((4,), name="x")
        layer = keras.layers.Dense(CLASSES)(given)
        return keras.Model(given, make_added_loss("std")(layer))

    def own(kind: Any) -> Any:
        given = keras.Input((4,), name="x")
        return kind(given, keras.layers.Dense(CLASSES)(given))

    sums = keras.losses.MeanSquaredError(reduction="sum")
    cases = {
        "root": (plain(), root, "number"),
        "added root": (added_root(), "mse", "number"),
        "train_step: no mean": (own(own_step_model(keras.ops.sqrt)), "mse", "number"),
        "train_step: sum over rows": (own(own_step_model()), sums, "number"),
        "train_step: optimizer.apply": (own(own_update_model()), "mse", "number"),
    }
    for name, kind in REFUSED.items():
        cases[name] = (plain(), getattr(keras.losses, name)(), kind)
    errors: dict[str, str] = {}
    for name, (model, loss, kind) in cases.items():
        data = make_data(24, [kind])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            columns = {n: pa.array(list(v)) if v.ndim > 1 else v for n, v in data.items()}
            pq.write_table(pa.table(columns), path)
            estimator = KerasEstimator(
                model=model,
                optimizer=keras.optimizers.SGD(0.01),
                loss=loss,
                feature_cols=["x"],
                label_cols=["y0"],
                batch_size=4,
                verbose=0,
                backend=gangs(2),
                store=f"{folder}/store",
            )
            try:
                estimator.fit_on_parquet(path=str(path))
                errors[name] = ""
            except Exception as error:  # noqa: BLE001 - the test looks at it
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


def run_half(gangs: Any) -> float:
    """Returns the difference of the weights of a fit in float16 from Keras's own on one process."""
    import keras

    from farandole.spark.keras import KerasEstimator

    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        draw = np.random.default_rng(0)
        x = draw.normal(size=(29, 3)).astype("float32")
        y = draw.uniform(-0.5, 0.5, (29, 1)).astype("float32")

        def compiled(scale: float) -> Any:
            random.seed(0)
            given = keras.Input((3,), name="x")
            hidden = keras.layers.Dense(8, activation="tanh")(given)
            model = keras.Model(given, keras.layers.Dense(1)(hidden))
            model.compile(keras.optimizers.SGD(0.05 * scale), "mse")
            return model

        plain = compiled(1.0)
        plain.fit(x, y, batch_size=GLOBAL_BATCH_ROWS, epochs=EPOCHS, shuffle=False, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            pq.write_table(pa.table({"x": list(x), "y": y[:, 0]}), path)
            fitted = KerasEstimator(
                model=compiled(1 / 2),
                feature_cols=["x"],
                label_cols=["y"],
                batch_size=GLOBAL_BATCH_ROWS // 2,
                epochs=EPOCHS,
                shuffle=False,
                verbose=0,
                backend=gangs(2),
                store=f"{folder}/store",
            ).fit_on_parquet(path=str(path))
        weights = zip(plain.get_weights(), fitted.getModel().get_weights(), strict=True)
        return max(float(np.abs(one - other).max()) for one, other in weights)
    finally:
        keras.config.set_dtype_policy(policy)


def untried_losses() -> list[str]:
    """Returns the losses of Keras that have no cell."""
    import keras

    known = {"Loss", *MEANS, *REFUSED}
    values = [(name, getattr(keras.losses, name)) for name in dir(keras.losses)]
    classes = [(name, one) for name, one in values if isinstance(one, type)]
    return [
        name for name, one in classes if issubclass(one, keras.losses.Loss) and name not in known
    ]


def main() -> None:
    logging.disable(logging.WARNING)
    if os.environ["KERAS_BACKEND"] == "torch":
        from farandole.spark.torch.training import deferred_compiler

        deferred_compiler.defer_compiler()  # Keras imports it, and no cell compiles a model
    from tests.parity.gang import StandingGang

    found: dict[int, StandingGang] = {}

    def gang(size: int) -> StandingGang:
        return found.setdefault(size, StandingGang(size))

    cells = make_cells(sys.argv[1] == "short")
    report = [(str(cell), run_cell(cell, gang)) for cell in cells]
    refused, half = run_refused(gang), run_half(gang)
    for one in found.values():
        one.close()
    found_all = {"cells": report, "refused": refused, "half": half, "untried": untried_losses()}
    print(json.dumps(found_all))


if __name__ == "__main__":
    main()
