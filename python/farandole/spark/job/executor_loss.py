# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Spark's own reasons for the loss of a gang's executors, from the Spark plugin."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.runner.errors import FarandoleJobError
    from farandole.runner.gang import JobOutput
    from farandole.runner.show.training_run_reports import TrainingRun
    from farandole.spark.shim import SparkPlugin

_MESSAGE_POLL_INTERVAL = 0.25
_REASON_WAIT_SECONDS = 3.0
"""Seconds to wait for Spark's reason of the loss of an executor, after its worker was lost."""
_REASON_RETRY_INTERVAL = 0.05


class ExecutorLossReasons:
    """Spark's messages about the executors of one job.

    Args:
        shim: The plugin; `None` without a plugin, and then there are no messages.
        tag: Tag of the job's Spark jobs.
        training: Receives the events of the executors.
        output: Receives messages for the user.
    """

    def __init__(
        self, shim: SparkPlugin | None, tag: str, training: TrainingRun, output: JobOutput
    ) -> None:
        self._plugin = shim
        self._tag = tag
        self._training = training
        self._output = output
        self._next_poll = 0.0
        self._rank_stage: str | None = None
        self._reasons: dict[str, str] = {}
        if shim is not None:
            shim.fetch_messages()  # discards messages of earlier jobs

    def poll_messages(self) -> None:
        """Polls Spark's messages, at most four times a second."""
        now = time.monotonic()
        if self._plugin is not None and now >= self._next_poll:
            self._next_poll = now + _MESSAGE_POLL_INTERVAL
            for message in self._plugin.fetch_messages():
                self._handle_message(message)

    def _handle_message(self, message: dict[str, str]) -> None:
        executor, reason = message.get("executor", ""), message.get("reason", "")
        match message["kind"]:
            case "started" if message["tag"] == self._tag:
                # Ranks are in the first stage. The next one collects their rows by a task that may
                # be elsewhere.
                if self._rank_stage is None:
                    self._rank_stage = message.get("stage", "")
                if message.get("stage", "") == self._rank_stage:
                    self._training.record_location(int(message["task"]), executor)
            case "removed" if self._training.has_executor(executor):
                self._reasons[executor] = reason
                self._report_event(f"Spark has removed executor {executor}", reason)
            case "decommissioning" if self._training.has_executor(executor):
                self._report_event(f"Spark decommissions executor {executor}", None)
            case "failed" if message["tag"] == self._tag:
                self._training.add_event(f"task {message['task']} failed", reason)
            case "stage" if message["tag"] == self._tag:
                self._training.add_event("stage failed", reason)

    def _report_event(self, event_text: str, reason: str | None) -> None:
        self._output.print_message(f"{event_text}: {reason}" if reason else event_text)
        self._training.add_event(event_text, reason)

    def add_loss_reason(self, error: FarandoleJobError) -> None:
        """Adds to a worker's death why Spark has removed its executor, if it has.

        An exception of the worker's own needs no other reason. If Spark has ended the job and no
        rank is known, the removal of an executor still becomes an event.

        Args:
            error: Error of the job.
        """
        if self._plugin is None or error.exception_type is not None:
            return
        executor = self._training.executor_of_rank(error.rank)
        # If a worker has ended by itself, its executor most likely continues.
        deadline = time.monotonic() + (_REASON_WAIT_SECONDS if error.exit_code is None else 0.0)
        while True:
            self._next_poll = 0.0
            self.poll_messages()
            known = self._reasons if executor is None else executor in self._reasons
            if known or time.monotonic() >= deadline:
                break
            time.sleep(_REASON_RETRY_INTERVAL)
        reason = self._reasons.get(executor) if executor is not None else None
        if reason and reason not in error.reason:
            error.add_reason(f"Spark has removed executor {executor}, which it was in: {reason}")
