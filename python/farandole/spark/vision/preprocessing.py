# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The size and the scale of the pixels that a backbone takes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue on ImageNet, as torchvision states them."""
DEFAULT_SIZE_PIXELS = 224
_MAX_VALUE = 255.0
_BILINEAR = 2
"""Pillow's number of the resampling of the decoding."""
_CONVNEXT_CROP_LIMIT_PIXELS = 384
"""From this size on, transformers' processor of ConvNeXt does not crop."""
RGB_CHANNELS = 3
MODE_BY_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's names of the colors that networks of so many channels take."""


@dataclass(frozen=True)
class ImagePreprocessing:
    """Size, crop and scale of images.

    Attributes:
        height: rows of pixels.
        width: pixels of a row.
        resize_mode: `"stretch"`, `"crop"` or `"pad"`, as `fit` of `farandole.data.Image`.
        mean: a number for each channel, or one for all, that is subtracted from values of 0 to 1.
        std: the same; the result is divided by it.
    """

    height: int
    width: int
    resize_mode: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


def default_preprocessing(channels: int, size: int = DEFAULT_SIZE_PIXELS) -> ImagePreprocessing:
    """Returns the preprocessing of networks that state none: ImageNet's colors, or for others than
    three channels values from -1 to 1.

    Args:
        channels: number of channels.
        size: rows, and pixels of a row.
    """
    if channels == RGB_CHANNELS:
        return ImagePreprocessing(size, size, "crop", IMAGENET_MEAN, IMAGENET_STD)
    return ImagePreprocessing(size, size, "crop", (0.5,), (0.5,))


def read_processor_config(
    content: dict[str, Any], chosen: Mapping[str, Any] | None = None
) -> ImagePreprocessing:
    """Returns the preprocessing that an image processor of transformers describes. Of a crop from
    a larger image, the size of the crop is taken, and no more is cut off than proportions demand.

    Args:
        content: content of preprocessor_config.json.
        chosen: fields of the result that the user set.

    Raises:
        ValueError: it has no size, or an unknown scale, and the user set none.
    """
    chosen = chosen or {}
    if content.get("do_flip_channel_order"):
        raise ValueError("do_flip_channel_order is not supported: the images are red, green, blue")
    if content.get("rescale_offset") and not {"mean", "std"} <= set(chosen):
        raise ValueError("rescale_offset is not supported: set image_mean and image_std")
    if {"height", "width"} <= set(chosen):
        height, width, mode = chosen["height"], chosen["width"], _read_mode(content)
    else:
        height, width, mode = _read_size(content)
    scale = content.get("rescale_factor", 1 / _MAX_VALUE) if content.get("do_rescale", True) else 1
    mean, std = (0.0,), (1.0,)
    if content.get("do_normalize", True):
        mean, std = (
            _as_numbers(content.get(name, default))
            for name, default in (("image_mean", 0.0), ("image_std", 1.0))
        )
    whole = scale * _MAX_VALUE
    stated = ImagePreprocessing(
        height, width, mode, tuple(one / whole for one in mean), tuple(one / whole for one in std)
    )
    return replace(stated, **chosen)


def change_processor_config(content: dict[str, Any], used: ImagePreprocessing) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json for a network that was trained with this
    preprocessing. transformers cannot pad or crop to a rectangle: it then stretches images.

    Args:
        content: content of the file of the checkpoint.
        used: preprocessing of the training.
    """
    if used.resize_mode == "stretch":
        # An unknown form is replaced: the user set every value.
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
            if read_processor_config(content) == used:
                return content
    size = {"height": used.height, "width": used.width}
    changed = {name: value for name, value in content.items() if name != "rescale_offset"} | {
        "do_resize": True,
        "size": size,
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / _MAX_VALUE,
        "do_normalize": True,
        "image_mean": list(used.mean),
        "image_std": list(used.std),
    }
    if "crop_pct" in content:
        changed["crop_pct"] = 1.0  # of the processor of ConvNeXt: it resizes to the crop
    if used.resize_mode == "crop" and used.height == used.width:
        return changed | {
            "size": {"shortest_edge": used.height},
            "do_center_crop": True,
            "crop_size": size,
        }
    return changed | {"do_center_crop": False}


def _read_size(content: dict[str, Any]) -> tuple[int, int, str]:
    """Returns height, width and mode of the resize."""
    mode = _read_mode(content)
    if content.get("do_center_crop") and content.get("crop_size"):
        return (*_read_pair(content["crop_size"]), mode)
    size = content.get("size")
    if size is None:
        raise ValueError("it has no size: set image_size")
    edge = _shortest_edge(content)
    return (*_read_pair(size if edge is None else edge), mode)


def _read_mode(content: dict[str, Any]) -> str:
    edge = _shortest_edge(content)
    if content.get("do_center_crop") and content.get("crop_size"):
        return "crop"
    if edge is None or ("crop_pct" in content and edge >= _CONVNEXT_CROP_LIMIT_PIXELS):
        return "stretch"
    return "crop"


def _shortest_edge(content: dict[str, Any]) -> int | None:
    size = content.get("size")
    return size.get("shortest_edge") if isinstance(size, dict) else None


def _read_pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        if not {"height", "width"} <= set(size):
            raise ValueError(f"its size is not understood, {size}: set image_size")
        return int(size["height"]), int(size["width"])
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _as_numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)
