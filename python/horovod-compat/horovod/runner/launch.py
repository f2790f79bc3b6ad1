# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`python -m horovod.runner.launch`: `horovodrun` under its other name."""

from __future__ import annotations

import sys

from horovod._command import main


def run_commandline() -> None:
    """Runs the command line and ends the process by its exit code."""
    sys.exit(main())


if __name__ == "__main__":
    run_commandline()
