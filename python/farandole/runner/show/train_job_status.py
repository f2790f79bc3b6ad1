# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports the progress of a job to the operator of Kubeflow Trainer: the status of the `TrainJob`.

The operator, from 2.2 on with the feature `TrainJobStatus`, gives the container of the launcher an
address, the certificate of its authority and a token, by environment variables. It takes
`{"trainerStatus": {...}}` by POST: a percentage, the remaining seconds and up to 256 metrics.

put_row --wake--> thread --POST--> operator
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.runner.show.run_reporter import RunReportReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

URL_VARIABLE: Final = "KUBEFLOW_TRAINER_SERVER_URL"
"""Variable of the address. `crates/cli/src/run/options.rs` reads it, too."""
CERTIFICATE_VARIABLE: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_VARIABLE: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - names a file

SEND_INTERVAL_SECONDS: Final = 5.0
_REQUEST_TIMEOUT_SECONDS: Final = 5.0
_END_TIMEOUT_SECONDS: Final = 8.0
_MAX_METRICS: Final = 256
_MAX_TEXT_LENGTH: Final = 64
"""Longest name and value of a metric that the operator takes."""
_MAX_TOKEN_BYTES: Final = 1 << 16
_MAX_ANSWER_BYTES: Final = 1 << 12
_MAX_UNFINISHED_PERCENTAGE: Final = 99

_log = logging.getLogger("farandole")


class TrainJobProgress:
    """Progress of a job, and the time that it still needs at its present speed.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None
        """Time and progress of the first report since the start, or since progress went back."""
        self._last = 0.0
        self._is_finished = False
        self._metrics: dict[str, Any] = {}

    def take_row(self, key: str, body: dict[str, Any]) -> None:
        """Takes a row of the run.

        Args:
            key: Name of the row.
            body: Content of the row.
        """
        if key == "run":
            self._metrics |= {"ranks": body.get("size"), "restarts": body.get("restarts")}
            self._is_finished = body.get("state") == "ended"
        elif key == "step":
            share = body["step"] / max(1, body["steps"])
            self._take_progress(body["epoch"], body.get("epochs"), share)
            self._metrics |= {name: body.get(name) for name in ("loss", "rows_per_second")}
        elif key.startswith("epoch/"):
            self._metrics |= {"epoch": body["epoch"], **body["values"]}

    def _take_progress(self, epoch: int, epochs: int | None, share: float) -> None:
        if not epochs:
            return
        progress = min(1.0, (epoch + share) / epochs)
        if self._first is None or progress < self._last:
            self._first = (self._clock(), progress)
        self._last = progress

    def status(self) -> dict[str, Any]:
        """Returns the status in the form of the operator. Unknown values are missing."""
        now = dt.datetime.now(dt.UTC).isoformat()
        status: dict[str, Any] = {"lastUpdatedTime": now, "metrics": self._named_metrics()}
        if self._is_finished:
            return status | {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        if self._first is None:
            return status
        status["progressPercentage"] = min(_MAX_UNFINISHED_PERCENTAGE, int(self._last * 100))
        began, first = self._first
        if self._last > first:
            speed = (self._last - first) / max(self._clock() - began, 1e-9)
            status["estimatedRemainingSeconds"] = round((1 - self._last) / speed)
        return status

    def _named_metrics(self) -> list[dict[str, str]]:
        finite = {
            name: f"{value:.6g}"
            for name, value in self._metrics.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and 0 < len(name) <= _MAX_TEXT_LENGTH
        }
        return [{"name": name, "value": value} for name, value in finite.items()][:_MAX_METRICS]


class TrainJobStatusReporter(RunReportReceiver):
    """Sends the status of a job from a thread, at most once in `SEND_INTERVAL_SECONDS`.

    An operator that does not answer or refuses the status is logged once, and never holds up a job.

    Args:
        url: Address of the operator; the token is sent only over TLS.
        certificate: File with the certificate of the operator's authority; `None` for those that
            this system trusts.
        token: File with the token of the pod, which Kubernetes replaces from time to time.

    Raises:
        OSError: The certificate cannot be read.
    """

    def __init__(self, url: str, certificate: str | None, token: str) -> None:
        self._url, self._token = url, token
        # Without redirects, which would get the token. Without proxies: the operator is near.
        self._opener = urllib.request.OpenerDirector()
        try:
            context = ssl.create_default_context(cafile=certificate or None)
        except OSError as error:
            raise OSError(f"{CERTIFICATE_VARIABLE}={certificate}: {error}") from error
        for handler in (
            urllib.request.HTTPSHandler(context=context),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)
        self._progress = TrainJobProgress()
        self._changed = threading.Condition()
        self._has_news = self._is_closed = self._has_warned = False
        self._thread = threading.Thread(
            target=self._send_changes, name="farandole-train-job-status", daemon=True
        )
        self._thread.start()

    def put_row(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Like `RunReportReceiver.put_row`."""
        del run, logged
        with self._changed:
            self._progress.take_row(key, body)
            self._has_news = True
            self._changed.notify()

    def close(self) -> None:
        """Sends the last status; gives up after `_END_TIMEOUT_SECONDS`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_END_TIMEOUT_SECONDS)

    def _send_changes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news or self._is_closed)
                status = self._progress.status() if self._has_news else None
                self._has_news = False
            if status is not None:
                self._send(status)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, SEND_INTERVAL_SECONDS) and (
                    not self._has_news
                ):
                    return

    def _send(self, status: dict[str, Any]) -> None:
        try:
            token = _read_token(self._token)
            request = urllib.request.Request(  # noqa: S310 - only https: the opener has no other handler
                self._url,
                data=json.dumps({"trainerStatus": status}).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                method="POST",
            )
            with self._opener.open(request, timeout=_REQUEST_TIMEOUT_SECONDS) as answer:
                answer.read(_MAX_ANSWER_BYTES)
        except Exception as error:  # noqa: BLE001 - a status never fails a job
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        answer_text = ""
        if isinstance(error, urllib.error.HTTPError):
            with contextlib.suppress(Exception):  # an answer that breaks off
                answer_text = f": {error.read(_MAX_ANSWER_BYTES).decode(errors='replace')}"
        _log.warning(
            "the operator of Kubeflow gets no status of this job: %s%s", error, answer_text
        )


def _read_token(path: str) -> str:
    with Path(path).open("rb") as file:
        return file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()


@contextlib.contextmanager
def report_train_job() -> Iterator[TrainJobStatusReporter | None]:
    """Reports the status of a job while it runs, if this is the launcher of a `TrainJob` whose
    operator takes it; else gives `None`.
    """
    url, token = os.environ.get(URL_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    if not url or not token:
        yield None
        return
    try:
        _read_token(token)
        if not url.startswith("https://"):
            raise ValueError(f"{URL_VARIABLE} must be an address of https: {url}")  # noqa: TRY301
        reporter = TrainJobStatusReporter(url, os.environ.get(CERTIFICATE_VARIABLE), token)
    except FileNotFoundError:  # a process of the job: it has the variables, but not the files
        yield None
        return
    except (OSError, ValueError) as error:
        _log.warning("the operator of Kubeflow gets no status of this job: %s", error)
        yield None
        return
    try:
        yield reporter
    finally:
        reporter.close()
