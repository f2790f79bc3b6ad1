# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Notifications of changed hosts for the states of elastic jobs."""

from farandole.common.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
