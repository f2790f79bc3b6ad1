# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Images as tensors: a loader with `Decode`, next to torchvision in as many threads.

    pip install torchvision
    python bench/images.py [--images 1000] [--repeat 5]

Photographs of 500 x 375 pixels, made up of smooth noise. JPEG files become float32 of 3 x 224 x
224: the middle, normalised. Then JPEG and PNG files are decoded alone, to uint8 of their own size.
torchvision has the files in memory; the loader reads them from prepared data. Prints medians of
images per second, and of the processor time of an image, which other load on the machine changes
less. The goal is 1.0 x torchvision.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import pyarrow as pa
import torch
from saved import save

from farandole.data import Decode, Image, ParquetLoader, prepare_data

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS, BATCH = 2, 64
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def photographs(count: int, kind: str) -> list[bytes]:
    """Returns files."""
    random = np.random.default_rng(0)
    files = []
    for _ in range(count):
        small = PIL.Image.fromarray(random.integers(0, 256, (25, 33, 3), np.uint8))
        out = io.BytesIO()
        small.resize((500, 375), PIL.Image.Resampling.BICUBIC).save(out, kind, quality=90)
        files.append(out.getvalue())
    return files


def normalised() -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns torchvision's steps of a decoded image."""
    from torchvision.transforms import v2  # noqa: PLC0415 - as in main

    return v2.Compose(
        [
            v2.Resize(224),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def resized() -> tuple[Image, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the middle of an image, normalised: for `Decode`, and as torchvision's steps."""
    return Image(224, fit="crop", mean=MEAN, std=STD), normalised()


def torchvision_pass(files: list[bytes], steps: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Decodes all files with torchvision."""
    from torchvision.io import ImageReadMode, decode_image  # noqa: PLC0415 - as in main

    def one(blob: bytes) -> torch.Tensor:
        encoded = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return steps(decode_image(encoded, ImageReadMode.RGB))

    count = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(files), BATCH):
            count += len(torch.stack(list(pool.map(one, files[start : start + BATCH]))))
    return count


def loader_pass(loader: ParquetLoader) -> int:
    """Decodes all files with a loader."""
    return sum(len(batch["image"]) for batch in loader)


def medians(
    repeat: int, passes: dict[str, Callable[[], int]], count: int
) -> dict[str, tuple[float, float]]:
    """Returns the seconds of one pass of each: elapsed, and of processors.

    Passes alternate, so that other load on the machine slows all alike.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for _ in range(repeat + 1):
        for name, function in passes.items():
            start, used = time.perf_counter(), time.process_time()
            if function() != count:
                raise RuntimeError("not all images were decoded")
            seconds[name].append((time.perf_counter() - start, time.process_time() - used))
    both = {name: zip(*some[1:], strict=True) for name, some in seconds.items()}
    return {
        name: (statistics.median(next(one)), statistics.median(next(one)))
        for name, one in both.items()
    }


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description="Images next to torchvision.")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    try:
        import torchvision  # noqa: F401, PLC0415 - --help works without it
    except ModuleNotFoundError:
        parser.error("torchvision is not installed: pip install torchvision")
    torch.set_num_threads(1)  # both have threads of their own
    results = {}
    for case, kind, how, steps in (
        ("jpeg, resized and normalised", "jpeg", *resized()),
        ("jpeg alone", "jpeg", Image(375, 500, dtype="uint8"), lambda image: image),
        ("png alone", "png", Image(375, 500, dtype="uint8"), lambda image: image),
    ):
        results[case] = seconds = compare(photographs(given.images, kind), how, steps, given.repeat)
        wall, processors = seconds["torchvision"]
        for name, (one, used) in seconds.items():
            print(
                f"{case:<28} {name:<12} {given.images / one:8.0f} images/s {wall / one:6.2f} x "
                f"{1000 * used / given.images:8.2f} ms of a processor {processors / used:6.2f} x",
                flush=True,
            )
    save("images", {"images": given.images, "threads": THREADS, "seconds": results})


def compare(
    files: list[bytes], how: Image, steps: Callable[[torch.Tensor], torch.Tensor], repeat: int
) -> dict[str, tuple[float, float]]:
    """Returns the seconds that torchvision and a loader take for all files."""
    with tempfile.TemporaryDirectory() as directory:
        url = prepare_data(pa.table({"image": files}), directory).train_url
        decode = Decode({"image": how})
        loader = ParquetLoader(
            url,
            BATCH,
            ["image"],
            framework="torch",
            transformation_fn=decode,
            transform_workers=THREADS,
        )
        passes = {
            "torchvision": lambda: torchvision_pass(files, steps),
            "farandole": lambda: loader_pass(loader),
        }
        return medians(repeat, passes, len(files))


if __name__ == "__main__":
    main()
