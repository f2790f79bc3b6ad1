# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints how many MiB large blocks give back when they are freed."""

import ctypes
import sys

from farandole.common.heap import MallocHeap

heap, library = MallocHeap(), ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "apart":
    heap.map_large_blocks()
blocks = [library.malloc(8 << 20) for _ in range(8)]
above = library.malloc(1000)
for block in blocks:
    ctypes.memset(block, 1, 8 << 20)
full = heap.anonymous_resident_bytes()
for block in blocks:
    library.free(block)
print((full - heap.anonymous_resident_bytes()) >> 20)
