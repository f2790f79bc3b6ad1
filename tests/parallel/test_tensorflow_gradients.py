# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""TensorFlow gradients are reduced during the backward pass, after several passes, or by the
stand-ins alone.
"""

import subprocess
import threading
from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)

LACKS = "TF_ForwardInputOrAllocateOutput"
OLDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

/* A TensorFlow whose C API lacks a function. */
void *dlsym(void *handle, const char *name) {
    void *(*look_up)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return strcmp(name, LACKS) == 0 ? 0 : look_up(handle, name);
}
"""  # noqa: E501


def close(actual, expected, what):
    import numpy as np

    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=what)


def groups_are_reduced_while_gradients_are_computed():
    """The gradient of the first layer is not there before that of the last one has been reduced."""
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank, reduced = hvd.rank(), threading.Event()

    def wait(grad):
        assert reduced.wait(20), "nothing was reduced while the backward pass went on"
        return grad

    def note(value):
        reduced.set()
        return value

    @tf.custom_gradient
    def slow(x):
        def backward(grad):
            # Not stateful: TensorFlow would put such calls in the order in which they were made.
            waited = tf.numpy_function(wait, [grad], tf.float32, stateful=False)
            return tf.ensure_shape(waited, grad.shape)

        return tf.identity(x), backward

    first, last = tf.Variable(tf.ones(3)), tf.Variable(tf.ones(3))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(slow(first) * last * (rank + 1.0))
        grads = hvd.DistributedGradientTape(tape, groups=2).gradient(loss, [first, last])
        return grads[0], tf.numpy_function(note, [grads[1]], tf.float32, stateful=False)

    for turn in range(2):
        reduced.clear()
        for grad in step():
            close(grad, [1.5] * 3, f"turn {turn}")


def passes_are_averaged_and_local_variables_kept_in_compat_v1():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    v1, mine = tf.compat.v1, hvd.rank() + 1.0

    def wrapped(**options):
        return hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), **options)

    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float32, [])
        averaged, shared, scaled, kept, passed = (
            v1.get_variable(name, initializer=tf.constant(1.0))
            for name in ("averaged", "shared", "scaled", "kept", "passed")
        )
        averaging = wrapped(backward_passes_per_step=2, average_aggregated_gradients=True)
        train_averaged = averaging.minimize(averaged * fed * mine, var_list=[averaged])
        keeping, unscaled, passing = (
            wrapped(),
            wrapped(scale_local_gradients=False),
            wrapped(backward_passes_per_step=2),
        )
        keeping.register_local_var(scaled)
        unscaled.register_local_var(kept)
        passing.register_local_var(passed)
        train = [
            keeping.minimize((shared + scaled) * mine, var_list=[shared, scaled]),
            unscaled.minimize(kept * mine, var_list=[kept]),
        ]
        train_passed = passing.minimize(passed * mine, var_list=[passed])
        with v1.train.MonitoredTrainingSession() as session:
            seen = [
                (session.run(train_averaged, {fed: value}), session.run(averaged))[1]
                for value in (1.0, 3.0)
            ]
            close(seen, [1.0, 1.0 - 0.1 * 1.5 * (1.0 + 3.0) / 2], "averaged")
            session.run(train)
            close(
                session.run([shared, scaled, kept]),
                [0.85, 1.0 - 0.1 * mine / 2, 1.0 - 0.1 * mine],
                "local",
            )
            seen = [(session.run(train_passed), session.run(passed))[1] for _ in range(2)]
            close(seen, [1.0, 1.0 - 2 * 0.1 * mine / 2], "local, two passes")


def optimizers_and_tapes_are_used_at_the_same_time():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    v1, mine = tf.compat.v1, hvd.rank() + 1.0
    with tf.Graph().as_default():
        weights = [v1.get_variable(f"w{index}", initializer=tf.constant(1.0)) for index in range(3)]
        train = [
            hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2
            ).minimize(weight * mine * (index + 1.0), var_list=[weight])
            for index, weight in enumerate(weights)
        ]
        with v1.train.MonitoredTrainingSession() as session:
            for turn in range(6):
                session.run(train)
                steps = (turn + 1) // 2
                expected = [1.0 - 0.1 * 2 * 1.5 * (index + 1) * steps for index in range(3)]
                np.testing.assert_allclose(session.run(weights), expected, atol=1e-5)
    results = {}

    def work(number, traced):
        weight = tf.Variable(tf.ones(1000))

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * mine * number)
            return hvd.DistributedGradientTape(tape, name=f"{traced}.{number}").gradient(
                loss, [weight]
            )[0][0]

        step = tf.function(step) if traced else step
        results[number, traced] = {round(float(step()), 4) for _ in range(40)}

    kinds = [(number, traced) for number in (1, 2) for traced in (False, True)]
    threads = [threading.Thread(target=work, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert results == {(number, traced): {1.5 * number} for number, traced in kinds}


def adasum_in_compat_v1_does_as_it_is_told():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    with tf.Graph().as_default():
        fine, coarse, local = (
            v1.get_variable(name, initializer=tf.zeros(2)) for name in ("fine", "coarse", "local")
        )
        small = 1.0 + 2.0**-12  # what a half loses
        step = tf.one_hot(rank, 2) * small

        def train(variable, **options):
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, **options
            )
            optimizer.register_local_var(local)
            loss = -tf.reduce_sum((variable + local) * step)
            return optimizer.minimize(loss, var_list=[variable, local])

        first = train(fine, groups=2)
        second = train(coarse, compression=hvd.Compression.fp16)
        with v1.train.MonitoredTrainingSession() as session:
            session.run(first)
            session.run(second)
            # Steps at right angles add up; a local variable takes this rank's.
            close(session.run(fine), [small, small], "in groups")
            close(session.run(coarse), [1.0, 1.0], "by halves")
            close(session.run(local), np.eye(2)[rank] * 2 * small, "local")


def layers_may_stay_with_their_rank():
    import keras
    import tensorflow as tf

    import farandole.tensorflow as hvd

    mine = hvd.rank() + 1.0
    shared, own, other = (
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(3)
    )
    for layer in (shared, own, other):
        layer.build((None, 1))
    sources = [layer.kernel for layer in (shared, own, other)]

    def run(**options):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(
                sum(layer(tf.ones([1, 1]) * mine) for layer in (shared, own, other))
            )
        tape = hvd.PartialDistributedGradientTape(tape, **options)
        local, reduced = tape.get_local_and_global_gradients(loss, sources)
        assert {id(source) for source, _ in local + reduced} == {id(source) for source in sources}
        whole = [float(grad[0, 0]) for grad in tape.gradient(loss, sources)]
        return whole, *([float(grad[0, 0]) for _, grad in part] for part in (local, reduced))

    assert run() == ([1.5] * 3, [], [1.5] * 3)
    assert run(local_layers=own) == ([1.5, mine / 2, 1.5], [mine / 2], [1.5, 1.5])
    assert run(local_layers=[own, other], scale_local_gradients=False) == (
        [1.5, mine, mine],
        [mine, mine],
        [1.5],
    )
    with pytest.raises(ValueError, match="local_layers must hold layers: EagerTensor"):
        run(local_layers=[tf.ones(1)])
    with pytest.raises(ValueError, match="the local layer 'mine' must be built"):
        run(local_layers=keras.layers.Dense(1, name="mine"))


def tapes_may_be_wrapped_while_they_record():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    weight = tf.Variable([1.0, 2.0])
    factor = hvd.rank() + 1.0
    for inside in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * factor)
            distributed = hvd.DistributedGradientTape(tape)
            if inside:
                close(distributed.gradient(loss, weight), [1.5, 1.5], "while it records")
        if not inside:
            # The end of the recording was the other's, too: it may begin again.
            with distributed:
                loss = loss * 2.0
            close(distributed.gradient(loss, weight), [3.0, 3.0], "after it was taken up again")
        with pytest.raises(RuntimeError, match="only be used to compute one set"):
            tape.gradient(loss, weight)
    # Before it records; and by two, each of which reduces with its own settings.
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(weight * factor)
    close(tape.gradient(loss, weight), [1.5, 1.5], "wrapped before")
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(weight * factor)
    averaged, summed = (
        hvd.DistributedGradientTape(tape),
        hvd.DistributedGradientTape(tape, op=hvd.Sum),
    )
    for one, expected in ((averaged, 1.5), (summed, 3.0), (averaged, 1.5)):
        close(one.gradient(loss, weight), [expected] * 2, "two wrappers")
    close(tape.gradient(loss, weight), [factor] * 2, "the tape itself")
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedGradientTape(summed)


def a_step_needs_no_more_than_one_call_of_the_stand_ins(lacks):
    import warnings

    import numpy as np
    import tensorflow as tf

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import farandole.keras as keras_hvd
        import farandole.tensorflow as hvd
        from farandole.tensorflow import _fallback, _native_ops

        assert _native_ops.ops is _fallback
        rank = hvd.rank()
        weights = [tf.Variable(tf.ones(size)) for size in (2, 3, 5)]

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(weight) * (rank + 1.0) for weight in weights])
            return hvd.DistributedGradientTape(tape).gradient(loss, weights)

        for _ in range(3):
            for grad, weight in zip(step(), weights, strict=True):
                close(grad, np.full(weight.shape, 1.5), "gradient")
        [graph] = [one.graph for one in [step.get_concrete_function()]]
        assert [op.type for op in graph.get_operations()].count("EagerPyFunc") == 1
        import keras

        layers = [
            keras.Input((2,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
        model = keras.Sequential(layers)
        model.compile(
            keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            loss=lambda _, predicted: predicted,
        )
        model.fit(np.full((1, 2), rank + 1.0), np.zeros((1, 1)), verbose=0)
        close(model.get_weights()[0], [[0.85], [0.85]], "fit")
    [warning] = [str(one.message) for one in told if "native ops" in str(one.message)]
    assert f"this TensorFlow lacks {lacks}" in warning
    assert "Python functions are used instead" in warning


def test_groups_are_reduced_while_the_backward_pass_continues(tensorflow_pair):
    tensorflow_pair.run(groups_are_reduced_while_gradients_are_computed)


def test_passes_are_averaged_and_local_variables_kept_in_graphs(tensorflow_pair):
    tensorflow_pair.run(passes_are_averaged_and_local_variables_kept_in_compat_v1)


def test_optimizers_of_one_session_and_tapes_of_several_threads_keep_apart(tensorflow_pair):
    tensorflow_pair.run(optimizers_and_tapes_are_used_at_the_same_time)


def test_adasum_takes_groups_compression_and_local_variables_in_graphs(tensorflow_pair):
    tensorflow_pair.run(adasum_in_compat_v1_does_as_it_is_told)


def test_tapes_may_be_wrapped_while_they_record(tensorflow_pair):
    tensorflow_pair.run(tapes_may_be_wrapped_while_they_record)


def test_a_partial_tape_leaves_layers_to_their_rank(tensorflow_pair):
    tensorflow_pair.run(layers_may_stay_with_their_rank)


def test_a_tensorflow_that_lacks_a_function_trains_by_the_stand_ins_with_one_warning(
    fresh_world, tmp_path
):
    source, library = tmp_path / "older.c", tmp_path / "older.so"
    source.write_text(OLDER)
    command = ["cc", "-shared", "-fPIC", f'-DLACKS="{LACKS}"', "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    env = {"LD_PRELOAD": str(library), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    fresh_world(2, env=env).run(a_step_needs_no_more_than_one_call_of_the_stand_ins, LACKS)
