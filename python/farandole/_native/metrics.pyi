# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of all metrics, their text for Prometheus, and the counters of this process."""

from collections.abc import Sequence

CONTENT_TYPE: str
"""Content type of `format_exposition`."""

def definitions() -> list[tuple[str, str, str, str, str]]:
    """Returns all metrics: the name in OpenTelemetry, `gauge` or `counter`, the unit, the
    documentation, and the name in Prometheus.
    """

def format_exposition(samples: Sequence[tuple[str, dict[str, str], float]], /) -> str:
    """Returns samples in Prometheus's text format.

    Args:
        samples: The metric's name in OpenTelemetry, labels, and the value of each.
    """

def process_counters() -> dict[str, float]:
    """Returns sums since the start of this process: `shared_memory_bytes` and `tcp_bytes` that were
    sent, `collective_wait_seconds`, and `store_retries`.
    """
