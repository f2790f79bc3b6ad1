# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains with Lightning without torch's compiler, and then with it."""

import sys
import warnings

warnings.simplefilter("ignore")
import torch

from farandole.spark.torch.training import deferred_compiler

deferred_compiler.defer_compiler()
import lightning

import farandole.lightning  # noqa: F401 - registers the strategy


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def training_step(self, batch, _index):
        return self.inner(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(module):
    options = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(strategy="farandole", enable_checkpointing=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4))


line = Line()
before = line.inner.weight.detach().clone()
fit(line)
assert not torch.equal(line.inner.weight, before)
assert deferred_compiler.is_compiler_deferred(), "Lightning has brought the compiler"
assert not isinstance(line, sys.modules["torch._dynamo"].OptimizedModule)

called = []


def backend(graph, _inputs):
    called.append(graph)
    return graph


compiled = torch.compile(line, backend=backend)
assert not deferred_compiler.is_compiler_deferred()
from lightning.pytorch.utilities import compile as compile_utilities

assert isinstance(compiled, compile_utilities.OptimizedModule)
assert not isinstance(line, compile_utilities.OptimizedModule)
fit(compiled)
assert called
