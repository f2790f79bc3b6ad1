# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Errors of readers."""


class NoDataAvailableError(Exception):
    """A reader has no rows: there are fewer row groups than shards, or an endless reader has found
    no row.
    """


class DecodeFieldError(RuntimeError):
    """A codec cannot decode a value."""
