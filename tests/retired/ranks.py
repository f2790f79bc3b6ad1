# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks that one rank runs; the argument is the name of the check."""

import os
import sys

os.environ["FARANDOLE_DYNAMIC_PROCESS_SETS"] = "1"

import mxnet as mx
import numpy as np

import farandole.mxnet as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()


def equal(actual, expected):
    np.testing.assert_allclose(actual.asnumpy(), expected, rtol=1e-6)


def operations():
    for dtype in ("float32", "float64", "float16", "int32", "int64", "int8", "uint8"):
        x = mx.nd.array(np.arange(6).reshape(2, 3) + rank, dtype=dtype)
        both = np.arange(6).reshape(2, 3) * 2 + 1
        total = hvd.allreduce(x, op=hvd.Sum, name=f"sum {dtype}")
        assert total.dtype == x.dtype
        equal(total, both)
        equal(hvd.allreduce(x, op=hvd.Max), np.arange(6).reshape(2, 3) + 1)
        equal(hvd.grouped_allreduce([x, x + 1], average=False)[1], both + 2)
        equal(
            hvd.allgather(x),
            np.concatenate([np.arange(6).reshape(2, 3) + other for other in range(size)]),
        )
        equal(hvd.grouped_allgather([x])[0], hvd.allgather(x).asnumpy())
        equal(hvd.broadcast(x, 1), np.arange(6).reshape(2, 3) + 1)
        equal(hvd.reducescatter(x, op=hvd.Sum), both[rank : rank + 1])
        equal(hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1], both[rank : rank + 1])
        equal(
            hvd.alltoall(x),
            [np.arange(6).reshape(2, 3)[rank], np.arange(6).reshape(2, 3)[rank] + 1],
        )
        output, received = hvd.alltoall(x, splits=[2, 0] if rank == 0 else [0, 2])
        equal(output, x.asnumpy())
        assert received.asnumpy().tolist() == ([2, 0] if rank == 0 else [0, 2])
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        equal(x, both)
        assert hvd.grouped_allreduce_([x], op=hvd.Min)[0] is x
        assert hvd.broadcast_(x, 0) is x
    equal(hvd.allreduce(mx.nd.ones(2) * (rank + 1), prescale_factor=2.0), [3.0, 3.0])
    equal(hvd.allreduce(mx.np.ones(2) * (rank + 1)), [1.5, 1.5])
    assert isinstance(hvd.allreduce(mx.np.ones(2)), mx.np.ndarray)
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]
    for wrong in ({"op": hvd.Adasum}, {"op": hvd.Sum, "average": True}):
        try:
            hvd.allreduce(mx.nd.ones(1), **wrong)
        except ValueError:
            continue
        raise AssertionError(wrong)


def optimizers():
    for groups in (0, 1):
        optimizer = hvd.DistributedOptimizer(
            mx.optimizer.SGD(learning_rate=1.0), 2.0, num_groups=groups
        )
        assert isinstance(optimizer, mx.optimizer.Optimizer)
        assert optimizer.lr == 1.0
        optimizer.set_learning_rate(0.5)
        weights, grads = (
            [mx.nd.ones(2) for _ in range(2)],
            [mx.nd.ones(2) * (rank + 1) for _ in range(2)],
        )
        states = [optimizer.create_state(index, weight) for index, weight in enumerate(weights)]
        optimizer.update([0, 1], weights, grads, states)
        for weight in weights:
            equal(weight, [1 - 0.5 * 1.5] * 2)
        optimizer.update_multi_precision(0, weights[0], mx.nd.ones(2) * rank, states[0])
        equal(weights[0], [0.25 - 0.25] * 2)


def network():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, activation="relu"), mx.gluon.nn.Dense(1))
    return net


def trainers():
    x = np.random.RandomState(0).normal(size=(8, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    mine = slice(rank * 4, rank * 4 + 4)
    for options in ({}, {"num_groups": 1, "prefix": "a."}, {"compression": hvd.Compression.fp16}):
        results = []
        for alone in (True, False):
            mx.random.seed(5)
            net = network()
            net.initialize(mx.init.Xavier(), force_reinit=True)
            net(mx.nd.array(x))
            params = net.collect_params()
            if alone:
                trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1}, kvstore=None)
            else:
                hvd.broadcast_parameters(params)
                trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.1}, **options)
            rows = slice(None) if alone else mine
            for _ in range(3):
                with mx.autograd.record():
                    loss = ((net(mx.nd.array(x[rows])) - mx.nd.array(y[rows])) ** 2).mean()
                loss.backward()
                trainer.step(1)
            results.append([param.data().asnumpy() for param in params.values()])
        loose = 1e-2 if "compression" in options else 1e-4
        for ours, theirs in zip(results[1], results[0], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=loose, atol=loose / 10)


def parameters():
    mx.random.seed(rank)
    net = network()
    net.initialize(mx.init.Normal(1.0))
    # Their shapes are not known yet: they are sent when they are.
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    net(mx.nd.ones((2, 4)))
    for name, param in sorted(net.collect_params().items()):
        everyones = hvd.allgather(param.data().expand_dims(0), name=name).asnumpy()
        assert (everyones[0] == everyones[1]).all(), name
    plain = {"a": mx.nd.ones(2) * rank}
    hvd.broadcast_parameters(plain, root_rank=1)
    equal(plain["a"], [1, 1])
    try:
        hvd.broadcast_parameters([mx.nd.ones(2)])
    except ValueError:
        return
    raise AssertionError("a list was taken")


def process_sets():
    alone = hvd.add_process_set([1])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=alone)
    weight = mx.nd.ones(1)
    optimizer.update(0, weight, mx.nd.ones(1) * (rank + 1), optimizer.create_state(0, weight))
    equal(weight, [-rank])
    if rank == 1:
        equal(hvd.allreduce(mx.nd.ones(1) * 3, process_set=alone), [3])
    assert hvd.remove_process_set(alone)


globals()[sys.argv[1]]()
print(sys.argv[1])
