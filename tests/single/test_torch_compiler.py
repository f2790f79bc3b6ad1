# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The compiler of torch in a training process: absent until it is needed, and then complete."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.programs import program_path

pytestmark = pytest.mark.timeout(120)

STEP = """
import sys, torch
from farandole.spark.torch.training import compiler

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

compiler.defer_compiler()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
step()
optimizer.load_state_dict(optimizer.state_dict())
assert compiler.is_deferred()
assert [name for name in sys.modules if name.startswith("torch._dynamo")] == ["torch._dynamo"]
"""
NEEDS = {
    "a module below it": """
import torch._dynamo.utils as utils
assert utils is torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert type(utils.__spec__.loader).__name__ == "SourceFileLoader"
""",
    "a compiled function": """
called = []
def backend(graph, _inputs):
    called.append(graph)
    return graph
assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]
assert called
""",
    "an attribute": """
from torch._dynamo import config
torch._dynamo.reset()
""",
}


LIGHTNING = program_path(__file__, "train_without_compiler")


def test_lightning_trains_by_distributed_data_parallel_without_the_compiler_and_with_it():
    subprocess.run([sys.executable, LIGHTNING], check=True, timeout=110)


@pytest.mark.parametrize("need", NEEDS)
def test_the_compiler_comes_with_the_first_need_and_optimizers_continue(need):
    ended = (
        "step()\nassert not compiler.is_deferred()\ncompiler.defer_compiler()\nassert not "
        "compiler.is_deferred()\n"
    )
    subprocess.run([sys.executable, "-c", STEP + NEEDS[need] + ended], check=True, timeout=110)
