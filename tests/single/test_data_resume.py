# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Going on where a loader was left: on the same world, on another one, in worker processes."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import AsyncDataLoaderMixin, ParquetLoader

ROWS = 1003


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resume")
    for number, (start, end) in enumerate([(0, 400), (400, ROWS)]):
        table = pa.table(
            {"id": np.arange(start, end), "x": np.arange(start, end, dtype=np.float32)}
        )
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=97)
    return directory


def world(path, size, batch_size, state=None, **options):
    loaders = [
        ParquetLoader(path, batch_size, rank=rank, size=size, **options) for rank in range(size)
    ]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    return loaders


def some(loader, batches):
    """Ids of so many batches."""
    epoch = iter(loader)
    found = [row for _ in range(batches) for row in next(epoch)["id"].tolist()]
    epoch.close()
    return found


def rest(loader):
    return [row for batch in loader for row in batch["id"].tolist()]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("done", [0, 1, 5, 7])
def test_an_epoch_continues_on_any_other_world_without_loss_or_repeat(path, done, shuffle):
    before = world(path, 2, 60, shuffle=shuffle, seed=3)
    seen = [row for loader in before for row in some(loader, done)]
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1]
    assert len(json.dumps(states[0])) < 1024
    for size, batch_size in ((1, 10), (3, 60), (5, 7)):
        after = world(path, size, batch_size, states[0], seed=99)
        batches = {len(loader) for loader in after}
        assert len(batches) == 1
        assert sorted(seen + [row for loader in after for row in rest(loader)]) == list(range(ROWS))


def test_the_same_world_continues_with_the_same_batches(path):
    whole = [batch["id"].tolist() for batch in ParquetLoader(path, 64, seed=1)]
    loader = ParquetLoader(path, 64, seed=1)
    some(loader, 4)
    other = ParquetLoader(path, 64)
    other.load_state_dict(loader.state_dict())
    assert [batch["id"].tolist() for batch in other] == whole[4:]
    assert other.state_dict()["epoch"] == 1
    assert other.state_dict()["rows"] == 0


def test_a_complete_epoch_is_followed_by_the_next_one(path):
    loader = ParquetLoader(path, 64)
    rest(loader)
    second = rest(loader)
    other = ParquetLoader(path, 64)
    other.set_epoch(1)
    assert rest(other) == second
    third = ParquetLoader(path, 64)
    third.load_state_dict(loader.state_dict())
    assert third.epoch == 2


def test_a_state_counts_what_was_handed_out_not_what_was_made_ahead(path):
    class Ahead(AsyncDataLoaderMixin, ParquetLoader):
        pass

    loader = Ahead(8, False, path, 50)
    seen = some(loader, 3)
    assert loader.state_dict()["rows"] == 150
    other = ParquetLoader(path, 50)
    other.load_state_dict(loader.state_dict())
    assert sorted(seen + rest(other)) == list(range(ROWS))


def test_a_state_of_other_data_is_refused(path, tmp_path):
    pq.write_table(pa.table({"id": np.arange(10)}), tmp_path / "f.parquet")
    state = ParquetLoader(tmp_path, 5).state_dict()
    with pytest.raises(
        ValueError, match="the state belongs to another data set, or the files have changed"
    ):
        ParquetLoader(path, 5).load_state_dict(state)
    with pytest.raises(ValueError, match="not a state of this version"):
        ParquetLoader(path, 5).load_state_dict({})
    with pytest.raises(ValueError, match="not a state of ParquetLoader, it lacks epoch, rows"):
        ParquetLoader(path, 5).load_state_dict(
            {key: state[key] for key in ("version", "seed", "shuffle", "fingerprint")}
        )


def test_the_ranks_that_have_rows_left_take_one_batch_more_when_they_join(path):
    loaders = world(path, 4, 10, tail="join")
    batches = [[len(batch["id"]) for batch in loader] for loader in loaders]
    assert (
        [len(loader) for loader in loaders] == [len(sizes) for sizes in batches] == [26, 26, 26, 25]
    )
    assert all(size > 0 for sizes in batches for size in sizes)
    assert sum(map(sum, batches)) == ROWS
    rows = {loader.state_dict()["rows"] for loader in loaders[:3]}
    assert rows == {0}


def test_a_loader_can_be_pickled(path):
    loader = ParquetLoader(path, 64, seed=4, columns=["id"])
    some(loader, 2)
    loader.load_state_dict(loader.state_dict())
    other = pickle.loads(pickle.dumps(loader))
    assert rest(other) == rest(loader)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("tail", ["keep", "drop_last", "pad"])
def test_workers_of_a_dataloader_see_every_row_once_in_as_many_batches(path, workers, tail):
    import torch

    ranks = [
        ParquetLoader(path, 16, rank=rank, size=2, tail=tail, framework="torch")
        for rank in range(2)
    ]
    plain = [[len(batch["id"]) for batch in loader] for loader in ranks]
    seen, sizes = [], []
    for loader in ranks:
        loader.set_epoch(0)
        batches = list(
            torch.utils.data.DataLoader(
                loader.as_torch_dataset(), batch_size=None, num_workers=workers
            )
        )
        sizes.append([len(batch["id"]) for batch in batches])
        assert len(loader) == len(batches)
        for batch in batches:
            kept = batch["_weights"] > 0 if tail == "pad" else slice(None)
            seen.extend(batch["id"][kept].tolist())
    assert sizes == plain
    assert len(seen) == len(set(seen)) == (ROWS // 32 * 32 if tail == "drop_last" else ROWS)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_iteration_of_a_dataloader_with_workers_is_the_next_epoch(path, persistent):
    import torch

    dataset = ParquetLoader(path, 100, framework="torch").as_torch_dataset()
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=persistent
    )
    epochs = [[batch["id"].tolist() for batch in loader] for _ in range(3)]
    assert len({json.dumps(epoch) for epoch in epochs}) == 3
    dataset.set_epoch(1)
    assert [batch["id"].tolist() for batch in loader] == epochs[1]


def test_worker_processes_continue_where_they_were(path, monkeypatch):
    import torch
    from torch.utils.data import _utils

    def worker(number, of=3):
        info = _utils.worker.WorkerInfo(id=number, num_workers=of, seed=0, dataset=None)
        monkeypatch.setattr(_utils.worker, "_worker_info", info)
        return ParquetLoader(path, 16, framework="torch").as_torch_dataset()

    def ids(batches):
        return [batch["id"].tolist() for batch in batches]

    for number in range(3):
        whole = ids(worker(number))
        for done in range(len(whole) + 1):
            dataset = worker(number)
            epoch = iter(dataset)
            for _ in range(done):
                next(epoch)
            state = dataset.state_dict() if done else None
            other = worker(number)
            if state is not None:
                other.load_state_dict(state)
            assert ids(other) == whole[done:]
    with pytest.raises(ValueError, match="the state is of 3 workers, here are 2"):
        worker(0, of=2).load_state_dict(state)
    assert torch is not None
