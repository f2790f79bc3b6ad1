# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Collects old data on a disk without room for another name."""

import errno
import json
import sys
from pathlib import Path

from farandole.spark.common import LocalStore

place = Path(sys.argv[1])
data = place / "intermediate_train_data.0"
data.mkdir()
(data / "part-0.parquet").write_bytes(bytes(100))
manifest = {"fingerprint": "data x", "files": [{"path": "part-0.parquet"}]}
(data / "_manifest.json").write_text(json.dumps(manifest))
count = 0
try:
    while True:
        (place / f"file-{count}").touch()
        count += 1
except OSError as error:
    assert error.errno == errno.ENOSPC
before = sorted(path.name for path in data.iterdir())
store = LocalStore(str(place))
try:
    store.gc(older_than=-0.0)
except OSError as error:
    print("_lease-" in str(error), str(data) in str(error))
assert sorted(path.name for path in data.iterdir()) == before
for number in range(4):
    (place / f"file-{number}").unlink()
print(sorted(store.gc(older_than=-0.0)))
