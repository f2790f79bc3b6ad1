# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the output that a task of Flyte has written."""

import sys

from flyteidl.core import literals_pb2
from flytekit.core.utils import load_proto_from_file

outputs = load_proto_from_file(literals_pb2.LiteralMap, f"{sys.argv[1]}/outputs.pb")
print(outputs.literals["o0"].scalar.primitive.float_value)
