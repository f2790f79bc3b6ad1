# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collects old data on a disk that it has filled."""

import errno
import json
import os
import sys
from pathlib import Path

from farandole.spark.common import LocalStore

place = Path(sys.argv[1])
data = place / "intermediate_train_data.0"
data.mkdir()
(data / "part-0.parquet").write_bytes(bytes(1 << 20))
manifest = {"fingerprint": "data x", "files": [{"path": "part-0.parquet"}]}
(data / "_manifest.json").write_text(json.dumps(manifest))
(place / "mine.txt").write_text("mine")
try:
    (place / "filler").write_bytes(os.urandom(16 << 20))
except OSError as error:
    assert error.errno == errno.ENOSPC
with open(place / "filler", "ab", buffering=0) as filler:
    for size in (4096, 1):
        try:
            while True:
                filler.write(bytes(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
store = LocalStore(str(place))
print(sorted(store.gc(older_than=-0.0)))
print(sorted(path.name for path in place.iterdir()), (place / "mine.txt").read_text())
