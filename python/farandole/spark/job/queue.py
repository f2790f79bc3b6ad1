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

from farandole.runner.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.spark.job.session import Cluster

_LOCK = threading.Lock()
_QUEUES: WeakKeyDictionary[Any, Slots] = WeakKeyDictionary()


def queue(cluster: Cluster) -> Slots:
    """Returns the queue of an application's gangs.

    Args:
        cluster: The application.
    """
    application = cluster.context if cluster.context is not None else cluster.session
    with _LOCK:
        if application not in _QUEUES:
            _QUEUES[application] = Slots(_total(cluster), "Spark tasks to start")
        return _QUEUES[application]


def _total(cluster: Cluster) -> Callable[[], int]:
    if cluster.context is None:
        # a Connect client sees no more, and by a job each time
        return functools.cache(cluster.default_parallelism)
    if cluster.is_dynamic:
        return functools.cache(lambda: cluster.most_slots() or 1 << 31)
    return lambda: cluster.slots() or cluster.default_parallelism()
