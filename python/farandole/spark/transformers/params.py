# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of estimators and models of text, and the adapters that `lora` stands for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from farandole.common import argument_checks
from farandole.spark.common.parameter import DeclaredParams, Parameter
from farandole.spark.transformers.checkpoint import check_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


ROW_CLASS_PARAMS = (
    "predictionCol",
    "rawPredictionCol",
    "labelIndexCol",
    "thresholds",
    "class_names",
)
"""Parameters of a classifier of rows that have no meaning for words and for generated texts."""


def _check_lora(name: str, value: Any) -> Any:
    """Returns the rank of adapters, or a `LoraConfig` of PEFT."""
    if find_spec("peft") is None:
        raise ValueError(f"{name} needs the package peft: pip install peft")
    import peft  # noqa: PLC0415 - it takes seconds, and few fits need it

    if isinstance(value, peft.LoraConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a rank, such as 8, or a LoraConfig of peft: {value!r}")
    return argument_checks.check_whole_number(name, value)


def _check_optimizer_function(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function of the trainable parameters that returns an optimizer, "
            f"such as torch.optim.AdamW or a partial of it: {value!r}"
        )
    return value


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


class TextParams(TextColumnParams):
    """The parameters of estimators that fine-tune a checkpoint on texts."""

    label_col: Parameter[str] = Parameter(
        "Column of labels.", argument_checks.check_nonempty_text, default=None
    )
    learning_rate: Parameter[float] = Parameter(
        "Learning rate of one process, without `optimizer`: of AdamW with a weight decay of 0.01.",
        argument_checks.check_positive_number,
        default=None,
    )
    optimizer: Parameter[  # pyright: ignore[reportIncompatibleVariableOverride]
        Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
    ] = Parameter(
        "Function of the trainable parameters that returns an optimizer, such as "
        "`partial(torch.optim.AdamW, lr=2e-5)`.",
        _check_optimizer_function,
        default=None,
    )
    lora: Parameter[Any] = Parameter(
        "Trains adapters and the weights that the checkpoint lacks, and no others: the rank of the "
        "adapters, or a `LoraConfig` of PEFT.",
        _check_lora,
        default=None,
    )
