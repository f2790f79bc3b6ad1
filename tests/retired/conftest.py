# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MXNet has an environment of its own, `make test-mxnet`: elsewhere there is nothing to collect."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mxnet") else ["test_mxnet.py"]
