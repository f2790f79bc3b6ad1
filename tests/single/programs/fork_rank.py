# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Forks a rank; the child may ask for its rank, but not communicate."""

import os

import torch

import farandole.torch as hvd

hvd.init()
pid = os.fork()
if pid == 0:
    assert hvd.rank() == 0
    try:
        hvd.allreduce(torch.ones(1))
    except ValueError as error:
        assert "forked" in str(error), error
        hvd.shutdown()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print(hvd.allreduce(torch.ones(1)).item())
