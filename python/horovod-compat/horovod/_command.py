# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`horovodrun`: `farandole run` under its old name."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line."""
    from farandole.__main__ import main as farandole  # noqa: PLC0415 - horovod's import installed the aliases only

    arguments = sys.argv[1:]
    sys.argv[1:] = ["--version"] if arguments in (["-v"], ["--version"]) else ["run", *arguments]
    return farandole()
