# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The interface of an estimator's `data_module`: a class whose objects return the batches of a
process.

By default there is none, and batches come from the native reader. Your own class is created in
every training process with the arguments below, and entered as a context. Its `train_data()` and
`val_data()` return iterables of batches, each a dict or a named tuple of columns, rows first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_NVTABULAR_RETIRED_MESSAGE = (
    "NVTabular has been retired by its makers and installs with no current framework: leave "
    "data_module out, the native reader takes categorical and continuous columns alike"
)


class DataModule(ABC):
    """One process's batches.

    Args:
        train_dir: URL of the training data.
        val_dir: URL of the validation data.
        num_train_epochs: epochs of the run.
        has_val: whether there is validation data.
        train_batch_size: rows of a batch.
        val_batch_size: rows of a validation batch.
        shuffle: whether each epoch has another order.
        transform_fn: the estimator's transformation, of a dict of arrays.
        inmemory_cache_all: whether rows stay in memory.
        cur_shard: rank of this process.
        shard_count: processes.
        schema_fields: names of the columns.
        storage_options: not needed by the native store.
        steps_per_epoch_train: batches of an epoch.
        steps_per_epoch_val: batches of a validation.
        verbose: whether to say anything.
        **kwargs: arguments of later versions.
    """

    short_name: str | None = None

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[..., Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_dir = train_dir
        self.val_dir = val_dir
        self.num_train_epochs = num_train_epochs
        self.has_val = has_val
        self.train_batch_size = train_batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.transform_fn = transform_fn
        self.inmemory_cache_all = inmemory_cache_all
        self.cur_shard = cur_shard
        self.shard_count = shard_count
        self.schema_fields = schema_fields
        self.storage_options = storage_options
        self.steps_per_epoch_train = steps_per_epoch_train
        self.steps_per_epoch_val = steps_per_epoch_val
        self.verbose = verbose
        self.kwargs = kwargs

    def __enter__(self) -> Self:
        """Starts the data module, before the first batch."""
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - few have anything to close
        """Ends the data module, after the last batch."""

    @abstractmethod
    def train_data(self) -> Iterable[Any]:
        """Returns the batches of one epoch, or of several."""

    @abstractmethod
    def val_data(self) -> Iterable[Any]:
        """Returns the batches of one validation, or of several."""


class ParquetDataModule(DataModule):
    """The native reader's batches, for a data module of one's own to build on: dicts of NumPy
    arrays.
    """

    short_name = "parquet"

    def train_data(self) -> Iterable[Any]:
        """Like `DataModule.train_data`; every iteration is the next epoch."""
        return self._create_loader(self.train_dir, self.train_batch_size, self.shuffle)

    def val_data(self) -> Iterable[Any]:
        """Like `DataModule.val_data`."""
        return self._create_loader(str(self.val_dir), self.val_batch_size, shuffle=True)

    def _create_loader(self, url: str, batch_size: int, shuffle: bool) -> Iterable[Any]:
        from farandole.data import ParquetLoader  # noqa: PLC0415 - in training processes

        return ParquetLoader(
            url,
            batch_size,
            columns=self.schema_fields,
            shuffle=shuffle,
            seed=int(self.kwargs.get("random_seed", 0)),
            rank=self.cur_shard,
            size=self.shard_count,
            tail="keep",
        )


class NVTabularDataModule:
    """Refuses to be made, with the reason."""

    short_name = "nvtabular"

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(_NVTABULAR_RETIRED_MESSAGE)


def resolve_data_module_class(module: Any) -> Any:
    """Returns the class to build, or `None` where the native reader does.

    Args:
        module: the estimator's `data_module`.

    Raises:
        NotImplementedError: NVTabular's, with the reason.
    """
    if isinstance(module, type) and issubclass(module, NVTabularDataModule):
        raise NotImplementedError(_NVTABULAR_RETIRED_MESSAGE)
    return None if module is ParquetDataModule else module
