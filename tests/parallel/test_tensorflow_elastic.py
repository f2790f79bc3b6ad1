# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic states of TensorFlow and Keras: a rank fails in the middle of a step, the others hear
of it by an op.
"""

from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)


def rolls_back(how):
    """Trains six steps; at the fourth, rank 1 fails while rank 0 waits for it in an op. Returns
    steps and values.
    """
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    weight = tf.Variable([1.0 if rank == 0 else 5.0])
    state = hvd.elastic.TensorFlowState([weight], step=0)
    resets, seen, tried = [], [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def step():
        with tf.GradientTape() as tape:
            loss = weight * (rank + 1.0)
        [grad] = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.1 * grad)

    run_step = {
        "eager": step,
        "traced": tf.function(step),
        "compiled": tf.function(step, jit_compile=True),
    }[how]

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            if state.step == 3 and not tried:
                tried.append(True)
                if rank == 1:
                    raise hvd.HorovodInternalError("told to")
            run_step()
            state.step += 1
            seen.append((state.step, round(float(weight[0]), 4)))
            if state.step % 2 == 0:
                state.commit()
        return state.step

    assert train(state) == 6
    assert resets == [2]
    return seen


def a_session_rolls_back():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank, v1 = hvd.rank(), tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=tf.constant(1.0 if rank == 0 else 5.0))
        train_op = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(
            weight * (rank + 1.0)
        )
        session.run(v1.global_variables_initializer())
        state, seen, tried = hvd.elastic.TensorFlowState(session=session, step=0), [], []

        @hvd.elastic.run
        def train(state):
            while state.step < 3:
                if state.step == 1 and not tried:
                    tried.append(True)
                    if rank == 1:
                        raise hvd.HorovodInternalError("told to")
                session.run(train_op)
                state.step += 1
                seen.append((state.step, round(float(session.run(weight)), 4)))
                if state.step == 2:
                    state.commit()

        train(state)
        return seen


def keras_goes_on_in_the_middle_of_an_epoch(failing):
    """`fit` in the wrapped function, with the callbacks that keep the state; other errors pass."""
    import keras
    import numpy as np
    import tensorflow as tf

    import farandole.keras as hvd
    import farandole.tensorflow as htf
    from farandole._keras.value_collectives import to_numpy_array

    rank = hvd.rank()
    x, y = np.ones((8, 2), np.float32) * (rank + 1), np.zeros((8, 1), np.float32)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=keras.initializers.Ones())]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss="mse")
    seen, tried = [], []

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 - Keras's
            if state.epoch == 1 and batch == 2 and failing and not tried:
                tried.append(True)
                if rank == 1:
                    raise htf.HorovodInternalError("told to")

        def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 - Keras's
            seen.append(int(to_numpy_array(model.optimizer.iterations)))

    kind = hvd.elastic.KerasState if rank == 0 else htf.elastic.TensorFlowKerasState
    state = kind(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(
            x,
            y,
            batch_size=2,
            epochs=3 - state.epoch,
            verbose=0,
            callbacks=[
                Fails(),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            ],
        )

    train(state)
    assert state.epoch == 3

    @hvd.elastic.run
    def wrong(state):
        raise tf.errors.UnknownError(None, None, "of another kind")

    with pytest.raises(tf.errors.UnknownError, match="another kind"):
        wrong(state)
    with pytest.raises(ValueError, match="must be built"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    return [weight.tolist() for weight in model.get_weights()], seen


@pytest.mark.parametrize("how", ["eager", "traced", "compiled"])
def test_a_step_that_lost_a_rank_is_taken_again_from_the_last_commit(tensorflow_pair, how):
    one, other = tensorflow_pair.run(rolls_back, how)
    # The third step was not committed: both take it again from rank 0's weight.
    assert (
        one == other == [(1, 0.85), (2, 0.7), (3, 0.55), (3, 0.55), (4, 0.4), (5, 0.25), (6, 0.1)]
    )


def test_variables_of_a_session_go_back_too(tensorflow_pair):
    one, other = tensorflow_pair.run(a_session_rolls_back)
    assert one == other == [(1, 0.85), (1, 0.85), (2, 0.7), (3, 0.55)]


def test_a_keras_fit_that_lost_a_rank_ends_as_one_that_did_not(tensorflow_pair):
    undisturbed = tensorflow_pair.run(keras_goes_on_in_the_middle_of_an_epoch, False)
    disturbed = tensorflow_pair.run(keras_goes_on_in_the_middle_of_an_epoch, True)
    assert undisturbed == disturbed
    assert undisturbed[0][1] == [4, 8, 12]


def goes_on_from_a_store(folder):
    """Trains three steps, and six in a job that starts anew; returns where that began."""
    import keras
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def network():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
        return model

    def trained(until):
        weight, half = tf.Variable([0.0]), tf.Variable(tf.zeros((), tf.bfloat16))
        model = network()
        states = [
            hvd.elastic.TensorFlowState([weight, half], step=0, notes=["begun"]),
            hvd.elastic.TensorFlowKerasState(model, epoch=0),
        ]
        begun = []

        @hvd.elastic.run
        def count(state):
            begun.append(state.step)
            while state.step < until:
                weight.assign_add([1.0])
                half.assign_add(tf.cast(0.5, tf.bfloat16))
                state.step += 1
                state.notes = [*state.notes, state.step]
                state.commit()
            return state.notes

        @hvd.elastic.run
        def fit(state):
            begun.append(state.epoch)
            while state.epoch < until:
                model.fit(tf.ones((4, 2)), tf.ones((4, 1)), batch_size=4, verbose=0)
                state.epoch += 1
                state.commit()

        for state, name in zip(states, ("values", "network"), strict=True):
            state.save_to(folder, name, every=2)
        notes = count(states[0])
        fit(states[1])
        found = [float(weight[0]), float(half), [value.tolist() for value in model.get_weights()]]
        return begun, notes, found

    begun, _, _ = trained(3)
    assert begun == [0, 0]
    again, notes, found = trained(6)
    model = network()
    for _ in range(6):
        model.fit(tf.ones((4, 2)), tf.ones((4, 1)), batch_size=4, verbose=0)
    assert found == [6.0, 3.0, [value.tolist() for value in model.get_weights()]]
    assert notes == ["begun", *range(1, 7)]
    return again


def test_a_job_that_starts_again_continues_from_the_store(tensorflow_pair, tmp_path):
    assert tensorflow_pair.run(goes_on_from_a_store, str(tmp_path)) == [[3, 3], [3, 3]]
