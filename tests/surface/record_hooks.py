# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits a subclass of an estimator that records the calls of its hooks: `python -m
tests.surface.record_hooks torch fit hook ...`, in a process of its own, which loads one framework.

Prints JSON: the hooks in the order of their first calls, with the names of their arguments.
"""

import inspect
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def recording(kind, names, calls):
    """Returns a subclass whose methods of these names record how they are called."""

    def record_calls(name):
        inner = getattr(kind, name)
        signature = inspect.signature(inner)

        def method(self, *args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            calls.setdefault(name, [one for one in bound.arguments if one != "self"])
            return inner(self, *args, **kwargs)

        return method

    return type(f"Recording{kind.__name__}", (kind,), {name: record_calls(name) for name in names})


class PlainBackend:
    """What Horovod asks of a backend: no class of ours."""

    def __init__(self):
        self.runs = 0

    def num_processes(self):
        """One, this process."""
        return 1

    def run(self, fn, args, kwargs, env):
        """Runs the function here."""
        assert isinstance(env, dict)
        self.runs += 1
        return [fn(*args, **kwargs)]


def torch_arguments():
    """The framework's arguments of an estimator."""
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss()}


def keras_arguments():
    """The same for Keras."""
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    return {"model": model, "optimizer": keras.optimizers.SGD(0.01), "loss": "mse"}


def estimator_of(framework):
    """Returns the class of an estimator, and its framework's arguments."""
    if framework == "keras":
        from farandole.spark.keras import KerasEstimator

        return KerasEstimator, keras_arguments()
    if framework == "lightning":
        from farandole.spark.lightning import LightningEstimator

        return LightningEstimator, torch_arguments()
    from farandole.spark.torch import TorchEstimator

    return TorchEstimator, torch_arguments()


def main(framework, way, names):
    """Fits, and prints the calls, the class of the result and the backend's runs."""
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 2)
    table = pa.table({"x": lists, "y": pa.array(x.sum(axis=1))})
    kind, arguments = estimator_of(framework)
    calls, backend = {}, PlainBackend()
    with tempfile.TemporaryDirectory() as directory:
        if way == "fit_on_parquet":
            place = Path(directory, "intermediate_train_data")
            place.mkdir()
            pq.write_table(table, place / "part-0.parquet")
        recorded = recording(kind, names, calls)

        def get_model_class(self):
            calls.setdefault("get_model_class", [])
            model = super(recorded, self).get_model_class()
            return type("ModelOfSubclass", (model,), {})

        recorded.get_model_class = get_model_class
        estimator = recorded(
            feature_cols=["x"], label_cols=["y"], batch_size=8, verbose=0, backend=backend,
            store=directory, **arguments,
        )  # fmt: skip
        fitted = estimator.fit(table) if way == "fit" else estimator.fit_on_parquet()
    metadata = fitted._get_metadata()
    print(
        json.dumps(
            {
                "calls": list(calls.items()),
                "model": type(fitted).__name__,
                "runs": backend.runs,
                "metadata": {
                    name: one["spark_data_type"].__name__ for name, one in metadata.items()
                },
                "run": fitted.getRunId(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
