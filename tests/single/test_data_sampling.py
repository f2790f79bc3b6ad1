# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Weighted draws, batches by length and mixes: what they choose, on all ranks alike, and how
they resume.
"""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from farandole.data import (
    LengthLoader,
    MixedLoader,
    Pad,
    ParquetLoader,
    WeightedLoader,
    prepare_data,
)
from farandole.data.loaders.pools import cut_into_balanced_batches

ROWS = 1000


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(0.05, ROWS), 100)
    table = pa.table({
        "id": range(ROWS),
        "tokens": [[row] * length for row, length in enumerate(lengths.tolist())],
        "label": (np.arange(ROWS) % 50 == 0).astype(np.int64),
        "weight": np.arange(ROWS) / 100.0,
    })  # fmt: skip
    pad = {"tokens": Pad(-1, max_length=100, buckets=100)}
    return prepare_data(table, tmp_path_factory.mktemp("data"), ragged=pad).train_url


def plain(url, batch_size, **options):
    return ParquetLoader(url, batch_size, ["id", "label", "weight"], seed=3, **options)


def by_length(url, pool=256, batch_size=16, columns=("id", "tokens"), even="rows", **options):
    return LengthLoader(
        ParquetLoader(url, pool, list(columns), seed=3, **options), "tokens", batch_size, even=even
    )


def weighted(url, **options):
    return WeightedLoader(plain(url, 200, **options), 50, weights="weight")


def mixed(url, **options):
    loaders = {"one": plain(url, 10, **options), "two": weighted(url, **options)}
    return MixedLoader(loaders, {"one": 3, "two": 1}, steps=7)


def seen(batches):
    return [batch["id"].tolist() for batch in batches]


def test_rows_are_drawn_in_proportion_to_their_weights(url):
    loader = weighted(url)
    assert len(loader) == 5
    times = np.zeros(ROWS)
    for _ in range(40):
        batches = seen(loader)
        assert [len(batch) for batch in batches] == [50] * 5
        for batch in batches:
            np.add.at(times, batch, 1)
    assert times[0] == 0  # of weight 0
    expected = 40 * 250 * np.arange(ROWS) / (ROWS * (ROWS - 1) / 2)
    tenths = [
        times[start : start + 100].sum() / expected[start : start + 100].sum()
        for start in range(100, ROWS, 100)
    ]
    assert tenths == pytest.approx([1.0] * 9, abs=0.06)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rare_classes_get_the_same_share_as_frequent_ones(url, framework):
    loader = WeightedLoader(plain(url, 250, framework=framework), 40, balanced="label")
    for batch in loader:
        assert isinstance(batch["label"], torch.Tensor if framework == "torch" else np.ndarray)
        assert 19 <= int(batch["label"].sum()) <= 21
    by_value = WeightedLoader(
        plain(url, 250, framework=framework), 40, weights={"label": {0: 0, 1: 2.5}}
    )
    assert all(batch["label"].all() for batch in by_value)


def test_a_pool_that_is_padded_or_short_has_no_row_that_does_not_exist(url):
    padded = WeightedLoader(plain(url, 300, size=2, rank=1, tail="pad"), 60, balanced="label")
    batches = list(padded)
    assert [len(batch["id"]) for batch in batches] == [60, 40]
    assert all((batch["_weights"] == 1).all() for batch in batches)
    short = WeightedLoader(plain(url, 600), 60, weights="weight")
    assert [len(batch) for batch in seen(short)] == [60, 40]
    assert seen(WeightedLoader(plain(url, 999, size=2, rank=1), 5, weights="weight"))[0]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_padding_is_in_no_class_and_has_no_share(url, framework):
    def last(batch_size, size, rank, **how):
        pools = plain(
            url, batch_size, size=size, rank=rank, tail="pad", shuffle=False, framework=framework
        )
        return list(WeightedLoader(pools, 200, **how))[-1]

    # The padding repeats a row of one class, which must not make that class rarer.
    batch = last(1500, 1, 0, balanced="label")
    assert len(batch["id"]) == round(200 * 1000 / 1500)
    assert int(batch["label"].sum()) == pytest.approx(len(batch["id"]) / 2, abs=1)
    # 1000 rows are one whole step of 3 * 333, and one row for the first rank.
    assert [len(last(333, 3, rank, weights="weight")["id"]) for rank in range(3)] == [1, 0, 0]
    assert len(last(333, 3, 2, balanced="label")["id"]) == 0
    assert len(last(333, 3, 2, weights={"label": {0: 1, 1: 2}})["id"]) == 0


def test_batches_hold_rows_of_similar_length_and_each_row_once(url):
    plain_values = sum(
        batch["tokens"].size for batch in ParquetLoader(url, 16, ["id", "tokens"], seed=3)
    )
    loader = by_length(url)
    batches = list(loader)
    assert len(batches) == 64 - 1  # 3 pools of 256 rows, and one of 232
    assert sorted(row for batch in seen(batches) for row in batch) == list(range(ROWS))
    values = sum(batch["tokens__length"].sum() for batch in batches)
    padded = sum(batch["tokens"].size for batch in batches)
    assert values < padded < 1.25 * values < 0.5 * plain_values
    for batch in batches:
        for row, tokens, length in zip(
            batch["id"], batch["tokens"], batch["tokens__length"], strict=True
        ):
            assert tokens.tolist() == [row] * length + [-1] * (len(tokens) - length)
    widths = [batch["tokens"].shape[1] for batch in batches[:16]]
    assert widths != sorted(widths)
    assert seen(loader) != seen(batches)


def test_batches_with_even_values_have_about_the_same_size_with_padding(url):
    rows, values = by_length(url), by_length(url, even="values")
    batches = list(values)
    assert len(batches) == len(values) == len(rows)
    assert sorted(row for batch in seen(batches) for row in batch) == list(range(ROWS))
    most = max(batch["tokens"].size for batch in batches)
    assert most < 0.6 * max(batch["tokens"].size for batch in rows)
    assert most <= 16 * 100
    rows_of = [len(batch["id"]) for batch in batches]
    assert min(rows_of) < 8
    assert max(rows_of) > 32


def test_pieces_are_as_even_as_can_be():
    random = np.random.default_rng(0)
    for _ in range(200):
        widths = -np.sort(-random.integers(1, 40, random.integers(1, 60)))
        count = int(random.integers(1, 20))
        pieces = cut_into_balanced_batches(widths, count)
        assert (len(pieces), sum(pieces)) == (count, len(widths))
        assert min(pieces) > 0 or len(widths) < count
        starts = np.cumsum([0, *pieces[:-1]])
        most = max(size * widths[start] for size, start in zip(pieces, starts, strict=True) if size)
        assert most <= widths[0] * -(-len(widths) // count)
    assert cut_into_balanced_batches(np.array([8, 4, 2, 1, 1]), 3) == [1, 2, 2]


@pytest.mark.parametrize("tail", ["keep", "pad", "drop_last"])
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_have_the_same_number_of_batches(url, tail, size):
    for maker in (by_length, weighted):
        ranks = [maker(url, tail=tail, size=size, rank=rank) for rank in range(size)]
        counts = [len(loader) for loader in ranks]
        batches = [list(loader) for loader in ranks]
        assert {len(one) for one in batches} == set(counts)
        assert len(set(counts)) == 1
        if maker is by_length and tail == "keep":
            assert sorted(row for one in batches for batch in seen(one) for row in batch) == list(
                range(ROWS)
            )
            widths = np.array([[batch["tokens"].shape[1] for batch in one] for one in batches])
            assert np.corrcoef(widths[0], widths[-1])[0, 1] > 0.9


@pytest.mark.parametrize("maker", [weighted, by_length, mixed])
def test_a_state_resumes_after_any_batch(url, maker):
    loader, whole, states = maker(url), [], []
    for _ in range(2):
        for batch in loader:
            whole.append(batch["id"].tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    length = len(loader)
    for done in range(1, len(whole)):
        again = maker(url)
        again.load_state_dict(states[done - 1])
        left = (-done) % length or length
        assert len(again) == left
        assert seen(again) == whole[done : done + left]
        if done < length:
            assert seen(again) == whole[done + left : done + left + length]


def test_a_state_fits_another_world_only_between_pools(url):
    loader = by_length(url)
    batches = iter(loader)
    first = [next(batches)["id"].tolist() for _ in range(16)]
    between = loader.state_dict()
    next(batches)
    others = [by_length(url, size=2, rank=rank, batch_size=8, pool=100) for rank in range(2)]
    for other in others:
        with pytest.raises(
            ValueError, match=r"within a pool.*\[1, 256, 16\] there, \[2, 100, 8\] here"
        ):
            other.load_state_dict(loader.state_dict())
        other.load_state_dict(between)
    rest = [row for other in others for batch in seen(other) for row in batch]
    assert sorted(rest + [row for batch in first for row in batch]) == list(range(ROWS))
    with pytest.raises(ValueError, match="not a state of WeightedLoader: LengthLoader 1"):
        weighted(url).load_state_dict(between)


def test_a_mix_takes_from_each_loader_its_share_and_continues_after_their_epochs(url):
    loaders = {"a": plain(url, 100), "b": plain(url, 7)}
    mix = MixedLoader(loaders, {"a": 1, "b": 3}, steps=50)
    sizes = [len(batch["id"]) for _ in range(2) for batch in mix]
    for step in range(1, 101):
        assert abs(sizes[:step].count(100) - step / 4) <= 1
    assert sizes.count(100) == 25  # two epochs and a half
    assert loaders["a"].epoch == 3
    mix.close()
    whole = MixedLoader({"a": plain(url, 100), "b": plain(url, 50, framework="numpy")})
    assert len(whole) == 20
    batches = list(whole)
    assert {len(batch["id"]) for batch in batches} == {150}
    assert len({row for batch in batches for row in batch["id"][100:].tolist()}) == ROWS
    whole.close()
    tensors = MixedLoader(
        {"a": plain(url, 2, framework="torch"), "b": plain(url, 3, framework="torch")}, steps=1
    )
    assert next(iter(tensors))["id"].shape == (5,)
    tensors.close()


def test_a_mix_without_ratios_drops_no_column(url):
    padded = {"a": plain(url, 10), "b": plain(url, 10, tail="pad")}
    with pytest.raises(
        ValueError, match=r"without ratios.*those of 'b' have '_weights', those of 'a' do not"
    ):
        MixedLoader(padded)
    lengths = {"a": by_length(url), "b": ParquetLoader(url, 10, ["id", "tokens"])}
    with pytest.raises(
        ValueError, match=r"without ratios.*those of 'a' have 'tokens__length', those of 'b' do not"
    ):
        MixedLoader(lengths)
    MixedLoader(padded, {"a": 1, "b": 1}).close()
    both = MixedLoader({"a": plain(url, 600, tail="pad"), "b": plain(url, 10, tail="pad")}, steps=2)
    assert [batch["_weights"].sum() for batch in both] == [610, 410]
    both.close()
    more = plain(
        url,
        10,
        transformation_fn=lambda batch: {"id": batch["id"].to_numpy(), "y": batch["id"].to_numpy()},
    )
    mix = MixedLoader({"a": plain(url, 10), "b": more})
    with pytest.raises(
        ValueError,
        match="joined must have the same columns: 'b' has id, y, 'a' has id, label, weight",
    ):
        next(iter(mix))
    mix.close()


def test_loaders_are_pickled_with_their_place(url):
    for maker in (weighted, by_length):
        loader = maker(url)
        next(iter(loader))
        assert seen(pickle.loads(pickle.dumps(loader))) == seen(loader)


def test_an_invalid_argument_names_the_column_the_loader_or_the_option(url):
    with pytest.raises(
        ValueError,
        match="weights names column 'age', which the loader does not read: id, label, we",
    ):
        WeightedLoader(plain(url, 100), 10, weights="age")
    with pytest.raises(ValueError, match="needs weights= or balanced=, and not both"):
        WeightedLoader(plain(url, 100), 10)
    with pytest.raises(ValueError, match="weights has no weight for the value 1 of column 'label'"):
        list(WeightedLoader(plain(url, 1000), 10, weights={"label": {0: 1}}))
    with pytest.raises(ValueError, match="all 1000 rows of a pool have weight 0 in column 'label'"):
        list(WeightedLoader(plain(url, 1000), 10, weights={"label": {0: 0, 1: 0}}))
    with pytest.raises(
        ValueError, match=r"weights of column 'label' must be finite numbers, 0 or more: -1\.0"
    ):
        list(WeightedLoader(plain(url, 1000), 10, weights={"label": {0: -1, 1: 0}}))
    with pytest.raises(
        ValueError,
        match="column 'id' is not a ragged column that the loader reads, these are: tokens",
    ):
        LengthLoader(ParquetLoader(url, 100), "id", 10)
    with pytest.raises(ValueError, match="pool: 100 rows are fewer than 200"):
        by_length(url, pool=100, batch_size=200)
    with pytest.raises(ValueError, match="even must be rows or values: tokens"):
        by_length(url, even="tokens")
    with pytest.raises(ValueError, match="batch_size must be a whole number, 1 or more: 0"):
        WeightedLoader(plain(url, 100), 0, weights="weight")
    with pytest.raises(TypeError, match="loader must be a ParquetLoader: str"):
        WeightedLoader(url, 10, weights="weight")
    two = {"a": plain(url, 100), "b": plain(url, 100)}
    for ratios, told in (
        ({"a": 1}, "these names are missing or unknown: b"),
        ({"a": 1, "b": 0}, "the ratio of 'b' must be a number above 0: 0"),
    ):
        with pytest.raises(ValueError, match=told):
            MixedLoader(two, ratios)
    with pytest.raises(ValueError, match="same columns: 'b' has id, 'a' has id, label, weight"):
        MixedLoader({"a": plain(url, 100), "b": ParquetLoader(url, 100, ["id"])})
    with pytest.raises(ValueError, match="the loader 'a' has no batches"):
        MixedLoader({"a": plain(url, 2000, tail="drop_last")})
    with pytest.raises(ValueError, match="the loader 'a' has tail='join'"):
        MixedLoader({"a": plain(url, 200, tail="join")})
    with pytest.raises(
        ValueError, match="the state belongs to other loaders: one, two there, a, b here"
    ):
        MixedLoader(two).load_state_dict(mixed(url).state_dict())
    with pytest.raises(ValueError, match="column 'weight' has different types, see cast"):
        next(
            iter(MixedLoader({"a": plain(url, 5), "b": plain(url, 5, cast={"weight": "float32"})}))
        )
