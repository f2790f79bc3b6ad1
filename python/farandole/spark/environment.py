# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What of the driver's environment goes to the workers of `SparkBackend`.

The environment travels in Spark's closure, which executors, their logs and the event log may show. So the rule says
what goes, not what stays:

1. variables of what trains: names that begin with one of `PREFIXES`, and those of `NAMES`;
2. of these, none whose name looks as if it held a secret: a word of it is one of `SECRETS`;
3. none that belongs to the driver's own process or devices: `OWN`.

Whatever else workers need is given to `SparkBackend(env=...)`, which takes the place of the driver's environment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIXES: Final = (
    "FARANDOLE_",
    "HOROVOD_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "GOMP_",
    "HF_",
    "HSA_",
    "JAX_",
    "KERAS_",
    "KMP_",
    "LC_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "NUMEXPR_",
    "OMP_",
    "OPENBLAS_",
    "PL_",
    "PYTHON",
    "PYTORCH_",
    "TF_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "XLA_",
)
NAMES: Final = frozenset({"LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TZ"})
OWN: Final = frozenset({"CUDA_VISIBLE_DEVICES", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "SPARK_HOME"})
SECRETS: Final = frozenset(
    {"AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASS", "PASSWD", "PASSWORD", "SECRET", "TOKEN", "TOKENS"}
)


def handed_on(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What goes to the workers.

    Args:
        environment: the driver's.

    Returns:
        The variables that go, and the names of those that stay, sorted.
    """
    goes = {name: value for name, value in environment.items() if _goes(name)}
    return goes, sorted(environment.keys() - goes.keys() - OWN)


def _goes(name: str) -> bool:
    if name in OWN or SECRETS & set(re.split(r"[^A-Z]+", name.upper())):
        return False
    return name in NAMES or name.startswith(PREFIXES)
