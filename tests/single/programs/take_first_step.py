# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints whether the first step of an optimizer in a warm worker imports the compiler."""

from farandole.spark.common import LocalBackend


def step():
    import sys

    import torch

    line = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
    line(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return "torch._dynamo.convert_frame" in sys.modules


if __name__ == "__main__":
    import torch  # noqa: F401 - workers start warm where it is imported

    print(LocalBackend(1, verbose=0).run(step))
