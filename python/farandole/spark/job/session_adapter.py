# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Queries of the driver to its Spark session, classic or Connect."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole.common.counted_noun import format_counted_noun
from farandole.spark.job.resource_profiles import supports_plan_resource_profiles

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, Row, SparkSession

_CANCEL_GRACE_SECONDS = 10.0
_SLOT_SETTINGS = (
    ("spark.dynamicAllocation.maxExecutors", str(1 << 31)),
    ("spark.executor.cores", "0"),
    ("spark.task.cpus", "1"),
)
"""Settings that limit the slots of dynamic allocation, with Spark's defaults."""
NO_SESSION = "Could not find an active SparkContext, are you running in a PySpark session?"


@dataclass(frozen=True)
class SparkSessionAdapter:
    """A Spark session, with the differences between classic Spark and Spark Connect.

    Attributes:
        session: The session.
        context: Its `SparkContext`; `None` on Connect.
    """

    session: SparkSession
    context: Any

    @classmethod
    def from_active_session(cls) -> SparkSessionAdapter:
        """Returns the session of this process.

        Raises:
            Exception: There is none, or pyspark is not installed; Horovod's type and words.
        """
        try:
            from pyspark.sql import SparkSession  # noqa: PLC0415 - `import farandole.spark` loads no pyspark
        except ImportError as error:
            raise ModuleNotFoundError(
                "pyspark is not installed; install it with: pip install 'farandole[spark]'",
                name="pyspark",
            ) from error
        # Connect first: pyspark's classic module handles it only if it was configured to be remote.
        session = (
            _active_connect_session() or SparkSession.getActiveSession() or _session_of_context()
        )
        if session is None:
            raise Exception(NO_SESSION)  # noqa: TRY002 - Horovod's type
        return cls(session, None if is_connect(session) else session.sparkContext)

    def default_parallelism(self) -> int:
        """Spark's own idea of how many tasks run side by side."""
        if self.context is not None:
            return int(self.context.defaultParallelism)
        from pyspark.sql import functions  # noqa: PLC0415 - as above

        # A range without a number of slices has the default parallelism. A Connect client can find
        # the default only by counting these slices.
        partitions = self.session.range(0, 1 << 20).select(
            functions.spark_partition_id().alias("partition")
        )
        return int(partitions.distinct().count())

    @property
    def master_url(self) -> str:
        """The master's URL; empty on Connect, where it is the server's affair."""
        return str(self.context.master) if self.context is not None else ""

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's own JVM, with a number of slots that never changes."""
        return self.master_url == "local" or self.master_url.startswith("local[")

    def make_job_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Returns a thread for a Spark job: it inherits its maker's job group, tags and
        properties.
        """
        from pyspark import InheritableThread  # noqa: PLC0415 - `import farandole.spark` loads no pyspark

        # pyspark 3.5 knows no sessions there, and a Connect client of it has nothing to inherit.
        asks = "session" in inspect.signature(InheritableThread.__init__).parameters
        inherit: dict[str, Any] = {"session": self.session} if self.context is None and asks else {}
        return InheritableThread(target=target, name=name, daemon=True, **inherit)

    def tag_jobs(self, tag: str, description: str) -> None:
        """Gives the jobs of this thread a tag by which they are cancelled, and a description."""
        if self.context is None:
            self.session.addTag(tag)
            return
        # `SparkSession.addTag` reaches no job of a classic session that collects rows: the
        # context's tags do.
        self.context.addJobTag(tag)
        self.context.setInterruptOnCancel(True)
        self.context.setLocalProperty("spark.job.description", description)

    @contextlib.contextmanager
    def watch_running_tasks(self, at_work: Callable[[], None]) -> Iterator[None]:
        """Calls back when a job of this Connect session has tasks that run; at once where
        pyspark cannot tell.
        """
        register = getattr(self.session, "registerProgressHandler", None)
        if self.context is not None or register is None:
            at_work()
            yield
            return

        def handle_progress(inflight_tasks: int = 0, **_: Any) -> None:
            if inflight_tasks:
                at_work()

        register(handle_progress)
        try:
            yield
        finally:
            self.session.removeProgressHandler(handle_progress)  # pyright: ignore[reportArgumentType]

    def cancel_jobs(self, tag: str) -> None:
        """Cancels the jobs of a tag, and with them Spark's Python processes that ignore it for
        two seconds.
        """
        if self.context is not None:
            self.context.cancelJobsWithTag(tag)
        else:
            self.session.interruptTag(tag)

    def collect_rows(self, frame: DataFrame, description: str) -> list[Row]:
        """Returns the rows of a frame; an interrupt of this thread cancels the job.

        The job runs on a separate thread: an interrupt while py4j receives an answer would break
        the connection, and the job would continue.
        """
        tag, rows, errors = f"farandole-{uuid.uuid4().hex[:12]}", [], []

        def collect_tagged() -> None:
            try:
                self.tag_jobs(tag, description)
                rows.extend(frame.collect())
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                errors.append(error)

        thread = self.make_job_thread(collect_tagged, f"{tag}-job")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.25)
        except BaseException:
            deadline = time.monotonic() + _CANCEL_GRACE_SECONDS
            while thread.is_alive() and time.monotonic() < deadline:
                self.cancel_jobs(tag)
                thread.join(0.5)
            raise
        if errors:
            raise errors[0]
        return rows

    def has_ended_tasks(self, tag: str) -> bool:
        """Returns whether a task of the tag's running jobs has ended; `False` if that is
        unknown.
        """
        if self.context is None:
            return False
        try:
            tracker = self.context._jsc.statusTracker()  # noqa: SLF001 - pyspark's own does not know tags
            jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForTag(tag)]
            stages = [
                tracker.getStageInfo(stage)
                for job in jobs
                if job is not None
                for stage in job.stageIds()
            ]
            return any(stage is not None and stage.numCompletedTasks() > 0 for stage in stages)
        except Exception:  # noqa: BLE001 - a JVM that does not show it
            return False

    def slot_count(self) -> int | None:
        """Returns the number of tasks that this application could run at once if it ran nothing
        else; `None` if unknown.
        """
        if self.context is None:
            return None
        try:
            scala = self.context._jsc.sc()  # noqa: SLF001 - the number that Spark's own barrier check uses
            return int(
                scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile())
            )
        except Exception:  # noqa: BLE001 - a JVM that does not show it
            return int(self.context.defaultParallelism) if self.is_local else None

    @property
    def uses_dynamic_allocation(self) -> bool:
        """Whether dynamic allocation is on. Spark then runs no barrier stage."""
        return (
            not self.is_local
            and self.get_setting("spark.dynamicAllocation.enabled", "false").lower() == "true"
        )

    def check_job_size(self, size: int) -> None:
        """Refuses settings that cannot work, before the job starts.

        Raises:
            ValueError: More tasks than there can be slots, or speculation in a gang without a
                barrier.
        """
        if self.uses_dynamic_allocation:
            self._check_dynamic_allocation(size)
        slots = self.slot_count() if self.is_local else None
        if slots is not None and slots < size:
            raise ValueError(
                f"num_proc={size} needs "
                f"{format_counted_noun(size, 'task slot')} at the same time, but this Spark "
                f"application has {slots} (master {self.master_url}, "
                f"spark.task.cpus={self.get_setting('spark.task.cpus', '1')}): start Spark with "
                f"master "
                f"local[{size}], or use num_proc={slots}"
            )

    def _check_dynamic_allocation(self, size: int) -> None:
        if self.get_setting("spark.speculation", "false").lower() == "true":
            raise ValueError(
                "spark.speculation starts slow tasks twice, with dynamic allocation also the "
                "processes of a job, which wait for each other: set spark.speculation=false"
            )
        max_slots = self.max_dynamic_slots()
        if max_slots is not None and max_slots < size:
            settings = ", ".join(
                f"{key}={self.get_setting(key, default)}" for key, default in _SLOT_SETTINGS
            )
            raise ValueError(
                f"num_proc={size} needs {format_counted_noun(size, 'task slot')} at the same "
                "time, but dynamic "
                f"allocation gives at most {max_slots}: {settings}"
            )

    def max_dynamic_slots(self) -> int | None:
        """Slots that dynamic allocation gives at most; `None` if unlimited or unknown."""
        try:
            max_executors, cores, cpus = (
                int(self.get_setting(key, default)) for key, default in _SLOT_SETTINGS
            )
        except ValueError:
            return None  # Spark itself reports invalid values
        return max_executors * (cores // cpus) if cores else None

    def check_profile_support(self) -> None:
        """Refuses resource profiles where pyspark has no way to them.

        Raises:
            ValueError: A Connect client of pyspark 3.5, which has neither plans nor RDDs that take
                one.
        """
        if self.context is None and not supports_plan_resource_profiles():
            raise ValueError("with Spark Connect, resource_profile needs pyspark 4.0 or newer")

    def get_setting(self, key: str, default: str) -> str:
        """Returns a setting, or its default where it is not set or not shown."""
        try:
            return str(self.session.conf.get(key, default))
        except Exception:  # noqa: BLE001 - Connect servers hide static settings
            return default

    def explain_failure(self, error: BaseException, job: str) -> str:
        """Explains a failed job to its user, by Spark's own message if that is as good.

        Args:
            error: Spark's error.
            job: Words for the job, with which such a message begins.
        """
        text = str(error)
        for module in ("pyarrow", "farandole", "cloudpickle", "pandas"):
            if f"No module named '{module}'" in text:
                return (
                    f"the Python of Spark's tasks has no module {module!r}: "
                    f"{self._describe_interpreter()}. Set PYSPARK_PYTHON (or "
                    f"spark.pyspark.python) to an "
                    "interpreter that has it, or install it "
                    "there with: pip install 'farandole[spark]'"
                )
        if "PYTHON_VERSION_MISMATCH" in text:
            return (
                "the Python of Spark's tasks has another version than the driver's "
                f"{sys.version.split()[0]}: {self._describe_interpreter()}. Set PYSPARK_PYTHON (or "
                "spark.pyspark.python) to an interpreter of that version"
            )
        if "spark.driver.maxResultSize" in text:
            return (
                f"{error_headline(error, 1)}: with store=..., which all executors and the driver "
                f"reach, "
                "results of more than "
                "16 MiB travel by that store"
            )
        if any(
            phrase in text
            for phrase in (
                "SPARK_JOB_CANCELLED",
                "OPERATION_CANCELED",
                "cancelled part of",
                "cancelled as",
            )
        ):
            return f"the Spark job was cancelled: {error_headline(error)}"
        return f"{job} has failed: {error_headline(error)}"

    def _describe_interpreter(self) -> str:
        named = getattr(self.context, "pythonExec", None) or os.environ.get(
            "PYSPARK_PYTHON", "python3"
        )
        found = shutil.which(named) if self.is_local else None
        is_other = found is not None and os.path.realpath(found) != os.path.realpath(sys.executable)
        return f"tasks run {found or named!r}" + (
            f", this driver runs {sys.executable!r}" if is_other else ""
        )


def error_headline(error: BaseException, limit: int = 20) -> str:
    """Returns Spark's message without the JVM's stack."""
    text = str(error).partition("JVM stacktrace:")[0].partition("Driver stacktrace:")[0]
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not line.startswith(("\tat ", "An error occurred"))
    ]
    return "\n".join(lines[:limit]).removeprefix(": ")


def is_connect(session: SparkSession) -> bool:
    """Returns whether a session is a client of a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def _active_connect_session() -> SparkSession | None:
    module = sys.modules.get("pyspark.sql.connect.session")
    return module.SparkSession.getActiveSession() if module is not None else None


def _session_of_context() -> SparkSession | None:
    """Returns a session for the context that exists, as in a thread that has made no session its
    own.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - as in `from_active_session`
    from pyspark.sql import SparkSession  # noqa: PLC0415 - as in `from_active_session`

    return (
        SparkSession.builder.getOrCreate()
        if SparkContext._active_spark_context is not None  # noqa: SLF001
        else None
    )
