# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Both packages have Horovod's public names, which take its arguments: `facts.json` is made from
its sources.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.surface import check
from tests.surface.exceptions import reasons

ROOT = Path(__file__).parents[2]
FACTS = check.facts()
NEEDS = {
    "tensorflow": (
        "horovod.tensorflow", "horovod.keras", "horovod.spark.keras", "horovod.spark.tensorflow",
    ),
    "torch": ("horovod.torch", "horovod.spark.torch", "horovod.spark.data_loaders"),
    "lightning": ("horovod.spark.lightning",),
    "mxnet": ("horovod.mxnet",),
}  # fmt: skip
"""Modules that need a framework; what needs none goes with torch. One process bears TensorFlow
or torch, not both.
"""


def framework(module):
    """The framework that a module needs."""
    homes = (
        name
        for name, roots in NEEDS.items()
        for root in roots
        if f"{module}.".startswith(f"{root}.")
    )
    return next(homes, "torch")


def check_output(*arguments):
    """Returns the output of the check in its own process."""
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.surface.check", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return {
        module if name == "*" else f"{module}: {name}": f"{module}: {name}: {what}"
        for module, name, what in json.loads(done.stdout)
    }


@pytest.mark.parametrize("needed", NEEDS)
def test_every_difference_from_horovod_has_a_reason_and_every_reason_a_difference(needed):
    modules = [module for module in FACTS if framework(module) == needed]
    if needed == "mxnet":
        found = check_output(
            "--sources", *(module.replace("horovod", "farandole", 1) for module in modules)
        )
    elif find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    else:
        found = check_output(*modules)
    known = {
        entry: why for entry, why in reasons().items() if framework(entry.split(":")[0]) == needed
    }
    assert [what for entry, what in found.items() if entry not in known] == []
    assert [entry for entry in known if entry not in found] == [], (
        "no difference any more: take out the row"
    )


def test_every_reason_is_for_a_module_of_horovods():
    assert {entry.split(":")[0] for entry in reasons()} <= set(FACTS)


def test_a_module_of_both_packages_is_one_object():
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        ours = importlib.import_module(name.replace('horovod', 'farandole', 1))\n"
        "    except ModuleNotFoundError:\n"
        "        continue\n"
        "    if ours.__name__.startswith('horovod'):\n"
        "        continue\n"
        "    assert importlib.import_module(name) is ours, name\n"
        "    assert ours.__spec__.name == ours.__name__ == name.replace('horovod', 'farandole', "
        "1)\n"
        "    print(name)\n"
    )
    modules = [name for name in FACTS if "." in name and framework(name) in ("torch", "lightning")]
    command = [sys.executable, "-c", program, json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert {"horovod.torch.mpi_ops", "horovod.common.util", "horovod.spark.torch"} <= set(
        done.stdout.split()
    )


def test_the_check_sees_what_differs():
    facts = {
        "split_list": ["l", "n"],
        "env": ["first", "**kwargs"],
        "num_rank_is_power_2": ["rank"],
        "gpu_available": ["ext_base_name='tensorflow'", "verbose=False"],
        "nothing": None,
    }
    found = dict(check.differences("farandole.common.util", facts))
    assert set(found) == {"env", "num_rank_is_power_2", "gpu_available", "nothing"}
    assert "has no argument first" in found["env"]
    assert "the default of ext_base_name is 'torch'" in found["gpu_available"]
    of_class = {
        "ProcessSet": {"__init__": ["ranks_or_comm"], "size": [], "rank": ["who"], "gone": []}
    }
    found = dict(check.differences("farandole.common.process_sets", of_class))
    assert set(found) == {"ProcessSet.rank", "ProcessSet.gone"}
    assert dict(check.differences("farandole.nothing", {})) == {"*": "no such module"}
