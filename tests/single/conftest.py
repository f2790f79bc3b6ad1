# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A world of one."""

import pytest


@pytest.fixture
def hvd():
    """`farandole.torch`, initialized in a process without a launcher."""
    from farandole import torch

    torch.init()
    yield torch
    torch.shutdown()
