# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reduces until a rank is lost, and prints the error."""

import os
import sys
import time

import torch

import farandole.torch as hvd

hvd.init()
print(f"pid {os.getpid()}", flush=True)
try:
    while True:
        hvd.allreduce(torch.ones(8), name="x")
        time.sleep(0.01)
except hvd.HorovodInternalError as error:
    print(f"answered {error}", flush=True)
    sys.exit(3)
