# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`make_spark_converter`: Spark writes a DataFrame once, as Parquet, and processes read it as
torch's or TensorFlow's batches.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from farandole._native.store import Store
from petastorm.reader import make_batch_reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from petastorm.reader import Reader

DEFAULT_ROW_GROUP_SIZE_BYTES = 32 << 20
_COMPRESSIONS = ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "deflate")
_FLOAT_TYPES = {"float32": ("double", "float"), "float64": ("float", "double")}
"""For each dtype, the type that is converted and its result."""
_RANK_VARIABLES = (
    *(("FARANDOLE_RANK", "FARANDOLE_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")),
    *(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")),
)
_DEFAULT_WORKERS = 4
_FILE_TIMEOUT_SECONDS = 30.0
_FILE_POLL_SECONDS = 0.5

logger = logging.getLogger(__name__)


class SparkDatasetConverter:
    """A DataFrame that Spark has written. It can be pickled and used in other processes."""

    PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"
    """Spark's setting of the directory for the files, which all processes must see."""

    def __init__(self, cache_dir_url: str, file_urls: list[str], dataset_size: int) -> None:
        """Refers to files.

        Args:
            cache_dir_url: Their directory.
            file_urls: The files.
            dataset_size: Number of their rows.
        """
        self.cache_dir_url = cache_dir_url
        self.file_urls = file_urls
        self.dataset_size = dataset_size

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.dataset_size

    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> ReaderContextManager:
        """Returns a context manager of a `tf.data.Dataset` of named tuples of tensors.

        Args:
            batch_size: Rows of a batch; default: 32.
            prefetch: Batches that are made ahead; default: TensorFlow decides.
            num_epochs: Number of passes over the rows; default: endless.
            workers_count: Number of row groups that are read at a time; default: 4.
            shuffling_queue_capacity: Number of rows among which each row is drawn; default: rows
                are not shuffled, but row groups are.
            petastorm_reader_kwargs: Options of `make_batch_reader`, such as `cur_shard` and
                `shard_count`.
        """
        size, capacity = batch_size or 32, shuffling_queue_capacity

        def make_dataset(reader: Reader) -> Any:
            import tensorflow as tf  # noqa: PLC0415 - optional

            from petastorm.tf_utils import make_petastorm_dataset  # noqa: PLC0415

            batches = make_petastorm_dataset(reader)
            batches = (
                batches.unbatch().shuffle(capacity).batch(size)
                if capacity
                else batches.rebatch(size)
            )
            return batches.prefetch(tf.data.AUTOTUNE if prefetch is None else prefetch)

        return self._open_later(make_dataset, num_epochs, workers_count, petastorm_reader_kwargs)

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> ReaderContextManager:
        """Returns a context manager of a loader of dicts of tensors.

        Args:
            batch_size: Rows of a batch.
            num_epochs: Like in `make_tf_dataset`.
            workers_count: Like in `make_tf_dataset`.
            shuffling_queue_capacity: Like in `make_tf_dataset`.
            data_loader_fn: Class of the loader; default: `petastorm.pytorch.DataLoader`.
            petastorm_reader_kwargs: Like in `make_tf_dataset`.
        """

        def make_loader(reader: Reader) -> Any:
            from petastorm.pytorch import DataLoader  # noqa: PLC0415 - torch is optional

            return (data_loader_fn or DataLoader)(
                reader=reader,
                batch_size=batch_size,
                shuffling_queue_capacity=shuffling_queue_capacity,
            )

        return self._open_later(make_loader, num_epochs, workers_count, petastorm_reader_kwargs)

    def _open_later(
        self,
        make_loader: Callable[[Reader], Any],
        num_epochs: int | None,
        workers_count: int | None,
        options: dict[str, Any],
    ) -> ReaderContextManager:
        _warn_of_other_shard(options.get("cur_shard"), options.get("shard_count"))

        def open_reader() -> Reader:
            deadline = time.monotonic() + _FILE_TIMEOUT_SECONDS
            while True:
                try:
                    return make_batch_reader(
                        self.file_urls,
                        num_epochs=num_epochs,
                        workers_count=workers_count or _DEFAULT_WORKERS,
                        **options,
                    )
                except FileNotFoundError:  # new files need a moment on some shared file systems
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_FILE_POLL_SECONDS)

        return ReaderContextManager(open_reader, make_loader)

    def delete(self) -> None:
        """Deletes the directory: also one that the converter has not written, but got as a URL."""
        with _written_frames_lock:
            _written_frames[:] = [
                frame for frame in _written_frames if frame.url != self.cache_dir_url
            ]
        _delete_directory(self.cache_dir_url)


class ReaderContextManager:
    """Opens a reader for a `with` block, and stops it at the end."""

    def __init__(
        self, open_reader: Callable[[], Reader], make_loader: Callable[[Reader], Any]
    ) -> None:
        """Opens nothing yet.

        Args:
            open_reader: Opens the reader.
            make_loader: Makes the value of the `with` block.
        """
        self._open_reader, self._make_loader = open_reader, make_loader

    def __enter__(self) -> Any:
        """Returns a loader of a new reader."""
        self.reader = self._open_reader()
        return self._make_loader(self.reader)

    def __exit__(self, *exception: object) -> None:
        """Stops the reader."""
        self.reader.stop()
        self.reader.join()


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = DEFAULT_ROW_GROUP_SIZE_BYTES,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Lets Spark write a DataFrame, unless a converter of this process has written the same rows.

    The directory is below `SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF`. It is deleted when
    this process ends.

    Args:
        df: A DataFrame, whose vectors of Spark ML become arrays; or the URL of Parquet.
        parquet_row_group_size_bytes: Bytes of a row group; shards consist of row groups.
        compression_codec: `gzip`, `snappy` or another one of Spark; default: `uncompressed`.
        dtype: `float32` or `float64` for all columns of floats and arrays of floats, or `None`.

    Raises:
        ValueError: The setting is missing, or has no scheme.
        RuntimeError: Another compression.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - only the driver converts

    spark = SparkSession.active()
    parent = _parent_directory_url(spark)
    if isinstance(df, str):
        url = df
    else:
        codec = compression_codec or "uncompressed"
        if codec.lower() not in _COMPRESSIONS:
            raise RuntimeError(
                f"compression_codec should be None or one of {', '.join(_COMPRESSIONS)}: {codec}"
            )
        url = _write_frame_once(df, parent, (parquet_row_group_size_bytes, codec, dtype))
    written = spark.read.parquet(url)
    files = sorted(map(unquote, written.inputFiles()))  # Spark quotes spaces; our stores do not
    return SparkDatasetConverter(url, files, written.count())


class _WrittenFrame(NamedTuple):
    frame: Any
    options: tuple[Any, ...]
    url: str


_written_frames: list[_WrittenFrame] = []
_written_frames_lock = threading.Lock()


def _write_frame_once(frame: Any, parent: str, options: tuple[int, str, str | None]) -> str:
    """Returns the URL of the directory of a frame's rows, which are written if they are not yet."""
    row_group_bytes, codec, dtype = options
    with _written_frames_lock:
        for written in _written_frames:
            if written.options == (parent, *options) and written.frame.sameSemantics(frame):
                return written.url
        application = frame.sparkSession.conf.get("spark.app.id", "unknown")
        name = f"{time.strftime('%Y%m%d%H%M%S')}-appid-{application}-{uuid.uuid4()}"
        url = f"{parent}/{name}"
        _with_plain_columns(frame, dtype).write.options(
            **{"compression": codec, "parquet.block.size": str(row_group_bytes)}
        ).parquet(url)
        atexit.register(_delete_at_exit, url, os.getpid())
        _written_frames.append(_WrittenFrame(frame, (parent, *options), url))
    return url


def _with_plain_columns(frame: Any, dtype: str | None) -> Any:
    """Returns the frame with arrays instead of vectors, and with floats of one precision."""
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415 - only the driver converts
    from pyspark.sql.functions import col  # noqa: PLC0415

    if dtype is not None and dtype not in _FLOAT_TYPES:
        raise ValueError(f"dtype {dtype} is not supported. Use 'float32' or 'float64'")
    source, result = _FLOAT_TYPES[dtype] if dtype else ("", "")
    columns = []
    for field in frame.schema:
        name, kind = "`" + field.name.replace("`", "``") + "`", field.dataType.simpleString()
        column = col(name)
        if kind == "vector":
            column = vector_to_array(column, dtype or "float64")
        elif kind in (source, f"array<{source}>"):
            column = column.cast(kind.replace(source, result))
        columns.append(column.alias(field.name))
    return frame.select(*columns)


def _parent_directory_url(spark: Any) -> str:
    setting = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
    url = spark.conf.get(setting, None)
    if url is None:
        raise ValueError(f"Please set the spark config {setting}.")
    if ":/" not in url:
        raise ValueError(
            f"the spark config {setting} needs a scheme, such as file:// for a file system that "
            f"all processes see: {url}"
        )
    return url.removesuffix("/")


def _warn_of_other_shard(shard: Any, shards: Any) -> None:
    for names in _RANK_VARIABLES:
        rank, size = (os.environ.get(name) for name in names)
        if rank is not None and size is not None:
            if (str(shard), str(shards)) != (rank, size):
                logger.warning(
                    "cur_shard=%s and shard_count=%s are not rank %s and size %s of this job: for "
                    "a shard for each rank, pass cur_shard=hvd.rank(), shard_count=hvd.size()",
                    shard, shards, rank, size,
                )  # fmt: skip
            return


def _delete_directory_of_url(url: str) -> None:
    store = Store(url)
    if store.local_path is None:
        store.delete_all()
    elif os.path.lexists(store.local_path):  # another converter of the same rows may be deleted
        shutil.rmtree(store.local_path)


_delete_directory = _delete_directory_of_url


def register_delete_dir_handler(handler: Callable[[str], None] | None) -> None:
    """Replaces the function that deletes a directory.

    Args:
        handler: Gets the URL; `None` for the function of this module.
    """
    global _delete_directory  # noqa: PLW0603 - petastorm has one for all converters
    _delete_directory = handler or _delete_directory_of_url


def _delete_at_exit(url: str, process: int) -> None:
    """Deletes the files of a converter, but not in a process that was forked."""
    if os.getpid() != process:
        return
    with _written_frames_lock:
        if url not in [frame.url for frame in _written_frames]:
            return
    try:
        _delete_directory(url)
    except Exception as error:  # noqa: BLE001 - at the end of the process, nothing else can be done
        logger.warning("the files of a converter in %s cannot be deleted: %s", url, error)
