# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Continues an epoch of a loader from its state, and prints the rows."""

import json
import pickle
import sys

from farandole.data import frame_loader

kind, place, state, cache = sys.argv[1:]
if kind == "copy":
    with open(place, "rb") as file:
        loader = pickle.load(file)
else:
    loader = frame_loader(place, 30, ["id"], cache=cache, seed=5)
loader.load_state_dict(json.loads(state))
for _ in range(2):
    print(json.dumps([row for batch in loader for row in batch["id"].tolist()]))
