# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Plain values as bytes: all of them come back as they were, and no bytes run code."""

import json
import math
import pickle
import random

import numpy as np
import pytest

from farandole.numpy.plain_value_exchange import pack_plain, unpack_plain

VALUES = [
    None,
    True,
    0,
    -(2**70),
    1.5,
    math.inf,
    "text with a \0 and \N{SNOWMAN}",
    b"",
    b"\0\xff" * 9,
    [],
    (),
    {},
    [1, [2.0, ("three", b"four", None)]],
    {"a": {1: (2,), None: [3]}, "tuple": "not a tuple", "array": {"bytes": 7}},
    np.float32(0.25),
    np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
    np.array(True),
    np.zeros((0, 4)),
    {"best": b"x" * 100_000, "history": [{"loss": 0.1}] * 3},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back(value):
    back = unpack_plain(pack_plain(value))
    assert type(back) is type(value)
    if isinstance(value, np.ndarray):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert np.array_equal(back, value)
        back[...] = 0  # may be written to
    else:
        assert back == value


def test_not_a_number_comes_back():
    assert math.isnan(unpack_plain(pack_plain([math.nan]))[0])


class Other:
    def __eq__(self, other):
        return isinstance(other, Other)

    __hash__ = None


@pytest.mark.parametrize(
    "value",
    [Other(), {1, 2}, np.array([Other()], object), Other, len],
    ids=lambda one: type(one).__name__,
)
def test_an_error_names_the_place_of_a_value_that_is_not_plain(value):
    with pytest.raises(
        TypeError,
        match=rf"value\['rows'\]\[1\] is a {type(value).__name__}, which is not a plain value",
    ):
        pack_plain({"rows": [0, value]})


def test_other_values_have_a_form_of_the_callers():
    assert unpack_plain(
        pack_plain([Other()], lambda _: "other"), lambda told: Other() if told == "other" else None
    ) == [Other()]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps([1, 2]),
        b"[1, 2",
        b"[1, 2]",
        b'{"bytes":9}\0short',
        b'{"bytes":-1}\0',
        b'{"bytes":"9"}\0',
        b'{"array":["<f8",[4],false]}\0short',
        b'{"array":["O",[1],false]}\0' + bytes(8),
        b'{"array":["<f8",[-1,-8],false]}\0' + bytes(64),
        b'{"array":["<f8",[4611686018427387904,4],false]}\0',
        b'{"array":["no type",[1],false]}\0' + bytes(8),
        b'{"dict":[[[],1]]}\0',
        b'{"dict":[1]}\0',
        b'{"tuple":1,"bytes":0}\0',
        b'{"set":[1]}\0',
        b'{"other":1}\0',
        b"[" * 100_000 + b"\0",
        b'"\xff"\0',
    ],
    ids=range(19),
)
def test_garbage_is_an_error(data):
    with pytest.raises(ValueError):
        unpack_plain(data)


def test_changed_bytes_give_values_or_errors():
    draw = random.Random(3)
    whole = pack_plain({"a": [1, 2.5, ("x", b"yz", np.arange(3))], "b": None})
    for _ in range(3_000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            unpack_plain(data[: draw.randint(0, len(data))] if draw.random() < 0.3 else data)
        except ValueError:
            continue


def test_the_text_is_json_without_a_zero_byte():
    text, _, rest = pack_plain(["\0", b"\0"]).partition(b"\0")
    assert json.loads(text) == ["\0", {"bytes": 1}]
    assert rest == b"\0"
