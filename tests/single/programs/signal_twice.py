# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sends itself the signals that tell a worker to leave."""

import os
import signal
import sys

from farandole.common import termination_notices


def leave(reason):
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    print("told:", reason, flush=True)
    if sys.argv[1] == "again":
        os.kill(os.getpid(), signal.SIGTERM)
    print("registered", flush=True)


termination_notices.leave = leave
with termination_notices.handle_notice_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
