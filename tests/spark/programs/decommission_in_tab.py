# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Decommissions an executor of a job, and prints when the plugin and the run knew."""

import json
import os
import threading
import time

from plugged_session import plugged, until_rows

import farandole.spark

spark = plugged("local-cluster[2,1,1024]", decommission_enabled="true")


def wait(folder):
    import os
    import time

    open(os.path.join(folder, "at-work-" + os.environ["RANK"]), "w").close()
    while not os.path.exists(os.path.join(folder, "over")):
        time.sleep(0.05)


times = []


def retire():
    deadline = time.monotonic() + 60
    while (
        not all(os.path.exists(f"at-work-{rank}") for rank in "01") and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    scala = spark.sparkContext._jsc.sc()
    jvm = spark.sparkContext._jvm
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
        "a test says so", jvm.scala.Option.apply(None)
    )
    scala.schedulerBackend().decommissionExecutor("0", info, False, False)
    while not scala.taskScheduler().getExecutorDecommissionState("0").isDefined():
        time.sleep(0.01)
    times.append(time.time())
    # Both say themselves when they were written, so this waits without a hurry.
    until_rows(spark, lambda run, key, body: key == "decommissioning/0")

    def decommissions(key, body):
        return key.startswith("event/") and "decommissions executor 0" in body["what"]

    found = until_rows(spark, lambda run, key, body: decommissions(key, body))
    times.extend(int(body["time"]) / 1000 for run, key, body in found if key == "decommissioning/0")
    times.extend(int(body["time"]) / 1000 for run, key, body in found if decommissions(key, body))
    open("over", "w").close()


thread = threading.Thread(target=retire, daemon=True)
thread.start()
farandole.spark.run(wait, args=(os.getcwd(),), num_proc=2)
thread.join(30)
print(json.dumps(times))
