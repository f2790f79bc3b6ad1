# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The units into which `strategy="fsdp"` divides a model, and the files of its states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.spark.torch.sharding.units import find_sharding_units


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class StackedModel(nn.Module):
    def __init__(self, blocks, width=4):
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 7)


def test_entries_of_lists_are_units():
    model = StackedModel(10)
    assert find_sharding_units(model) == [f"blocks.{number}" for number in range(10)]


def test_large_entries_are_divided_into_the_entries_of_their_lists():
    units = find_sharding_units(StackedModel(2))
    assert units == [
        "blocks.0.layers.0", "blocks.0.layers.2", "blocks.1.layers.0", "blocks.1.layers.2",
        "blocks.0", "blocks.1",
    ]  # fmt: skip


def test_lists_in_lists_are_no_units():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert find_sharding_units(model) == ["1.0", "0"]


def test_modules_that_share_a_parameter_with_others_are_no_units():
    model = StackedModel(10)
    model.blocks[3].layers[0].weight = model.blocks[7].layers[0].weight
    expected = [f"blocks.{number}" for number in range(10) if number not in (3, 7)]
    assert find_sharding_units(model) == expected


def test_the_blocks_that_a_model_declares_are_units():
    model = StackedModel(2)
    model._no_split_modules = ["ResidualBlock"]
    assert find_sharding_units(model) == ["blocks.0", "blocks.1"]


def test_the_user_names_classes_or_paths():
    model = StackedModel(2)
    assert find_sharding_units(model, ["ResidualBlock"]) == ["blocks.0", "blocks.1"]
    assert find_sharding_units(model, ["head", "blocks.1.layers"]) == ["blocks.1.layers", "head"]
    assert find_sharding_units(model, []) == []
    with pytest.raises(ValueError, match="'Blok', which is neither a class nor a path"):
        find_sharding_units(model, ["Blok"])


def test_parametrizations_are_no_units():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert find_sharding_units(model) == []


def test_a_model_without_parameters_in_lists_has_its_own_unit_only():
    assert find_sharding_units(nn.Linear(2, 2)) == []
    assert torch.nn.Linear(2, 2).weight.shape == (2, 2)
