# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What states of elastic jobs are told about a change of hosts."""

from farandole.common.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
