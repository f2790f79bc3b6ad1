# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""farandole.jax on real processes: at once, under jit, and through gradients."""

import numpy as np
import pytest

pytest.importorskip("jax")


def operations_work_at_once_and_under_jit():
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    inputs = [np.arange(6, dtype=np.float32).reshape(2 * 3, 1) + 10 * r for r in range(size)]
    mine = jnp.asarray(inputs[rank])
    rows = np.array_split(sum(inputs), size)
    blocks = [part[rank * (6 // size) : (rank + 1) * (6 // size)] for part in inputs]
    cases = {
        "allreduce": (hvd.allreduce, sum(inputs) / size),
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 2 * sum(inputs)),
        "max": (lambda x: hvd.allreduce(x, op=hvd.Max, name="max"), inputs[-1]),
        "group": (lambda x: hvd.grouped_allreduce([x, x + 1])[1], sum(inputs) / size + 1),
        "allgather": (hvd.allgather, np.concatenate(inputs)),
        "broadcast": (lambda x: hvd.broadcast(x, 1), inputs[1]),
        "alltoall": (hvd.alltoall, np.concatenate(blocks)),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), rows[rank]),
    }
    for name, (operation, expected) in cases.items():
        for run in (operation, jax.jit(operation)):
            result = run(mine)
            assert isinstance(result, jax.Array)
            assert np.allclose(result, expected), name

    # One program with many operations, some in a loop.
    def loop(x):
        def body(carry, _):
            return hvd.allreduce(carry, op=hvd.Sum), hvd.broadcast(carry, 0)

        return jax.lax.scan(body, x, None, length=4)

    carried, seen = jax.jit(loop)(jnp.full(3, float(rank + 1)))
    total = size * (size + 1) / 2
    assert np.allclose(carried, total * size**3)
    assert np.allclose(seen[:, 0], [1.0, *(total * size**i for i in range(3))])
    large = jax.jit(hvd.allreduce)(jnp.full((1000, 1000), float(rank)))
    assert np.allclose(large, (size - 1) / 2)
    halves = hvd.allreduce(jnp.ones(3, jnp.bfloat16), op=hvd.Sum)
    assert halves.dtype == jnp.bfloat16
    for kind in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        for run in (hvd.allreduce, jax.jit(hvd.allreduce)):
            eighths = run(jnp.full(3, 1.0 + (rank == 0), kind))
            assert eighths.dtype == kind
            assert jnp.array_equal(eighths, jnp.full(3, (size + 1) / size).astype(kind))
    # jit runs on while this thread continues with its own operations.
    later = jax.jit(lambda x: hvd.allreduce(jnp.sin(x @ x), op=hvd.Sum))(jnp.ones((300, 300)))
    assert hvd.allreduce(1.0, op=hvd.Sum) == size
    later.block_until_ready()
    # Ranks may differ in rows outside jit only.
    uneven = hvd.allgather(jnp.ones((rank + 1, 2)))
    assert uneven.shape == (total, 2)
    received, counts = hvd.alltoall(jnp.arange(size * (rank + 1)), splits=[rank + 1] * size)
    assert counts.tolist() == [r + 1 for r in range(size)]
    assert received.shape == (total,)
    with pytest.raises(ValueError, match="equal splits"):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1] + [0] * (size - 1)))(jnp.ones(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside jit"):
        jax.jit(hvd.allgather)(jnp.ones(rank + 1)).block_until_ready()
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(1.0)
    hvd.barrier()


def test_operations_work_at_once_and_under_jit(trio):
    trio.run(operations_work_at_once_and_under_jit)


def gradients_follow_the_chain_rule():
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    weight = jnp.full(size, float(rank + 1))
    total = size * (size + 1) / 2
    ones = jnp.ones(size)
    cases = {
        "allreduce": (lambda x: (hvd.allreduce(x) * weight).sum(), total / size),
        "group": (lambda x: (hvd.grouped_allreduce([x, x], op=hvd.Sum)[1] * weight).sum(), total),
        "allgather": (lambda x: (hvd.allgather(x) * jnp.tile(weight, size)).sum(), total),
        "broadcast": (lambda x: (hvd.broadcast(x, 1) * weight).sum(), total if rank == 1 else 0.0),
        "alltoall": (lambda x: (hvd.alltoall(x) * weight).sum(), np.arange(1.0, size + 1)),
        "reducescatter": (
            lambda x: (hvd.reducescatter(x) * (rank + 1.0)).sum(),
            np.arange(1.0, size + 1) / size,
        ),
    }
    for name, (loss, expected) in cases.items():
        for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
            assert np.allclose(grad(ones), expected), name
    with pytest.raises(ValueError, match="have a gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Min).sum())(ones)


def test_gradients_follow_the_chain_rule(trio):
    trio.run(gradients_follow_the_chain_rule)


def training_equals_one_process():
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    keys = jax.random.split(jax.random.key(3), 4)
    features = jax.random.normal(keys[0], (8 * size, 5))
    labels = jnp.sin(features.sum(1))

    def start(key):
        return {
            "a": jax.random.normal(key, (5, 16)) / 2,
            "b": [jnp.zeros(16), jax.random.normal(key, (16,)) / 4],
        }

    def loss(params, features, labels):
        hidden = jnp.tanh(features @ params["a"] + params["b"][0])
        return ((hidden @ params["b"][1] - labels) ** 2).mean(), hidden.shape[0]

    alone = start(keys[1])
    together = hvd.broadcast_parameters(
        start(jax.random.fold_in(keys[1], rank)) if rank else start(keys[1])
    )
    descend = lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  # noqa: E731

    @jax.jit
    def step(params, features, labels):
        (value, rows), grads = hvd.distributed_value_and_grad(loss, has_aux=True)(
            params, features, labels
        )
        return descend(params, grads), value, rows

    own = slice(8 * rank, 8 * rank + 8)
    for _ in range(5):
        alone = descend(alone, jax.grad(loss, has_aux=True)(alone, features, labels)[0])
        together, value, rows = step(together, features[own], labels[own])
    assert rows == 8
    assert value.shape == ()
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        assert np.allclose(a, b, atol=1e-5)

    class Descent:
        """A pair of functions as optax has it."""

        def init(self, params):
            return 0 * len(params)

        def update(self, grads, state, params):
            assert params is None
            return jax.tree.map(lambda grad: -grad, grads), state + 1

    init, update = hvd.DistributedOptimizer(Descent(), op=hvd.Sum)
    updates, state = jax.jit(update)({"w": jnp.ones(3)}, init({"w": jnp.ones(3)}))
    assert np.allclose(updates["w"], -size)
    assert state == 1
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == list(range(size))


def test_training_equals_one_process(pair):
    pair.run(training_equals_one_process)
