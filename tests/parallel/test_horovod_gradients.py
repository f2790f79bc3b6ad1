# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients by Horovod's convention, which `import horovod` chooses, by their numbers on two ranks.

Rank r derives r + 1 for every element of a result: the ranks' sum is 3, their average 1.5.
"""

import os
import subprocess
import sys

import pytest

CONVENTION = {"FARANDOLE_GRADIENT_CONVENTION": "horovod"}

EXPECTED = {
    "allgather": ([1.5, 1.5], [1.5, 1.5]),
    "grouped allgather": ([1.5, 1.5], [1.5, 1.5]),
    "broadcast": ([0.0, 0.0], [1.5, 1.5]),
    "reducescatter sum": ([2.0, 4.0], [2.0, 4.0]),
    "reducescatter average": ([1.0, 2.0], [1.0, 2.0]),
    "reducescatter factors": ([3.0, 6.0], [3.0, 6.0]),
    "grouped reducescatter": ([2.0, 4.0], [2.0, 4.0]),
    "average": ([1.5, 1.5], [1.5, 1.5]),
    "sum": ([3.0, 3.0], [3.0, 3.0]),
    "min": ([1.0, 1.0], [1.0, 1.0]),
    "max": ([2.0, 2.0], [2.0, 2.0]),
    "product": ([2.0, 2.0], [2.0, 2.0]),
    "adasum": ([1.5, 1.5], [1.5, 1.5]),
    "grouped max": ([2.0, 2.0], [2.0, 2.0]),
}
"""Results of ranks 0 and 1 for their two elements."""


def operations(hvd):
    """The operations, of a vector of two elements, to a list of results."""
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    return {
        "allgather": lambda x: [hvd.allgather(x)],
        "grouped allgather": lambda x: hvd.grouped_allgather([x]),
        "broadcast": lambda x: [hvd.broadcast(x, 1)],
        "reducescatter sum": lambda x: [hvd.reducescatter(x, op=hvd.Sum)],
        "reducescatter average": lambda x: [hvd.reducescatter(x, op=hvd.Average)],
        "reducescatter factors": lambda x: [hvd.reducescatter(x, op=hvd.Sum, **factors)],
        "grouped reducescatter": lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum),
        "average": lambda x: [hvd.allreduce(x, op=hvd.Average)],
        "sum": lambda x: [hvd.allreduce(x, op=hvd.Sum)],
        "min": lambda x: [hvd.allreduce(x, op=hvd.Min)],
        "max": lambda x: [hvd.allreduce(x, op=hvd.Max)],
        "product": lambda x: [hvd.allreduce(x, op=hvd.Product)],
        "adasum": lambda x: [hvd.allreduce(x, op=hvd.Adasum)],
        "grouped max": lambda x: hvd.grouped_allreduce([x], op=hvd.Max),
    }


def of_torch():
    import torch

    import farandole.torch as hvd

    found = {}
    for what, operation in operations(hvd).items():
        x = torch.full((2,), float(hvd.rank() + 4), requires_grad=True)
        sum((result * (hvd.rank() + 1)).sum() for result in operation(x)).backward()
        found[what] = x.grad.tolist()
    return found


def of_tensorflow():
    import tensorflow as tf

    import farandole.tensorflow as hvd

    found = {}
    for what, operation in operations(hvd).items():
        x = tf.constant([float(hvd.rank() + 4)] * 2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = sum(tf.reduce_sum(result * (hvd.rank() + 1)) for result in operation(x))
        found[what] = tape.gradient(loss, x).numpy().tolist()
    return found


def check(world, function):
    by_rank = world.run(function)
    for what, expected in EXPECTED.items():
        for rank, numbers in enumerate(expected):
            assert by_rank[rank][what] == pytest.approx(numbers), (what, rank)


def test_gradients_of_torch_are_horovods(shared_world):
    check(shared_world(2, "horovod", CONVENTION), of_torch)


def test_gradients_of_tensorflow_are_horovods(shared_world):
    pytest.importorskip("tensorflow")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **CONVENTION}
    check(shared_world(2, "tensorflow by horovod's convention", env), of_tensorflow)


def second_derivatives():
    import torch

    import farandole.torch as hvd

    x = torch.full((2,), 3.0, requires_grad=True)
    first = torch.autograd.grad((hvd.allgather(x) ** 2).sum(), x, create_graph=True)[0]
    first.sum().backward()
    return first.tolist(), x.grad.tolist()


def test_they_may_be_differentiated_again(shared_world):
    first, second = shared_world(2, "horovod", CONVENTION).run(second_derivatives)[0]
    assert first == [6.0, 6.0]  # 2 x, averaged
    assert second == [1.0, 1.0]  # 2, averaged on the way back, too


def test_another_convention_is_refused_by_name():
    program = "import farandole.numpy as hvd; hvd.init()"
    env = {**os.environ, "FARANDOLE_GRADIENT_CONVENTION": "theirs"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1
    assert "FARANDOLE_GRADIENT_CONVENTION must be farandole or horovod: theirs" in done.stderr
