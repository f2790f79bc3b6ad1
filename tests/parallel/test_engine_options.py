# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Settings of the engine by variables, in real processes: fusion, cache and autotune."""

import csv

import pytest
import torch

import farandole.torch as hvd

COUNT, NUMBERS = 12, 256
"""Tensors of a burst, of 1 KiB each."""


def burst(step):
    """Tensors that are submitted at once and waited for afterwards; whether all came out right."""
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.full((NUMBERS,), float(step + index + rank)) for index in range(COUNT)]
    handles = [
        hvd.allreduce_async_(tensor, name=f"gradient {index}", op=hvd.Sum)
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)
    ranks = size * (size - 1) / 2
    return all(
        bool((tensor == size * (step + index) + ranks).all())
        for index, tensor in enumerate(tensors)
    )


def bursts(count):
    return [step for step in range(count) if not burst(step)]


@pytest.mark.parametrize(
    "env",
    [
        {"FARANDOLE_FUSION_THRESHOLD": "0"},
        {"HOROVOD_FUSION_THRESHOLD": "3000"},
        {"FARANDOLE_CACHE_CAPACITY": "0"},
        {"FARANDOLE_CACHE_CAPACITY": "5"},
    ],
    ids=lambda env: " ".join(f"{name.partition('_')[2]}={value}" for name, value in env.items()),
)
def test_results_are_the_same_however_much_is_fused_and_remembered(fresh_world, env):
    world = fresh_world(2, env=env)
    assert world.run(bursts, 20) == [[], []]


def test_autotune_writes_down_what_it_tries_and_changes_no_result(fresh_world, tmp_path):
    path = tmp_path / "samples.csv"
    env = {
        "FARANDOLE_AUTOTUNE": "1",
        "FARANDOLE_AUTOTUNE_LOG": str(path),
        "FARANDOLE_AUTOTUNE_WARMUP_SAMPLES": "1",
        "FARANDOLE_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "FARANDOLE_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
    }
    world = fresh_world(2, env=env)
    # Five scores of two steps make a sample; one that does not count, three that do, and the step
    # that ends the last.
    assert world.run(bursts, 4 * 5 * 2 + 2) == [[], []]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    assert all(float(row["score"]) > 0 for row in rows)
    assert len({row["tensor_fusion_threshold"] for row in rows}) >= 2
