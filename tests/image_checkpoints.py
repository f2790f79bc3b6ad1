# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A small checkpoint of images in the layout of Hugging Face, with random weights, and images."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import PIL.Image
import pyarrow as pa
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

SIZE: Final = 16
"""Rows of pixels, and pixels of a row, that the network takes."""
CLASSES: Final = ("bottom", "top")


def make_network() -> ViTForImageClassification:
    """Returns a small vision transformer with random weights, whose only patch is the image: it
    learns the bright half in a few steps.
    """
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=SIZE,
            patch_size=SIZE,
            num_labels=3,
        )
    )


def make_processor() -> ViTImageProcessor:
    """Returns the image processor of the network."""
    return ViTImageProcessor(size={"height": SIZE, "width": SIZE})


def write_checkpoint(directory: Path) -> str:
    """Writes network and image processor, and returns the directory."""
    make_network().save_pretrained(directory)
    make_processor().save_pretrained(directory)
    return str(directory)


def change_json(path: Path, **changes: Any) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def encode_image(pixels: npt.NDArray[Any], kind: str = "png", **options: Any) -> bytes:
    """Returns the file of an image."""
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def make_pixels(rows: int) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Returns noisy images, (rows, SIZE, SIZE, 3), with a bright half, and the names of these."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 90, (rows, SIZE, SIZE, 3), np.uint8)
    is_top = draw.integers(0, 2, rows)
    for image, top in zip(pixels, is_top, strict=True):
        image[slice(0, SIZE // 2) if top else slice(SIZE // 2, SIZE)] += 150
    return pixels, [CLASSES[top] for top in is_top]


def make_pictures(rows: int) -> pa.Table:
    """Returns files of images, the names of their bright halves, and numbers of these."""
    pixels, names = make_pixels(rows)
    return pa.table(
        {
            "picture": pa.array([encode_image(one) for one in pixels], pa.binary()),
            "half": names,
            "number": [CLASSES.index(one) for one in names],
        }
    )


def make_spark_image(pixels: npt.NDArray[Any], origin: str = "") -> dict[str, Any]:
    """Returns an image of (height, width, channels), in RGB order, as Spark's source does."""
    height, width, channels = pixels.shape
    order = [2, 1, 0, 3][:channels] if channels > 1 else [0]
    return {
        "origin": origin,
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": {1: 0, 3: 16, 4: 24}[channels],
        "data": np.ascontiguousarray(pixels[:, :, order]).tobytes(),
    }


SPARK_IMAGE_TYPE: Final = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)
