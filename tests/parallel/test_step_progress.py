# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The time of a step and its wait for the reduction, as optimizers measure them for metrics."""

import time

import pytest
import torch

import farandole.torch as hvd

SLEEP = 0.15
"""Seconds by which rank 1 is late in each step."""


def plain_step(optimizer, loss):
    loss().backward()
    optimizer.step()


def step_with_scaler(optimizer, loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped_step(optimizer, loss):
    loss().backward()
    optimizer.synchronize()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()


def clipped_step_of_shards(optimizer, loss):
    loss().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def step_with_closure(optimizer, loss):
    def evaluate():
        value = loss()
        value.backward()
        return value

    optimizer.step(evaluate)


CASES = {
    "plain": (plain_step, {}),
    "scaler": (step_with_scaler, {}),
    "clipping": (clipped_step, {}),
    "closure": (step_with_closure, {}),
    "shards": (plain_step, {"shard_states": True}),
    "clipped shards": (clipped_step_of_shards, {"shard_states": True}),
    "Adasum": (plain_step, {"op": hvd.Adasum}),
}


def measure_steps(step, options):
    """Trains some steps, for which rank 1 is late; the report of this rank."""
    from farandole.common.rank_progress import OWN_PROGRESS

    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
    )
    OWN_PROGRESS.measures_steps = True
    try:
        for number in range(4):
            if number == 1:
                OWN_PROGRESS.take_report()
            optimizer.zero_grad()
            time.sleep(SLEEP * hvd.rank())
            step(optimizer, lambda: model(torch.ones(3, 4)).square().sum())
        return OWN_PROGRESS.take_report()
    finally:
        OWN_PROGRESS.measures_steps = False


@pytest.mark.parametrize("case", CASES)
def test_the_wait_for_the_reduction_is_part_of_a_step(pair, case):
    early, late = pair.run(measure_steps, *CASES[case])
    for report in (early, late):
        assert SLEEP * 0.9 < report["step_seconds"] < 20 * SLEEP, report
        assert report["reduce_seconds"] < report["step_seconds"], report
    assert early["reduce_seconds"] > SLEEP / 2, (early, late)
