# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The hosts of the tests of launches."""

from tests.launch.conftest import hosts, machine

__all__ = ["hosts", "machine"]
