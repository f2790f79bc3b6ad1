# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SynapseML's two deep estimators and their models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.clients.environments import described, run_program

pytestmark = pytest.mark.timeout(900)

PATCHED = Path(__file__).with_name("patched")
NEEDED = {
    "synapseml_text": ("module-available", "text-epoch-end"),
    "synapseml_vision": ("module-available", "vision-epoch-end"),
}
"""Patches of each program."""


def run_patched(name, folder, patches):
    return run_program(
        "synapseml",
        name,
        folder,
        PYTHONPATH=str(PATCHED),
        CLIENT_PATCHES=",".join(patches),
        TORCH_HOME=str(folder / "torch"),
    )


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("synapseml_text", "48 texts are classified as labelled"),
        ("synapseml_vision", "24 images are classified as labelled"),
    ],
)
def test_an_estimator_fits_and_its_model_predicts_before_and_after_it_was_saved(
    tmp_path, name, printed
):
    done = run_patched(name, tmp_path, NEEDED[name])
    assert done.returncode == 0, described(done)
    assert printed in done.stdout, described(done)


@pytest.mark.parametrize(
    ("name", "without"), [(name, patch) for name, patches in NEEDED.items() for patch in patches]
)
def test_each_patch_is_needed(tmp_path, name, without):
    done = run_patched(name, tmp_path, [patch for patch in NEEDED[name] if patch != without])
    assert done.returncode != 0, described(done)
    assert listed_patches()[without].error in done.stdout + done.stderr, described(done)


def test_no_patch_is_listed_that_no_program_needs():
    assert {patch for patches in NEEDED.values() for patch in patches} == set(listed_patches())


def listed_patches():
    spec = importlib.util.spec_from_file_location("patches", PATCHED / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(patch.reason for patch in module.PATCHES.values())
    return module.PATCHES
