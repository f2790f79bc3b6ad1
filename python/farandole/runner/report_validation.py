# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks the reports of workers in the driver, so that all receivers can rely on their form.

A report is any JSON object. Two kinds have a form, because curves are drawn of them: `{"kind":
"step", "epoch": 0, "step": 3, "steps": 10, "loss": 0.5, ...}` and `{"kind": "epoch", "entry":
{"epoch": 0, "train": {"loss": 0.5, "all_metrics": [{"accuracy": 0.9}]}, ...}, ...}`. Estimators add
`epochs` and `rows_per_second` to both, and `steps` to an epoch. A number of an entry may be `None`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Final

_QUIET_SECONDS: Final = 60.0
_LOG = logging.getLogger("farandole")
_LAST_WARNING_TIMES: dict[str, float] = {}
"""Time of the last warning, by its cause."""


class MalformedReportError(ValueError):
    """A report that does not have the form of its kind."""


def parse_worker_report(data: bytes) -> dict[str, Any]:
    """Returns the report that a worker has sent.

    Args:
        data: The bytes as received.

    Raises:
        MalformedReportError: The data is no report; the message names the error.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedReportError("it is no JSON") from error
    if not isinstance(record, dict):
        raise MalformedReportError("it is no JSON object")
    match record.get("kind"):
        case "step":
            _check_step(record)
            _check_progress(record)
        case "epoch":
            _check_history_entry(record.get("entry"))
            _check_progress(record)
    return record


def warn_dropped_report(who: str, error: MalformedReportError) -> None:
    """Logs that a report is dropped, for each reason once a minute.

    Args:
        who: Sender of the report.
        error: Defect of the report.
    """
    now, reason = time.monotonic(), str(error)
    if now - _LAST_WARNING_TIMES.get(reason, -_QUIET_SECONDS) >= _QUIET_SECONDS:
        _LAST_WARNING_TIMES[reason] = now
        _LOG.warning("a report of %s is left out: %s", who, reason)


def _check_step(record: dict[str, Any]) -> None:
    for name in ("epoch", "step", "steps"):
        _check_count(record, name)
    if not _is_number(record.get("loss")):
        raise MalformedReportError("its loss is no number")


def _check_progress(record: dict[str, Any]) -> None:
    """Checks the fields about the whole run that estimators may add."""
    for name in ("epochs", "steps"):
        if record.get(name) is not None:
            _check_count(record, name)
    if record.get("epochs") == 0:
        raise MalformedReportError("its epochs is 0")
    if not _is_missing_or_number(record.get("rows_per_second")):
        raise MalformedReportError("its rows_per_second is no number")


def _check_history_entry(entry: Any) -> None:
    if not isinstance(entry, dict):
        raise MalformedReportError("its entry is no JSON object")
    _check_count(entry, "epoch")
    for name in ("seconds", "rows"):
        if not _is_missing_or_number(entry.get(name)):
            raise MalformedReportError(f"its {name} is no number")
    for part in ("train", "validation"):
        if scores := entry.get(part):
            _check_scores(part, scores)


def _check_scores(part: str, scores: Any) -> None:
    if not isinstance(scores, dict) or "loss" not in scores:
        raise MalformedReportError(f"its part {part!r} has no loss")
    if not _is_missing_or_number(scores["loss"]):
        raise MalformedReportError(f"the loss of its part {part!r} is no number")
    groups = scores.get("all_metrics")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise MalformedReportError(f"all_metrics of its part {part!r} is no list of JSON objects")
    for name, value in (one for group in groups for one in group.items()):
        if not _is_missing_or_number(value):
            raise MalformedReportError(f"the metric {name!r} of its part {part!r} is no number")


def _check_count(record: dict[str, Any], name: str) -> None:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MalformedReportError(f"its {name} is no whole number")


def _is_missing_or_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
