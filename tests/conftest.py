# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures of all tests."""

import signal

# A shell starts what it puts into the background deaf to Ctrl-C, and every child inherits that; the
# tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)
