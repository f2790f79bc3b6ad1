# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Interrupts its own agent when the worker is up."""

import os
import signal
import sys
import threading

from farandole._native.launcher import run_agent
from farandole._native.registrar import Registrar

folder = sys.argv[1]
registrar = Registrar(1, host="127.0.0.1")


def interrupt():
    while not any(event.kind == "log" for event in registrar.events(1.0)):
        pass
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt).start()
try:
    run_agent(registrar.ticket, 0, ["sh", "-c", f"echo $$ > {folder}/pid; echo up; sleep 600"])
except KeyboardInterrupt:
    sys.exit(0 if not os.path.exists(f"/proc/{int(open(f'{folder}/pid').read())}") else 4)
sys.exit(5)
