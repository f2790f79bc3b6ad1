# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A new worker takes the memory for its first step from the system before it joins."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import farandole.torch as hvd
from farandole.torch import _memory_ahead

PARAMETERS = 32 << 20
"""Bytes."""


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_ahead, "_is_done", False)
    monkeypatch.setattr(_memory_ahead, "_SECONDS", 60.0)


def status(name: str) -> int:
    """A number of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_memory_for_gradients_results_and_state_is_written_to_once_and_freed_in_a_world() -> None:
    layer = torch.nn.Linear(PARAMETERS // 4, 1, bias=False)
    before = status("VmRSS")
    size = _memory_ahead.touch()
    assert size >= 3 * layer.weight.nbytes
    assert status("VmRSS") - before > 0.9 * size
    hvd.init()
    try:
        assert status("VmRSS") - before < 0.5 * size
        assert _memory_ahead.touch() == 0
    finally:
        hvd.shutdown()


def test_nothing_is_taken_for_a_small_model_for_frozen_parameters_or_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _memory_ahead.touch() == 0
    layer = torch.nn.Linear(PARAMETERS // 4, 1, bias=False).requires_grad_(requires_grad=False)
    monkeypatch.setattr(_memory_ahead, "_is_done", False)
    assert _memory_ahead.touch() == 0
    layer.requires_grad_()
    monkeypatch.setattr(_memory_ahead, "_is_done", False)
    monkeypatch.setattr(_memory_ahead, "available", lambda: 10 * PARAMETERS)
    assert _memory_ahead.touch() == 0


def test_what_is_available_is_less_than_what_the_host_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 0 < _memory_ahead.available() < total


def test_what_is_kept_is_freed_if_no_world_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_ahead, "_SECONDS", 0.1)
    layer = torch.nn.Linear(PARAMETERS // 4, 1, bias=False)
    assert _memory_ahead.touch() >= 3 * layer.weight.nbytes
    assert _memory_ahead._kept
    end = time.monotonic() + 10.0
    while _memory_ahead._kept:
        assert time.monotonic() < end
        time.sleep(0.02)
