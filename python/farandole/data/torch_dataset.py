# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loader as torch's `IterableDataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError("as_torch_dataset needs torch: pip install 'farandole[torch]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.loader import ParquetLoader
    from farandole.data.row_assignment import RowAssignment

MAX_LOADER_WORKERS = 1024
"""Worker processes that a `DataLoader` may have."""


class TorchDataset(IterableDataset):
    """Whole batches, as dicts of tensors: `DataLoader(dataset, batch_size=None)`.

    Every iteration is the next epoch. Worker processes count epochs in memory that they share with
    this one, so that it makes no difference whether a `DataLoader` keeps its workers.
    """

    def __init__(self, loader: ParquetLoader) -> None:
        """Continues at the loader's position.

        Args:
            loader: The loader to read from; with `framework="numpy"` batches hold arrays.
        """
        self._loader = loader
        self._resumed: dict[str, Any] | None = None
        self._skip = 0
        self._done = 0
        # For each worker, the epochs started since `_base` (an epoch and a row) was set.
        self._started = torch.zeros(MAX_LOADER_WORKERS, dtype=torch.int64).share_memory_()
        self._base = torch.tensor(loader._next_position, dtype=torch.int64).share_memory_()  # noqa: SLF001 - internal to this package

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, which does not depend on workers."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Chooses which epoch the next iteration is; to be called in the process of the
        `DataLoader`.
        """
        self._loader.set_epoch(epoch)
        self._restart_epochs()

    def _restart_epochs(self) -> None:
        self._base.copy_(torch.tensor(self._loader._next_position, dtype=torch.int64))  # noqa: SLF001
        self._started.zero_()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches of this process: all of them, or a worker's share."""
        info = get_worker_info()
        if info is None:
            yield from self._loader
            return
        if info.num_workers > MAX_LOADER_WORKERS:
            raise ValueError(
                f"a DataLoader may have up to {MAX_LOADER_WORKERS} workers here: {info.num_workers}"
            )
        if lists := self._loader._nested_columns():  # noqa: SLF001 - internal to this package
            raise ValueError(
                "worker processes cannot send nested tensors: use num_workers=0 for "
                f"{', '.join(lists)}; the loader "
                "reads in threads of its own"
            )
        if self._resumed is None:
            turn = int(self._started[info.id])
            self._started[info.id] += 1
            epoch, start = (int(self._base[0]) + turn, int(self._base[1]) if turn == 0 else 0)
            self._skip = 0
        else:
            epoch, start, self._skip = (self._resumed[key] for key in ("epoch", "start", "done"))
            self._started[info.id] = epoch - int(self._base[0]) + 1
            self._resumed = None
        self._done, self._position = self._skip, (epoch, start, info.num_workers)
        for batch in self._loader._batches_of_worker_process(  # noqa: SLF001
            info.id, info.num_workers, epoch, start, self._skip
        ):
            self._done += 1
            yield batch

    def take_turns(self, books: RowAssignment | None = None) -> RowAssignment:
        """Like `ParquetLoader.take_turns`; of a `DataLoader` without worker processes."""
        return self._loader.take_turns(books)

    def follow_world(self) -> None:
        """Like `ParquetLoader.follow_world`; of a `DataLoader` without worker processes."""
        self._loader.follow_world()
        self._restart_epochs()

    def state_dict(self) -> dict[str, Any]:
        """Returns the consumer's position; in a worker process, this worker's, for torchdata's
        `StatefulDataLoader`.

        The state of a worker belongs to that number of workers; without workers, it is the loader's
        and fits any world.
        """
        if get_worker_info() is None:
            return self._loader.state_dict()
        epoch, start, workers = self._position
        return {"epoch": epoch, "start": start, "done": self._done, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue where a state was taken.

        Args:
            state: From `state_dict`, in the same kind of process.

        Raises:
            ValueError: A state of another data set, or of another number of workers.
        """
        info = get_worker_info()
        if info is None:
            self._loader.load_state_dict(state)
            self._restart_epochs()
        elif state["workers"] != info.num_workers:
            raise ValueError(
                f"the state is of {state['workers']} workers, here are {info.num_workers}"
            )
        else:
            self._resumed = dict(state)
