# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Spark plugin, which is a jar, and the access to it from a Python driver.

Everything works without it. It adds a Training tab to Spark's UI and to the History Server, numbers
to Spark's metrics, and Spark's own reason to the error of a lost worker. A Connect client has no
JVM, and so no access to it.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.runner import warm_workers
from farandole.runner.show.run_reporter import RunReportReceiver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLUGIN_CLASS: Final = "io.farandole.spark.FarandolePlugin"
"""The class to name in `spark.plugins`."""

WARM_WORKERS_SETTING: Final = "spark.farandole.warmWorkers"
"""The setting by which executors start a fork server of warm workers when they start."""

JAR_PATH: Final = Path(__file__).with_name("farandole-spark.jar")
"""The jar that travels in the wheel."""

_PLUGIN_LOGGER = logging.getLogger("farandole.spark")


def plugin(builder: SparkSession.Builder, *, warm: bool | None = None) -> SparkSession.Builder:
    """Enables the Spark plugin for a session that does not exist yet.

    Jars and plugins that the builder was given stay. As with every setting of a builder, the jars
    and plugins of `spark-defaults.conf` are replaced: if this file has `spark.jars` or
    `spark.plugins`, add the plugin in the file instead.

    Args:
        builder: `SparkSession.builder`, of a session that does not exist yet.
        warm: Whether each executor starts the fork server of warm workers when it starts, so that
            also the first job finds PyTorch imported; by default where `FARANDOLE_WARM_WORKERS`
            says `on`, and in notebooks that have imported torch.

    Returns:
        The builder.

    Raises:
        FileNotFoundError: This installation has no jar: it is a checkout in which `make install`
            has not run.
        ValueError: `FARANDOLE_WARM_WORKERS` or `FARANDOLE_WARM_IDLE_SECONDS` does not parse.
    """
    if not JAR_PATH.is_file():
        raise FileNotFoundError(
            f"the jar of the Spark plugin is not installed: {JAR_PATH}; in a checkout run: make "
            f"shim"
        )
    given: dict[str, Any] = getattr(builder, "_options", {})
    for name, value in (("spark.jars", str(JAR_PATH)), ("spark.plugins", PLUGIN_CLASS)):
        before = [one.strip() for one in str(given.get(name) or "").split(",") if one.strip()]
        builder.config(name, ",".join([*before, *([] if value in before else [value])]))
    if warm_workers.resolve_warm_worker_settings(warm, by_default=False) is not None:
        builder.config(WARM_WORKERS_SETTING, "true")
    return builder


class SparkPlugin(RunReportReceiver):
    """The plugin of the driver's SparkContext. Nothing here raises: after the first error it is
    left alone.

    Args:
        java_class: The Java class.
    """

    def __init__(self, java_class: Any) -> None:
        self._java_class: Any = java_class
        self._next_message = 0

    @classmethod
    def from_context(cls, context: Any) -> SparkPlugin | None:
        """Returns the plugin of a context; `None` where it has none, as on Connect.

        Args:
            context: A `SparkContext`, or `None`.
        """
        if context is None:
            return None
        try:
            java_class = context._jvm.io.farandole.spark.DriverGateway  # noqa: SLF001 - pyspark has no other way to a class
            return cls(java_class) if java_class.isOn() is True else None
        except Exception:  # noqa: BLE001 - a name that is no class cannot be called
            return None

    @classmethod
    def from_active_context(cls) -> SparkPlugin | None:
        """Returns the plugin of the context that runs in this process, if there is one; loads no
        pyspark.
        """
        context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
        return cls.from_context(getattr(context, "_active_spark_context", None))

    def put_row(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Writes a row of a run, instead of the one of that name.

        Args:
            run: The run; empty for the application.
            key: The row's name within it.
            body: Content of the row.
            logged: Whether the event log keeps it.
        """
        self._call_plugin("put", run, key, json.dumps(body, allow_nan=False, default=str), logged)

    def set_gauge(self, name: str, value: float) -> None:
        """Sets a number in Spark's metrics system.

        Args:
            name: Name of a gauge that the plugin registers.
            value: The number.
        """
        self._call_plugin("gauge", name, float(value))

    def publish_timeline(self, run: str, path: str) -> None:
        """Like `RunReportReceiver.publish_timeline`: the tab offers the file while the driver
        lives.

        Args:
            run: The run.
            path: The file's.
        """
        self._call_plugin("timeline", run, path)

    def fetch_messages(self) -> list[dict[str, str]]:
        """Returns Spark's news of executors and of the gangs' stages and tasks since the last
        call of this object.
        """
        reply = self._call_plugin("news", self._next_message)
        if reply is None:
            return []
        answer = json.loads(reply)
        self._next_message = answer["next"]
        return answer["news"]

    def _call_plugin(self, name: str, *arguments: Any) -> Any:
        if self._java_class is None:
            return None
        try:
            return getattr(self._java_class, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - a context that has stopped; a training continues without its tab
            _PLUGIN_LOGGER.debug("the Spark plugin no longer answers: %s", error)
            self._java_class = None
            return None
