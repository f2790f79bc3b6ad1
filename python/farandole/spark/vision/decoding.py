# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Images become pixels in the process that reads them, one batch at a time: no pixels are stored.

A batch of images is one uint8 array (rows, channels, height, width). Several threads decode a
batch. Augmentations change the pixels of training rows in each pass.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from farandole.data import Decode, Image
from farandole.data.inputs.spark_images import is_packed_image, unpack_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class ImageDecoding:
    """A function of batches that replaces a column of images by a column of pixels.

    Attributes:
        image_col: the column: files as bytes, paths, or packed images of Spark's source.
        height: rows of the pixels.
        width: pixels of a row.
        mode: `"L"`, `"RGB"` or `"RGBA"`.
        resize_mode: as `fit` of `farandole.data.Image`.
        root: directory of relative paths, local or the URL of a store.
        threads: number of threads that decode a batch.
        augmentations: a transform of one image (channels, height, width), for training rows.
    """

    image_col: str
    height: int
    width: int
    mode: str = "RGB"
    resize_mode: str = "stretch"
    root: str | None = None
    threads: int = 1
    augmentations: Any = None

    batched: ClassVar[bool] = True
    """`farandole.spark.common.transform` gives whole batches to functions with this mark."""
    reads_ahead: ClassVar[bool] = True
    """The next batch is decoded while the network computes: Rust and Pillow do not hold the
    interpreter's lock.
    """

    def __call__(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of a batch, with pixels (rows, channels, height, width), uint8, in
        the column of images.

        Args:
            columns: arrays by name, rows first; the images are bytes or texts.

        Raises:
            ValueError: an image cannot be decoded; the message names the column and the row.
            FileNotFoundError: a path has no file; the message names the column and the row.
        """
        return columns | {self.image_col: self.decode_images(columns[self.image_col])}

    def decode_images(self, values: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Returns the pixels of some images, (rows, channels, height, width).

        Args:
            values: bytes of files, paths, or packed images.

        Raises:
            ValueError: as for a call.
            FileNotFoundError: as for a call.
        """
        count = len(values)
        parts = max(1, min(self.threads, count))
        ends = [count * part // parts for part in range(parts + 1)]
        ranges = list(itertools.pairwise(ends))
        if parts == 1:
            return self._decode_range(values, *ranges[0])
        with ThreadPoolExecutor(parts, "farandole-images") as pool:
            decoded = pool.map(lambda part: self._decode_range(values, *part), ranges)
            return np.concatenate(list(decoded))

    def augment_rows(
        self, columns: dict[str, npt.NDArray[Any]], seed: int, number: int
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of a batch of the training, with augmented pixels. The change of an
        image depends on the image, the seed and the pass, and not on the batch or the process.

        Args:
            columns: results of a call.
            seed: seed of the run.
            number: number of the pass.

        Raises:
            ValueError: the augmentations fail, or return another shape or type.
        """
        if self.augmentations is None:
            return columns
        pixels = columns[self.image_col]
        made = np.empty_like(pixels)
        import torch  # noqa: PLC0415 - a training process has it, a predicting one may not need it

        from farandole.spark.torch.random_numbers import hold_random_numbers  # noqa: PLC0415

        with hold_random_numbers():
            for row, image in enumerate(pixels):
                key = f"{seed} {number} {zlib.crc32(image.tobytes())}"
                digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
                torch.default_generator.manual_seed(int.from_bytes(digest))
                made[row] = self._augment_image(torch.from_numpy(image.copy()))
        return columns | {self.image_col: made}

    def _augment_image(self, image: Any) -> npt.NDArray[np.uint8]:
        import torch  # noqa: PLC0415 - as above

        shape = tuple(image.shape)
        try:
            found = self.augmentations(image)
        except Exception as error:
            raise ValueError(f"augmentations do not take an image of {shape}: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"augmentations must return a tensor, they returned {type(found).__name__}"
            )
        if tuple(found.shape) != shape or found.dtype != torch.uint8:
            raise ValueError(
                f"augmentations must return uint8 of the shape {shape}, they returned "
                f"{str(found.dtype).removeprefix('torch.')} of {tuple(found.shape)}: scaling and "
                "normalizing follow in the network"
            )
        return found.numpy()

    def _decode_range(
        self, values: Sequence[Any] | npt.NDArray[Any], first: int, last: int
    ) -> npt.NDArray[np.uint8]:
        blobs = [self._read_image(values[row], row) for row in range(first, last)]
        return self._image.decode(blobs, self.image_col, first)

    def _read_image(self, value: Any, row: int) -> Any:
        where = f"column {self.image_col!r}, row {row} of a batch"
        if value is None:
            raise ValueError(f"{where}: null is no image")
        try:
            blob = self._decode.read_cell_bytes(value, self.image_col, row)
        except OSError as error:
            raise type(error)(f"{where}: cannot read the file {value}: {error}") from error
        if not is_packed_image(blob):
            return blob
        try:
            return unpack_image(blob)
        except ValueError as error:
            raise ValueError(f"{where}: cannot decode the image of Spark: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the decoder of this process."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def _image(self) -> Image:
        return Image(self.height, self.width, mode=self.mode, fit=self.resize_mode, dtype="uint8")

    @cached_property
    def _decode(self) -> Decode:
        return Decode({self.image_col: self._image}, root=self.root)
