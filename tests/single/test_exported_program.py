# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as a file of torch.export, which predicts the same without Farandole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.pages import blocks_of

from farandole.spark.torch import TorchModel

pytestmark = pytest.mark.timeout(600)

NUMBERS = {"columns": ["a", "b"], "shape": [-1, 2], "dtype": "float32"}
WORD = {"columns": ["word"], "shape": [-1, 1], "dtype": "int64"}


class Network(torch.nn.Module):
    """Takes two numbers side by side and the index of a category, and has two outputs."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))

    def forward(self, numbers, word):
        found = self.body(torch.cat([numbers, self.table(word[:, 0])], 1))
        return found, found.sum(1)


class Surprising(torch.nn.Module):
    """Predicts something else each time, as no file can."""

    def forward(self, numbers):
        return numbers + np.random.default_rng().random()


class Pooled(torch.nn.Module):
    """The sum of the products of two lists, which must have equal lengths."""

    def forward(self, first, second):
        return (first * second).sum(1, keepdim=True)


def model_of(network, *signature, labels=("y",)):
    columns = [one["columns"] for one in signature]
    return TorchModel(
        model=network, feature_columns=columns, label_columns=list(labels), signature=signature
    )


def test_an_exported_program_predicts_what_the_model_predicts(tmp_path):
    network = Network().eval()
    model = model_of(network, NUMBERS, WORD, labels=["y", "z"])
    block = blocks_of("docs/spark/serving.md")[3]
    names = {"model": model}
    exec(block.text.replace('"model.pt2"', repr(str(tmp_path / "model.pt2"))), names)
    assert [one.name for one in tmp_path.iterdir()] == ["model.pt2"]
    program = names["program"]
    for rows in (1, 6):  # any number of rows
        given = torch.rand(rows, 2), torch.randint(5, (rows, 1))
        for found, expected in zip(program(*given), network(*given), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_program_that_predicts_something_else_is_not_kept(tmp_path):
    model = model_of(Surprising(), NUMBERS)
    with pytest.raises(
        ValueError, match=r"exported program does not predict what the model predicts: y__output"
    ):
        model.export(tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_lists_that_must_have_equal_lengths_are_checked_with_equal_ones(tmp_path):
    lists = [
        {"columns": [name], "shape": [-1, 5], "dtype": "float32", "ragged": True}
        for name in ("first", "second")
    ]
    model_of(Pooled(), *lists).export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    (found,) = program(torch.ones(2, 9), torch.ones(2, 9))
    torch.testing.assert_close(found, torch.full((2, 1), 9.0))


def test_other_files_and_models_are_refused_by_name(tmp_path):
    model = model_of(Network(), NUMBERS, WORD, labels=["y", "z"])
    with pytest.raises(ValueError, match=r"end in \.onnx or \.pt2.*model\.bin"):
        model.export(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"opset is for \.onnx"):
        model.export(tmp_path / "model.pt2", opset=18)
    with pytest.raises(ValueError, match=r"torch\.export cannot export Linear: "):
        model_of(torch.nn.Linear(3, 1), NUMBERS).export(tmp_path / "model.pt2")
    without = TorchModel(model=Network(), feature_columns=["a"], label_columns=["y"])
    with pytest.raises(ValueError, match="needs the model's signature"):
        without.export(tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
