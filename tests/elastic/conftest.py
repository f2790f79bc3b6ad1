# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures for tests of elastic training: launchers that end with their test."""

from tests.launcher.conftest import launch

__all__ = ["launch"]
