# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions with `jit_compile=True` where XLA cannot hold collectives: split around them, with
the same results.
"""

import contextlib
import os
from importlib.util import find_spec

import cloudpickle
import pytest
from tests.parallel import compiled_fits

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)

cloudpickle.register_pickle_by_value(compiled_fits)  # workers import no test
SWITCH = "FARANDOLE_ENABLE_XLA_OPS"


@contextlib.contextmanager
def without_custom_calls():
    """The probe fails, as it does where TensorFlow has another XLA."""
    from farandole.tensorflow import xla

    os.environ[SWITCH] = "0"
    xla.xla_unsupported_reason.cache_clear()
    try:
        assert "is off" in (xla.xla_unsupported_reason() or "")
        yield
    finally:
        del os.environ[SWITCH]
        xla.xla_unsupported_reason.cache_clear()


def close(actual, expected, what):
    import numpy as np

    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=what)


def made_of(run):
    """Types of the ops of functions that are run for the first time, by what is made of their
    graphs in the end.
    """
    from tensorflow.python.eager.context import context

    context().enable_graph_collection()
    try:
        run()
        metadata = context().export_run_metadata()
    finally:
        context().disable_graph_collection()
    return {node.op for graph in metadata.partition_graphs for node in graph.node}


def steps_are_split():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank, traces = hvd.rank(), []
    dense, table = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4, 2]))

    @tf.function(jit_compile=True)
    def step(x):
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x) * x + tf.exp(-x * x)
            loss = (
                tf.reduce_sum(dense * (rank + 1.0))
                + tf.reduce_sum(tf.gather(table, [rank]))
                + tf.reduce_sum(hidden)
            )
        grads = hvd.DistributedGradientTape(tape).gradient(loss, [dense, table])
        return loss, [tf.square(tf.sqrt(grad)) * 1.0 + 0.0 for grad in grads]

    with without_custom_calls():
        for turn in range(3):
            _, grads = step(tf.ones([5]))
            close(grads[0], [1.5] * 3, f"dense, turn {turn}")
            close(grads[1], [[0.5] * 2, [0.5] * 2, [0.0] * 2, [0.0] * 2], f"rows, turn {turn}")
        assert len(traces) == 1
        # Traced again, for another shape.
        ops = made_of(lambda: close(step(tf.ones([7]))[1][0], [1.5] * 3, "another shape"))
        assert len(traces) == 2
        assert "FarandoleGroupedAllreduce" in ops, ops
        assert ops & {"_XlaRun", "XlaLaunch"}, ops
        assert not ops & {"Tanh", "Exp", "Square"}, ops
    # What needs no collectives is compiled as a whole, now as ever.
    whole = tf.function(lambda x: tf.tanh(x) * x, jit_compile=True)
    assert "tanh" in whole.experimental_get_compiler_ir(tf.ones([2]))(stage="hlo")


def functions_in_functions_are_split():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    inner = tf.function(lambda x: hvd.allreduce(x * 2, op=hvd.Sum) + 1, jit_compile=True)
    plain = tf.function(lambda x: hvd.allreduce(x, op=hvd.Max, name="max") * 2)

    @tf.function(jit_compile=True)
    def outer(x, times):
        total = inner(x) + plain(x)
        for _ in tf.range(times):
            total = hvd.allreduce(total, op=hvd.Average)
        if tf.reduce_sum(total) > 0.0:
            total += hvd.broadcast(x, 1)
        gathered = hvd.allgather(tf.ones([hvd.rank() + 1]))
        return total, gathered

    @tf.function
    def around(x):
        return outer(x, tf.constant(2))

    mine = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)
    with without_custom_calls():
        for call in (lambda: outer(mine, tf.constant(2)), lambda: around(mine)):
            total, gathered = call()
            # 2 * (1 + 2) + 1 and 2 * 2 and 2, of the first element.
            close(total, [7.0 + 4.0 + 2.0, 13.0 + 8.0 + 4.0], "nested")
            close(gathered, [1.0] * 3, "of different sizes")
        concrete = tf.function(
            lambda x: hvd.allreduce(x, op=hvd.Sum), jit_compile=True
        ).get_concrete_function(mine)
        close(concrete(mine), [3.0, 6.0], "concrete")


def keras_splits_the_step():
    import warnings

    def compiled(model, _):
        assert model.jit_compile is True

    with without_custom_calls(), warnings.catch_warnings():
        warnings.simplefilter("error")
        # The last batch is smaller.
        compiled_fits.equal_one_process(
            36, [{"jit_compile": True}, {"jit_compile": True, "steps_per_execution": 2}], compiled
        )


def auto_never_compiles_what_has_to_be_split():
    """As on a machine with a GPU, where Keras would compile."""
    import keras

    import farandole.keras as hvd

    trainer = keras.src.trainers.trainer
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile="auto"
    )
    assert model.jit_compile is False  # no GPU
    tf = keras.src.utils.module_utils.tensorflow
    listed = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda kind=None: [gpu] if kind != "CPU" else []
    try:
        from farandole.tensorflow import xla

        xla.xla_unsupported_reason.cache_clear()
        assert "on a GPU" in (xla.xla_unsupported_reason() or "")
        assert model._resolve_auto_jit_compile() is False
        assert trainer.model_supports_jit(model)
        other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        other.compile("sgd", loss="mse", jit_compile="auto")
        assert other.jit_compile is True
    finally:
        tf.config.list_physical_devices = listed
        xla.xla_unsupported_reason.cache_clear()


def test_compiled_steps_are_split_around_their_reduction(tensorflow_pair):
    tensorflow_pair.run(steps_are_split)


def test_compiled_functions_in_compiled_functions_are_split(tensorflow_pair):
    tensorflow_pair.run(functions_in_functions_are_split)


def test_a_split_fit_equals_one_process(tensorflow_pair):
    tensorflow_pair.run(keras_splits_the_step)


def test_auto_never_compiles_what_has_to_be_split(tensorflow_pair):
    tensorflow_pair.run(auto_never_compiles_what_has_to_be_split)
