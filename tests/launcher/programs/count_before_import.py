# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Accelerate counts one process, although two ranks run, and the import after it says so."""

from accelerate import Accelerator

assert Accelerator().num_processes == 1
try:
    import farandole.transformers  # noqa: F401 - raises
except ValueError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
