# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""torch's compiler, which the constructor of every torch optimizer imports."""

import importlib


def import_torch_compiler() -> None:
    """Imports the compiler now, which takes a second on an idle core and several on busy ones.

    Scripts construct an optimizer after `init`. If a new rank of an elastic job imported the
    compiler there, the other ranks would wait.
    """
    importlib.import_module("torch._dynamo")
