# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Whether this process runs in a notebook."""

import sys
from typing import Any


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which shows HTML."""
    if "IPython" not in sys.modules:
        return False
    shell: Any = sys.modules["IPython"].get_ipython()
    # Terminals have a shell without a kernel; Jupyter, Databricks and Colab have one.
    return shell is not None and getattr(shell, "kernel", None) is not None
