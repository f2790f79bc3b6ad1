# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data for training, without Spark: prepared from files and frames, read as batches of tensors by
Rust threads.

Example:
    ```python
    data = prepare_data("/raw/*.csv", "/data/farandole", label_cols=["label"], validation=0.1)
    loader = ParquetLoader(data.train_url, batch_size=1024, framework="torch")
    ```

    or, on Parquet from any program,

    ```python
    loader = ParquetLoader("/data/train", batch_size=1024, columns=["features", "label"], framework="torch")
    for epoch in range(3):
        for batch in loader:  # {"features": tensor, "label": tensor}
            ...
    ```
"""  # noqa: E501

from farandole.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from farandole.data.expressions import SqlExpressions
from farandole.data.inputs.tables import open_table
from farandole.data.loader import ParquetLoader
from farandole.data.loaders.frames import frame_loader
from farandole.data.loaders.global_batches import GlobalBatchLoader
from farandole.data.loaders.mixed import MixedLoader
from farandole.data.loaders.pools import LengthLoader, WeightedLoader
from farandole.data.loaders.stream import StreamLoader
from farandole.data.media_decoding import Audio, Decode, Image
from farandole.data.prepare import PreparedData, prepare_data
from farandole.data.ragged import Jagged, Nested, Pad
from farandole.data.statistics import Statistics, statistics_of

__all__ = [
    "AsyncDataLoaderMixin",
    "Audio",
    "BaseDataLoader",
    "Decode",
    "GlobalBatchLoader",
    "Image",
    "Jagged",
    "LengthLoader",
    "MixedLoader",
    "Nested",
    "Pad",
    "ParquetLoader",
    "PreparedData",
    "SqlExpressions",
    "Statistics",
    "StreamLoader",
    "WeightedLoader",
    "frame_loader",
    "open_table",
    "prepare_data",
    "statistics_of",
]
