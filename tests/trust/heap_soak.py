# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Work of ranks in a soak of their memory: random operations, sizes, dtypes, process sets and
optimizers.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import time

MIB = 1 << 20
HELD = 256 * MIB
"""Bytes of tensors that a rank keeps for a while, at most."""


def resident():
    """Bytes of memory of this process that are no pages of files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def tidy():
    """Returns all unused memory of all allocators."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def layers(draw):
    """The widths of one of a few models: programs have their models again and again."""
    chosen = random.Random(draw.randrange(12))
    return [chosen.randrange(8, 900) for _ in range(chosen.randrange(2, 6))]


class Torch:
    """The operations in torch."""

    def __init__(self):
        import torch

        import farandole.torch as hvd

        self.torch, self.hvd = torch, hvd
        torch.set_num_threads(1)
        self.dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8]

    def tensor(self, draw, rows, columns):
        return self.torch.ones(rows, columns).to(draw.choice(self.dtypes))

    def size(self, tensor):
        return tensor.nbytes

    def step(self, draw):
        """A few steps of a new model by a new optimizer; the bytes that these had."""
        torch = self.torch
        widths = layers(draw)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(*pair) for pair in itertools.pairwise(widths))
        )
        made = draw.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])(
            model.parameters(), lr=0.01
        )
        optimizer = self.hvd.DistributedOptimizer(made, named_parameters=model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, widths[0])).sum().backward()
            optimizer.step()
        # Weights and their gradients; the optimizer has one more of each, or two.
        kept = [
            run_operation
            for state in optimizer.state.values()
            for run_operation in state.values()
            if torch.is_tensor(run_operation)
        ]
        return sum(map(self.size, kept)) + 2 * sum(map(self.size, model.parameters()))


class TensorFlow:
    """The operations in TensorFlow."""

    def __init__(self):
        import tensorflow as tf

        import farandole.tensorflow as hvd

        self.tf, self.hvd = tf, hvd
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self.dtypes = [tf.float32, tf.float64, tf.float16, tf.int64, tf.uint8]

    def tensor(self, draw, rows, columns):
        return self.tf.ones([rows, columns], draw.choice(self.dtypes))

    def size(self, tensor):
        return tensor.dtype.size * tensor.shape.num_elements()

    def step(self, draw):
        """A few steps of a new model; the bytes that it had."""
        tf = self.tf
        widths = layers(draw)
        weights = [tf.Variable(tf.ones(pair)) for pair in itertools.pairwise(widths)]
        for _ in range(3):
            with self.hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.ones([4, widths[0]])
                for weight in weights:
                    loss = loss @ weight * 1e-3
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(gradient * 1e-6)
        # Weights, gradients, and the products that are taken from the weights.
        return 3 * sum(map(self.size, weights))


def run_operation(ops, draw, own, held, sets):
    """One operation, drawn by all ranks alike; `held` is what this rank keeps, by draws of its own.

    The bytes that were alive at most: what was held before, and what the operation itself has in
    its hands.
    """
    hvd, kind = ops.hvd, draw.randrange(9)
    rows, columns = 2 * draw.randrange(1, 60), int(10 ** draw.uniform(0, 4.7))
    tensor = ops.tensor(draw, rows, columns)
    root, mine = draw.randrange(2), [chosen for chosen in sets if chosen.included()]
    of_step = 0
    collectives = [
        lambda: [hvd.allreduce(tensor, op=hvd.Sum)],
        lambda: [hvd.allgather(tensor[: 1 + (hvd.rank() + rows) % rows])],
        lambda: [hvd.broadcast(tensor, root)],
        lambda: [hvd.alltoall(tensor)],
        lambda: hvd.grouped_allreduce([tensor, tensor[:1]], op=hvd.Sum),
    ]
    if kind < len(collectives):
        held.extend(collectives[kind]())
    elif kind == len(collectives):
        of_step = ops.step(draw)
    elif kind == 6 and sets:
        hvd.remove_process_set(sets.pop())
    elif kind == 7 and not sets:
        sets.append(hvd.add_process_set([root]))
    elif mine:
        held.append(hvd.allreduce(tensor, op=hvd.Sum, process_set=mine[0]))
    held.append(tensor)
    alive = sum(map(ops.size, held)) + of_step
    keep = own.uniform(0, 1) ** 2 * HELD
    while sum(map(ops.size, held)) > keep:
        held.pop(own.randrange(len(held)))
    return alive


def soak(kind, seconds, seed):
    """Works for so long; the base, and samples of what was alive, what was resident, and what
    malloc had given away.
    """
    from farandole.common.heap import MallocHeap

    ops = {"torch": Torch, "tensorflow": TensorFlow}[kind]()
    hvd = ops.hvd
    hvd.init(process_sets="dynamic")
    draw, own, held, sets = random.Random(seed), random.Random(hvd.rank()), [], []
    for _ in range(40):
        run_operation(ops, draw, own, held, sets)
    held.clear()
    tidy()
    heap, base, samples, looked = MallocHeap(), resident(), [], time.monotonic()
    most, end = 0, time.monotonic() + seconds
    while hvd.broadcast_object(time.monotonic() < end):
        for _ in range(10):
            most = max(most, run_operation(ops, draw, own, held, sets))
        if time.monotonic() - looked > 0.5:
            samples.append((most, resident(), heap.used_bytes()))
            most, looked = 0, time.monotonic()
    return base, samples
