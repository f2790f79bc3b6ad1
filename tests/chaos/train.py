# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training of the chaos test: least squares, every sample of every epoch once, until the file
`enough` is there.

The state has the weights, which samples of the epoch are done, and how often each sample was
counted. Ranks divide each batch of samples that are still to be done; a step's gradient and its
count of samples are summed in one operation.
"""

import json
import os
import socket
import sys
import time

import numpy as np

import farandole.numpy as hvd
from farandole._native import engine
from farandole.common.elastic import ObjectState, leave_and_join, run_fn

SAMPLES, FEATURES, BATCH = 512, 8, 48


def problem() -> tuple[np.ndarray, np.ndarray]:
    """Inputs of shape (samples, features) and targets of shape (samples,), equal on all ranks;
    both float64.
    """
    random = np.random.default_rng(7)
    inputs = random.standard_normal((SAMPLES, FEATURES))
    return inputs, inputs @ np.arange(1.0, FEATURES + 1) + 0.1 * random.standard_normal(SAMPLES)


def train(state: ObjectState) -> None:
    """Trains from the position of the state."""
    inputs, targets = problem()
    generation = engine.world().generation
    print(f"world {generation} {hvd.rank()} {os.getpid()} {socket.gethostname()}", flush=True)
    while True:
        left = np.flatnonzero(~state.done)
        # The order of an epoch is its own, and the same on all ranks.
        order = np.random.default_rng(state.epoch).permutation(SAMPLES)
        batch = order[np.isin(order, left)][:BATCH]
        mine = batch[hvd.rank() :: hvd.size()]
        errors = inputs[mine] @ state.weights - targets[mine]
        counted = np.zeros(SAMPLES)
        counted[mine] = 1.0
        enough = float(os.path.exists("enough"))
        told = hvd.allreduce(
            np.concatenate([inputs[mine].T @ errors, counted, [enough]]), op=hvd.Sum
        )
        gradient, counted, enough = told[:FEATURES], told[FEATURES:-1], told[-1]
        assert counted.sum() == len(batch), "every rank's samples are in the sum"
        # A rate that falls with the epochs ends in the optimum of all samples.
        state.weights = state.weights - 0.5 / (1 + 0.1 * state.epoch) * gradient / len(batch)
        state.counts = state.counts + counted
        state.done = state.done | (counted > 0)
        state.step += 1
        if state.done.all():
            state.epoch, state.done = state.epoch + 1, np.zeros(SAMPLES, bool)
        if hvd.rank() == 0 and state.step % 5 == 0:
            print(f"step {state.step} {hvd.size()}", flush=True)
        if enough and not state.done.any():
            return
        time.sleep(0.01)
        state.commit()


def main() -> None:
    """Joins, trains, and prints the result."""
    hvd.init()
    state = ObjectState(
        hvd.broadcast_object,
        hvd.rank,
        step=0,
        epoch=0,
        weights=np.zeros(FEATURES),
        counts=np.zeros(SAMPLES),
        done=np.zeros(SAMPLES, bool),
    )
    run_fn(train, leave_and_join)(state)
    said = {"rank": hvd.rank(), "size": hvd.size(), "step": state.step, "epoch": state.epoch}
    said |= {"weights": state.weights.tolist(), "counts": state.counts.tolist()}
    sys.stdout.write(f"result {json.dumps(said)}\n")


if __name__ == "__main__":
    main()
