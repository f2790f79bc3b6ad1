# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs a function on several hosts, and prints its results or its error."""

import json
import os
import socket
import sys
import time

import farandole


def world(factor):
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.full(3, float(hvd.rank())), op=hvd.Sum)
    return socket.gethostname(), hvd.rank(), (total * factor).tolist()


def failing():
    rank = int(os.environ["RANK"])
    if rank == 3:
        raise LookupError("no digits on this host")
    time.sleep(1000)


def waiting():
    print("up", os.environ["RANK"], flush=True)
    time.sleep(1000)


how, hosts = sys.argv[1:]
try:
    if how == "world":
        print(json.dumps(farandole.run(world, kwargs={"factor": 10}, num_proc=4, hosts=hosts)))
    else:
        farandole.run(failing if how == "failing" else waiting, num_proc=4, hosts=hosts)
except Exception as error:
    print(
        json.dumps(
            {
                "type": type(error).__name__,
                "error": str(error),
                "cause": repr(error.__cause__),
                "remote": getattr(error, "remote_traceback", None),
            }
        )
    )
