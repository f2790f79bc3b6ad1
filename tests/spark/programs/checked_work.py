# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Work whose results and errors a driver checks."""

import os

import farandole.spark


def work(offset):
    import os

    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.full(4, hvd.rank() + offset, dtype=np.float32), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_size(), os.getppid(), total.tolist()


ran = os.getcwd()


def fail():
    import os
    import tempfile

    os.close(tempfile.mkstemp(prefix="ran-", dir=ran)[0])
    if os.environ["RANK"] == "1":
        raise KeyError("no such layer")


def check(local_size, executors):
    results = farandole.spark.run(work, args=(1,), num_proc=2)
    assert [result[:3] for result in results] == [(0, 2, local_size), (1, 2, local_size)], results
    assert [result[4] for result in results] == [[3.0] * 4] * 2, results
    assert len({result[3] for result in results}) == 2, results
    try:
        farandole.spark.run(fail, num_proc=2)
        raise AssertionError("nothing was raised")
    except farandole.spark.FarandoleJobError as error:
        assert error.rank == 1, error
        assert isinstance(error.__cause__, KeyError), error
        assert "no such layer" in error.remote_traceback, error
    # Nothing is run again for it: rank 0 once, unless it was ended before it came to that, and
    # rank 1 once.
    assert len([name for name in os.listdir(ran) if name.startswith("ran-")]) in (1, 2), os.listdir(
        ran
    )
    print("all well")
