# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors

"""Arrow batches in, Parquet and a manifest out.

`spec` is JSON, the same text for every partition and for `commit`:

    {
      "train": "intermediate_train_data.0",     relative to `url`, or a URL of its own
      "val": "intermediate_val_data.0",         may be null when there is no validation
      "columns": ["features", "label", "w"],    what is kept, in this order; null: every column
      "labels": ["label"],                      these roles are only recorded in the manifest
      "weight": "w",                            or null
      "validation": {"fraction": 0.1},          {"below": hash}, {"column": "is_val"} (not kept), or
                                                null
      "seed": 0,                                of the split by fraction
      "compression": "none",                    none, snappy, lz4 or zstd; default none
      "compress_sparse": false,                 compress Spark's vectors in any case
      "fill": {"*": "0", "name": ""},           what takes the place of nulls and NaN, by column;
                                                else they are errors
      "allow_nan": false,                       NaN and infinities are values like others
      "row_group_rows": null,                   null: by size, suited to shuffling
      "fingerprint": "..."                      what this data was made from; kept in the manifest
    }

Only "train" must be there.

The split by fraction depends on a row's content and the seed alone: the same rows land in
validation however the data is partitioned. A validation column of booleans sends true to
validation; of numbers, those above 0; of texts, "validation", "val", "valid", "true", "1", "yes"
(others are "train", "training", "false", "0", "no"). Negative numbers, "test" and nulls go to
neither side, and the manifest counts them as dropped.

What becomes of a column: booleans, integers and floats stay; decimals become the nearest float64;
dates become int64 days, timestamps, times and durations int64 microseconds; arrays of numbers that
all have one length, and Spark vectors (dense or sparse, as float64), become fixed-size rows;
strings and binaries stay as they are. A time that is more microseconds than an int64 can hold is an
error.
"""

from typing import Any, final

@final
class PartitionWriter:
    """Writes one partition. Not usable after `finish` or `abort`; dropping it aborts.

    Errors are `ValueError` for what is in the data (naming column, partition and count) and
    `OSError` for the store.
    """

    def __new__(cls, url: str, spec: str, partition: int, attempt: str) -> PartitionWriter:
        """`attempt` must be unique to this try of the partition: its files carry it."""
    def write(self, batch: Any) -> None:
        """Takes anything with `__arrow_c_array__` (a `pyarrow.RecordBatch`), without copying."""
    def finish(self) -> bytes:
        """Completes the files; what it returns goes to `commit`, once per partition."""
    def abort(self) -> None: ...

def commit_partitions(url: str, spec: str, parts: list[bytes]) -> str:
    """Makes the written files a data set, by writing the manifests last.

    Returns JSON: {"train": manifest, "val": manifest or null, "dropped": rows}, see `read_manifest`
    for a manifest.

    Raises:
        ValueError: no rows at all, no rows on a side that was asked for, or partitions that
            disagree about a column.
    """

def read_manifest(url: str) -> str | None:
    """The manifest of one directory (train or validation), or `None` if it is not prepared data.

    JSON: {"format": 1, "fingerprint": str, "rows": int, "bytes": int, "columns": [{"name", "role":
    "feature" | "label"
    | "weight", "element": "bool" | "int8".."int64" | "uint8".."uint64" | "float32" | "float64" | "utf8" | "binary",
    "shape": [] or [length], "source": Arrow type as it came, "nulls": int, "min": number or null,
    "max": number or null}], "files": [{"path", "rows", "bytes", "checksum", "content", "groups":
    [{"rows", "bytes"}]}]}
    """  # noqa: E501

def is_partition_whole(url: str, spec: str, part: bytes) -> bool:
    """Returns whether the files of a partition that `finish` described are there, with all their
    bytes.
    """

def verify_checksums(url: str) -> tuple[int, int, list[str]]:
    """Reads every file of prepared data: how many, their bytes, and a sentence for each that is not
    what it was.

    Raises:
        ValueError: It is not prepared data.
    """
