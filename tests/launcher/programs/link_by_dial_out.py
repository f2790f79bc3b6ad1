# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A rank that prints who listens on its host; the last one dies if it is asked to."""

import glob
import json
import os
import pathlib
import signal
import sys
import time

import numpy as np
from tests.sockets import listening

import farandole.numpy as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
total = hvd.allreduce(np.arange(300_000, dtype=np.float32) * (rank + 1), op=hvd.Sum)
right = bool((total == np.arange(300_000, dtype=np.float32) * sum(range(1, size + 1))).all())
gathered = hvd.allgather(np.full((rank + 1, 2), rank, dtype=np.int32)).shape
print(
    json.dumps(
        {
            "rank": rank,
            "local": hvd.local_size(),
            "right": right,
            "rows": gathered[0],
            "listening": sorted({address for address, _ in listening()}),
        }
    ),
    flush=True,
)
hvd.barrier()
if "--one-dies" in sys.argv:
    if rank == size - 1:
        # Not before the others are in the operation: what it said last, that the barrier is over,
        # may die with it, as the way out of here is a thread of this process.
        deadline = time.monotonic() + 30
        while len(glob.glob("in-flight-*")) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    handle = hvd.allreduce_async(total)
    pathlib.Path(f"in-flight-{rank}").touch()
    began = time.monotonic()
    try:
        hvd.synchronize(handle)
    except hvd.FarandoleInternalError as error:
        print(
            json.dumps({"rank": rank, "heard": time.monotonic() - began, "error": str(error)}),
            flush=True,
        )
        sys.exit(1)
hvd.shutdown()
