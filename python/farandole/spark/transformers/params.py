# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of estimators and models of text."""

from __future__ import annotations

from typing import Any

from farandole.common import argument_checks
from farandole.spark.common.parameter import DeclaredParams, Parameter
from farandole.spark.torch.fine_tuning import FineTuningParams
from farandole.spark.transformers.checkpoint import check_checkpoint

ROW_CLASS_PARAMS = (
    "predictionCol",
    "rawPredictionCol",
    "labelIndexCol",
    "thresholds",
    "class_names",
)
"""Parameters of a classifier of rows that have no meaning for words and for generated texts."""


class TextColumnParams(DeclaredParams):
    """The parameters of everything that takes a checkpoint and a column of text."""

    checkpoint: Parameter[Any] = Parameter(
        "Directory in the layout of Hugging Face, as a path or a URL of a store, with "
        "config.json, tokenizer.json and safetensors; or a tuple of model and tokenizer in memory.",
        check_checkpoint,
        default=None,
    )
    text_col: Parameter[str] = Parameter(
        "Column of texts.", argument_checks.check_nonempty_text, default=None
    )
    max_length: Parameter[int] = Parameter(
        "Largest number of tokens of a text; the rest of longer texts is not used. Without it, as "
        "many as the model takes, 512 at most.",
        argument_checks.make_minimum_check(2),
        default=None,
    )
    length_multiple: Parameter[int] = Parameter(
        "A batch is padded to the length of its longest text, rounded up to a multiple of this, so "
        "there are few different lengths.",
        argument_checks.make_minimum_check(1),
        default=8,
    )


class TextParams(TextColumnParams, FineTuningParams):
    """The parameters of estimators that fine-tune a checkpoint on texts."""
