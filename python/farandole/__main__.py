# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The `farandole` command; `python -m farandole` is the same."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    # Raised between two waits of the native code, which first ends the processes it has started.
    raise SystemExit(128 + number)


def main(called: str = "farandole") -> int:
    """Runs the command of this process.

    Args:
        called: The command's name; as `horovodrun` it is `farandole run`.

    Returns:
        The exit status; 128 and the signal's number when a signal ended it.
    """
    from farandole._native import cli  # noqa: PLC0415 - loading this module is not yet running the command

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # `nohup` ignores SIGHUP for the command that it starts, which then continues without its
        # terminal.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_on_signal)
    return cli.main([called, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
