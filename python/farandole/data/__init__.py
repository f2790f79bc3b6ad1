# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches of Parquet data as tensors or arrays, read by Rust threads.

Example:
    ```python
    loader = ParquetLoader("/data/train", batch_size=1024, columns=["features", "label"], framework="torch")
    for epoch in range(3):
        for batch in loader:  # {"features": tensor, "label": tensor}
            ...
    ```
"""

from farandole.data.loader import ParquetLoader

__all__ = ["ParquetLoader"]
