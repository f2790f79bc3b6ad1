# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Keras example on torch, without TensorFlow: `farandole run -np 2 python
examples/keras_torch_backend.py`.
"""

import os
import runpy
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
runpy.run_path(str(Path(__file__).with_name("keras_digits.py")), run_name="__main__")
