# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predicts with a module whose weights are a file, and prints the growth of its memory.

It reads lines: after the first, it measures; after the second, it ends.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from farandole.spark.torch.saving import host_weights

reads = []


class FileWeights:
    """Weights in a file, in the place of Spark's broadcast."""

    def __init__(self, path):
        self.path = path
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def read_content(self):
        reads.append(1)
        return self.path.read_bytes()


def measure_memory():
    """Returns the bytes of memory that are not files of a disk, shared pages in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines[1:]}
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


module, weights = (Path(path) for path in sys.argv[1:])
sent = FileWeights(weights)
torch.nn.Linear(1600, 1600)(torch.zeros(4, 1600))
before = measure_memory()
loaded = host_weights.load_module(module.read_bytes(), sent).eval()
with torch.inference_mode():
    total = float(loaded(torch.ones(4, 1600)).sum())
print("loaded", flush=True)
sys.stdin.readline()
print(json.dumps([measure_memory() - before, len(reads), total]), flush=True)
sys.stdin.readline()
