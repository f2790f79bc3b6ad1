# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains without torch's compiler until it is needed, in the way that the test names."""

import sys

import torch

from farandole.spark.torch.training import deferred_compiler


def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def import_module_below():
    import torch._dynamo.exc as errors

    assert errors is torch._dynamo.exc is sys.modules["torch._dynamo.exc"]
    assert type(errors.__spec__.loader).__name__ == "SourceFileLoader"


def compile_function():
    called = []

    def backend(graph, _inputs):
        called.append(graph)
        return graph

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert called


def import_attribute():
    from torch._dynamo import config  # noqa: F401

    torch._dynamo.reset()


NEEDS = {
    "a module below it": import_module_below,
    "a compiled function": compile_function,
    "an attribute": import_attribute,
}
deferred_compiler.defer_compiler()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
step()
optimizer.load_state_dict(optimizer.state_dict())
assert deferred_compiler.is_compiler_deferred()
assert [name for name in sys.modules if name.startswith("torch._dynamo")] == ["torch._dynamo"]
NEEDS[sys.argv[1]]()
step()
assert not deferred_compiler.is_compiler_deferred()
deferred_compiler.defer_compiler()
assert not deferred_compiler.is_compiler_deferred()
