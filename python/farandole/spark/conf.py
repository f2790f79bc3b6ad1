# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Spark settings that decide where failed tasks run again, as (key, value) pairs.

The names are Horovod's. Spark 3.1 renamed `spark.blacklist.*` to `spark.excludeOnFailure.*` and
Spark 4 reads only the new names; `both` gives a setting under both.
"""

from typing import Final

Setting = tuple[str, str]

SPARK_CONF_MAX_INT: Final = "2147483647"
SPARK_CONF_MAX_INT_MINUS_ONE: Final = "2147483646"

_BLACKLIST_PREFIX: Final = "spark.blacklist."
_EXCLUDE_ON_FAILURE_PREFIX: Final = "spark.excludeOnFailure."


def _executor_exclusion_setting(key: str, value: str) -> Setting:
    """Returns a setting of the exclusion of failed executors and hosts, under its old name."""
    return _BLACKLIST_PREFIX + key, value


SPARK_CONF_ALWAYS_RESTART_FAILED_TASK: Final[Setting] = (
    "spark.task.maxFailures",
    SPARK_CONF_MAX_INT,
)

SPARK_CONF_BLACKLIST_DISABLED: Final = _executor_exclusion_setting("enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED: Final = _executor_exclusion_setting("enabled", "true")

_STAGE_TASKS: Final = "stage.maxFailedTasksPerExecutor"
_STAGE_EXECUTORS: Final = "stage.maxFailedExecutorsPerNode"
_TASK_EXECUTOR: Final = "task.maxTaskAttemptsPerExecutor"
_TASK_NODE: Final = "task.maxTaskAttemptsPerNode"
_APP_TASKS: Final = "application.maxFailedTasksPerExecutor"
_APP_EXECUTORS: Final = "application.maxFailedExecutorsPerNode"

SPARK_CONF_REUSE_FAILED_EXECUTOR: Final = _executor_exclusion_setting(
    _STAGE_TASKS, SPARK_CONF_MAX_INT
)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR: Final = _executor_exclusion_setting(_STAGE_TASKS, "1")

SPARK_CONF_REUSE_FAILING_NODE: Final = _executor_exclusion_setting(
    _STAGE_EXECUTORS, SPARK_CONF_MAX_INT_MINUS_ONE
)
SPARK_CONF_DONT_REUSE_FAILING_NODE: Final = _executor_exclusion_setting(_STAGE_EXECUTORS, "1")

SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK: Final = _executor_exclusion_setting(
    _TASK_EXECUTOR, SPARK_CONF_MAX_INT
)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK: Final = _executor_exclusion_setting(
    _TASK_EXECUTOR, "2"
)
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK: Final = _executor_exclusion_setting(
    _TASK_EXECUTOR, "1"
)

SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK: Final = _executor_exclusion_setting(
    _TASK_NODE, SPARK_CONF_MAX_INT_MINUS_ONE
)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK: Final = _executor_exclusion_setting(_TASK_NODE, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK: Final = _executor_exclusion_setting(_TASK_NODE, "1")

SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP: Final = _executor_exclusion_setting(
    _APP_TASKS, SPARK_CONF_MAX_INT
)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP: Final = _executor_exclusion_setting(_APP_TASKS, "1")

SPARK_CONF_REUSE_FAILING_NODE_IN_APP: Final = _executor_exclusion_setting(
    _APP_EXECUTORS, SPARK_CONF_MAX_INT
)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP: Final = _executor_exclusion_setting(_APP_EXECUTORS, "1")

_DEFAULT_SETTINGS: Final = {
    "enabled": "false",
    _STAGE_TASKS: "2",
    _STAGE_EXECUTORS: "2",
    _TASK_EXECUTOR: "1",
    _TASK_NODE: "2",
    _APP_TASKS: "2",
    _APP_EXECUTORS: "2",
}

SPARK_CONF_DEFAULT_VALUES: Final[dict[str, str]] = {
    "spark.task.maxFailures": "4",
    **{
        prefix + key: value
        for prefix in (_BLACKLIST_PREFIX, _EXCLUDE_ON_FAILURE_PREFIX)
        for key, value in _DEFAULT_SETTINGS.items()
    },
}
"""Spark's own defaults of every key above, under the old names and the new ones."""


def both(setting: Setting) -> list[Setting]:
    """Returns a setting under every name Spark has had for it.

    Args:
        setting: One of the pairs of this module.

    Returns:
        The pair itself and, when its key has a newer name, the pair with that name.
    """
    key, value = setting
    if not key.startswith(_BLACKLIST_PREFIX):
        return [setting]
    return [setting, (_EXCLUDE_ON_FAILURE_PREFIX + key.removeprefix(_BLACKLIST_PREFIX), value)]
