# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Kills an executor of a job, and prints the reason and the events of its run."""

import json
import os
import threading
import time

from executor_kills import kill_one
from plugged_session import plugged, until_rows

import farandole.spark

spark = plugged("local-cluster[2,1,1024]", stage_maxConsecutiveAttempts="1")


def wait(folder):
    import os
    import time

    open(os.path.join(folder, "at-work-" + os.environ["RANK"]), "w").close()
    time.sleep(60)


def kill():
    deadline = time.monotonic() + 60
    while (
        not all(os.path.exists(f"at-work-{rank}") for rank in "01") and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    kill_one()


threading.Thread(target=kill, daemon=True).start()
try:
    farandole.spark.run(wait, args=(os.getcwd(),), num_proc=2)
except farandole.spark.FarandoleJobError as error:
    reason = error.reason
found = until_rows(
    spark, lambda run, key, body: key.startswith("event/") and "removed executor" in body["what"]
)
print(
    json.dumps(
        [reason, [body for run, key, body in found if key.startswith(("event/", "removed/"))]]
    )
)
