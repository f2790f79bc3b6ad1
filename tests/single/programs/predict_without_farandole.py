# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predicts with a model of MLflow in a process that cannot import Farandole."""

import importlib
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "farandole":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
try:
    import farandole  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    sys.exit("farandole can be imported")

import numpy as np

flavor, model, rows, found = sys.argv[1:]
network = importlib.import_module(f"mlflow.{flavor}").load_model(model)
given = np.load(rows)
if flavor == "pytorch":
    import torch

    with torch.no_grad():
        made = network.eval()(torch.from_numpy(given)).numpy()
else:
    import keras

    made = keras.ops.convert_to_numpy(network(given))
np.save(found, made)
