# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of estimators and models of images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import argument_checks
from farandole.spark.common.parameter import DeclaredParams, Parameter
from farandole.spark.torch.fine_tuning import FineTuningParams

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAIR = 2


def _check_checkpoint(name: str, value: Any) -> Any:
    """Checks a checkpoint as users give it: a path or URL, or a model with its image processor."""
    if isinstance(value, str | Path):
        return argument_checks.check_nonempty_text(name, str(value))
    if isinstance(value, tuple | list) and len(value) == _PAIR:
        model, processor = value
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"{name} has a model with adapters: give the result of its merge_and_unload()"
            )
        if all(hasattr(one, "save_pretrained") for one in value) and hasattr(model, "config"):
            return model, processor
    raise TypeError(
        f"{name} must be the path of a directory, or (model, image processor) of transformers: "
        f"{type(value).__name__}"
    )


def _check_backbone(name: str, value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return value
    if isinstance(value, str) and ":" in value:
        return value
    shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    raise TypeError(f"{name} must be torchvision:NAME, timm:NAME, or a torch.nn.Module: {shown}")


def _check_image_size(name: str, value: Any) -> list[int]:
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(pair) != _PAIR:
        raise ValueError(f"{name} must be one number, or height and width: {value!r}")
    return [argument_checks.make_minimum_check(1)(name, pixels) for pixels in pair]


def _check_scale(name: str, value: Any) -> list[float]:
    numbers = argument_checks.check_number_list(
        name, list(value) if isinstance(value, list | tuple) else [value]
    )
    if not numbers or not all(math.isfinite(one) for one in numbers):
        raise ValueError(f"{name} must have finite numbers, one or one for each channel: {value!r}")
    return numbers


def _check_deviation(name: str, value: Any) -> list[float]:
    numbers = _check_scale(name, value)
    if 0.0 in numbers:
        raise ValueError(f"{name} must not be 0: {value!r}")
    return numbers


class ImageColumnParams(DeclaredParams):
    """The parameters of everything that takes a column of images."""

    image_col: Parameter[str] = Parameter(
        "Column of images: files as bytes (PNG, JPEG and others), paths or URLs of files, or "
        "structs of Spark's source `image`.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    image_root: Parameter[str] = Parameter(
        "Directory of relative paths, local or the URL of a store.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    image_size: Parameter[int | Sequence[int]] = Parameter(
        "Rows and pixels of a row after the resize: one number, or height and width. Without it, "
        "as the backbone states.",
        _check_image_size,
        default=None,
    )
    resize_mode: Parameter[str] = Parameter(
        '`"stretch"` ignores proportions, `"crop"` keeps the middle, `"pad"` adds black around '
        "the image. Without it, as the backbone states.",
        argument_checks.make_choice_check("stretch", "crop", "pad"),
        default=None,
    )
    image_mean: Parameter[Sequence[float]] = Parameter(
        "A number for each channel, or one for all, that is subtracted from pixels of 0 to 1. "
        "Without it, as the backbone states.",
        _check_scale,
        default=None,
    )
    image_std: Parameter[Sequence[float]] = Parameter(
        "As `image_mean`; the result is divided by it.", _check_deviation, default=None
    )


class ImageParams(ImageColumnParams, FineTuningParams):
    """The parameters of estimators that fine-tune a backbone on images."""

    checkpoint: Parameter[Any] = Parameter(
        "Directory in the layout of Hugging Face, as a path or a URL of a store, with "
        "config.json, preprocessor_config.json and safetensors; or a tuple of model and image "
        "processor in memory.",
        _check_checkpoint,
        default=None,
    )
    backbone: Parameter[Any] = Parameter(
        "Instead of `checkpoint`: a network by name, `torchvision:resnet18` or `timm:resnet18`, or "
        "a module that takes (rows, channels, height, width) and returns logits.",
        _check_backbone,
        default=None,
    )
    backbone_weights: Parameter[str] = Parameter(
        "File of the weights of a `backbone` by name, as a path or a URL of a store: safetensors, "
        "or a state_dict that torch.save wrote. Without it, they are random.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    augmentations: Parameter[Any] = Parameter(
        "Transform of torchvision.transforms.v2, or another function, that takes the pixels of one "
        "image, (channels, height, width) as uint8, and returns as many. It changes the rows of "
        "the training, in each epoch in another way, and no others.",
        argument_checks.check_callable_value,
        default=None,
    )
    freeze_backbone: Parameter[bool] = Parameter(
        "Whether the last layer alone is trained.",
        argument_checks.check_boolean_flag,
        default=False,
    )
