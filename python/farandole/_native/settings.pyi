# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The settings of the environment, as the engine reads them."""

from typing import Any

def read_setting(variable: str, /) -> Any:
    """Value of a setting by the name of its variable, such as `FARANDOLE_SPIN`; `HOROVOD_SPIN`
    counts where that one is not set. Durations are seconds, sizes bytes; `None` where there is no
    value and no default. A value that cannot be read raises ValueError, which names the variable.
    """
