# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""TensorFlow: eager allreduce next to torch, the cost of a step, and `fit` next to one process and
to tf.distribute.

    python bench/tensorflow_training.py [--ranks 2] [--steps 30] [--batch 64]

Operations take turns in the same processes. The training rows run one after the other, each in
processes of its own, twice: `alone` and `whole` are one process, with one thread on a rank's share
of the batch and with a thread for every rank on all of it; `apart` is as many processes as ranks,
each as `alone`, at the same time: no reduction at all, which nobody's can beat; `fit` and `loop`
are Farandole's, `groups` is `fit` with gradients in four groups, of which the first travel while
the backward pass computes the last; `mirrored` is tf.distribute's MultiWorkerMirroredStrategy with
strategy.run, which Keras 3 refuses in `fit`. Writes bench/results/tensorflow.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, LAYERS = 2236, 5
"""Five layers of 2236 x 2236: 25.0 M parameters in 10 tensors."""
SMALL = 40
"""Layers of the model whose step costs next to nothing: what is left is overhead."""
LARGE = 64 << 20


def turns(calls: dict[str, Callable[[], object]], count: int, rounds: int = 5) -> dict[str, float]:
    """Median microseconds of each contestant, turn by turn."""
    import farandole.torch as hvd  # noqa: PLC0415 - only ranks need it

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            hvd.barrier()
            for index in range(count + 5):
                start = time.perf_counter()
                call()
                if index >= 5:  # noqa: PLR2004 - warm by then
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def report(what: str, microseconds: dict[str, float]) -> None:
    import farandole.torch as hvd  # noqa: PLC0415

    if hvd.rank() == 0:
        print(
            json.dumps({"what": what, "ranks": hvd.size(), "microseconds": microseconds}),
            flush=True,
        )


def operations() -> None:
    """One rank: eager operations next to torch's."""
    import tensorflow as tf  # noqa: PLC0415
    import torch  # noqa: PLC0415

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import farandole.tensorflow as hvd  # noqa: PLC0415
    import farandole.torch as torched  # noqa: PLC0415
    from farandole.tensorflow._native_ops import ops  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    for size, count in ((4, 2000), (LARGE, 8)):
        ours, theirs = tf.ones(size // 4), torch.ones(size // 4)
        number = tf.constant([1], tf.int64)
        calls: dict[str, Callable[[], object]] = {
            "farandole.tensorflow": lambda ours=ours: hvd.allreduce(ours, op=hvd.Sum, name="t"),
            "farandole.torch": lambda theirs=theirs: torched.allreduce(
                theirs, op=hvd.Sum, name="t"
            ),
            "farandole.torch, in place": lambda theirs=theirs: torched.allreduce_(
                theirs, op=hvd.Average, name="i"
            ),
        }
        if size == 4:  # noqa: PLR2004
            calls["op that does nothing"] = lambda number=number: ops.farandole_probe(
                tensor=number, delay=0
            )
        report(f"allreduce of {size} B", turns(calls, count))
    overhead()


def overhead() -> None:
    """A step of many tiny layers, compiled by tf.function, with and without its reduction; and
    that by torch.
    """
    import tensorflow as tf  # noqa: PLC0415
    import torch  # noqa: PLC0415

    import farandole.tensorflow as hvd  # noqa: PLC0415
    import farandole.torch as torched  # noqa: PLC0415

    weights = [tf.Variable(tf.ones([8, 8]) / 8) for _ in range(SMALL)]
    inputs = tf.ones([4, 8])

    def step(wrap: Callable[[Any], Any]) -> Callable[[], object]:
        @tf.function
        def run() -> None:
            with tf.GradientTape() as tape:
                value = inputs
                for weight in weights:
                    value = value @ weight
                loss = tf.reduce_sum(value)
            for weight, grad in zip(weights, wrap(tape).gradient(loss, weights), strict=True):
                weight.assign_sub(1e-6 * grad)

        return run

    tensors = [torch.ones(8, 8) for _ in range(SMALL)]
    alone = step(lambda tape: tape)

    def reduce() -> None:
        torched.grouped_allreduce_(tensors, op=hvd.Average, name="g")

    def meet() -> None:
        alone()
        # The cost of a reduction for its caller: the transfer, and the wait for the rank that comes
        # later.
        reduce()

    calls = {
        "step with DistributedGradientTape": step(hvd.DistributedGradientTape),
        "step alone": alone,
        "grouped allreduce by torch": reduce,
        "step, then that allreduce": meet,
    }
    report(f"a step with {SMALL} gradients of 256 B", turns(calls, 300))


def data(batch: int, steps: int) -> tuple[Any, Any]:
    import numpy as np  # noqa: PLC0415

    random = np.random.default_rng(0)
    return tuple(random.normal(size=(batch * steps, WIDTH)).astype(np.float32) for _ in range(2))


def fit(
    batch: int, steps: int, threads: int, distributed: bool, groups: int | None = None
) -> float:
    """Median milliseconds of a step of `model.fit`."""
    import tensorflow as tf  # noqa: PLC0415

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    import keras  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    x, y = data(batch, 4)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS - 1)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH)])
    optimizer: Any = keras.optimizers.SGD(1e-4)
    callbacks: list[Any] = []
    if distributed:
        import farandole.keras as hvd  # noqa: PLC0415

        optimizer = hvd.DistributedOptimizer(optimizer, groups=groups)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    ends: list[float] = []

    class Clock(keras.callbacks.Callback):
        """Notes when batches end."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's
            """Notes it."""
            ends.append(time.perf_counter())

    model.compile(optimizer, loss="mse")
    model.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[*callbacks, Clock()])
    return float(np.median(np.diff(ends)[3:])) * 1e3


def loop(batch: int, steps: int, mirrored: bool) -> float:
    """Median milliseconds of a step of a loop without Keras."""
    import tensorflow as tf  # noqa: PLC0415

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import numpy as np  # noqa: PLC0415

    import farandole.tensorflow as hvd  # noqa: PLC0415

    strategy: Any = None
    if mirrored:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x, y = (tf.constant(values) for values in data(batch, 1))

    def variables() -> list[Any]:
        return [tf.Variable(tf.random.normal([WIDTH, WIDTH]) / WIDTH**0.5) for _ in range(LAYERS)]

    if strategy is None:
        weights = variables()
    else:
        with strategy.scope():
            weights = variables()

    def step() -> None:
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.nn.relu(value @ weight)
            loss = tf.reduce_mean(tf.square(value - y))
        if strategy is None:
            grads = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        else:
            mine = tape.gradient(loss, weights)
            grads = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.MEAN, mine
            )
        for weight, grad in zip(weights, grads, strict=True):
            weight.assign_sub(1e-4 * grad)

    run: Any = tf.function(step if strategy is None else lambda: strategy.run(step))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:])) * 1e3


def mirror(rank: int, size: int) -> None:
    """Configures tf.distribute: every rank finds a free port, and all ranks learn all ports."""
    import farandole.numpy as arrays  # noqa: PLC0415

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = arrays.allgather_object(free.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:size]]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": rank}}
    )


def worker(what: str, batch: int, steps: int, threads: int) -> None:
    """One process of a row."""
    from farandole.common import basics  # noqa: PLC0415

    basics.init()
    rank, size = basics.rank(), basics.size()
    if what == "operations":
        operations()
        return
    if what == "mirrored":
        mirror(rank, size)
    rows: dict[str, Callable[[], float]] = {
        "alone": lambda: fit(batch, steps, 1, distributed=False),
        "apart": lambda: fit(batch, steps, 1, distributed=False),
        "whole": lambda: fit(batch, steps, threads, distributed=False),
        "fit": lambda: fit(batch, steps, 1, distributed=True),
        "groups": lambda: fit(batch, steps, 1, distributed=True, groups=4),
        "loop": lambda: loop(batch, steps, mirrored=False),
        "mirrored": lambda: loop(batch, steps, mirrored=True),
    }
    milliseconds = rows[what]()
    if rank == 0:
        print(json.dumps({"row": what, "milliseconds": milliseconds}), flush=True)


def judged(times: dict[str, float]) -> Iterator[str]:
    """Yields comparisons for the times of operations."""
    ours, theirs = times.get("farandole.tensorflow"), times.get("farandole.torch")
    nothing, step = (
        times.get("op that does nothing"),
        times.get("step with DistributedGradientTape"),
    )
    if ours is not None and theirs is not None:
        yield f"{ours / theirs:.2f} x farandole.torch" + (
            "" if nothing is None else f", {ours - nothing:.1f} beyond nothing"
        )
    if step is not None:
        yield f"{step - times['step, then that allreduce']:.1f} beyond a step and torch's allreduce"


def launch(ranks: int, what: str, batch: int, steps: int, threads: int = 1) -> list[dict[str, Any]]:
    """Starts the processes of a row and reads what they print."""
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        str(ranks),
        sys.executable,
        __file__,
    ]
    command += [
        "--worker",
        what,
        "--batch",
        str(batch),
        "--steps",
        str(steps),
        "--threads",
        str(threads),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    # The launcher puts the rank before every line.
    return [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="size of the world")
    parser.add_argument("--steps", type=int, default=30, help="training steps of a row")
    parser.add_argument("--batch", type=int, default=64, help="rows of a rank's batch")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks, batch, steps = arguments.ranks, arguments.batch, arguments.steps
    if arguments.worker:
        worker(arguments.worker, batch, steps, arguments.threads)
        return
    rows = launch(ranks, "operations", batch, steps)
    for row in rows:
        print(f"\n{row['what']}, {ranks} ranks on {os.cpu_count()} cores (median microseconds)")
        for name, microseconds in row["microseconds"].items():
            print(f"{name:>36} {microseconds:>10.1f}")
        for words in judged(row["microseconds"]):
            print(f"{words:>36}")
    times: dict[str, list[float]] = {}
    for _ in range(2):
        for what, processes, rows_of_batch, threads in (
            ("alone", 1, batch, 1),
            ("whole", 1, batch * ranks, ranks),
            ("apart", ranks, batch, 1),
            ("fit", ranks, batch, 1),
            ("groups", ranks, batch, 1),
            ("loop", ranks, batch, 1),
            ("mirrored", ranks, batch, 1),
        ):
            [row] = launch(processes, what, rows_of_batch, steps, threads)
            times.setdefault(what, []).append(row["milliseconds"])
    medians = {what: min(values) for what, values in times.items()}
    print(
        f"\na training step of 25 M parameters, {batch} rows a rank (median milliseconds, the "
        "better of two runs)"
    )
    for what, milliseconds in medians.items():
        peer = "mirrored" if what == "loop" else "whole"
        print(f"{what:>14} {milliseconds:>9.1f}  {milliseconds / medians[peer]:.3f} x {peer}")
    rows.append(
        {
            "what": f"training step, {batch} rows a rank",
            "ranks": ranks,
            "milliseconds": medians,
            "runs": times,
        }
    )
    save("tensorflow", {"rows": rows})


if __name__ == "__main__":
    main()
