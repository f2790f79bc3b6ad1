# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""TensorFlow where not all ranks do the same: joins, process sets, Adasum; and the Python
stand-ins' gradients.
"""

from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)


def close(actual, expected, what):
    import numpy as np

    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=what)


def uneven_ranks_join_and_go_on():
    """Ranks that gave out different numbers to unnamed operations agree again after a join."""
    import numpy as np
    import tensorflow as tf

    import farandole.numpy as arrays
    import farandole.tensorflow as hvd

    rank = hvd.rank()
    sums = [float(hvd.allreduce(tf.constant(rank + 1.0), op=hvd.Sum)) for _ in range(5 - 3 * rank)]
    if rank == 0:
        # The other rank is neutral in all of them, and still counts in averages.
        assert float(hvd.allreduce(tf.constant(-3.0), op=hvd.Max)) == -3.0
        assert float(hvd.allreduce(tf.constant(3.0), op=hvd.Min)) == 3.0
        assert float(hvd.allreduce(tf.constant(3.0), op=hvd.Product)) == 3.0
        assert float(hvd.allreduce(tf.constant(3.0))) == 1.5
    assert int(hvd.join()) == 0
    assert sums == [3.0, 3.0, *[1.0] * (3 - 3 * rank)]
    # Eagerly, in functions and by another module of ours, all without names.
    close(hvd.allreduce(tf.constant([rank, 1.0]), op=hvd.Sum), [1.0, 2.0], "after the first join")
    grouped = tf.function(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum))
    close(grouped(tf.ones(2))[1], [2.0, 2.0], "a group after the first join")
    close(arrays.allreduce(np.ones(2), op=hvd.Sum), [2.0, 2.0], "NumPy after TensorFlow's join")
    if rank == 1:
        close(hvd.allreduce(tf.constant(7.0)), 3.5, "alone")
    assert int(tf.function(hvd.join)()) == 1
    close(hvd.allgather(tf.constant([rank])), [0, 1], "after the second join")
    arrays.join()
    close(hvd.allreduce(tf.ones(1), op=hvd.Sum), [2.0], "TensorFlow after NumPy's join")


def process_sets_reduce_among_themselves():
    import keras
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    alone, both = hvd.add_process_set([1]), hvd.global_process_set
    variable = tf.Variable([1.0, 2.0])
    if rank == 1:
        close(hvd.allreduce(tf.constant([3.0]), process_set=alone, op=hvd.Sum), [3.0], "one rank")
        assert int(hvd.size_op(alone.process_set_id)) == 1
        assert hvd.broadcast(tf.constant([5]), 1, process_set=alone).numpy().tolist() == [5]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="member"):
            hvd.allreduce(tf.constant([3.0]), process_set=alone)
        assert int(hvd.process_set_included_op(alone.process_set_id)) == 0
    close(hvd.allgather(tf.constant([[rank]]), process_set=both), [[0], [1]], "both")
    close(
        hvd.reducescatter(tf.constant([1.0, 2.0]) + rank, op=hvd.Sum, process_set=both),
        [[3.0, 5.0][rank]],
        "rows",
    )

    def gradient(process_set):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (rank + 1.0))
        return hvd.DistributedGradientTape(tape, process_set=process_set).gradient(
            loss, [variable]
        )[0]

    for how in (gradient, tf.function(gradient)):
        close(how(both), [1.5, 1.5], "tape among both")
        close(how(alone), [rank + 1.0] * 2, "tape where one is left out")
    for process_set, expected in ((both, 1.5), (alone, rank + 1.0)):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=process_set),
            loss=lambda _, p: p,
        )
        model.fit(np.full((1, 1), rank + 1.0), np.zeros((1, 1)), verbose=0)
        close(model.get_weights()[0], [[1.0 - expected]], f"fit in {process_set}")
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(variable, op=hvd.Adasum, process_set=alone)
    assert hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(variable, process_set=alone)


def adasum_and_halves_are_what_they_should_be():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    vectors = [np.array([1.0, 2.0, 0.5, 0.0]), np.array([2.0, -1.0, 0.0, 3.0])]
    mine = tf.constant(vectors[rank], tf.float32)
    dot, norms = vectors[0] @ vectors[1], [vector @ vector for vector in vectors]
    expected = (1 - dot / 2 / norms[0]) * vectors[0] + (1 - dot / 2 / norms[1]) * vectors[1]
    close(hvd.allreduce(mine, op=hvd.Adasum), expected, "adasum")
    close(
        tf.function(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Adasum))(mine)[1],
        expected,
        "adasum in a group",
    )
    # What travels as halves loses what halves lose, and comes back in its own type.
    fine = tf.constant([1.0 + 2.0**-12, 1.5], tf.float64) * (rank + 1)
    for compression, lost in ((hvd.Compression.fp16, 2.0**-12), (hvd.Compression.none, 0.0)):
        summed = hvd.allreduce(fine, op=hvd.Sum, compression=compression)
        assert summed.dtype == tf.float64
        close(summed, [3.0 + 3 * 2.0**-12 - 3 * lost, 4.5], f"{compression}")
    whole = hvd.allreduce(
        tf.constant([2**20 + 1], tf.int64), op=hvd.Sum, compression=hvd.Compression.fp16
    )
    assert whole.numpy().tolist() == [2**21 + 2]
    slices = tf.IndexedSlices(
        tf.ones([1, 2]) * (rank + 1), tf.constant([rank]), dense_shape=tf.constant([2, 2])
    )
    reduced = tf.function(
        lambda values: hvd.allreduce(tf.IndexedSlices(values, slices.indices, slices.dense_shape))
    )
    close(tf.convert_to_tensor(reduced(slices.values)), [[0.5, 0.5], [1.0, 1.0]], "slices")


def stand_ins_have_gradients_too():
    """The whole way of a step by `tf.py_function`: eagerly, traced, in a session."""
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow import _fallback

    rank, v1 = hvd.rank(), tf.compat.v1
    dense, table, unused = tf.Variable(tf.ones(3)), tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)

    def step(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense * (rank + 1.0)) + tf.reduce_sum(tf.gather(table, [rank]))
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, [dense, table, unused])

    def through(operation, value):
        variable = tf.Variable(value)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((rank + 1.0) * operation(variable))
        return tape.gradient(loss, variable)

    unknown = hvd.ProcessSet([0, 1])
    unknown.process_set_id = 9
    native, hvd.mpi_ops.ops = hvd.mpi_ops.ops, _fallback
    try:
        for options in (
            {},
            {"sparse_as_dense": True},
            {"groups": 2, "compression": hvd.Compression.bf16},
        ):
            for how in (step, tf.function(step)):
                grads = how(**options)
                close(grads[0], [1.5] * 3, f"dense, {options}")
                close(
                    tf.convert_to_tensor(grads[1]),
                    [[0.5] * 2, [0.5] * 2, [0.0] * 2, [0.0] * 2],
                    f"rows, {options}",
                )
                assert grads[2] is None
        square = tf.ones([2, 2])
        cases = {
            "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), 3.0),
            "group": (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0], 3.0),
            "allgather": (hvd.allgather, 3.0),
            "broadcast": (lambda x: hvd.broadcast(x, 0), 3.0 * (1 - rank)),
            "alltoall": (hvd.alltoall, [[1.0] * 2, [2.0] * 2]),
            "reducescatter": (hvd.reducescatter, [[0.5] * 2, [1.0] * 2]),
        }
        for what, (operation, expected) in cases.items():
            whole = tf.zeros([2, 2]) + expected
            close(through(operation, square), whole, f"{what}, eager")
            close(
                tf.function(lambda x, op=operation: through_traced(op, x, rank))(square),
                whole,
                f"{what}, traced",
            )
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", initializer=tf.constant(rank + 1.0))
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
            train = optimizer.minimize(weight * (rank + 1.0))
            with v1.train.MonitoredTrainingSession(
                hooks=[hvd.BroadcastGlobalVariablesHook(0)]
            ) as session:
                session.run(train)
                close(session.run(weight), 1.0 - 0.15, "session")
        with pytest.raises(tf.errors.InvalidArgumentError, match="rows must divide"):
            hvd.alltoall(tf.ones(3))
        # The codes of the native ops; in graphs there is one for all wrong calls.
        codes = (tf.errors.FailedPreconditionError, tf.errors.AbortedError)
        for how, (mismatch, cannot) in (
            (lambda call: call(), codes),
            (lambda call: tf.function(call)(), [tf.errors.InvalidArgumentError] * 2),
        ):
            with pytest.raises(mismatch, match="Mismatched ALLREDUCE tensor shapes"):
                how(lambda: hvd.allreduce(tf.ones(3 + rank), name="stand-in"))
            with pytest.raises(cannot, match="failed: "):
                how(lambda: hvd.allreduce(tf.constant([1j]), op=hvd.Max, name="no order"))
            with pytest.raises(ValueError, match="the process set is not registered"):
                how(lambda: hvd.allreduce(tf.ones(3), process_set=unknown))
    finally:
        hvd.mpi_ops.ops = native


def through_traced(operation, value, rank):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(value)
        loss = tf.reduce_sum((rank + 1.0) * operation(value))
    return tape.gradient(loss, value)


def test_ranks_that_run_out_of_data_join_and_unnamed_operations_agree_afterwards(tensorflow_pair):
    tensorflow_pair.run(uneven_ranks_join_and_go_on)


def test_process_sets_reduce_among_themselves(tensorflow_pair):
    tensorflow_pair.run(process_sets_reduce_among_themselves)


def test_adasum_and_compression_are_what_they_should_be(tensorflow_pair):
    tensorflow_pair.run(adasum_and_halves_are_what_they_should_be)


def test_the_python_stand_ins_carry_a_whole_step(tensorflow_pair):
    tensorflow_pair.run(stand_ins_have_gradients_too)
