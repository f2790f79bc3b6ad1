# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Global batches of loaders and estimators have the same rows on any number of ranks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import GlobalBatchLoader, MixedLoader, ParquetLoader, WeightedLoader
from farandole.spark.common.data.batch_source import BatchSource

ROWS = 103
GLOBAL_BATCH_SIZE = 10


@pytest.fixture
def path(tmp_path):
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        pq.write_table(pa.table({"id": rows}), tmp_path / f"{number}.parquet")
    return str(tmp_path)


def loaders(path, size, **options):
    return [
        GlobalBatchLoader(path, GLOBAL_BATCH_SIZE, rank=rank, size=size, **options)
        for rank in range(size)
    ]


def read_steps(ranks, count=None):
    """Returns the sorted rows of all ranks in each step, and the sum of the ranks' factors times
    their rows.
    """
    steps, iterators = [], [iter(one) for one in ranks]
    for _ in range(len(ranks[0]) if count is None else count):
        batches = [next(one)["id"] for one in iterators]
        assert all(len(one) for one in batches), "a mean of nothing is not a number"
        factors = [one.loss_factor for one in ranks]
        counted = [
            one[: len(one) if factor else 0] for one, factor in zip(batches, factors, strict=True)
        ]
        sizes = [len(one) for one in counted]
        assert max(sizes) - min(sizes) <= 1
        rows = sorted(int(row) for one in counted for row in one)
        assert factors == pytest.approx([len(ranks) * size / len(rows) for size in sizes])
        steps.append(rows)
    if count is None:
        assert all(next(one, None) is None for one in iterators)
    return steps


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("tail", ["keep", "drop_last"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(path, shuffle, tail, framework):
    options = {"shuffle": shuffle, "tail": tail, "framework": framework}
    wanted = read_steps(loaders(path, 1, **options))
    assert [len(step) for step in wanted] == [10] * 10 + ([3] if tail == "keep" else [])
    for size in (2, 3, 4, 7):
        assert read_steps(loaders(path, size, **options)) == wanted, size


def test_an_epoch_continues_on_another_number_of_ranks_with_the_same_steps(path):
    wanted = read_steps(loaders(path, 1))
    before = loaders(path, 4)
    found = read_steps(before, 3)
    after = loaders(path, 3)
    for one in after:
        one.load_state_dict(before[0].state_dict())
    found += read_steps(after)
    assert found == wanted
    assert read_steps(after) == read_steps(loaders_at_epoch(path, 1)), "the next epoch is whole"


def loaders_at_epoch(path, epoch):
    (loader,) = loaders(path, 1)
    loader.set_epoch(epoch)
    return [loader]


def test_rows_come_as_from_a_plain_loader_where_ranks_have_equally_many(path):
    plain = [row["id"].tolist() for row in ParquetLoader(path, 5, rank=1, size=2)]
    assert [row["id"].tolist() for row in loaders(path, 2)[1]] == plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tail": "pad"}, "tail"),
        ({"rank": 0, "size": 11}, "fewer rows than there are ranks: 11"),
        ({"rank": 0, "size": 1, "global_batch_size": 0}, "global_batch_size"),
    ],
)
def test_options_that_divide_rows_otherwise_are_refused(path, options, words):
    with pytest.raises(ValueError, match=words):
        GlobalBatchLoader(path, **{"global_batch_size": GLOBAL_BATCH_SIZE, **options})


def test_it_is_refused_where_other_loaders_or_optimizers_count_rows(path):
    with pytest.raises(TypeError, match="GlobalBatchLoader"):
        WeightedLoader(loaders(path, 1)[0], 2, weights="id")
    with pytest.raises(TypeError, match="'rows' is a GlobalBatchLoader"):
        MixedLoader({"rows": loaders(path, 1)[0]})
    with pytest.raises(ValueError, match="without the rows of lost ranks"):
        GlobalBatchLoader(path, GLOBAL_BATCH_SIZE).take_turns()


def sources(path, size, **options):
    return [
        BatchSource(
            path,
            {"id": None},
            batch_size=1,
            step_rows=GLOBAL_BATCH_SIZE,
            rank=rank,
            size=size,
            shuffle=True,
            **options,
        )
        for rank in range(size)
    ]


def read_source_steps(ranks, epoch, steps):
    """Returns the sorted rows of all ranks in each step, after checks of the ranks' numbers."""
    found = []
    batches = [list(one.iterate_epoch_batches(epoch, steps)) for one in ranks]
    for same in zip(*batches, strict=True):
        (number,) = {one.step for one in same}
        rows = sorted(int(row) for one in same for row in one.columns["id"][: one.valid])
        assert len(rows) == ranks[0].row_count_in_steps(number, number + 1)
        factors = [rank.loss_factor(one) for rank, one in zip(ranks, same, strict=True)]
        assert sum(factors) == pytest.approx(len(ranks))
        assert all(len(one.columns["id"]) == one.count >= 2 for one in same)
        found.append(rows)
    for rank, own in zip(ranks, batches, strict=True):
        assert rank.idle_steps(steps) == [one.step for one in own if not one.valid]
    return found


@pytest.mark.parametrize("in_memory", [False, True])
def test_processes_of_estimators_get_the_same_steps(path, in_memory):
    """An epoch of two passes, and the next one, which comes from memory if there is room."""
    options = {"least": 2, "in_memory": in_memory}
    steps = 2 * -(-ROWS // GLOBAL_BATCH_SIZE)
    wanted = [read_source_steps(sources(path, 1), epoch, steps) for epoch in (0, 1)]
    for size in (2, 3, 4, 7):
        ranks = sources(path, size, **options)
        assert {one.steps for one in ranks} == {steps // 2}
        for epoch, same in enumerate(wanted):
            found = read_source_steps(ranks, epoch, steps)
            if in_memory:  # a pass from memory has an order of its own
                assert [len(one) for one in found] == [len(one) for one in same]
                one_pass = [row for step in found[: steps // 2] for row in step]
                assert sorted(one_pass) == list(range(ROWS))
            else:
                assert found == same, size


def test_an_epoch_of_processes_continues_on_another_number_of_them(path):
    steps = -(-ROWS // GLOBAL_BATCH_SIZE)
    wanted = read_source_steps(sources(path, 1), 0, steps)
    before, after = sources(path, 4, least=2), sources(path, 3, least=2)
    found = read_source_steps(before, 0, 4)
    for one in after:
        one.set_epoch_start(before[0].position_after_steps(0, 4))
    assert found + read_source_steps(after, 0, steps) == wanted


def test_a_rank_without_rows_in_the_only_step_of_an_iteration_gets_a_row(path):
    before, ranks = loaders(path, 1, shuffle=False), loaders(path, 7, shuffle=False)
    read_steps(before, ROWS // GLOBAL_BATCH_SIZE)
    for loader in ranks:
        loader.load_state_dict(before[0].state_dict())
    assert read_steps(ranks) == [[ROWS - 3, ROWS - 2, ROWS - 1]]


@pytest.mark.parametrize("rows", ["fewer", "more"])
def test_a_function_that_changes_the_number_of_rows_is_refused(path, rows):
    def change(batch):
        return {"id": batch["id"][::2] if rows == "fewer" else np.repeat(batch["id"], 2)}

    for loader in loaders(path, 2, transformation_fn=change):
        with pytest.raises(ValueError, match=r"dealt 5 rows to this batch, .* keep all rows"):
            next(iter(loader))
