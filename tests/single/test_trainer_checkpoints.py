# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Copies of checkpoints of Hugging Face's Trainer for a world of another size."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from farandole.transformers import elastic


def write_checkpoint(folder, step):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 3.0}))
    schedule = {"last_epoch": step, "_step_count": step + 1, "base_lrs": [0.1]}
    torch.save(schedule, folder / "scheduler.pt")


@pytest.mark.parametrize(("rows_now", "step"), [(16, 48), (64, 12), (40, 19)])
def test_a_copy_has_the_steps_of_its_world(rows_now, step, tmp_path):
    before = tmp_path / "checkpoint-24"
    write_checkpoint(before, 24)
    copy = elastic.copy_rescaled(before, tmp_path / "copies", 32, rows_now)
    assert copy.name == f"checkpoint-{step}"
    assert json.loads((copy / "trainer_state.json").read_text())["global_step"] == step
    schedule = torch.load(copy / "scheduler.pt", weights_only=True)
    assert (schedule["last_epoch"], schedule["base_lrs"]) == (step, [0.1])
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    # The checkpoint itself is as it was, although files of the copy are links to its files.
    assert json.loads((before / "trainer_state.json").read_text())["global_step"] == 24
    assert torch.load(before / "scheduler.pt", weights_only=True)["last_epoch"] == 24


def test_no_checkpoint_of_another_count_is_lost_and_the_best_is_named(tmp_path):
    for step in (12, 24):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
    state = tmp_path / "checkpoint-24/trainer_state.json"
    best = {"best_global_step": 12, "best_model_checkpoint": f"{tmp_path}/checkpoint-12"}
    state.write_text(json.dumps({"global_step": 24, **best}))
    folder = tmp_path / "elastic/first"
    copy = elastic.copy_rescaled(tmp_path / "checkpoint-24", folder, 32, 16)
    elastic._set_aside_other_counts(tmp_path, copy)
    aside = tmp_path / "earlier-worlds/first"
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoint-12", "checkpoint-24"]
    assert not list(tmp_path.glob("checkpoint-*"))
    found = json.loads((copy / "trainer_state.json").read_text())
    assert found["best_global_step"] == 24
    assert found["best_model_checkpoint"] == f"{aside}/checkpoint-12"
    assert json.loads((aside / "checkpoint-24/trainer_state.json").read_text())["global_step"] == 24
    again = elastic.copy_rescaled(copy, tmp_path / "elastic/second", 16, 32)
    elastic._set_aside_other_counts(tmp_path, again)
    found = json.loads((again / "trainer_state.json").read_text())
    assert found["best_model_checkpoint"] == f"{aside}/checkpoint-12", "it has stayed there"
    assert not copy.exists()
    assert (again / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_strategy": "no"}, "save_strategy='no' writes none"),
        ({"max_steps": 10}, "not by max_steps: 10"),
    ],
)
def test_arguments_without_commits_are_refused(options, words, tmp_path):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **options
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), arguments)
    with pytest.raises(ValueError, match=words):
        elastic.TrainerProgress().train(trainer)
