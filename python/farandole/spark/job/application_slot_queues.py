# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The jobs of this process on one Spark application, elastic ones too, wait for each other's slots.

Spark starts a barrier stage only when it has all slots, but it checks only every few seconds and
gives up after some time. Tasks of a gang without a barrier would hold some slots while another gang
holds the rest.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from farandole.runner.job_slot_queue import SlotQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.spark.job.session_adapter import SparkSessionAdapter

_QUEUES_LOCK = threading.Lock()
_QUEUE_BY_APPLICATION: WeakKeyDictionary[Any, SlotQueue] = WeakKeyDictionary()


def slot_queue(cluster: SparkSessionAdapter) -> SlotQueue:
    """Returns the queue of an application's gangs.

    Args:
        cluster: The application.
    """
    application = cluster.context if cluster.context is not None else cluster.session
    with _QUEUES_LOCK:
        if application not in _QUEUE_BY_APPLICATION:
            _QUEUE_BY_APPLICATION[application] = SlotQueue(
                _make_slot_counter(cluster), "Spark tasks to start"
            )
        return _QUEUE_BY_APPLICATION[application]


def _make_slot_counter(cluster: SparkSessionAdapter) -> Callable[[], int]:
    if cluster.context is None:
        # a Connect client sees no more, and by a job each time
        return functools.cache(cluster.default_parallelism)
    if cluster.uses_dynamic_allocation:
        return functools.cache(lambda: cluster.max_dynamic_slots() or 1 << 31)
    return lambda: cluster.slot_count() or cluster.default_parallelism()
