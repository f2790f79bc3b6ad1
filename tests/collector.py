# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A collector of OpenTelemetry for tests: it keeps the metrics that it gets by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Collector(HTTPServer):
    """Receives requests until it is closed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.authorizations: list[str | None] = []
        self.requests: list[ExportMetricsServiceRequest] = []

    @property
    def url(self) -> str:
        """The endpoint for the standard variables."""
        return f"http://127.0.0.1:{self.server_port}"

    def last_values(self) -> dict[str, tuple[str, bool, float]]:
        """Unit, whether it is a sum, and the first value of each metric of the last request that
        has some.
        """
        values: dict[str, tuple[str, bool, float]] = {}
        for request in self.requests[::-1]:
            for metric in _metrics(request):
                is_sum = metric.WhichOneof("data") == "sum"
                assert not is_sum or metric.sum.is_monotonic
                point = (metric.sum if is_sum else metric.gauge).data_points[0]
                value = getattr(point, point.WhichOneof("value"))
                values[metric.name] = (metric.unit, is_sum, value)
            if values:
                break
        return values


def _metrics(request: ExportMetricsServiceRequest) -> list[Any]:
    scopes = [scope for resource in request.resource_metrics for scope in resource.scope_metrics]
    return [metric for scope in scopes for metric in scope.metrics]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        """Keeps a request."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_right = (self.path, self.headers["Content-Type"]) == (
            "/v1/metrics",
            "application/x-protobuf",
        )
        self.server.authorizations.append(self.headers["authorization"])
        self.server.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200 if is_right else 400)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector that runs while the context lasts."""
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()
