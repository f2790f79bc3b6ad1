# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stall reports of a worker as events of its run, for the run viewer and Spark's Training tab."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STALL_LOGGER: Final = "farandole.session.stalls"
"""The logger that gets stall reports, and a few other notes of the session."""

_MAX_REPORT_CHARACTERS: Final = 2000
_MISSING_LINE: Final = re.compile(r"\n(\d+)!?: \[.*")
"""A line with the tensors that a rank has not submitted."""
_STALL_REPORT: Final = re.compile(rf"\nMissing ranks:((?:{_MISSING_LINE.pattern})+)")


def forward_stall_reports(report_event: Callable[[dict[str, Any]], object]) -> None:
    """Sends each stall report that this process logs as an event.

    It is a filter of the logger, because with a handler, reports would no longer go to stderr by
    themselves.

    Args:
        report_event: Gets an event.
    """

    def forward_record(record: logging.LogRecord) -> bool:
        event = parse_stall_report(record.getMessage())
        if event is not None:
            # such as a driver that is gone; the report is logged anyway
            with contextlib.suppress(Exception):
                report_event(event)
        return True

    logging.getLogger(STALL_LOGGER).addFilter(forward_record)


def parse_stall_report(text: str) -> dict[str, str] | None:
    """Returns the event of a stall report; `None` if the text is no such report.

    Args:
        text: As it is logged.
    """
    found = _STALL_REPORT.search(text)
    if found is None:
        return None
    ranks = _MISSING_LINE.findall(found[1])
    noun = "rank" if len(ranks) == 1 else "ranks"
    return {
        "what": f"stall: others wait for {noun} {', '.join(ranks)}",
        "reason": text[:_MAX_REPORT_CHARACTERS],
    }
