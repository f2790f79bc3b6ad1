# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory for large results: casts of compression give what `Tensor.to` gives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farandole._native import engine
from farandole.torch import _large_tensor_memory
from farandole.torch.compression import Compression

LARGE = engine.LARGE_MEMORY // 4
"""Elements of float32 from which on memory is prepared."""


def transposed():
    return torch.arange(LARGE * 2, dtype=torch.float32).remainder(1000).view(1024, -1).t()


def with_gradient():
    return torch.ones(LARGE * 2).requires_grad_()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(5),
        lambda: torch.rand(LARGE * 2),
        transposed,
        with_gradient,
        lambda: torch.nn.Parameter(torch.ones(LARGE)),
        lambda: torch.eye(5).to_sparse(),
        lambda: torch.empty(LARGE, device="meta"),
    ],
)
def test_casts_are_those_of_torch(make):
    tensor = make()
    result, ctx = Compression.bf16.compress(tensor)
    expected = tensor.to(torch.bfloat16)
    assert ctx is torch.float32
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert (result.layout, result.requires_grad) == (expected.layout, expected.requires_grad)
    if tensor.layout is torch.strided:
        assert result.stride() == expected.stride()
    if tensor.device.type != "meta":
        assert torch.equal(result.to_dense(), expected.to_dense())
    assert Compression.bf16.decompress(result, ctx).dtype is torch.float32


def test_tensors_without_memory_are_cast():
    seen = torch.vmap(lambda row: Compression.fp16.compress(row)[0])(torch.ones(2, LARGE))
    assert seen.dtype is torch.float16
    assert seen.shape == (2, LARGE)
    with FakeTensorMode():
        assert _large_tensor_memory.uninitialized_tensor(
            (LARGE,), torch.float32, torch.device("cpu")
        ).shape == (LARGE,)
        assert Compression.bf16.compress(torch.empty(LARGE))[0].dtype is torch.bfloat16


def test_large_memory_is_prepared_and_small_is_not(monkeypatch):
    prepared = []
    monkeypatch.setattr(engine, "advise_large_pages", lambda *range_: prepared.append(range_))
    small = _large_tensor_memory.uninitialized_like(torch.empty(LARGE - 1))
    large = _large_tensor_memory.uninitialized_like(torch.empty(LARGE))
    assert prepared == [(large.data_ptr(), large.nbytes)]
    assert small.nbytes < engine.LARGE_MEMORY
