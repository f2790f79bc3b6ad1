# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Farandole on Ray: ranks are Ray actors. Ray places them and assigns GPUs to them.

`RayExecutor` keeps Horovod's interface: it starts actors once and then runs functions on all of
them. `RayBackend` is a place where estimators train, beside `SparkBackend` and `LocalBackend`.

The ranks meet at the registrar of rank 0, with TLS and a token that Ray passes from actor to actor.
Neither ssh nor a search for network interfaces is needed.
"""

from farandole.ray.adapter import Adapter, BaseParams
from farandole.ray.backend import RayBackend
from farandole.ray.elastic import ElasticRayExecutor
from farandole.ray.runner import MiniSettings, RayExecutor
from farandole.ray.worker import BaseHorovodWorker

__all__ = [
    "Adapter",
    "BaseHorovodWorker",
    "BaseParams",
    "ElasticRayExecutor",
    "MiniSettings",
    "RayBackend",
    "RayExecutor",
]
