# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Arrow columns to arrays and back."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from farandole.spark.common.model.arrow_arrays import (
    VECTOR_TYPE,
    column_fill,
    column_to_array,
    to_spark_vectors,
)


def test_numbers_and_booleans_become_one_axis():
    assert column_to_array(pa.array([1, 2, 3], pa.int16()), "c").tolist() == [1, 2, 3]
    assert column_to_array(pa.array([True, False]), "c").tolist() == [True, False]
    assert column_to_array(pa.array([Decimal("1.5"), Decimal("2.5")]), "c").tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.int64()), pa.list_(pa.float64(), 2)]
)
def test_lists_of_one_length_become_a_matrix(kind):
    array = pa.array([[1, 2], [3, 4], [5, 6]], kind)
    assert column_to_array(array, "c").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert column_to_array(array.slice(1, 2), "c").tolist() == [[3, 4], [5, 6]]


def test_dense_and_sparse_vectors_mix():
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [0, 2], "values": [4.0, 5.0]}
    nothing = {"type": 0, "size": 3, "indices": [], "values": []}
    array = pa.array([dense, sparse, nothing, dense], VECTOR_TYPE)
    expected = [[1, 2, 3], [4, 0, 5], [0, 0, 0], [1, 2, 3]]
    assert column_to_array(array, "c").tolist() == expected
    assert column_to_array(array.slice(1, 2), "c").tolist() == expected[1:3]
    assert column_to_array(array.take(pa.array([0, 3])), "c").tolist() == [[1, 2, 3], [1, 2, 3]]


def test_vectors_go_out_as_they_came_in():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = to_spark_vectors(matrix)
    assert array.type == VECTOR_TYPE
    assert array.to_pylist()[1] == {
        "type": 1,
        "size": None,
        "indices": None,
        "values": [3.0, 4.0, 5.0],
    }
    assert column_to_array(array, "c").tolist() == matrix.tolist()
    assert len(to_spark_vectors(np.empty((0, 3)))) == 0
    assert to_spark_vectors(np.empty((2, 0))).to_pylist()[1]["values"] == []


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (pa.array([1, None]), "column 'c' has nulls: 1 of 2 rows"),
        (pa.array([[1], [1, 2]]), "column 'c' has rows of different length: 1, 2"),
        (pa.array(["a"]), "column 'c' has type string, which no tensor can hold"),
    ],
)
def test_a_value_that_no_array_can_hold_is_refused_with_its_column(array, told):
    with pytest.raises(ValueError, match=told):
        column_to_array(array, "c")


def test_dates_times_and_nested_lists_become_what_preparation_makes_of_them():
    import datetime as dt

    days = pa.array([dt.date(1970, 1, 3), dt.date(1969, 12, 31)])
    assert column_to_array(days, "d").tolist() == [2, -1]
    moment = dt.datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001 - Spark's are without a zone
    assert column_to_array(pa.array([moment], pa.timestamp("us")), "t").tolist() == [1_000_000]
    nested = column_to_array(pa.array([[[1.0, 2.0], [3.0, 4.0]]] * 2), "n")
    assert nested.shape == (2, 2, 2)


def test_a_fill_takes_the_place_of_nulls_and_nan():
    assert column_to_array(
        pa.array([1.0, None, float("nan")]), "x", column_fill(5, "x")
    ).tolist() == [
        1.0,
        5.0,
        5.0,
    ]
    assert column_to_array(pa.array([[1, None], [3, 4]]), "x", column_fill(0, "x")).tolist() == [
        [1, 0],
        [3, 4],
    ]
    odd = {"type": 1, "size": None, "indices": None, "values": [1.0, float("nan")]}
    sparse = {"type": 0, "size": 2, "indices": [1], "values": [float("nan")]}
    assert column_to_array(
        pa.array([odd, sparse], VECTOR_TYPE), "x", column_fill(7, "x")
    ).tolist() == [[1, 7], [0, 7]]
    assert column_to_array(
        pa.array([odd, odd, sparse], VECTOR_TYPE).slice(1), "x", column_fill(7, "x")
    ).tolist() == [
        [1, 7],
        [0, 7],
    ]


def test_a_fill_is_what_preparation_makes_of_it_for_every_type():
    import datetime as dt

    half = column_fill(0.5, "x")
    assert column_to_array(pa.array([1, 2]), "x", half).tolist() == [1, 2], "nothing is missing"
    with pytest.raises(ValueError, match="column 'x' has nulls: 1 of 2 rows"):
        column_to_array(pa.array([1, None]), "x", half)
    with pytest.raises(
        ValueError, match=r"column 'x' is int64, which cannot hold the value of fill: 0\.5"
    ):
        column_to_array(pa.array([1, None]), "x", column_fill({"x": 0.5}, "x"))
    assert column_to_array(pa.array([True, None]), "x", column_fill(False, "x")).tolist() == [
        True,
        False,
    ]
    assert column_to_array(
        pa.array([Decimal("1.5"), None]), "x", column_fill({"*": 2}, "x")
    ).tolist() == [
        1.5,
        2.0,
    ]
    day = column_fill({"x": "1970-01-03", "*": 0}, "x")
    assert column_to_array(pa.array([dt.date(1970, 1, 2), None]), "x", day).tolist() == [1, 2]
    assert column_to_array(
        pa.array([1.0, float("nan")]), "y", column_fill({"x": 1, "*": 3}, "y")
    ).tolist() == [
        1.0,
        3.0,
    ]
    assert column_fill({"x": 1}, "y") is None
    assert column_fill(None, "y") is None
