# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SynapseML's two deep estimators and their models."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.clients.environments import client_variables, described, run_program, run_words
from tests.pages import blocks_of
from tests.programs import program_path

pytestmark = pytest.mark.timeout(900)

PATCHED = Path(__file__).with_name("patched")
NEEDED = {
    "synapseml_text": ("module-available", "text-epoch-end"),
    "synapseml_vision": ("module-available", "vision-epoch-end"),
}
"""Patches of each program."""


def run_patched(name, folder, patches):
    return run_program("synapseml", name, folder, **patched_variables(folder, patches))


def patched_variables(folder, patches):
    return {
        "PYTHONPATH": str(PATCHED),
        "CLIENT_PATCHES": ",".join(patches),
        "TORCH_HOME": str(folder / "torch"),
    }


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("synapseml_text", "at least 42 of 48 texts are right"),
        ("synapseml_vision", "at least 20 of 24 images are right"),
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


def test_the_notebook_of_the_page_about_moving_runs(tmp_path):
    text = next(
        block.text
        for block in blocks_of("docs/moving.md")
        if block.kind == "python" and "synapse.ml" in block.text
    )
    page = tmp_path / "page.py"
    begin = program_path(__file__, "synapseml_page").read_text()
    text = text.replace("bert-base-uncased", str(tmp_path / "tiny"))
    page.write_text(begin + text.replace("/tmp/farandole", str(tmp_path / "store")))
    env = patched_variables(tmp_path, NEEDED["synapseml_text"])
    env["PYTHONPATH"] += os.pathsep + str(program_path(__file__, "synapseml_text").parent)
    done = run_words(["python", str(page), str(tmp_path)], client_variables("synapseml", **env))
    assert done.returncode == 0, described(done)
    assert "|prediction|" in done.stdout, described(done)


def listed_patches():
    spec = importlib.util.spec_from_file_location("patches", PATCHED / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(patch.reason for patch in module.PATCHES.values())
    return module.PATCHES
