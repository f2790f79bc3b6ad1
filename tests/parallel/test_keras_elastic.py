# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic states of Keras on torch and JAX; on TensorFlow see `test_tensorflow_elastic`."""

from importlib.util import find_spec

import pytest

if find_spec("keras") is None:
    pytest.skip("needs Keras", allow_module_level=True)


def fit(failing):
    """Three epochs; in the second, rank 1 may fail while rank 0 waits for it in a step."""
    import keras
    import numpy as np

    import farandole.keras as hvd
    from farandole.common.exceptions import FarandoleInternalError

    rank = hvd.rank()
    x, y = np.ones((8, 2), np.float32) * (rank + 1), np.zeros((8, 1), np.float32)
    # What a random layer draws is of its rank, and drawn again with a step that is taken again.
    layers = [
        keras.layers.Dropout(0.5, seed=1 + rank),
        keras.layers.Dense(1, kernel_initializer="ones"),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss="mse")
    tried = []

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 - Keras's
            if state.epoch == 1 and batch == 2 and failing and not tried:
                tried.append(True)
                if rank == 1:
                    raise FarandoleInternalError("told to")

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        kept = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, 100),
        ]
        model.fit(x, y, batch_size=2, epochs=3 - state.epoch, verbose=0, callbacks=[Fails(), *kept])

    train(state)
    assert state.epoch == 3
    return [weight.tolist() for weight in model.get_weights()]


def other_errors_pass():
    import keras

    import farandole.keras as hvd

    def raise_in_a_step():
        if keras.backend.backend() == "torch":
            raise RuntimeError("of another kind")
        import jax

        def fail(_):
            raise ValueError("of another kind")

        jax.jit(lambda x: jax.pure_callback(fail, x, x))(1.0).block_until_ready()

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(RuntimeError, match="of another kind"):
        hvd.elastic.run(lambda _: raise_in_a_step())(hvd.elastic.KerasState(model))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_fit_that_lost_a_rank_ends_as_one_that_did_not(fresh_world, backend):
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    world = fresh_world(2, env={"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"})
    undisturbed, disturbed = world.run(fit, False), world.run(fit, True)
    assert undisturbed == disturbed
    assert undisturbed[0] == undisturbed[1]
    world.run(other_errors_pass)
