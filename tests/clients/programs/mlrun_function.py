# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the variables that MLRun's MPI job sets for a timeline and for autotuning."""

import json
import sys

import mlrun

function = mlrun.new_function("train", kind="mpijob", image="none", project="p")
function.with_tracing(f"{sys.argv[1]}/trace.json", enable_cycle_markers=True)
function.with_autotune(f"{sys.argv[1]}/autotune.csv", warmup_samples=1)
variables = {}
for item in function.spec.env:
    entry = item if isinstance(item, dict) else item.to_dict()
    variables[entry["name"]] = str(entry["value"])
print(json.dumps(variables))
