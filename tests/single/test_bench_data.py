# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The row of images of `bench/data.py`, with torchvision and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
ROW = "import json, data; print(json.dumps(data.photographs(3, 1)))"
TORCHVISION = {
    "__init__.py": "",
    "io.py": """
import io
import PIL.Image, numpy, torch
class ImageReadMode:
    RGB = "RGB"
def decode_image(encoded, mode):
    image = PIL.Image.open(io.BytesIO(encoded.numpy().tobytes())).convert(mode)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
""",
    "transforms/__init__.py": "",
    "transforms/v2.py": """
Compose = lambda steps: lambda image: image[:, :224, :224].float()
Resize = CenterCrop = ToDtype = Normalize = lambda *_, **__: None
""",
}


def row(directory):
    """Returns the printed lines of the row, with the packages in a directory."""
    paths = os.pathsep.join([str(directory), str(BENCH)])
    done = subprocess.run(
        [sys.executable, "-c", ROW],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_row_of_images_stands_next_to_torchvision(tmp_path):
    for name, text in TORCHVISION.items():
        path = tmp_path / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    *lines, told = row(tmp_path)
    assert lines[1] == "3 photographs of 500 x 375 as float32 of 3 x 224 x 224, 2 threads"
    assert [line.split()[0] for line in lines[2:]] == ["torchvision", "farandole"]
    assert lines[3].endswith("at least 1.0 x")
    found = json.loads(told)
    assert list(found) == ["torchvision", "farandole"]
    assert all(set(values) == {"seconds", "rows_per_second", "ratio"} for values in found.values())


def test_without_torchvision_the_row_of_images_says_so(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError('no', name='torchvision')")
    lines = row(tmp_path)
    assert (
        lines[2] == "  not measured, torchvision is not installed: pip install torchvision pillow"
    )
