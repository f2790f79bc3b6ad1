# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loses an executor after the time to start has passed."""

import os
import pathlib
import signal
import threading
import time

import checked_work
import cloudpickle
from checked_work import work
from driver_session import session
from executor_kills import executors, until_executors

import farandole.spark

cloudpickle.register_pickle_by_value(checked_work)  # executors cannot import it


def trains(folder):
    import pathlib
    import time

    from farandole.runner.warm_workers import fork_server_owner_pid

    mine, deadline = fork_server_owner_pid(), time.monotonic() + 60
    pathlib.Path(folder, f"rank-{mine}").touch()
    # The one whose fork_server_owner_pid is lost never returns: it could be faster than its end.
    while not (lost := list(pathlib.Path(folder).glob("lost-*"))) or lost[0].name == f"lost-{mine}":
        assert time.monotonic() < deadline, "no fork_server_owner_pid was lost"
        time.sleep(0.05)
    return mine


def ranks(folder):
    return {int(entry.name.partition("-")[2]) for entry in folder.glob("rank-*")}


def lose(folder, seconds):
    deadline = time.monotonic() + 60
    while len(ranks(folder)) < 2:
        assert time.monotonic() < deadline, "no two ranks"
        time.sleep(0.05)
    time.sleep(seconds)  # the job grows older than it may take to start
    victim = min(ranks(folder))
    (folder / f"lost-{victim}").touch()
    os.kill(victim, signal.SIGKILL)


spark = session("local-cluster[3,1,1024]", executor_cores="1")
until_executors(3, 60)
farandole.spark.run(work, args=(1,), num_proc=3)
folder, limit = pathlib.Path("ranks").absolute(), 8
folder.mkdir()
saboteur = threading.Thread(target=lose, args=(folder, limit + 2), daemon=True)
saboteur.start()
owners = farandole.spark.run(trains, args=(str(folder),), num_proc=2, start_timeout=limit)
saboteur.join()
print("on the dead", set(owners) - set(executors()), "on", len(set(owners)))
spark.stop()
