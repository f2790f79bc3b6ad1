# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A script for `TorchDistributor`, with a command line."""

import argparse
import json
import sys
from pathlib import Path

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("number", type=int)
arguments = parser.parse_args()
dist.init_process_group("gloo")
record = {
    "name": __name__,
    "number": arguments.number,
    "size": dist.get_world_size(),
    "beside": sys.path[0] == str(Path(__file__).parent),
}
(arguments.folder / f"{dist.get_rank()}.json").write_text(json.dumps(record))
print(f"number {arguments.number}")
dist.destroy_process_group()
