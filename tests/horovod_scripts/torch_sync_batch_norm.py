# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batch normalisation over the batches of all ranks."""

import horovod.torch as hvd
import torch

hvd.init()
x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
rows = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
mine = x[rows].clone().requires_grad_()
layer = hvd.SyncBatchNorm(3)
(layer(mine) ** 3).sum().backward()

whole = x.clone().requires_grad_()
alone = torch.nn.BatchNorm1d(3)
(alone(whole) ** 3).sum().backward()
assert torch.allclose(layer.running_mean, alone.running_mean, atol=1e-6)
assert torch.allclose(layer.running_var, alone.running_var, atol=1e-6)
assert torch.allclose(mine.grad, whole.grad[rows], atol=1e-5)
print("done", hvd.rank())
