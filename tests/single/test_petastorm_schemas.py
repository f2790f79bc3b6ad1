# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Schemas that petastorm has pickled into data sets are read, and nothing in them is executed.

`petastorm_schemas` has a schema that petastorm 0.13.1 pickled with each protocol
(`tests/clients/petastorm/programs/write_data_sets.py`).
"""

import io
import os
import pickle
import random
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import petastorm
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from petastorm._pickled_schemas import read_pickled_schema
from petastorm.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import (
    UNISCHEMA_KEY,
    PetastormMetadataError,
    get_schema_from_dataset_url,
)
from petastorm.unischema import Unischema, UnischemaField

STORED = Path(__file__).parent / "petastorm_schemas"


def stored_schema(protocol):
    return (STORED / f"protocol-{protocol}.pickle").read_bytes()


class ProgramInPickle:
    """Its pickle runs a command in those who unpickle it."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_schema_of_petastorm_is_read_from_every_kind_of_pickle(protocol):
    schema = read_pickled_schema(stored_schema(protocol), "file")
    assert schema._name == "EveryCodec"
    assert len(schema.fields) == 22
    assert schema.points == UnischemaField("points", np.float64, (None, 3), None, True)
    assert schema.fields["price"].numpy_dtype is Decimal
    assert [str(schema.fields[name].codec) for name in ("price", "jpeg", "packed", "plain_id")] == [
        "ScalarCodec(DecimalType())",
        "CompressedImageCodec('jpeg', 90)",
        "CompressedNdarrayCodec()",
        "None",
    ]


def test_a_type_of_spark_is_made_when_someone_writes():
    schema = read_pickled_schema(stored_schema(4), "file")
    assert schema.as_spark_schema()["price"].dataType.simpleString() == "decimal(10,3)"
    assert pickle.loads(pickle.dumps(schema)).fields == schema.fields


def test_former_names_of_petastorm_and_of_sparks_named_tuples_are_known():
    field = (
        b"cpyspark.serializers\n_restore\n(VUnischemaField\n(Vname\nVnumpy_dtype\nVshape\nVcodec\n"
        b"Vnullable\nt(Vx\ncnumpy\nunicode_\n(tccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit."
        b"codecs\nNdarrayCodec\nc__builtin__\nobject\nNtRI01\nttR"
    )
    data = (
        b"ccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit.unischema\nUnischema\nc__builtin__\n"
        b"object\nNtR(dV_name\nVold\nsV_fields\nccollections\nOrderedDict\n((lp0\n(lp1\nVx\na"
        + field
        + b"aatRsb."
    )
    schema = read_pickled_schema(data, "file")
    assert schema.fields["x"] == UnischemaField("x", np.str_, (), None, True)
    assert isinstance(schema.fields["x"].codec, NdarrayCodec)


def hostile_values(witness):
    program, spark_type = ProgramInPickle(witness), ScalarCodec(ProgramInPickle(witness))
    return {
        "petastorm.unischema.Unischema, found posix.system": program,
        "petastorm.unischema.Unischema, found list": [program],
        "a type of NumPy, found posix.system": schema_of(UnischemaField("x", program, ())),
        "a class of petastorm.codecs, found posix.system": schema_of(
            UnischemaField("x", np.int8, (), program)
        ),
        "a class of pyspark.sql.types, found posix.system": schema_of(
            UnischemaField("x", np.int8, (), spark_type)
        ),
    }


def schema_of(field):
    return Unischema("s", [field])


@pytest.mark.parametrize("reason", list(hostile_values("")))
def test_what_a_schema_may_not_contain_is_named_and_not_executed(tmp_path, reason):
    witness, data_set = tmp_path / "witness", tmp_path / "rows"
    pickled = pickle.dumps(hostile_values(witness)[reason])
    data_set.mkdir()
    pq.write_table(pa.table({"x": [1]}), data_set / "part.parquet")
    schema = pa.schema([("x", pa.int64())], {UNISCHEMA_KEY: pickled})
    pq.write_metadata(schema, data_set / "_common_metadata")
    for make in (petastorm.make_reader, petastorm.make_batch_reader):
        with pytest.raises(pickle.UnpicklingError, match="rows/_common_metadata") as error:
            make(data_set.as_uri())
        assert not witness.exists()
        assert f"expected {reason}" in str(error.value)


def test_a_pickle_that_changes_a_class_changes_nothing():
    attack = b"cpetastorm.unischema\nUnischema\n}(V__init__\ncos\nsystem\nub."  # BUILD on the class
    with pytest.raises(pickle.UnpicklingError, match="no object"):
        read_pickled_schema(attack, "file")


def test_a_pickle_that_grows_without_end_is_an_error_within_a_moment():
    nested = b"cpyspark.sql.types\nArrayType\n)\x81}(VelementType\nVx\nub"
    for _ in range(40):
        nested = (
            b"cpyspark.sql.types\nArrayType\n)\x81}(VelementType\n"
            + nested
            + b"p1\nVcontainsNull\ng1\nub"
        )
    started = time.monotonic()
    codec = b"cpetastorm.codecs\nScalarCodec\n)\x81}V_spark_type\n" + nested + b"sb"
    field = b"cpetastorm.unischema\nUnischemaField\n(Vx\ncnumpy\nint8\n)" + codec + b"\x89t\x81"
    data = b"cpetastorm.unischema\nUnischema\n)\x81}(V_name\nVs\nV_fields\n}Vx\n" + field + b"sub."
    with pytest.raises(pickle.UnpicklingError, match="containsNull"):
        read_pickled_schema(data, "file")
    assert time.monotonic() - started < 30


DOUBLED = b")p0\n" + b"".join(b"g%d\n\x86p%d\n" % (number, number + 1) for number in range(60))
"""A tuple whose text has 2**60 characters."""


@pytest.mark.parametrize(
    "arguments",
    [
        DOUBLED + b"cnumpy\nint8\n)N\x89",
        b"Vx\n" + DOUBLED + b")N\x89",
        b"Vx\ncnumpy\nint8\n" + DOUBLED + b"N\x89",
        b"Vx\ncnumpy\nint8\n)N" + DOUBLED,
        b"Vx\ncnumpy\ndtype\n" + DOUBLED + b"\x85R)N\x89",
        b"Vx\ncnumpy\nint8\n)cpetastorm.codecs\nCompressedImageCodec\n)\x81}V_image_codec\n"
        + DOUBLED
        + b"sb\x89",
    ],
    ids=["name", "type", "shape", "nullable", "name of a type", "image format"],
)
def test_no_message_has_the_text_of_a_value_that_grows(arguments):
    started = time.monotonic()
    field = b"cpetastorm.unischema\nUnischemaField\n(" + arguments + b"t\x81"
    data = b"cpetastorm.unischema\nUnischema\n)\x81}(V_name\nVs\nV_fields\n}Vx\n" + field + b"sub."
    with pytest.raises(pickle.UnpicklingError) as caught:
        read_pickled_schema(data, "file")
    assert len(str(caught.value)) < 500
    assert time.monotonic() - started < 30


def test_a_name_that_is_no_string_is_refused_before_it_is_hashed():
    deep = b")" + b"\x85" * 200_000 + b"Vx\n\x93"
    with pytest.raises(pickle.UnpicklingError, match="no string"):
        read_pickled_schema(b"\x80\x04" + deep + b".", "file")


def test_a_pickle_that_no_schema_needs_is_refused_by_its_size():
    with pytest.raises(pickle.UnpicklingError, match="at most"):
        read_pickled_schema(b"N" * (1 << 21) + b".", "file")


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_damaged_schema_is_an_error_of_unpickling(protocol):
    seed = random.randrange(1 << 32)
    generator, good = random.Random(seed), stored_schema(protocol)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        damaged = bytes(data[: generator.choice([len(data), generator.randrange(len(data))])])
        try:
            read_pickled_schema(damaged, "file")
        except pickle.UnpicklingError:
            continue
        except Exception as error:  # noqa: BLE001 - any other error is what is looked for
            pytest.fail(f"seed {seed}: {error!r} for {damaged!r}")


def test_a_data_set_without_a_schema_is_an_error_that_names_it(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "part.parquet")
    with pytest.raises(PetastormMetadataError, match=tmp_path.name):
        get_schema_from_dataset_url(tmp_path.as_uri())


def test_fields_are_equal_whatever_their_codecs():
    fields = [UnischemaField("x", np.uint8, (2, 2), codec) for codec in (None, NdarrayCodec())]
    assert fields[0] == fields[1]
    assert len(set(fields)) == 1
    assert fields[0] != UnischemaField("x", np.uint8, (2, 3))


def test_views_have_the_order_of_the_schema_and_refuse_strangers():
    fields = [UnischemaField(name, np.int8, ()) for name in ("abc", "b", "ab")]
    schema = Unischema("s", fields)
    assert list(schema.create_schema_view(["ab.?"]).fields) == ["abc", "ab"]
    assert list(schema.create_schema_view([fields[2], "a.*"]).fields) == ["ab", "abc"]
    assert schema.create_schema_view(["a"]).fields == {}
    with pytest.raises(ValueError, match="does not belong to the schema"):
        schema.create_schema_view([UnischemaField("c", np.int8, ())])


@pytest.mark.parametrize(
    ("codec", "value", "message"),
    [
        (NdarrayCodec(), np.zeros((2, 2), np.float64), "Unexpected type of x feature"),
        (NdarrayCodec(), np.zeros((2, 3), np.uint8), "Unexpected dimensions of x feature"),
        (NdarrayCodec(), [[1, 2], [3, 4]], "got list"),
        (CompressedImageCodec(), np.zeros((2, 2, 2), np.uint8), "Unexpected dimensions"),
    ],
)
def test_a_value_of_another_type_or_shape_is_not_encoded(codec, value, message):
    with pytest.raises(ValueError, match=message):
        codec.encode(UnischemaField("x", np.uint8, (2, 2), codec), value)


def test_an_array_of_objects_is_not_unpickled():
    file = io.BytesIO()
    np.save(file, np.array([ProgramInPickle("/nothing")], object), allow_pickle=True)
    field = UnischemaField("x", np.object_, (1,), NdarrayCodec())
    with pytest.raises(ValueError, match="allow_pickle=False"):
        field.codec.decode(field, file.getvalue())
