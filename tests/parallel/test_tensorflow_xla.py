# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collectives inside of functions that XLA compiles for the CPU, against the same functions
uncompiled.
"""

from importlib.util import find_spec

import cloudpickle
import pytest
from tests.parallel import compiled_fits

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)

cloudpickle.register_pickle_by_value(compiled_fits)  # workers import no test


def close(actual, expected, what):
    import numpy as np

    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=what)


def compiled_functions_equal_others():
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow import xla

    assert xla.xla_unsupported_reason() is None, xla.xla_unsupported_reason()
    rank = hvd.rank()

    def everything(x):
        doubled = hvd.allreduce(x, op=hvd.Sum)
        # One after the other and beside each other, in a branch and in a loop.
        chosen = tf.cond(doubled[0, 0] > 1e9, lambda: x, lambda: hvd.allreduce(x * 2, op=hvd.Max))
        looped = tf.while_loop(
            lambda step, _: step < 3,
            lambda step, value: (step + 1, hvd.allreduce(value, op=hvd.Average) + 1),
            [tf.constant(0), x],
        )[1]
        return {
            "sum": doubled,
            "chained": hvd.allreduce(doubled, op=hvd.Min, prescale_factor=0.5),
            "chosen": chosen,
            "looped": looped,
            "group": hvd.grouped_allreduce([x, tf.cast(x, tf.int32), x[0, 0]], op=hvd.Sum),
            "halves": hvd.allreduce(tf.cast(x, tf.bfloat16), postscale_factor=4.0),
            "broadcast": hvd.broadcast(x, 1),
            "gathered": hvd.allgather(x),
            "scattered": hvd.reducescatter(x, op=hvd.Sum),
            "dealt": hvd.alltoall(x),
            "nothing": hvd.allreduce(x[:0]),
            "slices": hvd.allreduce(
                tf.IndexedSlices(x, tf.constant([rank, 0]), tf.constant([2, 3]))
            ),
            "numbers": [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()],
        }

    mine = tf.reshape(tf.range(6, dtype=tf.float32), [2, 3]) + rank
    expected, compiled = tf.function(everything)(mine), tf.function(everything, jit_compile=True)
    for turn in range(3):
        actual = compiled(mine)
        for what, value in expected.items():
            one, other = (
                tf.nest.flatten(actual[what]),
                tf.nest.flatten(value, expand_composites=False),
            )
            for ours, theirs in zip(one, other, strict=True):
                assert ours.dtype == theirs.dtype
                dense = tf.convert_to_tensor(theirs)
                close(tf.cast(ours, tf.float64), tf.cast(dense, tf.float64), f"{what}, turn {turn}")


def gradients_are_compiled_too():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    dense, table = tf.Variable(tf.ones(3)), tf.Variable(tf.ones([4, 2]))

    def step(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense * (rank + 1.0)) + tf.reduce_sum(tf.gather(table, [rank]))
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [dense, table])

    for options in (
        {},
        {"groups": 2, "compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0},
    ):
        grads = tf.function(step, jit_compile=True)(**options)
        close(grads[0], [1.5] * 3, f"dense, {options}")
        close(grads[1], [[0.5] * 2, [0.5] * 2, [0.0] * 2, [0.0] * 2], f"rows, {options}")

    def through(operation):
        variable = tf.Variable(tf.ones([2, 2]))

        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((rank + 1.0) * operation(variable))
            return tape.gradient(loss, variable)

        return tf.function(gradient, jit_compile=True)(), tf.function(gradient)()

    operations = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "group": lambda x: hvd.grouped_allreduce([x, x])[1],
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "allgather": hvd.allgather,
        "alltoall": hvd.alltoall,
        "reducescatter": hvd.reducescatter,
    }
    for what, operation in operations.items():
        close(*through(operation), what)


def compiled_calls_follow_branches_loops_and_functions():
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow import xla

    doubled = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    # A function that both call, after a call of their own.
    one, other = (
        tf.function(lambda x, by=by: doubled(hvd.allreduce(x) * by), jit_compile=True)
        for by in (1.0, 2.0)
    )
    close(one(tf.constant(1.0)), 2.0, "a function in one")
    close(other(tf.constant(1.0)), 4.0, "the same function in another")

    @tf.function(jit_compile=True)
    def held(x, what):
        if what == "branch":
            tf.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Max), lambda: x)
        elif what == "loop":
            tf.while_loop(
                lambda i, _: i < 3, lambda i, v: (i + 1, hvd.allreduce(v)), [tf.constant(0), x]
            )
        else:
            doubled(x)
        return hvd.allreduce(x * 3, op=hvd.Sum)

    for what, holder in (
        ("branch", "StatelessIf"),
        ("loop", "StatelessWhile"),
        ("function", "PartitionedCall"),
    ):
        graph = held.get_concrete_function(tf.constant(1.0), what).graph
        [last] = [op for op in graph.get_operations() if op.type == "XlaCustomCallV2"]
        waits, left = set(), [last]
        while left:
            left = [tensor.op for op in left for tensor in op.inputs if tensor.op.type not in waits]
            waits.update(op.type for op in left)
        assert any(kind.endswith(holder) for kind in waits), (what, waits)
        close(held(tf.constant(1.0), what), 6.0, what)

    # A function that others call, too, in any order.
    for turns in (0, 1):
        shared = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
        compiled = tf.function(lambda x, shared=shared: shared(x) + 1.0, jit_compile=True)
        plain = tf.function(lambda x, shared=shared: shared(x) + 2.0)
        calls = [(shared, 2.0), (compiled, 3.0), (plain, 4.0)]
        for call, expected in (calls[::-1] if turns else calls) * 2:
            close(
                call(tf.constant(1.0)),
                expected,
                f"shared by compiled functions and others, turn {turns}",
            )
        assert shared.experimental_get_tracing_count() == 2

    # What was compiled for a world of another size says so.
    kept, xla._traced_process_set_size = xla._traced_process_set_size, lambda _: 3
    try:
        for operation in (hvd.allgather, hvd.reducescatter):
            with pytest.raises(
                tf.errors.OpError, match="another number of ranks, trace it again: 3 then, 2 now"
            ):
                tf.function(operation, jit_compile=True)(tf.ones([3, 2]))
    finally:
        xla._traced_process_set_size = kept


def keras_compiles_the_whole_step():
    def compiled(model, options):
        assert model.jit_compile is (options["jit_compile"] is True)  # without a GPU "auto" is no

    compiled_fits.equal_one_process(32, [{"jit_compile": True}, {"jit_compile": "auto"}], compiled)


def what_cannot_be_compiled_says_why():
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow import xla, xla_function_splitting

    def compiled(function, *specs):
        return tf.function(function, jit_compile=True, input_signature=specs or None)

    with pytest.raises(ValueError, match="shapes that are known"):
        compiled(hvd.allreduce, tf.TensorSpec([None]))(tf.ones(2))
    with pytest.raises(NotImplementedError, match="join"):
        compiled(hvd.join)()
    with pytest.raises(NotImplementedError, match="equal parts"):
        compiled(lambda x: hvd.alltoall(x, splits=[1, 1])[0])(tf.ones(2))
    with pytest.raises(ValueError, match="must divide by the 2 ranks: 3"):
        compiled(hvd.reducescatter)(tf.ones(3))
    uneven = compiled(hvd.allgather)
    with pytest.raises(tf.errors.OpError, match="same number of rows from every rank"):
        uneven(tf.ones([hvd.rank() + 1]))
    different = compiled(hvd.allreduce)
    with pytest.raises(tf.errors.OpError, match=r"FarandoleAllreduce: .*ismatch"):
        different(tf.ones([3 + hvd.rank()]))
    close(compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones(3)), [2.0] * 3, "afterwards")
    # Where the custom call is not to be had, nor a function to be split.
    kept = xla.xla_unsupported_reason, xla_function_splitting.is_split_possible
    xla.xla_unsupported_reason, xla_function_splitting.is_split_possible = (
        lambda: "some reason",
        lambda: False,
    )
    try:
        with pytest.raises(NotImplementedError, match="for some reason; reduce outside of it"):
            compiled(hvd.allreduce)(tf.ones(5))
    finally:
        xla.xla_unsupported_reason, xla_function_splitting.is_split_possible = kept


def test_collectives_are_compiled_by_xla(tensorflow_pair):
    tensorflow_pair.run(compiled_functions_equal_others)
    tensorflow_pair.run(gradients_are_compiled_too)
    tensorflow_pair.run(compiled_calls_follow_branches_loops_and_functions)


def test_a_compiled_fit_equals_one_process(tensorflow_pair):
    tensorflow_pair.run(keras_compiles_the_whole_step)


def test_an_operation_that_xla_cannot_compile_is_an_error_with_the_reason(tensorflow_pair):
    tensorflow_pair.run(what_cannot_be_compiled_says_why)
