# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The data of a training process, for the estimators of all frameworks: its rows, how they are
read, and the rows with which a model and a loss are tried.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from farandole.data.columns import PreparedColumn
from farandole.data.loader_arguments import fill_argument_by_column
from farandole.spark.common.data.batch_source import BatchSource, MissingValuePolicy, sample_rows
from farandole.spark.common.global_batch import batch_rows_of_all
from farandole.spark.common.transform import UserTransformation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.data.prepare import PreparedData
    from farandole.data.ragged import RaggedColumn
    from farandole.spark.common.params import EstimatorParams
    from farandole.stores.remote_store import RemoteStore
    from farandole.stores.store_options import StorageOptions

_Source = TypeVar("_Source", bound=BatchSource)

EXAMPLE_ROWS = 2
"""Rows of the example with which a model is tried."""
PROBE_PART_ROWS = (3, 20, 9) * 8
"""Number of rows of each part on which a loss is tried. The rows are drawn from the whole data set,
so that they contain labels that only a few rows have. The parts are small: the loss of a part that
has most of the rows is close to the loss of all rows, for any loss.
"""


@dataclass(frozen=True)
class TrainingDataSpec:
    """The rows that a process reads, and the way it reads them."""

    train_url: str
    val_url: str | None
    train_rows: int
    val_rows: int
    columns: dict[str, PreparedColumn]
    """Columns of the data set, before any transformation."""
    batch_size: int
    """Rows that a process puts through the model at once, at most."""
    val_batch_size: int
    order_seed: int
    shuffle: bool
    train_steps: int | None
    val_steps: int | None
    train_threads: int
    val_threads: int
    in_memory: bool
    missing: MissingValuePolicy
    ragged: Mapping[str, RaggedColumn] = field(default_factory=dict)
    step_rows: int | None = None
    """Rows of a training batch of all processes together, for any number of them; `None` is
    `batch_size` on each.
    """
    source_options: tuple[StorageOptions, ...] = ()
    """Options of the places of the rows, which take effect when this object is unpickled."""

    def create_data_module(
        self,
        kind: Any,
        *,
        epochs: int,
        transformation: Any,
        rank: int,
        size: int,
        steps: tuple[int, int],
    ) -> Any:
        """Creates the user's data module with the arguments of Horovod's data modules.

        Args:
            kind: class of the module.
            epochs: number of epochs of the run.
            transformation: the user's transformation, or `None`.
            rank: this process.
            size: number of processes.
            steps: number of steps of an epoch, in training and in validation.
        """
        return kind(
            train_dir=self.train_url,
            val_dir=self.val_url,
            num_train_epochs=epochs,
            has_val=self.val_url is not None,
            train_batch_size=self.batch_size,
            val_batch_size=self.val_batch_size,
            shuffle=self.shuffle,
            transform_fn=transformation,
            inmemory_cache_all=self.in_memory,
            cur_shard=rank,
            shard_count=size,
            schema_fields=list(self.columns),
            storage_options=None,
            steps_per_epoch_train=steps[0],
            steps_per_epoch_val=steps[1],
            verbose=False,
            random_seed=self.order_seed,
        )

    def open_sources(
        self, kind: type[_Source], casts: dict[str, str | None], **more: Any
    ) -> tuple[_Source, _Source | None]:
        """Returns the sources of training and validation rows; the second is `None` if there are no
        validation rows.

        Args:
            kind: class of the sources.
            casts: columns to read, and the type to which the reader converts each of them; `None`
                leaves the type.
            **more: further arguments of the class, such as `rank` and `size`.
        """

        def open_source(
            url: str,
            batch_size: int,
            threads: int,
            step_rows: int | None,
            *,
            shuffle: bool,
            augmentation: Any = None,
        ) -> _Source:
            return kind(
                url,
                casts,
                batch_size=batch_size,
                step_rows=step_rows,
                seed=self.order_seed,
                shuffle=shuffle,
                threads=threads,
                in_memory=self.in_memory,
                missing=self.missing,
                ragged=self.ragged,
                augmentation=augmentation,
                **more,
            )

        train = open_source(
            self.train_url,
            self.batch_size,
            self.train_threads,
            self.step_rows,
            shuffle=self.shuffle,
            augmentation=getattr(more.get("transformation"), "augment_rows", None),
        )
        if self.val_url is None:
            return train, None
        # Sums over rows do not depend on the order. In the order of the files, every process would
        # read all of them; shuffled, all processes together read each byte once.
        return train, open_source(
            self.val_url, self.val_batch_size, self.val_threads, None, shuffle=True
        )

    def read_probe_parts(
        self, transformation: Any, convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> list[ProbePart]:
        """Returns the rows on which a loss is tried, which come from all parts of the data: first
        all of them, then one part after the other.

        Args:
            transformation: the user's transformation of rows, or `None`.
            convert: changes the columns before they are divided into parts.
        """
        rows, names = sum(PROBE_PART_ROWS), list(self.columns)
        columns = convert(
            sample_rows(
                self.train_url, names, rows, transformation, self.missing, self.ragged, spread=True
            )
        )
        ends = list(itertools.accumulate(PROBE_PART_ROWS))
        return [
            ProbePart({name: one[first:last] for name, one in columns.items()}, last - first)
            for first, last in [(0, rows), *zip([0, *ends[:-1]], ends, strict=True)]
        ]


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The parts of a run's description for training processes that all frameworks have."""

    objects: bytes
    """The user's objects, pickled."""
    store: RemoteStore
    run_id: str
    data: TrainingDataSpec
    weight: str | None
    """Column of the weights of rows."""

    def file_paths(self) -> dict[str, str]:
        """Returns the paths of the run's data and files, by kind; a kind without a path is left
        out.
        """
        run, filename = self.store.checkpoint_path, self.store.checkpoint_filename
        named = {
            "training data": self.data.train_url,
            "validation data": self.data.val_url,
            "checkpoint": None if run is None else f"{run}/{filename}",
            "logs": self.store.logs_path,
        }
        return {name: path for name, path in named.items() if path is not None}


class ProbePart(NamedTuple):
    """Rows on which a loss is tried: arrays or tensors by column, and the number of rows."""

    columns: dict[str, Any]
    rows: int


def training_data_spec(
    estimator: EstimatorParams,
    prepared: PreparedData,
    columns: Sequence[str],
    unseeded: int | None = None,
) -> TrainingDataSpec:
    """Returns the rows that a process reads, and the way it reads them.

    Args:
        estimator: the estimator, for its parameters.
        prepared: the data.
        columns: columns that are read.
        unseeded: seed of the order if the estimator has none; `None` draws one.
    """
    seed = estimator.getRandomSeed()
    if seed is None:
        seed = secrets.randbelow(2**31) if unseeded is None else unseeded
    step_rows, is_limited = batch_rows_of_all(estimator), estimator.isSet("batch_size")
    return TrainingDataSpec(
        train_url=prepared.train_url,
        val_url=prepared.val_url,
        train_rows=prepared.train_rows,
        val_rows=prepared.val_rows,
        columns={name: prepared.columns[name] for name in columns},
        batch_size=estimator.getBatchSize() if step_rows is None or is_limited else step_rows,
        val_batch_size=estimator.getValBatchSize() or estimator.getBatchSize(),
        order_seed=seed,
        shuffle=estimator.getShuffle(),
        train_steps=estimator.getTrainStepsPerEpoch(),
        val_steps=estimator.getValidationStepsPerEpoch(),
        train_threads=estimator.getTrainReaderNumWorkers(),
        val_threads=estimator.getValReaderNumWorkers(),
        in_memory=estimator.getInmemoryCacheAll(),
        missing=missing_value_policy(estimator, prepared),
        ragged={name: one for name, one in prepared.ragged.items() if name in columns},
        step_rows=step_rows,
        source_options=prepared.source_options,
    )


def missing_value_policy(estimator: EstimatorParams, prepared: PreparedData) -> MissingValuePolicy:
    """Returns the treatment of nulls, NaN and infinities when data is read.

    Args:
        estimator: the estimator, for its parameters.
        prepared: the data. If this fit prepared it, its missing values are replaced already.
    """
    given = {} if prepared.place is not None else fill_argument_by_column(estimator.getFill())
    numbers: dict[str, float] = {}
    for name, value in given.items():
        # Only a number can fill a column of numbers. With another value, reading the column reports
        # its nulls.
        with contextlib.suppress(ValueError):
            numbers[name] = float(value)
    return MissingValuePolicy(numbers, estimator.getAllowNan())


def create_transformation(estimator: EstimatorParams) -> UserTransformation | None:
    """Returns the user's transformation of rows, or `None`.

    Args:
        estimator: the estimator, for its parameters.
    """
    function = estimator.getTransformationFn()
    if function is None:
        return None
    edits, removed = (
        estimator.getTransformationEditFields(),
        estimator.getTransformationRemovedFields(),
    )
    return UserTransformation(function, edits or (), removed or ())


def read_example_rows(
    estimator: EstimatorParams, prepared: PreparedData, names: Sequence[str], transformation: Any
) -> dict[str, Any]:
    """Returns `EXAMPLE_ROWS` rows as training processes will see them, arrays by column.

    Args:
        estimator: the estimator, for its parameters.
        prepared: the data.
        names: columns that are read.
        transformation: the user's transformation of rows, or `None`.
    """
    missing = missing_value_policy(estimator, prepared)
    return sample_rows(
        prepared.train_url, names, EXAMPLE_ROWS, transformation, missing, prepared.ragged
    )


def columns_from_sample_arrays(
    arrays: Mapping[str, Any], names: Sequence[str] = ()
) -> dict[str, PreparedColumn]:
    """Returns the columns that a model gets, by arrays of some rows; a transformation may have made
    some of them.

    Args:
        arrays: some rows, by column.
        names: columns that are needed.

    Raises:
        ValueError: the transformation does not return a column that is needed.
    """
    lacking = [name for name in names if name not in arrays]
    if lacking:
        raise ValueError(
            f"transformation_fn returns no columns with these names: {', '.join(lacking)}"
        )
    return {
        name: PreparedColumn(name, str(array.dtype), tuple(array.shape[1:]))
        for name, array in arrays.items()
    }
