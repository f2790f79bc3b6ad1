# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes checkpoints on a full disk, and resumes after each."""

import sys
from pathlib import Path

from tests.single.test_checkpoint_safety import archive, text_of

from farandole.spark.common import LocalStore

place = Path(sys.argv[1])
run = LocalStore(str(place)).to_remote("r")
for epoch in range(4):
    run.write_checkpoint("checkpoint", archive(f"epoch {epoch} " + "x" * 100_000))
filler = place / "filler"
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
    file.truncate(file.tell() - (64 << 10))  # room for the marker, but for no checkpoint
failed = 0
for epoch in range(4, 14):
    try:
        run.write_checkpoint("checkpoint", archive(f"epoch {epoch} " + "x" * 1_000_000))
    except OSError:
        failed += 1
    print(text_of(run.read_checkpoint_to_resume())[:7])
filler.unlink()
run.write_checkpoint("checkpoint", archive("epoch 9 again"))
print(failed, text_of(run.read_checkpoint_to_resume()))
