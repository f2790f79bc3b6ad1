# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Records the calls of overridden methods, in a process of its own that loads one framework:
`python -m tests.surface.record_hooks torch fit`, or `... callbacks`.

Prints JSON: for each class, the methods in the order of their first calls, with the names of their
arguments.
"""

import functools
import inspect
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.surface import hooks

CLASS_MODULE = {
    "torch": "horovod.spark.torch.estimator: Torch",
    "lightning": "horovod.spark.lightning.estimator: Torch",
    "keras": "horovod.spark.keras.estimator: Keras",
}
"""Beginning of the names of a framework's estimator and model in the table."""


def recording(kind, names, calls):
    """Returns a subclass whose methods of these names record how they are called first."""

    def record_calls(name):
        inner = getattr(kind, name)
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def method(self, *args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            calls.setdefault(name, [one for one in bound.arguments if one != "self"])
            return inner(self, *args, **kwargs)

        return method

    return type(f"Recording{kind.__name__}", (kind,), {name: record_calls(name) for name in names})


class PlainBackend:
    """A backend with the methods that Horovod needs: no class of ours."""

    def num_processes(self):
        """One, this process."""
        return 1

    def run(self, fn, args, kwargs, env):
        """Runs the function here."""
        assert isinstance(env, dict)
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


def record_fit(framework, way):
    """Returns the calls of a fit, by class, and what the fit made."""
    from farandole.spark.common.store import LocalStore

    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 2)
    table = pa.table({"x": lists, "y": pa.array(x.sum(axis=1))})
    kind, arguments = estimator_of(framework)
    module = CLASS_MODULE[framework]
    calls = {name: {} for name in ("estimator", "model", "backend", "store")}
    recorded = recording(kind, hooks.CALLED[f"{module}Estimator"], calls["estimator"])
    plain = recorded.get_model_class

    def get_model_class(self):
        rows = [name for name in hooks.CALLED[f"{module}Model"] if name != "_transform"]
        model = recording(plain(self), rows, calls["model"])

        def _transform(_self, dataset):
            calls["model"].setdefault("_transform", ["dataset"])
            return dataset

        model._transform = _transform
        return model

    recorded.get_model_class = get_model_class
    backend = recording(PlainBackend, ("num_processes", "run"), calls["backend"])()
    with tempfile.TemporaryDirectory() as directory:
        if way == "fit_on_parquet":
            place = Path(directory, "intermediate_train_data")
            place.mkdir()
            pq.write_table(table, place / "part-0.parquet")
        store = recording(LocalStore, hooks.STORE, calls["store"])(directory)
        calls["store"].clear()
        estimator = recorded(
            feature_cols=["x"], label_cols=["y"], batch_size=8, verbose=0, backend=backend,
            store=store, **arguments,
        )  # fmt: skip
        fitted = estimator.fit(table) if way == "fit" else estimator.fit_on_parquet()
    assert fitted.transform("a frame") == "a frame"
    if framework != "keras":
        fitted.getOptimizer()
    metadata = fitted._get_metadata()
    return {
        "calls": {name: list(found.items()) for name, found in calls.items()},
        "model": type(fitted).__name__,
        "metadata": {name: one["spark_data_type"].__name__ for name, one in metadata.items()},
        "run": fitted.getRunId(),
    }


def record_callbacks():
    """Returns the calls of each callback in a fit of Keras's own."""
    import keras

    import farandole.keras as hvd
    from farandole._keras import callbacks, elastic

    hvd.init()
    arguments = keras_arguments()
    model = arguments.pop("model")
    model.compile(**arguments)
    state = SimpleNamespace(commit=lambda: None, batch=0, epoch=0)
    given = {
        "BroadcastGlobalVariablesCallback": (0, "", model.weights[:1]),
        "LearningRateScheduleCallback": (0.01, lambda _: 1.0, 0, None, False, True, 2),
        "LearningRateWarmupCallback": (0.01, 1, True, 2),
    }
    found = {}
    for name, rows in hooks.CALLBACKS.items():
        kind = getattr(elastic if "State" in name else callbacks, name)
        calls = found[name] = {}
        more = (state,) if "State" in name else given.get(name, ())
        model.fit(
            np.ones((16, 2)), np.ones(16), batch_size=8, verbose=0,
            callbacks=[recording(kind, rows, calls)(*more)],
        )  # fmt: skip
    assert keras.backend.backend() == "torch"
    hvd.shutdown()
    return found


if __name__ == "__main__":
    found = record_callbacks() if sys.argv[1] == "callbacks" else record_fit(*sys.argv[1:])
    print(json.dumps(found))
