# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Metrics of the runs of this process for Prometheus, by HTTP, and for collectors of
OpenTelemetry, by OTLP.

One server and one exporter serve all runs of the process: they start with the first run and end
with the last.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, cast

from farandole import _variables as variables
from farandole._native import metrics
from farandole._native.settings import read_setting
from farandole.runner.show.job_metrics import JobMetrics, MetricSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

OTLP_ENDPOINT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Variables of OpenTelemetry of which one names the collector."""
_OTLP_PROTOCOL_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)
_OTLP_PROTOCOL: Final = "http/protobuf"
_SERVICE_NAME: Final = "farandole"
_REQUEST_TIMEOUT: Final = 5.0
"""Seconds for a whole request: a client that sends a byte now and then keeps no connection."""
_MAX_REQUESTS_AT_A_TIME: Final = 8
_SHUTDOWN_POLL_SECONDS: Final = 0.1
"""Longest time in seconds that a client may take to send its request."""
_LAST_EXPORT_TIMEOUT: Final = 10.0
"""Longest time in seconds that the end of the last run waits for the collector."""
_MAX_PORT: Final = 65535

_log = logging.getLogger("farandole")


class MetricsAddressError(ValueError):
    """An address on which no metrics can be served."""


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host and the port of an address such as `9400`, `0.0.0.0:9400` or `[::]:9400`; a
    port alone is one of the loopback.

    Args:
        text: The address.

    Raises:
        MetricsAddressError: It is no address.
    """
    host, colon, port = text.strip().rpartition(":")
    if not port.isdecimal() or int(port) > _MAX_PORT or (colon and not host):
        raise MetricsAddressError(
            f"{variables.METRICS} and --metrics take a port or host:port, such as 9400 or "
            f"0.0.0.0:9400: {text}"
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class _MetricsServer(ThreadingMixIn, TCPServer):
    """Answers a few requests at a time; closes further connections."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # the end of a job waits for no client

    def __init__(self, address: tuple[str, int], samples: Callable[[], list[MetricSample]]) -> None:
        self.samples = samples
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._slots = threading.Semaphore(_MAX_REQUESTS_AT_A_TIME)
        super().__init__(address, _MetricsRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a request, if there are few."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request, and closes the connection when its time is over."""
        deadline = threading.Timer(_REQUEST_TIMEOUT, _close_connection, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._slots.release()


def _close_connection(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _MetricsRequest(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT

    def do_GET(self) -> None:
        if self.path.split("?", 1)[0] != "/metrics":
            self.send_error(404)
            return
        server = cast("_MetricsServer", self.server)
        body = metrics.format_exposition(server.samples()).encode()
        self.send_response(200)
        self.send_header("Content-Type", metrics.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of http.server
        """Logs nothing: a request every few seconds is no event."""


class MetricsExport:
    """The runs of this process, and the ways on which their metrics leave it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lifecycle_lock = threading.Lock()
        """Held while the server starts or ends: a run that begins then finds the port free."""
        self._runs: list[JobMetrics] = []
        self._end_server: Callable[[], None] | None = None
        self._otlp: OtlpExport | None = None

    def samples(self) -> list[MetricSample]:
        """Returns the present values of all runs."""
        with self._lock:
            runs = list(self._runs)
        return [sample for run in runs for sample in run.samples()]

    @contextlib.contextmanager
    def export_run(self, name: str, address: str, *, uses_otlp: bool) -> Iterator[JobMetrics]:
        """Exports the metrics of a run while the context lasts.

        Args:
            name: Name of the run.
            address: Address of the server; empty for no server. The first run decides.
            uses_otlp: Whether a collector gets the metrics.

        Raises:
            MetricsAddressError: The address is wrong.
            OSError: The port is taken.
        """
        with self._lifecycle_lock:
            if address and self._end_server is None:
                self._end_server = self._start_server(address)
            if uses_otlp and self._otlp is None:
                self._otlp = start_otlp_export(self.samples)
            with self._lock:
                run = JobMetrics(_unused_name(name, {each.name for each in self._runs}))
                self._runs.append(run)
        try:
            yield run
        finally:
            self._end_run(run)

    def _end_run(self, run: JobMetrics) -> None:
        # Before the run is removed, so that the collector gets its last values.
        if (otlp := self._otlp) is not None:
            otlp.flush()
        with self._lifecycle_lock:
            with self._lock:
                self._runs.remove(run)
                if self._runs:
                    return
            end_server, self._end_server = self._end_server, None
            otlp, self._otlp = self._otlp, None
            if end_server is not None:
                end_server()
            if otlp is not None:
                otlp.close()

    def _start_server(self, address: str) -> Callable[[], None]:
        host, port = parse_address(address)
        try:
            server = _MetricsServer((host, port), self.samples)
        except OSError as error:
            raise OSError(
                error.errno, f"metrics cannot be served on {address}: {error.strerror}"
            ) from error
        thread = threading.Thread(
            target=server.serve_forever,
            args=[_SHUTDOWN_POLL_SECONDS],
            name="farandole-metrics",
            daemon=True,
        )
        thread.start()
        shown = f"[{host}]" if ":" in host else host
        sys.stderr.write(
            f"farandole: metrics are at http://{shown}:{server.server_address[1]}/metrics\n"
        )
        sys.stderr.flush()

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return end


def _unused_name(name: str, used: set[str]) -> str:
    """Returns the name of a run, with a number if another run of this process has it now."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in used else next(each for each in numbered if each not in used)


_EXPORT: Final = MetricsExport()


def otlp_endpoint() -> str | None:
    """Returns the collector that the environment names."""
    return next(filter(None, map(os.environ.get, OTLP_ENDPOINT_VARIABLES)), None)


@contextlib.contextmanager
def export_run_metrics(name: str, address: str | None = None) -> Iterator[JobMetrics | None]:
    """Exports the metrics of a run, if the environment or the caller asks for it; else gives
    `None`.

    Args:
        name: Name of the run.
        address: Address of the server; default: `FARANDOLE_METRICS`.

    Raises:
        MetricsAddressError: The address is wrong.
        OSError: The port is taken.
    """
    address = str(read_setting(variables.METRICS) or "") if address is None else address
    uses_otlp = otlp_endpoint() is not None
    if not address and not uses_otlp:
        yield None
        return
    with _EXPORT.export_run(name, address, uses_otlp=uses_otlp) as run:
        yield run


class OtlpExport:
    """Sends metrics to a collector from time to time, and at the end of each run.

    Args:
        provider: The meter provider of OpenTelemetry's SDK, whose reader sends the metrics.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def flush(self) -> None:
        """Sends the present values; gives up after ten seconds."""
        _call_with_deadline(self._provider.force_flush)

    def close(self) -> None:
        """Ends the export; gives up after ten seconds."""
        _call_with_deadline(self._provider.shutdown)


def _call_with_deadline(call: Callable[[], object]) -> None:
    """Calls a function in a thread: a collector that does not answer must not hold up a job."""

    def call_quietly() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - metrics never fail a job
            _log.warning("metrics could not be sent to the collector: %s", error)

    thread = threading.Thread(target=call_quietly, name="farandole-otlp-end", daemon=True)
    thread.start()
    thread.join(_LAST_EXPORT_TIMEOUT)


def start_otlp_export(samples: Callable[[], Iterable[MetricSample]]) -> OtlpExport | None:
    """Starts to send samples to the collector. Returns `None`, with a warning, if that is not
    possible.

    Args:
        samples: Returns the present samples.
    """
    protocol = next(filter(None, map(os.environ.get, _OTLP_PROTOCOL_VARIABLES)), _OTLP_PROTOCOL)
    if protocol != _OTLP_PROTOCOL:
        _warn_of_no_otlp(f"set {_OTLP_PROTOCOL_VARIABLES[1]} to {_OTLP_PROTOCOL}: {protocol}")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415 - optional
        from opentelemetry.sdk.metrics import MeterProvider, export  # noqa: PLC0415 - as above
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above
    except ImportError:
        _warn_of_no_otlp("install opentelemetry-exporter-otlp-proto-http")
        return None
    has_name = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = MeterProvider(
        [export.PeriodicExportingMetricReader(metric_exporter.OTLPMetricExporter())],
        resource=Resource.create({} if has_name else {"service.name": _SERVICE_NAME}),
    )
    _create_instruments(provider.get_meter(_SERVICE_NAME), samples)
    return OtlpExport(provider)


def _warn_of_no_otlp(advice: str) -> None:
    names = [name for name in OTLP_ENDPOINT_VARIABLES if os.environ.get(name)]
    _log.warning("%s names a collector, and gets no metrics: %s", names[0], advice)


def _create_instruments(meter: Any, samples: Callable[[], Iterable[MetricSample]]) -> None:
    from opentelemetry.metrics import Observation  # noqa: PLC0415 - optional

    def observe(name: str) -> Callable[[Any], list[Any]]:
        return lambda _: [
            Observation(value, labels) for metric, labels, value in samples() if metric == name
        ]

    for name, kind, unit, help_text, _ in metrics.definitions():
        create = getattr(meter, f"create_observable_{kind}")
        create(name, callbacks=[observe(name)], unit=unit, description=help_text)
