# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs an agent for each task of a host."""

import json
import sys
import threading

from farandole._native import launcher

print("ready", flush=True)
ticket = sys.stdin.readline().strip()
host, tasks, command = sys.argv[1], json.loads(sys.argv[2]), [sys.executable, *sys.argv[3:]]


def run(task):
    outcome = launcher.run_agent(ticket, task, command, host=host, start_timeout=40.0)
    sys.stderr.write(f"{outcome}\n{outcome.stderr_tail}\n")


threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
