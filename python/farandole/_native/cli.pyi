# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The `farandole` command."""

from collections.abc import Sequence

def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: As `sys.argv`: the program's name first.

    Returns:
        The exit status.
    """
