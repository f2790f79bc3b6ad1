# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Announces its leave to a registrar that does not answer the first attempts, or none."""

import os
import signal
import sys

from farandole.common import termination_notices
from farandole.common.exceptions import FarandoleEnvironmentError

attempts = []


def announce_leave(reason, timeout):
    attempts.append(timeout)
    if len(attempts) == 2 and sys.argv[1] == "again":
        os.kill(os.getpid(), signal.SIGTERM)
    if len(attempts) < 3 or sys.argv[1] == "gone":
        raise FarandoleEnvironmentError("timed out waiting for the registrar's answer to a leave")
    return True


termination_notices.engine.announce_leave = announce_leave
if sys.argv[1] == "gone":
    # Each attempt takes its time.
    termination_notices.time.monotonic = lambda: sum(attempts)
with termination_notices.handle_notice_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", len(attempts), flush=True)
