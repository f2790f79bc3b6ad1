# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`horovodrun`: `farandole run` under its old name."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line.

    Returns:
        The exit status, as `farandole run` has it.
    """
    import horovod  # noqa: PLC0415 - what runs is loaded by those who run
    from farandole.__main__ import main as farandole  # noqa: PLC0415

    if sys.argv[1:2] in (["-v"], ["--version"]):
        print(horovod.__version__)  # noqa: T201 - what was asked for
        return 0
    return farandole("horovodrun")
