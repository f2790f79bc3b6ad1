# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Finds the GPUs of a host for Spark: a discovery script must run `python -m farandole.spark.gpus`.

Spark gives a task the addresses of GPUs, and accepts resource profiles with GPUs, only if a script
on each host lists them (`spark.worker.resource.gpu.discoveryScript`, or
`spark.executor.resource.gpu.discoveryScript` on YARN and Kubernetes). The numbers come from
`nvidia-smi`. A host without `nvidia-smi` has no GPUs for Spark, and the exit status is 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

_NVIDIA_SMI_COMMAND: Final = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_NVIDIA_SMI_TIMEOUT: Final = 60.0


def gpu_addresses() -> list[str]:
    """Returns the numbers of this host's GPUs.

    Raises:
        OSError: There is no `nvidia-smi`.
        subprocess.SubprocessError: It has failed, or gives no answer.
    """
    completed = subprocess.run(  # noqa: S603 - a constant
        _NVIDIA_SMI_COMMAND, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_TIMEOUT
    )
    return completed.stdout.split()


def main() -> int:
    """Writes the GPUs as Spark reads them.

    Returns:
        The exit status.
    """
    try:
        found = gpu_addresses()
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"farandole.spark.gpus: {error}\n")
        return 1
    sys.stdout.write(json.dumps({"name": "gpu", "addresses": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
