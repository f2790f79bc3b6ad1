# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A `Trainer` of transformers whose training rows come from a loader of `farandole.data`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from farandole.common.counted_noun import format_counted_noun
from farandole.data import GlobalBatchLoader, ParquetLoader
from farandole.transformers.progress import ReportProgress

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoaderBatches(IterableDataset):
    """The batches of a loader, each a dict of tensors with the names of the model's arguments.

    Args:
        loader: The loader of this rank.
    """

    def __init__(self, loader: ParquetLoader) -> None:
        self.loader = loader
        self._resumed_batches = 0
        loader.set_epoch(0)
        self._length = len(loader)

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration."""
        self._resumed_batches = 0
        self.loader.set_epoch(epoch)

    def resume_at(self, epoch: int, batches: int) -> None:
        """Lets the next iteration begin behind some batches. For those, which Trainer drops, it
        yields empty dicts, and reads nothing.

        Args:
            epoch: The epoch.
            batches: Batches of each rank that were trained.
        """
        self.loader.set_epoch(epoch)
        if batches:
            rows = batches * self.loader.batch_size * self.loader.size
            self.loader.load_state_dict({**self.loader.state_dict(), "rows": rows})
        self._resumed_batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the batches of the next epoch."""
        for _ in range(self._resumed_batches):
            yield {}
        self._resumed_batches = 0
        for batch in self.loader:
            yield {name: torch.as_tensor(values) for name, values in batch.items()}


class LoaderDataLoader(DataLoader):
    """The form in which Trainer takes batches that are ready."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration."""
        assert isinstance(self.dataset, LoaderBatches)  # noqa: S101 - made with it
        self.dataset.set_epoch(epoch)


class _ResumeLoader(transformers.TrainerCallback):
    """Moves a loader to the batch at which a resumed training begins."""

    def __init__(self, batches: LoaderBatches) -> None:
        self._batches = batches

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Finds the epoch and the batch of the checkpoint's step."""
        del control
        accumulated = args.gradient_accumulation_steps
        steps_in_epoch = max(1, -(-len(self._batches) // accumulated))
        epoch, steps = divmod(state.global_step, steps_in_epoch)
        skips = 0 if args.ignore_data_skip else steps * accumulated
        self._batches.resume_at(epoch, skips)


class Trainer(transformers.Trainer):
    """`transformers.Trainer` that takes a `ParquetLoader` as `train_dataset`, also one that
    `frame_loader` makes from a DataFrame of Spark.

    The loader deals the rows to the ranks, shuffles them in each epoch, and has the names of the
    model's arguments as columns. A training that is resumed from a checkpoint goes on with the next
    batch and reads no earlier one. `data_collator` does not see these batches.

    The driver of the job gets losses, metrics and checkpoints: see `ReportProgress`.

    Raises:
        ValueError: The loader was made for other ranks or another batch size, or its last batch
            differs between ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(ReportProgress())
        self._loader_batches: LoaderBatches | None = None
        if isinstance(self.train_dataset, ParquetLoader):
            # The ranks are known now, also for a loader from a pickle.
            self.train_dataset.follow_world()
            _check_loader(self.train_dataset, self.args)
            self._loader_batches = LoaderBatches(self.train_dataset)
            self.add_callback(_ResumeLoader(self._loader_batches))
        if isinstance(self.eval_dataset, ParquetLoader):
            raise ValueError(
                "eval_dataset must be a dataset of rows: a loader gives each rank its own batches, "
                "and Trainer gathers predictions in the order of rows"
            )

    def get_train_dataloader(self) -> DataLoader:
        """Returns the batches of the loader, or the `DataLoader` of other datasets."""
        if self._loader_batches is None:
            return super().get_train_dataloader()
        return LoaderDataLoader(self._loader_batches, batch_size=None)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Returns the number of rows of all ranks."""
        if isinstance(dataloader, LoaderDataLoader):
            assert isinstance(dataloader.dataset, LoaderBatches)  # noqa: S101 - made with it
            return dataloader.dataset.loader.dataset.rows
        return super().num_examples(dataloader)


def _check_loader(loader: ParquetLoader, arguments: transformers.TrainingArguments) -> None:
    """Refuses a loader with which ranks would train other rows than Trainer counts."""
    if loader.size != arguments.world_size:
        raise ValueError(
            f"the loader was made for {format_counted_noun(loader.size, 'rank')}, and "
            f"{arguments.world_size} train: leave rank and size out"
        )
    if isinstance(loader, GlobalBatchLoader):
        raise ValueError(
            "a GlobalBatchLoader gives ranks different numbers of rows, which Trainer would weigh "
            "differently: give it a ParquetLoader"
        )
    if loader.batch_size != arguments.train_batch_size:
        raise ValueError(
            f"the loader has batches of {format_counted_noun(loader.batch_size, 'row')}, and "
            f"per_device_train_batch_size is {arguments.train_batch_size}: give both one value"
        )
    rest = loader.dataset.rows % (loader.batch_size * loader.size)
    if rest and not loader.tail.startswith("drop"):
        raise ValueError(
            f"the last step of an epoch has {format_counted_noun(rest, 'row')} for "
            f"{format_counted_noun(loader.size, 'rank')}, which Trainer would weigh differently: "
            'make the loader with tail="drop_last"'
        )
