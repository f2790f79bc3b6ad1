# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Suspension of a job that will be started again: its ranks commit to a store and end.

launcher --value of the world--> rank 0 --broadcast at a commit--> all ranks
launcher <--record: a commit is in the store, with progress or without-- rank 0
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

from farandole import _variables as variables
from farandole.common.exceptions import FarandoleInternalError

if TYPE_CHECKING:
    from farandole.common.commits import StoredCommits

SUSPENSION_KEY: Final = "farandole/suspend"
"""Key of the value by which the launcher requests the suspension; the same in Rust."""
SUSPENSION_KIND: Final = "suspended"
"""Kind of the record by which rank 0 reports its commit; the same in Rust."""

_REQUEST_POLL_SECONDS: Final = 1.0
_REPORT_FLUSH_SECONDS: Final = 20.0

_log = logging.getLogger("farandole")


def may_be_suspended() -> bool:
    """Returns whether the launcher of this worker may request a suspension."""
    return variables.REQUEUE in os.environ


class SuspensionWatch:
    """Asks the registrar once a second, in a thread, whether the launcher has requested the
    suspension of the job.
    """

    def __init__(self) -> None:
        self._is_requested = threading.Event()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start_thread(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._poll_registrar, name="farandole-suspension", daemon=True
            )
            self._thread.start()

    def is_requested(self) -> bool:
        """Returns whether the launcher has requested the suspension."""
        return self._is_requested.is_set()

    def close(self) -> None:
        """Ends the thread, and returns when it has ended."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()

    def _poll_registrar(self) -> None:
        from farandole._native import values  # noqa: PLC0415 - few jobs are suspended

        while not self._has_ended.wait(_REQUEST_POLL_SECONDS):
            try:
                if values.wait_for_value(SUSPENSION_KEY, 0.0) is None:
                    continue
            except Exception as error:  # noqa: BLE001 - between two worlds there is no registrar
                _log.debug("the registrar was not asked about a suspension: %s", error)
                continue
            self._is_requested.set()
            return


def report_suspension(stored: StoredCommits, commits: int) -> None:
    """Reports to the launcher that the last commit is in the store.

    Args:
        stored: Store with the commit.
        commits: Number of the commit since this process has started.

    Raises:
        FarandoleInternalError: The launcher does not confirm the report.
    """
    from farandole._native import launcher  # noqa: PLC0415 - few jobs are suspended

    # An empty buffer drops no record.
    launcher.flush_reports(_REPORT_FLUSH_SECONDS)
    record = {
        "commit": commits,
        "directory": stored.directory_url,
        "progress": stored.has_progressed(),
    }
    launcher.report_record(SUSPENSION_KIND, json.dumps(record).encode())
    if not launcher.flush_reports(_REPORT_FLUSH_SECONDS):
        # Otherwise the job would look complete.
        raise FarandoleInternalError(
            f"commit {commits} is in {stored.directory_url}, but the launcher has not confirmed "
            "the report of it, so the job is not requeued: a job that is submitted again "
            "continues from the commit"
        )


def withdraw_report() -> None:
    """Withdraws an earlier report of a suspension on rank 0: the job continues, or has ended by
    itself.
    """
    from farandole._native import launcher  # noqa: PLC0415 - few jobs are suspended

    launcher.report_record(SUSPENSION_KIND, b"{}")
    if not launcher.flush_reports(_REPORT_FLUSH_SECONDS):
        _log.warning(
            "the launcher has not confirmed that the job continues or has ended: it may requeue "
            "the job once more"
        )
