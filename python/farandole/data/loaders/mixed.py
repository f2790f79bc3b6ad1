# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`MixedLoader`: batches of several data sets, in given proportions."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.common.argument_checks import check_whole_number
from farandole.data.data_loader_base import BaseDataLoader, close_iterator
from farandole.data.loader import WEIGHTS_KEY
from farandole.data.loaders.global_batches import GlobalBatchLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Batch = dict[str, Any]

_STATE_VERSION = 1


class MixedLoader(BaseDataLoader):
    """Batches of several loaders; each loader repeats its epochs endlessly.

    With `ratios`, every batch comes from one loader. After any number of batches, the number of
    batches from each loader differs from its share by at most one. Without `ratios`, every batch
    has the rows of one batch of each loader, so the batch sizes set the proportions. All ranks take
    from the same loaders in the same order.

    An iteration is `steps` batches. The next one continues with the rows after them.
    """

    def __init__(
        self,
        loaders: Mapping[str, Any],
        ratios: Mapping[str, float] | None = None,
        *,
        steps: int | None = None,
    ) -> None:
        """Stores the arguments; reading starts with the first iteration.

        Args:
            loaders: By name: `ParquetLoader`, `WeightedLoader` or `LengthLoader`, with the same
                columns. Without `ratios`, all or none have `tail="pad"`, and all or none are
                `LengthLoader`.
            ratios: Share of the batches of each loader, in proportion: `{"web": 3, "books": 1}`.
            steps: Batches of one iteration; default: as many as one epoch of all loaders has, or of
                the longest one without `ratios`.

        Raises:
            ValueError: No loaders, ratios of other loaders, ratios that are no numbers above 0, a
                loader without batches, other columns, or `tail="join"`.
            TypeError: A `GlobalBatchLoader`.
        """
        if not loaders:
            raise ValueError("MixedLoader needs at least one loader")
        if steps is not None:
            steps = check_whole_number("steps", steps)
        self.loaders = dict(loaders)
        self._ratios = None if ratios is None else _normalize_ratios(ratios, self.loaders)
        lengths = []
        for name, loader in self.loaders.items():
            if isinstance(loader, GlobalBatchLoader):
                raise TypeError(
                    f"the loader {name!r} is a GlobalBatchLoader, whose loss_factor is for its own "
                    "batches alone: a mix takes a ParquetLoader"
                )
            lengths.append(len(loader))
            if not lengths[-1]:
                raise ValueError(f"the loader {name!r} has no batches")
            if getattr(getattr(loader, "loader", loader), "tail", None) == "join":
                raise ValueError(
                    f"the loader {name!r} has tail='join': a mix needs the same batches on all "
                    "ranks"
                )
        first = next(iter(self.loaders))
        for name, loader in self.loaders.items():
            if sorted(loader.columns) != sorted(self.loaders[first].columns):
                raise ValueError(
                    f"loaders of a mix must have the same columns: {name!r} has "
                    f"{', '.join(sorted(loader.columns))}, {first!r} has "
                    f"{', '.join(sorted(self.loaders[first].columns))}"
                )
        if ratios is None:
            _refuse_unequal_extra_columns(self.loaders)
        self._steps = steps or (max(lengths) if ratios is None else sum(lengths))
        self._open_iterators: dict[str, Iterator[Batch]] = {}
        self._first_step = 0
        """The step of the next iteration at which it begins."""
        self._produced_at = self._consumed_at = self._state_after_step(
            0, dict.fromkeys(self.loaders, 0)
        )
        self._counts = dict.fromkeys(self.loaders, 0)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read."""
        return next(iter(self.loaders.values())).columns

    def __len__(self) -> int:
        """Batches of the next iteration."""
        return self._steps - self._first_step

    def _state_after_step(self, step: int, counts: Mapping[str, int]) -> dict[str, Any]:
        """Returns the positions of all loaders after a batch."""
        return {
            "version": _STATE_VERSION,
            "step": step,
            "counts": dict(counts),
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
        }

    def _iterate(self) -> Iterator[Batch]:
        first, self._first_step = self._first_step, 0
        for step in range(first, self._steps):
            if self._ratios is None:
                batch = self._join_batches({name: self._next_batch(name) for name in self.loaders})
            else:
                batch = self._next_batch(self._loader_furthest_behind())
            self._produced_at = self._state_after_step((step + 1) % self._steps, self._counts)
            yield batch

    def _loader_furthest_behind(self) -> str:
        """Returns the loader that is furthest behind its share."""
        ratios, step = self._ratios or {}, sum(self._counts.values()) + 1
        chosen = max(ratios, key=lambda name: ratios[name] * step - self._counts[name])
        self._counts[chosen] += 1
        return chosen

    def _next_batch(self, name: str) -> Batch:
        """Returns the next batch of a loader, of its next epoch if this one is over."""
        if name in self._open_iterators:
            batch = next(self._open_iterators[name], None)
            if batch is not None:
                return batch
        self._open_iterators[name] = iter(self.loaders[name])
        batch = next(self._open_iterators[name], None)
        if batch is None:  # the rest of an epoch, which was empty
            self._open_iterators[name] = iter(self.loaders[name])
            batch = next(self._open_iterators[name], None)
        if batch is None:
            raise ValueError(f"the loader {name!r} has no batches")
        return batch

    def _join_batches(self, batches: Mapping[str, Batch]) -> Batch:
        """Returns the rows of several batches, in the order of their loaders."""
        first = next(iter(batches))
        for name, batch in batches.items():
            if batch.keys() != batches[first].keys():
                raise ValueError(
                    f"batches that are joined must have the same columns: {name!r} has "
                    f"{', '.join(batch)}, {first!r} has {', '.join(batches[first])}"
                )
        return {column: _concatenate_column(column, batches) for column in batches[first]}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the consumer: the states of all loaders, and the number of
        batches of each.
        """
        return self._consumed_at

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue where a state was taken.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: A state of other loaders, or that this version cannot read.
        """
        if state.get("version") != _STATE_VERSION or not isinstance(state.get("loaders"), dict):
            raise ValueError(f"not a state of MixedLoader: version {state.get('version')}")
        if set(state["loaders"]) != set(self.loaders):
            raise ValueError(
                f"the state belongs to other loaders: {', '.join(state['loaders'])} there, "
                f"{', '.join(self.loaders)} here"
            )
        self.close()
        for name, loader in self.loaders.items():
            loader.load_state_dict(state["loaders"][name])
        self._first_step = int(state["step"]) % self._steps
        self._counts = {name: int(state["counts"][name]) for name in self.loaders}
        self._produced_at = self._consumed_at = self._state_after_step(
            self._first_step, self._counts
        )

    def close(self) -> None:
        """Ends the iterations of all loaders, and their threads."""
        for batches in self._open_iterators.values():
            close_iterator(batches)
        self._open_iterators.clear()
        for loader in self.loaders.values():
            loader.close()


def _normalize_ratios(ratios: Mapping[str, float], loaders: Mapping[str, Any]) -> dict[str, float]:
    """Ratios that add up to 1."""
    if set(ratios) != set(loaders):
        strange = sorted(set(ratios) ^ set(loaders))
        raise ValueError(
            "ratios must have one number for each loader, by name; these names are missing or "
            "unknown: "
            f"{', '.join(strange)}"
        )
    for name, ratio in ratios.items():
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio < math.inf:
            raise ValueError(f"the ratio of {name!r} must be a number above 0: {ratio!r}")
    total = sum(ratios[name] for name in loaders)
    return {name: ratios[name] / total for name in loaders}


def _refuse_unequal_extra_columns(loaders: Mapping[str, Any]) -> None:
    """Refuses loaders whose batches could not be joined, since some have weights or lengths and
    others do not.
    """
    added: dict[str, set[str]] = {}
    for name, loader in loaders.items():
        pools = getattr(loader, "loader", loader)
        lists = pools._nested_columns() if hasattr(pools, "_nested_columns") else []  # noqa: SLF001 - internal to this package
        if lists:
            raise ValueError(
                f"without ratios, lists of a mix must be padded: prepare {', '.join(lists)} with "
                "Pad"
            )
        suffix = getattr(pools, "_length_suffix", "")
        added[name] = (
            {column + suffix for column in getattr(pools, "_ragged", ())} if suffix else set()
        )
        if getattr(pools, "tail", None) == "pad":
            added[name].add(WEIGHTS_KEY)
    first = next(iter(added))
    for name, columns in added.items():
        if columns != added[first]:
            odd_column = min(columns ^ added[first])
            has, lacks = (name, first) if odd_column in columns else (first, name)
            raise ValueError(
                f"without ratios, batches of a mix must have the same columns: those of {has!r} "
                f"have {odd_column!r}, those of {lacks!r} do not"
            )


def _concatenate_column(column: str, batches: Mapping[str, Batch]) -> Any:
    values = {name: batch[column] for name, batch in batches.items()}
    shapes = {name: tuple(one.shape[1:]) for name, one in values.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"column {column!r} has rows of different shapes: {shapes}; ragged columns of a mix "
            "need the same "
            "max_length and buckets=1"
        )
    kinds = {name: str(one.dtype) for name, one in values.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"column {column!r} has different types, see cast= of ParquetLoader: {kinds}"
        )
    parts = list(values.values())
    if hasattr(parts[0], "numpy"):
        import torch  # noqa: PLC0415 - optional

        return torch.cat(parts)

    return np.concatenate(parts)
