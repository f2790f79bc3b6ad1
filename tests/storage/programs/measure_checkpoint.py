# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints how much memory a checkpoint takes while it is written and read, in KiB."""

import json
import re
import sys
from pathlib import Path

from farandole._native import store as native


def kilobytes(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


url, options, size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
native.configure_options(url, options)
store = native.Store(url)
store.write("warm", b"x" * (20 << 20))
store.read("warm")
data = bytes(range(256)) * (size // 256)
base = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
store.write("checkpoint", data)
store.copy("checkpoint", "checkpoint.previous")
written = kilobytes("VmHWM") - base
first, last = data[:1000], data[-1000:]
del data
base = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
found = store.read("checkpoint.previous")
read = kilobytes("VmHWM") - base - size // 1024
assert len(found) == size
assert found[:1000] == first
assert found[-1000:] == last
print(written, read)
