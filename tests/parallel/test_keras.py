# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`model.fit` on two ranks of each backend, against one process that sees both ranks' batches."""

import os
import tempfile
from importlib.util import find_spec

import pytest
from tests.parallel import keras_locals

if find_spec("keras") is None:
    pytest.skip("needs Keras", allow_module_level=True)

RANKS, BATCH, STEPS, EPOCHS = 2, 8, 4, 2


def batches():
    """Inputs and targets of all steps: the first half of each batch is rank 0's, the second rank
    1's.
    """
    import numpy as np

    random = np.random.default_rng(3)
    x = random.normal(size=(STEPS * BATCH, 5)).astype(np.float32)
    return x, (x @ random.normal(size=(5, 1)) + 0.1).astype(np.float32)


def mine(values, rank):
    """The rows of this rank."""
    half = BATCH // RANKS
    return values.reshape(STEPS, RANKS, half, -1)[:, rank].reshape(STEPS * half, -1)


def build(optimizer, seed=7, **compile_options):
    import keras

    # Not by keras.utils.set_random_seed, which imports every backend there is.
    initializers = [keras.initializers.GlorotUniform(seed + layer) for layer in range(2)]
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh", kernel_initializer=initializers[0]),
            keras.layers.Dense(1, kernel_initializer=initializers[1]),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse", **compile_options)
    return model


def fit(model, x, y, batch, callbacks=()):
    return model.fit(
        x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def same(model, expected, what):
    import keras
    import numpy as np

    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=2e-5, atol=2e-6, err_msg=f"{keras.backend.backend()}: {what}"
        )


def fit_equals_one_process():
    """Every kind of optimizer; the ranks start from different weights, which the callback makes
    rank 0's.
    """
    import keras
    import numpy as np

    import farandole.keras as hvd

    x, y = batches()
    wrap = hvd.DistributedOptimizer
    kinds = {
        "plain": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), wrap),
        "adam, clipped": (lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.05), wrap),
        "accumulated": (
            lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, clipnorm=0.1),
            wrap,
        ),
        "loss scale inside": (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            wrap,
        ),
        "groups": (
            lambda: keras.optimizers.SGD(0.1),
            lambda o: wrap(o, groups=2, gradient_predivide_factor=2.0),
        ),
    }
    for what, (make, distribute) in kinds.items():
        expected = build(make())
        fit(expected, x, y, BATCH)
        model = build(distribute(make()), seed=7 + hvd.rank())
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        history = fit(model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS, callbacks)
        same(model, expected, what)
        gathered = hvd.allgather([history.history["loss"][-1]], name=f"loss {what}")
        assert gathered[0] == gathered[1]
        if keras.backend.backend() == "torch" and what == "plain":
            # Reduced where they are: no second copy of all gradients.
            for index, variable in enumerate(model.trainable_variables):
                everyones = hvd.allgather(
                    variable.value.grad.numpy()[None], name=f"gradient {index}"
                )
                np.testing.assert_array_equal(everyones[0], everyones[1])
    return keras.backend.backend()


def embeddings_are_learned_as_by_one_process():
    """Their gradients are slices on TensorFlow, of rows that differ from rank to rank."""
    import keras
    import numpy as np

    import farandole.keras as hvd

    rows = np.random.default_rng(5).integers(0, 12, size=(STEPS * BATCH, 2)).astype(np.int32)
    targets = rows.sum(axis=1, keepdims=True).astype(np.float32) / 12

    def network(optimizer):
        initializers = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        embedding = keras.layers.Embedding(12, 3, embeddings_initializer=initializers[0])
        layers = [
            embedding,
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer=initializers[1]),
        ]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile(optimizer=optimizer, loss="mse")
        return model

    kinds = {
        "plain": (lambda: keras.optimizers.SGD(0.5), {}),
        "adam, clipped": (lambda: keras.optimizers.Adam(0.05, clipnorm=0.2), {}),
        "accumulated": (lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), {}),
        "predivided": (
            lambda: keras.optimizers.SGD(0.5),
            {"gradient_predivide_factor": 2.0, "sparse_as_dense": True},
        ),
    }
    for what, (make, options) in kinds.items():
        expected, model = network(make()), network(hvd.DistributedOptimizer(make(), **options))
        fit(expected, rows, targets, BATCH)
        fit(model, mine(rows, hvd.rank()), mine(targets, hvd.rank()), BATCH // RANKS)
        same(model, expected, what)


def an_inf_on_one_rank_skips_the_step_on_all():
    import keras
    import numpy as np

    import farandole.keras as hvd

    x, y = batches()
    x[BATCH + BATCH // RANKS] = np.inf  # in rank 1's half of the second batch
    for what in ("around", "inside"):

        def make():
            return keras.optimizers.SGD(0.1)

        def scale(inner):
            return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)

        expected = build(scale(make()))
        fit(expected, x, y, BATCH)
        assert all(np.isfinite(weight).all() for weight in expected.get_weights())
        optimizer = (
            scale(hvd.DistributedOptimizer(make()))
            if what == "around"
            else hvd.DistributedOptimizer(scale(make()))
        )
        model = build(optimizer)
        fit(model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS)
        same(model, expected, f"loss scale {what}")
        assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 16.0


def passes_and_local_layers_and_rates():
    import keras
    import numpy as np

    import farandole.keras as hvd

    x, y = batches()
    # Two passes summed, with a rate, are one pass of twice the batch averaged, with twice the rate.
    expected = build(keras.optimizers.SGD(0.1))
    expected.fit(x, y, batch_size=2 * BATCH, shuffle=False, verbose=0)
    model = build(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2))
    model.fit(
        mine(x, hvd.rank()),
        mine(y, hvd.rank()),
        batch_size=BATCH // RANKS,
        shuffle=False,
        verbose=0,
    )
    same(model, expected, "two passes")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model = build(optimizer)
    model.fit(
        mine(x, hvd.rank()),
        mine(y, hvd.rank()),
        batch_size=BATCH // RANKS,
        shuffle=False,
        verbose=0,
    )
    same(model, expected, "two passes averaged")

    model = build("sgd")
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[0]
    )
    model.compile(optimizer=optimizer, loss="mse")
    fit(model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS)
    parts = [
        hvd.allgather(weight[None], name=f"weight {index}")
        for index, weight in enumerate(model.get_weights())
    ]
    differ = [not np.array_equal(part[0], part[1]) for part in parts]
    assert differ == [True, True, False, False], differ

    model = build(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)
    later = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda _epoch: 0.5, start_epoch=1)
    logs = fit(
        model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS, [warmup, later]
    ).history["lr"]
    np.testing.assert_allclose(logs, [0.1, 0.05], rtol=1e-5)


def saved_models_load_with_and_without():
    import keras
    import numpy as np

    import farandole.keras as hvd

    x, y = batches()
    model = build(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    fit(model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        plain, again = keras.saving.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer).__name__ == "Adam"
    assert not hasattr(plain.optimizer, "_farandole")
    assert hasattr(again.optimizer, "_farandole")
    for kept, loaded in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(kept), keras.ops.convert_to_numpy(loaded)
        )
    for trained in (model, again):
        trained.fit(
            mine(x, hvd.rank()),
            mine(y, hvd.rank()),
            batch_size=BATCH // RANKS,
            shuffle=False,
            verbose=0,
        )
    same(again, model, "loaded")
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(model.optimizer)
    value = hvd.allreduce(np.float64(hvd.rank()), op=hvd.Sum)
    assert value == 1.0

    class Coarse(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            return keras.ops.round(tensor), "told"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "told"
            return tensor * 2.0

    for compression, expected in (
        (hvd.Compression.fp16, 3.5),
        (hvd.Compression.bf16, 3.5),
        (Coarse, 8.0),
    ):
        for given in (compression, compression()):
            value = hvd.allreduce(np.float32(1.75), op=hvd.Sum, compression=given)
            assert (value, value.dtype) == (expected, np.float32), given
    assert hvd.broadcast([hvd.rank()], 1).tolist() == [1]
    with pytest.raises(RuntimeError, match="no global variables"):
        hvd.broadcast_global_variables(0)


def copies_reduce_too():
    """From its configuration, by deepcopy and by pickle; and ranks that make optimizers in
    different orders.
    """
    import copy
    import pickle

    import keras

    import farandole.keras as hvd
    from farandole._keras import is_distributed

    x, y = batches()
    if hvd.rank() == 1:
        # Not used, but made.
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    made = [
        hvd.DistributedOptimizer(keras.optimizers.SGD(rate))
        for rate in ((0.1, 0.2), (0.2, 0.1))[hvd.rank()]
    ]
    mine_of = {
        float(keras.ops.convert_to_numpy(optimizer.learning_rate)): optimizer for optimizer in made
    }
    for rate in (0.1, 0.2):
        [optimizer] = [one for known, one in mine_of.items() if abs(known - rate) < 1e-6]
        expected, model = build(keras.optimizers.SGD(rate)), build(optimizer)
        fit(expected, x, y, BATCH)
        fit(model, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS)
        same(model, expected, f"rate {rate}")

    def kinds():
        yield hvd.DistributedOptimizer(
            keras.optimizers.Adam(0.05, clipnorm=0.1), gradient_predivide_factor=2.0
        )
        yield hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        )
        yield hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)

    ways = {
        "pickle": lambda one: pickle.loads(pickle.dumps(one)),
        "configuration": lambda one: type(one).from_config(one.get_config()),
        "deepcopy": copy.deepcopy,
    }
    for index, (how, way) in enumerate(ways.items()):
        original, copied = list(kinds())[index], way(list(kinds())[index])
        assert is_distributed(copied)
        assert type(copied).__name__ == type(original).__name__
        expected, model = build(original), build(copied)
        for one in (expected, model):
            fit(one, mine(x, hvd.rank()), mine(y, hvd.rank()), BATCH // RANKS)
        same(model, expected, f"{how} of {original.name}")
    model.optimizer.register_local_var(model.trainable_variables[0])
    with pytest.raises(TypeError, match="local variables"):
        copy.deepcopy(model.optimizer)


def callbacks_broadcast_and_average():
    """Checks the cases that `fit_equals_one_process` leaves out."""
    import keras
    import numpy as np

    import farandole.keras as hvd

    x, y = batches()
    rank = hvd.rank()
    # A model that is built by its first batch: weights are broadcast after it, those of one layer
    # are not.
    layers = [
        keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(rank + seed))
        for seed in (1, 9)
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    assert not model.built
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(1)

    model.fit(
        mine(x, rank), mine(y, rank), batch_size=BATCH // RANKS, verbose=0, callbacks=[broadcast]
    )
    assert broadcast.broadcast_done
    for index, weight in enumerate(model.get_weights()):
        everyones = hvd.allgather(weight[None], name=f"late weight {index}")
        np.testing.assert_array_equal(everyones[0], everyones[1])
    kept = build(keras.optimizers.SGD(0.0), seed=20 + rank)
    first = kept.layers[0].kernel
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[first])
    fit(kept, mine(x, rank), mine(y, rank), BATCH // RANKS, [broadcast])
    everyones = [
        hvd.allgather(weight[None], name=f"kept {index}")
        for index, weight in enumerate(kept.get_weights())
    ]
    assert [np.array_equal(one[0], one[1]) for one in everyones] == [False, True, True, True]

    # So does the optimizer, in or out of a loss scale, and with it what it keeps for such a
    # variable.
    for wrap in (
        hvd.DistributedOptimizer,
        lambda one: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(one)),
    ):
        model = build(wrap(keras.optimizers.SGD(0.0, momentum=0.5)), seed=20 + rank)
        model.optimizer.build(model.trainable_variables)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        for momentum in inner.momentums:
            momentum.assign(momentum + rank + 1.0)
        model.optimizer.register_local_var(model.layers[0].kernel)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        broadcast.set_model(model)
        broadcast.on_train_begin()
        for index, variables in enumerate((model.trainable_variables, inner.momentums)):
            values = [keras.ops.convert_to_numpy(variable) for variable in variables]
            everyones = [
                hvd.allgather(value[None], name=f"{index}.{place}")
                for place, value in enumerate(values)
            ]
            assert [np.array_equal(one[0], one[1]) for one in everyones] == [
                False,
                True,
                True,
                True,
            ]

    # Metrics are the mean of all ranks', and only numbers count.
    average = hvd.callbacks.MetricAverageCallback()
    logs = {
        "loss": 1.0 + rank,
        "accuracy": 0.5,
        "table": np.ones(2),
        "note": f"of {rank}",
        "nothing": None,
    }
    average.on_epoch_end(0, logs)
    assert (logs["loss"], logs["accuracy"], logs["note"], logs["nothing"]) == (
        1.5,
        0.5,
        f"of {rank}",
        None,
    )
    with pytest.raises(ValueError, match="ranks have different metrics"):
        average.on_epoch_end(1, {f"of rank {rank}": 1.0})


def callbacks_set_rates_and_keep_the_best():
    import math

    import keras
    import numpy as np

    import farandole.keras as hvd
    from farandole._keras import callbacks

    x, y = batches()
    rank = hvd.rank()
    # A constant is a base, and epochs have their bounds.
    model = build(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9)))
    decay = hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=3)
    history = model.fit(
        mine(x, rank),
        mine(y, rank),
        batch_size=BATCH // RANKS,
        epochs=4,
        verbose=0,
        callbacks=[decay],
    ).history["lr"]
    np.testing.assert_allclose(history, [1.0, 0.8, 0.4, 0.4], rtol=1e-6)
    seen = []

    def note(batch, **_):
        callbacks.write_jax_state_to_model(model)
        seen.append((batch, float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))))

    rates = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    fit(model, mine(x, rank), mine(y, rank), BATCH // RANKS, [warmup, rates])
    steps = range(STEPS * EPOCHS)
    expected = [(step % STEPS, 0.2 * ((step + 1) / STEPS * (RANKS - 1) / 2 + 1)) for step in steps]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)
    endless = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: epoch, staircase=False)
    endless.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        endless.on_train_begin()

    # The best model: written where the estimator says, when the metric has become better.
    with tempfile.TemporaryDirectory() as folder:
        for only_weights, name in ((False, "best.keras"), (True, "best.weights.h5")):
            best = hvd.callbacks.BestModelCheckpoint(
                monitor="loss", mode="min", save_weights_only=only_weights
            )
            assert best.save_best_only
            best.filepath = os.path.join(folder, name)
            best.set_model(model)
            written = []
            for epoch, loss in enumerate([3.0, 2.0, 2.5, math.inf, 1.0]):
                if os.path.exists(best.filepath):
                    os.remove(best.filepath)
                best.on_epoch_begin(epoch)
                best.on_epoch_end(epoch, {"loss": loss})
                written.append(os.path.exists(best.filepath))
            assert written == [True, True, False, False, True], name


def loads_no_tensorflow():
    import sys

    return "tensorflow" not in sys.modules


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_fit_on_two_ranks_equals_one_process(backend, request):
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    if backend == "tensorflow":
        world = request.getfixturevalue("tensorflow_pair")
    else:
        env = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
        world = request.getfixturevalue("fresh_world")(RANKS, env=env)
    assert world.run(fit_equals_one_process) == [backend] * RANKS
    # A process that loads Triton after TensorFlow ends, and Triton comes with Keras on torch.
    assert world.run(loads_no_tensorflow) == [backend != "tensorflow"] * RANKS
    world.run(embeddings_are_learned_as_by_one_process)
    world.run(an_inf_on_one_rank_skips_the_step_on_all)
    world.run(passes_and_local_layers_and_rates)
    world.run(saved_models_load_with_and_without)
    world.run(copies_reduce_too)
    world.run(callbacks_broadcast_and_average)
    world.run(callbacks_set_rates_and_keep_the_best)
    for function in keras_locals.ALL:
        world.run(function)
