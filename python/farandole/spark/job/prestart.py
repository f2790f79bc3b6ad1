# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Starts the fork server of an executor before its first job. The Spark plugin runs this when the
executor starts.

`python -m farandole.spark.job.prestart <executor's process> <directory of Spark's files>` returns
when the server listens. Tasks look for a server of their own environment and `sys.path`, so this
process must have the same. If it has not, a job starts another server, as without the plugin.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.runner import agent, warm_workers

if TYPE_CHECKING:
    from collections.abc import Sequence

PRESTART_IDLE_SECONDS: Final = 600.0
"""Seconds that the server waits for work. A job's own server waits less, because data is
prepared before a fit.
"""


def main(arguments: Sequence[str]) -> int:
    """Starts the server.

    Args:
        arguments: See the module.

    Returns:
        The exit status.
    """
    owner, files = arguments
    # Where Spark's Python workers have it.
    if files not in sys.path:
        sys.path.insert(1, files)
    idle = read_setting(variables.WARM_IDLE_SECONDS)
    warm = warm_workers.WarmWorkerSettings(idle=PRESTART_IDLE_SECONDS if idle is None else idle)
    cold = [sys.executable, "-m", "farandole.runner.worker"]
    if (
        warm_workers.warm_worker_command(
            warm, cold, agent.worker_environment_changes({}, {}), int(owner)
        )
        == cold
    ):
        sys.stderr.write("a fork server cannot be started on this host\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
