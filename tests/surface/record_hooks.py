# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Records the calls of overridden methods, in a process of its own that loads one framework:
`python -m tests.surface.record_hooks fit torch fit_on_parquet`, `... callbacks`, or
`... states tensorflow`.

Prints JSON: for each class, the methods in the order of their first calls, with the names of their
arguments. The methods that the table calls uncalled are overridden, too.
"""

import functools
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.surface import hooks

from farandole.common import elastic as elastic_states
from farandole.common.elastic import HostUpdateResult, run_fn
from farandole.common.exceptions import FarandoleInternalError

CLASS_MODULE = {
    "torch": "horovod.spark.torch.estimator: Torch",
    "lightning": "horovod.spark.lightning.estimator: Torch",
    "keras": "horovod.spark.keras.estimator: Keras",
}
"""Beginning of the names of a framework's estimator and model in the table."""
STORE_MODULE = "horovod.spark.common.store"
STORES = [f"{STORE_MODULE}: {kind}" for kind in ("Store", "AbstractFilesystemStore")]
STORES_OF_FILES = [*STORES, f"{STORE_MODULE}: FilesystemStore"]


def recording(kind, names, calls):
    """Returns a subclass whose methods of these names record how they are called first."""

    def record_calls(name):
        inner = getattr(kind, name, None)
        if inner is None:  # a method of Horovod that ours has not, for which there is nothing to do
            return lambda *_, **__: calls.setdefault(name, [])
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def method(self, *args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            calls.setdefault(name, [entry for entry in bound.arguments if entry != "self"])
            return inner(self, *args, **kwargs)

        return method

    return type(f"Recording{kind.__name__}", (kind,), {name: record_calls(name) for name in names})


def names_of(*kinds):
    """Methods of classes of the table: those that are called, and those that are not."""
    called = {name for kind in kinds for name in hooks.CALLED.get(kind, {})}
    return called | set(hooks.uncalled_methods(*kinds))


class PlainBackend:
    """A backend with the methods that Horovod needs: no class of ours."""

    def num_processes(self):
        """One, this process."""
        return 1

    def run(self, fn, args, kwargs, env):
        """Runs the function here."""
        assert isinstance(env, dict)
        return [fn(*args, **kwargs)]


def make_backend(framework, calls):
    """Returns a backend of no class, of `Backend` or of `SparkBackend` that runs in this
    process.
    """
    if framework == "torch":
        return recording(PlainBackend, hooks.BACKEND, calls)()
    from farandole.spark.common.backend import Backend, SparkBackend

    base = Backend if framework == "lightning" else SparkBackend
    kind = type("OwnBackend", (PlainBackend, base), {"check": lambda _: None})
    return recording(kind, hooks.BACKEND, calls)()


def make_store(framework, directory, calls):
    """Returns a store in a directory: on Databricks with Lightning, or else a local one."""
    from farandole.spark.common.store import DBFSLocalStore, LocalStore

    on_databricks = framework == "lightning"
    kinds = [*STORES_OF_FILES, *([f"{STORE_MODULE}: DBFSLocalStore"] if on_databricks else [])]
    os.environ["FARANDOLE_DBFS_ROOT"] = directory
    base, path = (DBFSLocalStore, "/dbfs/store") if on_databricks else (LocalStore, directory)
    store = recording(base, names_of(*kinds), calls)(path)
    calls.clear()
    return store, Path(directory, "store") if on_databricks else Path(directory)


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
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 2)
    table = pa.table({"x": lists, "y": pa.array(x.sum(axis=1))})
    kind, arguments = estimator_of(framework)
    module = CLASS_MODULE[framework]
    calls = {name: {} for name in ("estimator", "model", "backend", "store")}
    recorded = recording(kind, names_of(f"{module}Estimator"), calls["estimator"])
    plain = recorded.get_model_class
    model_names = names_of(f"{module}Model", "horovod.spark.common.params: ModelParams")

    def get_model_class(self):
        model = recording(plain(self), model_names - {"_transform"}, calls["model"])

        def _transform(_self, dataset):
            calls["model"].setdefault("_transform", ["dataset"])
            return dataset

        model._transform = _transform
        return model

    recorded.get_model_class = get_model_class
    backend = make_backend(framework, calls["backend"])
    with tempfile.TemporaryDirectory() as directory:
        store, folder = make_store(framework, directory, calls["store"])
        if way == "fit_on_parquet":
            rows = folder / "intermediate_train_data"
            rows.mkdir(parents=True)
            pq.write_table(table, rows / "part-0.parquet")
        estimator = recorded(
            feature_cols=["x"], label_cols=["y"], batch_size=8, verbose=0, backend=backend,
            store=store, **arguments,
        )  # fmt: skip
        fitted = estimator.fit(table) if way == "fit" else estimator.fit_on_parquet()
    assert fitted.transform("a frame") == "a frame"
    if framework != "keras":
        fitted.getOptimizer()
    found = {name: list(rows.items()) for name, rows in calls.items()}
    metadata = fitted._get_metadata()
    return {
        "calls": found,
        "model": type(fitted).__name__,
        "metadata": {name: entry["spark_data_type"].__name__ for name, entry in metadata.items()},
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
    for name in hooks.CALLBACKS:
        module = elastic if "State" in name else callbacks
        calls = found[name] = {}
        more = (state,) if "State" in name else given.get(name, ())
        listed = f"horovod.{module.__name__.removeprefix('farandole.')}: {name}Impl"
        callback = recording(getattr(module, name), names_of(listed), calls)(*more)
        model.fit(np.ones((16, 2)), np.ones(16), batch_size=8, verbose=0, callbacks=[callback])
    assert keras.backend.backend() == "torch"
    hvd.shutdown()
    return found


def run_elastic(state):
    """Trains with a state whose world fails once, and whose hosts change once."""
    worlds = []
    changes = [[], [(1.0, HostUpdateResult.added)], []]
    real = elastic_states.engine
    elastic_states.engine = SimpleNamespace(host_changes=lambda: changes.pop(0))
    state.register_reset_callbacks([lambda: worlds.append("a callback")])

    def train(state):
        state.commit()
        if not worlds:
            raise FarandoleInternalError("a peer is lost")
        return "done"

    try:
        assert run_fn(train, lambda: worlds.append("a world"))(state) == "done"
    finally:
        elastic_states.engine = real
    assert worlds == ["a world", "a callback"] * 2


def record_states_of_torch():
    """Returns the calls of `TorchState` and of its handlers."""
    import farandole.torch as hvd
    from farandole.torch.elastic import state as states

    hvd.init()
    found, registry = {}, []
    module = "horovod.torch.elastic.state"
    for kind, handler in states.get_handler_registry():
        calls = found[handler.__name__] = {}
        registry.append((kind, recording(handler, hooks.HANDLER, calls)))
    states.set_handler_registry(registry)
    values = torch_arguments()
    sampler = hvd.elastic.ElasticSampler(list(range(4)))
    calls = found["TorchState"] = {}
    recorded = recording(states.TorchState, names_of(f"{module}: TorchState"), calls)
    state = recorded(values["model"], values["optimizer"], sampler=sampler)
    for rows in found.values():
        rows.clear()
    run_elastic(state)
    for name in ("model", "optimizer", "sampler"):
        setattr(state, name, getattr(state, name))
    hvd.shutdown()
    return found


def record_states_of_tensorflow():
    """Returns the calls of TensorFlow's states: of variables, and of a model of Keras."""
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

    hvd.init()
    arguments = keras_arguments()
    given = {
        TensorFlowState: ([tf.Variable(1.0)],),
        TensorFlowKerasState: (arguments["model"], arguments["optimizer"]),
    }
    found = {}
    for kind, values in given.items():
        name = f"TensorFlow{'Keras' if kind is TensorFlowKerasState else ''}State"
        calls = found[name] = {}
        state = recording(kind, names_of(f"horovod.tensorflow.elastic: {name}"), calls)(*values)
        calls.clear()
        run_elastic(state)
    hvd.shutdown()
    return found


if __name__ == "__main__":
    found = {
        "fit": record_fit,
        "callbacks": record_callbacks,
        "states_of_torch": record_states_of_torch,
        "states_of_tensorflow": record_states_of_tensorflow,
    }[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(found))
