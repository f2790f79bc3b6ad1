# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The variables of the driver that are forwarded to the workers on Spark.

The variables are sent in the closure of Spark's tasks. Spark keeps the closure in caches, and
administrators can read it. So a variable is forwarded only if workers need it and it is not likely
to be a secret:

1. Its name is in `FORWARDED_NAMES`, or starts with one of `FORWARDED_PREFIXES`, or matches a
   pattern of the user.
2. If its name matches no pattern of the user, its name contains no word of secrets, and its value
   is not a URL with a password.

`SparkBackend(pass_env=["WANDB_*"])` forwards further variables, and `env={...}` replaces all of
them.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORWARDED_NAMES = ("LANG", "LANGUAGE", "TZ", "NO_COLOR")
FORWARDED_PREFIXES = (
    *("FARANDOLE_", "HOROVOD_"),
    *(
        "KERAS_",
        "TF_",
        "XLA_",
        "JAX_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "TORCHDYNAMO_",
        "PYTORCH_",
        "TRITON_",
        "PL_",
    ),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_", "GLOO_", "UCX_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
    *("HADOOP_CONF_", "HADOOP_USER_", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
    *("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "LC_"),
)
_SECRET_WORDS = re.compile(
    r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|_KEY$|TICKET"
)
_URL_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def split_forwarded_variables(
    environment: Mapping[str, str], more: Sequence[str], never: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the variables to forward to workers, and the names of all others.

    Args:
        environment: Variables of the driver.
        more: Shell patterns of further names.
        never: Names that belong to the driver's own process and mean nothing elsewhere.
    """
    known = {name: value for name, value in environment.items() if name not in never}
    taken = {name: value for name, value in known.items() if _is_forwarded(name, value, more)}
    return taken, sorted(set(known) - set(taken))


def _is_forwarded(name: str, value: str, more: Sequence[str]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in more):
        return True
    if name not in FORWARDED_NAMES and not name.startswith(FORWARDED_PREFIXES):
        return False
    return _SECRET_WORDS.search(name.upper()) is None and _URL_PASSWORD.search(value) is None
