# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Local variables of the ranks of a Keras fit: `test_keras` runs these functions on each
backend.
"""

import pytest

STEPS, BATCH = 4, 4


def build(optimizer, seed):
    import keras

    initializers = [keras.initializers.GlorotUniform(seed + layer) for layer in range(2)]
    layers = [
        keras.layers.Dense(width, kernel_initializer=one)
        for width, one in zip((4, 1), initializers, strict=True)
    ]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model, callbacks=(), epochs=1):
    """On rows of this rank's own."""
    import numpy as np

    import farandole.keras as hvd

    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(STEPS * BATCH, 5)).astype(np.float32)
    y = (x.sum(axis=1, keepdims=True) * (1 + hvd.rank())).astype(np.float32)
    return model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def alike(variables, name):
    """Returns whether each is the same on both ranks."""
    import keras
    import numpy as np

    import farandole.keras as hvd

    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    everyones = [
        hvd.allgather(value[None], name=f"{name} {place}") for place, value in enumerate(values)
    ]
    return [np.array_equal(one[0], one[1]) for one in everyones]


def slots_of_local_variables_stay_with_their_rank():
    """Checks this for optimizers with slots of all kinds."""
    import keras

    import farandole.keras as hvd

    class Own(keras.optimizers.Optimizer):
        """One that is reached by name, one of another shape, one that is for no variable."""

        def build(self, variables):
            super().build(variables)
            self.total = self.add_variable((), name="total")
            self.velocity_of = {
                one.path: self.add_variable_from_reference(one, "velocity") for one in variables
            }
            self.first_of = {}
            for one in variables:
                self.first_of[one.path] = self.add_variable(one.shape[:1], name="first")

        def update_step(self, gradient, variable, learning_rate):
            del learning_rate
            self.assign_sub(variable, gradient * 0.0)

    plain = 2  # iterations and rate
    kinds = [
        # Variables made for none, then which of those made for the four weights are made for the
        # first.
        (Own(0.1, use_ema=True), 0, [0, 5, 9]),
        (keras.optimizers.Adafactor(0.1), 0, [0, 1, 2]),
        (keras.optimizers.Muon(0.1, exclude_layers=["dense"]), 0, [0, 1]),
        (keras.optimizers.Nadam(0.1), 0, [0, 1]),
        (
            keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9
            ),
            -1,
            [0],
        ),
    ]
    for optimizer, more, mine in kinds:
        what = type(optimizer).__name__
        distributed = hvd.DistributedOptimizer(optimizer)
        model = build(distributed, seed=20 + hvd.rank())
        distributed.build(model.trainable_variables)
        kept = distributed.variables[plain + more :]
        for variable in kept:
            variable.assign(variable + keras.ops.cast(hvd.rank() + 1, variable.dtype))
        distributed.register_local_var(model.layers[0].kernel)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        broadcast.set_model(model)
        broadcast.on_train_begin()
        assert alike(model.trainable_variables, what) == [False, True, True, True]
        assert [
            place for place, same in enumerate(alike(kept, f"{what} kept")) if not same
        ] == mine, what

    class Closed(keras.optimizers.SGD):
        def __init__(self, told, **options):
            super().__init__(**options)
            self.told = told

    model = build(Closed("what its configuration does not hold"), seed=1)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[model.layers[0].kernel]
    )
    broadcast.set_model(model)
    with pytest.raises(ValueError, match="Closed cannot be created from its configuration"):
        broadcast.on_train_begin()


def local_gradients_do_not_clip_what_all_share():
    import keras

    import farandole.keras as hvd

    for options in ({"global_clipnorm": 0.05}, {"clipnorm": 0.02}, {"clipvalue": 0.01}):
        model = build("sgd", seed=1)
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1, **options), local_layers=model.layers[0]
        )
        model.compile(optimizer=optimizer, loss="mse")
        fit(model)
        assert alike(model.trainable_variables, str(options)) == [False, False, True, True], options


def what_cannot_be_distributed_is_said():
    import keras

    import farandole.keras as hvd

    with pytest.raises(ValueError, match="optimizer must be one of Keras's: 'adam'"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ValueError, match="the local layer 'mine' must be built"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1, name="mine")
        )


def a_model_may_be_built_on_some_ranks_only():
    """One that a rank has loaded or tried is built there, and by its first batch elsewhere."""
    import keras
    import numpy as np

    import farandole.keras as hvd

    initializers = [keras.initializers.GlorotUniform(hvd.rank() + seed) for seed in (1, 9)]
    model = keras.Sequential(
        [keras.layers.Dense(2, kernel_initializer=one) for one in initializers]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    if hvd.rank() == 0:
        model(np.zeros((1, 5), np.float32))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, [broadcast])
    assert broadcast.broadcast_done
    assert all(alike(model.trainable_variables, "built"))


def a_warm_up_ends_at_its_rate():
    """Also one of one and a half epochs, and one that has travelled."""
    import copy

    import cloudpickle
    import keras
    import numpy as np

    import farandole.keras as hvd
    from farandole._keras import callbacks
    from farandole.common import pickling

    original = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1.5)
    travelled = cloudpickle.loads(pickling.pickle_by_value(copy.copy(original)))
    for warmup in (original, travelled):
        model = build(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), seed=1)
        seen = []

        def note(batch, model=model, seen=seen, **_):
            del batch
            callbacks.write_jax_state_to_model(model)
            seen.append(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))

        fit(model, [warmup, keras.callbacks.LambdaCallback(on_train_batch_end=note)], epochs=3)
        steps = np.minimum(np.arange(1, 3 * STEPS + 1), 1.5 * STEPS)
        np.testing.assert_allclose(seen, 0.2 * (steps / (1.5 * STEPS) + 1), rtol=1e-5)


ALL = (
    slots_of_local_variables_stay_with_their_rank,
    local_gradients_do_not_clip_what_all_share,
    what_cannot_be_distributed_is_said,
    a_model_may_be_built_on_some_ranks_only,
    a_warm_up_ends_at_its_rate,
)
