# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""TensorFlow's ops on two ranks, against what one process computes: eagerly, in functions,
graphs and SavedModels.
"""

import os
import tempfile
import threading
from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)

RANKS = 2


def close(actual, expected, what):
    import numpy as np

    actual, expected = (np.asarray(value).astype(np.float64) for value in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=what)


def operations_equal_one_process():
    """Eagerly, in a function and by the Python stand-ins; every dtype."""
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow import _fallback, _native_ops

    assert _native_ops.ops is not _fallback, "the native ops are not in use"
    rank, size = hvd.rank(), hvd.size()
    everyones = [np.arange(6) + other for other in range(size)]
    mine = tf.constant(everyones[rank])

    def all_operations(x):
        rows = tf.ones([rank + 1, 2], x.dtype) * tf.cast(rank, x.dtype)
        dealt, received = hvd.alltoall(x, splits=[4, 2] if rank == 0 else [1, 5])
        return {
            "sum": hvd.allreduce(x, op=hvd.Sum),
            "average": hvd.allreduce(x),
            "max": hvd.allreduce(x, op=hvd.Max, name="a name"),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
            "grouped": hvd.grouped_allreduce([x, x + 1], op=hvd.Min)[1],
            "gathered": hvd.allgather(rows),
            "gathered in groups": hvd.grouped_allgather([rows, x])[0],
            "broadcast": hvd.broadcast(x, 1),
            "dealt": dealt,
            "received": received,
            "scattered": hvd.reducescatter(tf.stack([x, x, x]), op=hvd.Sum),
            "scattered in groups": hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1],
        }

    total = sum(everyones)
    ones = np.concatenate([np.ones([other + 1, 2]) * other for other in range(size)])
    expected = {
        "sum": total,
        "average": total / size,
        "max": everyones[-1],
        "scaled": total * 6,
        "grouped": everyones[0] + 1,
        "gathered": ones,
        "gathered in groups": ones,
        "broadcast": everyones[1],
        "dealt": np.concatenate(
            [everyones[0][:4], everyones[1][:1]]
            if rank == 0
            else [everyones[0][4:], everyones[1][1:]]
        ),
        "received": [4, 1] if rank == 0 else [2, 5],
        "scattered": np.stack([total] * (2 - rank)),
        "scattered in groups": total[3 * rank : 3 * rank + 3],
    }
    dtypes = [
        tf.uint8,
        tf.int8,
        tf.uint16,
        tf.int16,
        tf.uint32,
        tf.int32,
        tf.uint64,
        tf.int64,
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.float64,
    ]
    traced = tf.function(all_operations, input_signature=[tf.TensorSpec([None], tf.float32)])
    runs = [
        (f"eager {dtype.name}", all_operations(tf.cast(mine, dtype)), dtype) for dtype in dtypes
    ]
    runs += [
        (f"traced, run {index}", traced(tf.cast(mine, tf.float32)), tf.float32)
        for index in range(3)
    ]
    native, hvd.mpi_ops.ops = hvd.mpi_ops.ops, _fallback
    try:
        runs.append(("Python", all_operations(tf.cast(mine, tf.float64)), tf.float64))
        runs.append(
            ("Python, traced", tf.function(all_operations)(tf.cast(mine, tf.float32)), tf.float32)
        )
    finally:
        hvd.mpi_ops.ops = native
    for how, results, dtype in runs:
        for what, value in expected.items():
            exact = value if dtype.is_floating or what != "average" else np.trunc(value)
            close(tf.cast(results[what], tf.float64), exact, f"{what}, {how}")
    for dtype in (tf.complex64, tf.complex128):
        number = tf.constant([1 + 2j, 3 - 1j], dtype) * (rank + 1)
        for how in (lambda step: step, tf.function):
            summed, apply_both, first = how(
                lambda x: (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0))
            )(number)
            assert summed.dtype == dtype
            np.testing.assert_allclose(summed, [1.5 + 3j, 4.5 - 1.5j], rtol=1e-6)
            np.testing.assert_allclose(apply_both, [1 + 2j, 3 - 1j, 2 + 4j, 6 - 2j], rtol=1e-6)
            np.testing.assert_allclose(first, [1 + 2j, 3 - 1j], rtol=1e-6)
    flags = hvd.allgather(tf.constant([rank == 0, True]))
    assert flags.numpy().tolist() == [True, True, False, True]
    assert [hvd.size_op().numpy(), hvd.rank_op().numpy(), hvd.local_size_op().numpy()] == [
        size,
        rank,
        size,
    ]
    assert hvd.process_set_included_op().numpy() == 1
    # Nothing at all is something, too.
    assert hvd.allreduce(tf.zeros([0, 3])).shape == (0, 3)
    assert hvd.allgather(tf.zeros([0, 3])).shape == (0, 3)


def gradients_are_those_of_the_sum_of_losses():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    mine = tf.constant(np.arange(6, dtype=np.float32) + 1) * (rank + 1)
    weights = sum((np.arange(6) + 1) * (other + 1) for other in range(RANKS))
    factor = tf.cast(rank + 1, tf.float32)
    by_sender = np.arange(1, RANKS + 1)[:, None] * np.ones([RANKS, 2])
    line, square, uneven = (
        tf.range(6, dtype=tf.float32),
        tf.ones([RANKS, 2]),
        tf.ones([rank + 1, 2]),
    )
    cases = {
        "sum": (lambda x: tf.reduce_sum(mine * hvd.allreduce(x, op=hvd.Sum)), line, weights),
        "average": (
            lambda x: tf.reduce_sum(mine * hvd.allreduce(x, postscale_factor=3.0)),
            line,
            weights / RANKS * 3,
        ),
        "group": (
            lambda x: tf.reduce_sum(mine * hvd.grouped_allreduce([x, x], op=hvd.Sum)[1]),
            line,
            weights,
        ),
        "broadcast": (
            lambda x: tf.reduce_sum(mine * hvd.broadcast(x, 0)),
            line,
            weights * (rank == 0),
        ),
        "allgather": (
            lambda x: tf.reduce_sum(factor * hvd.allgather(x)),
            uneven,
            np.ones([rank + 1, 2]) * 3,
        ),
        "groups of allgather": (
            lambda x: tf.reduce_sum(factor * hvd.grouped_allgather([x, x])[1]),
            uneven,
            np.ones([rank + 1, 2]) * 3,
        ),
        "alltoall": (lambda x: tf.reduce_sum(factor * hvd.alltoall(x)), square, by_sender),
        "reducescatter": (
            lambda x: tf.reduce_sum(factor * hvd.reducescatter(x)),
            square,
            by_sender / RANKS,
        ),
    }
    for what, (loss, value, expected) in cases.items():
        variable = tf.Variable(value)

        def gradient(loss=loss, variable=variable):
            with tf.GradientTape() as tape:
                result = loss(variable)
            return tape.gradient(result, variable)

        close(gradient(), expected, f"{what}, eager")
        close(tf.function(gradient)(), expected, f"{what}, traced")
    with tf.GradientTape() as tape:
        tape.watch(line)
        most = hvd.allreduce(line, op=hvd.Max)
    with pytest.raises(ValueError, match="have a gradient"):
        tape.gradient(most, line)


def tapes_reduce_what_they_should():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    rank = hvd.rank()
    dense, table, local = tf.Variable(tf.ones(4)), tf.Variable(tf.ones([5, 2])), tf.Variable(1.0)
    sources = {"dense": dense, "rest": [table, local], "none": tf.Variable(0.0)}

    def run(**options):
        with tf.GradientTape() as tape:
            loss = (
                tf.reduce_sum(dense * (rank + 1.0))
                + tf.reduce_sum(tf.gather(table, [rank, rank + 1]))
                + local * (rank + 1)
            )
        distributed = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(distributed, tf.GradientTape)
        distributed.register_local_source(local)
        return distributed.gradient(loss, sources)

    rows = np.zeros([5, 2])
    for other in range(RANKS):
        rows[[other, other + 1]] += 1.0 / RANKS
    for options in (
        {},
        {"sparse_as_dense": True},
        {"groups": 2},
        {"groups": [[table]], "compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0, "sparse_as_dense": True},
    ):
        for how in (run, tf.function(run)):
            grads = how(**options)
            close(grads["dense"], np.full(4, 1.5), f"dense, {options}")
            close(tf.convert_to_tensor(grads["rest"][0]), rows, f"rows, {options}")
            close(grads["rest"][1], (rank + 1) / RANKS, f"local, {options}")
            assert grads["none"] is None
            assert isinstance(grads["rest"][0], tf.IndexedSlices) != bool(
                options.get("sparse_as_dense")
            )
    with pytest.raises(ValueError, match="needs op=Average"):
        run(gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="each variable once"):
        run(groups=[[dense], [dense]])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    for word in ("Min", "Max", "Product", "Adasum"):
        op = getattr(hvd, word)
        for reduce in (
            lambda given, op=op: hvd.allreduce(given[1], op=op),
            lambda given, op=op: hvd.grouped_allreduce(given, op=op),
            tf.function(lambda given, op=op: hvd.grouped_allreduce(given, op=op)),
        ):
            with pytest.raises(NotImplementedError, match=f"{word}: convert .* sparse_as_dense"):
                # Refused before the dense tensor is sent, for which the other rank does not wait.
                reduce([tf.ones(3), slices] if rank == 0 else [slices, slices])
    with pytest.raises(NotImplementedError, match="2 and 1: convert"):
        hvd.grouped_allreduce([tf.ones(3), slices], prescale_factor=2.0)
    close(hvd.allreduce(tf.ones(1), op=hvd.Sum), [RANKS], "after refusals")


def graphs_of_compat_v1_run_in_sessions():
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float32, [None])
        # Many at once, in whatever order a session's threads come to them.
        sums = [hvd.allreduce(fed * index, op=hvd.Sum) for index in range(30)]
        weight = v1.get_variable("weight", initializer=tf.constant(rank + 1.0))
        passes = v1.get_variable("passes", initializer=tf.constant(1.0))
        adasum = v1.get_variable("adasum", initializer=tf.constant([1.0, 1.0]))
        train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(
            weight * (rank + 1.0), var_list=[weight]
        )
        slowly = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2
        )
        train_slowly = slowly.minimize(passes * (rank + 1.0), var_list=[passes])
        together = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
        train_together = together.minimize(adasum[rank], var_list=[adasum])
        with v1.train.MonitoredTrainingSession(
            hooks=[hvd.BroadcastGlobalVariablesHook(0)]
        ) as session:
            assert session.run(weight) == 1.0
            for _ in range(5):
                close(session.run(sums, {fed: [1.0, 2.0]})[3], [6.0, 12.0], "session")
            session.run(train)
            close(session.run(weight), 1.0 - 0.15, "train")
            seen = [(session.run(train_slowly), session.run(passes))[1] for _ in range(4)]
            close(seen, [1.0, 1.0 - 0.3, 0.7, 0.4], "two passes")
            session.run(train_together)
            # Steps at right angles add up.
            close(session.run(adasum), [0.0, 0.0], "adasum")
    with pytest.raises(RuntimeError, match="eager"):
        hvd.broadcast_global_variables(0)
    variables = [
        tf.Variable(np.full(3, rank, dtype)) for dtype in (np.float32, np.int64, np.float16)
    ]
    hvd.broadcast_variables(variables, root_rank=1)
    assert all((variable.numpy() == 1).all() for variable in variables)
    import keras

    given = [tf.Variable(rank + 5.0), keras.Variable(np.full(2, rank, "float32"))]
    returned = hvd.broadcast_(given, root_rank=1)
    assert [id(one) for one in returned] == [id(one) for one in given]
    assert float(given[0]) == 6.0
    close(given[1], [1, 1], "a variable of Keras")
    given[0].assign(rank + 7.0)
    within = tf.function(lambda: [one + 1.0 for one in hvd.broadcast_(given, root_rank=0)])
    close(within()[0], 8.0, "in a function")
    with tf.Graph().as_default(), v1.Session() as session:
        for resource in (True, False):
            one = v1.get_variable(
                f"one{resource}", initializer=tf.constant([rank, 2.0]), use_resource=resource
            )
            (read,) = hvd.broadcast_([one], root_rank=1)
            session.run(v1.global_variables_initializer())
            close(session.run(read), [1.0, 2.0], f"read, resource={resource}")
            close(session.run(one), [1.0, 2.0], f"assigned, resource={resource}")
    # A function may return what that returns.
    own = tf.Variable([rank])
    tf.function(lambda: hvd.broadcast_variables([own], root_rank=1))()
    assert own.numpy() == [1]
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.broadcast_object_fn(0)(rank) == 0
    assert hvd.allgather_object(rank) == [0, 1]


def functions_loop_save_and_run_in_threads():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    @tf.function(reduce_retracing=True)
    def looped(x, times):
        for _ in tf.range(times):
            x = hvd.allreduce(x, op=hvd.Sum)
            if tf.reduce_sum(x) > 1e6:
                x = hvd.allreduce(x, op=hvd.Average)
        return x

    for count in (3, 4, 5):
        close(looped(tf.ones([count]), tf.constant(10)), [2.0**10] * count, "loop")
    results = {}

    def work(number):
        reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"thread {number}"))
        results[number] = [float(reduce(tf.constant(float(number)))) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert results == {number: [2.0 * number] * 20 for number in range(8)}

    module = tf.Module()
    module.call = tf.function(
        lambda x: hvd.allreduce(x, op=hvd.Sum), input_signature=[tf.TensorSpec([2], tf.float32)]
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, os.path.join(folder, "saved"))
        loaded = tf.saved_model.load(os.path.join(folder, "saved"))
    close(loaded.call(tf.ones(2)), [2.0, 2.0], "saved model")


def wrong_calls_are_told_and_harm_nothing():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    ok = tf.ones(3)
    with pytest.raises(tf.errors.FailedPreconditionError, match="ismatch"):
        hvd.allreduce(tf.ones(3 + hvd.rank()), name="different shapes")
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched operations: "):
        _ = hvd.broadcast(ok, 0) if hvd.rank() else hvd.allreduce(ok)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one dimension"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such process set: 9"):
        hvd.mpi_ops.size_op(9)
    strange, splits = hvd.ProcessSet([0]), tf.constant([1, 2])
    for number in (None, 9):
        strange.process_set_id = number
        for name, given in (
            ("allreduce", (ok,)),
            ("grouped_allreduce", ([ok, ok],)),
            ("allgather", (ok,)),
            ("broadcast", (ok, 0)),
            ("broadcast_", ([tf.Variable(ok)], 0)),
            ("alltoall", (ok, splits)),
            ("reducescatter", (ok,)),
        ):
            for call in (getattr(hvd, name), tf.function(getattr(hvd, name))):
                with pytest.raises(ValueError, match="process set is not registered"):
                    call(*given, process_set=strange)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(ok, average=True, op=hvd.Sum)
    close(hvd.allreduce(ok, op=hvd.Sum), [2.0] * 3, "afterwards")


def batch_norm_sees_all_batches():
    import copy

    import keras
    import numpy as np
    import tensorflow as tf

    import farandole.tensorflow as hvd

    everything = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32) + 2
    # Batches of different sizes.
    mine = everything[:4] if hvd.rank() == 0 else everything[4:]
    layer, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    close_enough = {"rtol": 1e-4, "atol": 1e-5}
    outputs, expected = layer(mine, training=True), plain(everything, training=True)
    part = expected[:4] if hvd.rank() == 0 else expected[4:]
    np.testing.assert_allclose(outputs, part, **close_enough)
    np.testing.assert_allclose(
        layer.moving_variance.numpy(), plain.moving_variance.numpy(), **close_enough
    )
    assert layer.name.startswith("sync_batch_normalization")
    # A model may have several.
    keras.Sequential(
        [keras.Input((3,)), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()]
    )
    assert "process_set" not in layer.get_config()
    # A copy normalizes among the same ranks.
    alone = [hvd.add_process_set([rank]) for rank in range(RANKS)][hvd.rank()]
    among = hvd.SyncBatchNormalization(process_set=alone)
    again = type(among).from_config(among.get_config())
    for one in (among, again):
        local = keras.layers.BatchNormalization()(mine, training=True)
        np.testing.assert_allclose(one(mine, training=True), local, **close_enough)
    for other in range(RANKS):
        hvd.remove_process_set(alone if other == hvd.rank() else copy.copy(hvd.ProcessSet([other])))
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    # Keras numbers layers by what a process has made: on one rank that is more.
    if hvd.rank() == 0:
        hvd.SyncBatchNormalization()
    again, compiled = hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()

    @tf.function
    def apply_both(values):
        return compiled(again(values, training=True), training=True)

    # what is normal already, but for epsilon
    np.testing.assert_allclose(apply_both(mine), part, rtol=1e-2, atol=1e-2)


def a_peer_that_leaves_is_an_unknown_error():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    try:
        if hvd.rank() == 1:
            return "left"
        with pytest.raises(tf.errors.UnknownError, match=r"FarandoleAllreduce.*rank 1"):
            hvd.allreduce(tf.ones(1), name="alone")
        return "told"
    finally:
        hvd.shutdown()
        hvd.init()


def test_operations_on_two_ranks(tensorflow_pair):
    world = tensorflow_pair
    world.run(operations_equal_one_process)
    world.run(gradients_are_those_of_the_sum_of_losses)
    world.run(tapes_reduce_what_they_should)
    world.run(graphs_of_compat_v1_run_in_sessions)
    world.run(functions_loop_save_and_run_in_threads)
    world.run(wrong_calls_are_told_and_harm_nothing)
    world.run(batch_norm_sees_all_batches)
    assert world.run(a_peer_that_leaves_is_an_unknown_error) == ["told", "left"]
