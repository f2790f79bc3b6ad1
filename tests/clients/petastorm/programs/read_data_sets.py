# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reads data sets in many ways with the petastorm of this process, whichever it is, and prints a
line of JSON for each: its name, and its rows and batches or its error.
"""

import json
import sys
import warnings

import numpy as np
import petastorm
import torch
from petastorm import TransformSpec, make_batch_reader, make_reader
from petastorm.predicates import in_lambda, in_negate, in_pseudorandom_split, in_reduce, in_set
from petastorm.pytorch import BatchedDataLoader, DataLoader
from petastorm.transform import edit_field
from value_descriptions import describe

sys.modules["jax"] = None  # TensorFlow uses it if it is there, but it needs another NumPy
BASE = sys.argv[1]
CODECS, PLAIN, PARTITIONED = (
    f"file://{BASE}/{name}" for name in ("codecs", "plain", "partitioned")
)
NUMBERS = ["id", "f", "g", "flag", "vector", "byte"]
FILES = [f"{PLAIN}/part-{number}.parquet" for number in (2, 0)]
# Threads of the real petastorm sometimes return row groups in another order than that of the plan.
POOL = "thread" if hasattr(petastorm, "__farandole_version__") else "dummy"
IN_ORDER = {"shuffle_row_groups": False, "reader_pool_type": POOL}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def read(make, url, *arguments, **options):
    with make(url, *arguments, **options) as reader:
        return list(reader)


def load(loader):
    with loader:
        return list(loader)


def from_plain(**options):
    options = {"schema_fields": NUMBERS, **IN_ORDER, **options}
    return make_batch_reader(PLAIN, **options)


def from_codecs(*fields, **options):
    return make_reader(CODECS, schema_fields=list(fields), **IN_ORDER, **options)


def type_name(kind):
    return "bool" if kind is np.bool_ else kind.__name__  # NumPy 2 has another name


@case
def all_rows_of_every_codec():
    return read(make_reader, CODECS, **IN_ORDER)


@case
def all_batches_without_codecs():
    return read(make_batch_reader, PLAIN, **IN_ORDER)


@case
def rows_without_a_stored_schema():
    return read(make_reader, PLAIN, schema_fields=[*NUMBERS, "text", "nulls"], **IN_ORDER)


@case
def batches_of_encoded_columns():
    return read(
        make_batch_reader, CODECS, schema_fields=["id", "name", "matrix", "maybe"], **IN_ORDER
    )


@case
def files_in_the_given_order():
    return read(make_batch_reader, FILES, **IN_ORDER)


@case
def a_field_by_pattern():
    return read(make_reader, CODECS, schema_fields=["i."], **IN_ORDER)


@case
def no_field():
    return read(make_reader, CODECS, schema_fields=["nothing.*"], **IN_ORDER)


@case
def types_of_the_schema():
    with make_reader(CODECS) as coded, make_batch_reader(PLAIN) as plain:
        fields = [*coded.schema.fields.values(), *plain.schema.fields.values()]
        row, batch = next(coded), next(plain)
        names = [[type(each).__name__, each._fields] for each in (row, batch)]
        return names + [
            [each.name, type_name(each.numpy_dtype), each.shape, each.nullable, str(each.codec)]
            for each in fields
        ]


@case
def seeded_order_of_row_groups():
    return read(make_batch_reader, PLAIN, ["id"], POOL, seed=42, num_epochs=2)


@case
def seeded_order_in_parts():
    return read(make_batch_reader, PLAIN, ["id"], POOL, seed=7, shuffle_row_drop_partitions=3)


@case
def rows_in_parts():
    return read(
        make_reader, CODECS, schema_fields=["id"], shuffle_row_drop_partitions=2, **IN_ORDER
    )


@case
def shards():
    shards = [{"cur_shard": each, "shard_count": 4} for each in range(4)]
    return [read(make_batch_reader, PLAIN, ["id"], **shard, **IN_ORDER) for shard in shards]


@case
def seeded_shards():
    shards = [{"cur_shard": each, "shard_count": 2} for each in range(2)]
    return [read(make_reader, CODECS, ["id"], POOL, seed=5, **shard) for shard in shards]


@case
def more_shards_than_row_groups():
    return read(make_batch_reader, PLAIN, cur_shard=0, shard_count=100)


@case
def a_shard_without_a_count():
    return read(make_batch_reader, PLAIN, cur_shard=0)


@case
def endless_epochs():
    with make_batch_reader(PLAIN, schema_fields=["id"], num_epochs=None, **IN_ORDER) as reader:
        return [next(reader) for _ in range(25)]


@case
def no_epochs():
    return read(make_batch_reader, PLAIN, num_epochs=0)


@case
def a_reset_reader():
    with from_plain(schema_fields=["id"], num_epochs=1) as reader:
        first = list(reader)
        reader.reset()
        return first + list(reader)


@case
def a_reset_in_the_middle():
    with from_plain() as reader:
        next(reader)
        reader.reset()


@case
def a_stopped_reader():
    with from_plain() as reader:
        pass
    next(reader)


@case
def rows_of_a_predicate():
    predicate = in_reduce(
        [in_set({3, 8, 40}, "id"), in_negate(in_lambda(["flag"], lambda flag: flag))], any
    )
    return read(make_reader, CODECS, ["id", "flag", "name"], predicate=predicate, **IN_ORDER)


@case
def rows_of_a_split():
    predicate = in_pseudorandom_split([0.3, 0.7], 0, "name")
    return read(make_reader, CODECS, ["id", "name"], predicate=predicate, **IN_ORDER)


@case
def batches_of_a_predicate():
    predicate = in_lambda(["id"], lambda ids: ids % 9 < 2)
    batches = read(make_batch_reader, PLAIN, ["id", "f"], predicate=predicate, **IN_ORDER)
    return [[each.id.astype(np.int64), each.f] for each in batches]  # petastorm makes floats


@case
def a_predicate_of_another_field():
    predicate = in_lambda(["g"], lambda g: g > 0)
    return read(make_batch_reader, PLAIN, ["id"], predicate=predicate, reader_pool_type="dummy")


@case
def transformed_rows():
    def double(row):
        return {**row, "matrix": row["matrix"] * 2, "new": np.float32(row["id"] / 2)}

    spec = TransformSpec(double, [edit_field("new", np.float32, (), False)], removed_fields=["id"])
    return read(make_reader, CODECS, ["id", "matrix"], transform_spec=spec, **IN_ORDER)


@case
def transformed_frames():
    def images(frame):
        frame["image"] = frame["f"].map(lambda f: np.full((2, 3), f, np.float32))
        frame["label"] = (frame["id"] * 2).astype(np.int32)
        return frame.drop(columns=["f", "text", "id"])

    edited = [("image", np.float32, (2, 3), False), ("label", np.int32, (), False)]
    spec = TransformSpec(images, edited, selected_fields=["label", "image", "g"])
    return read(make_batch_reader, PLAIN, ["id", "f", "g", "text"], transform_spec=spec, **IN_ORDER)


@case
def frames_without_a_function():
    spec = TransformSpec(removed_fields=["f", "g"])
    return read(make_batch_reader, PLAIN, NUMBERS, transform_spec=spec, **IN_ORDER)


@case
def a_frame_with_another_column():
    spec = TransformSpec(lambda frame: frame.assign(more=1))
    options = {"transform_spec": spec, "reader_pool_type": "dummy"}
    return read(make_batch_reader, PLAIN, ["id"], **options)


@case
def both_kinds_of_fields():
    TransformSpec(removed_fields=["a"], selected_fields=["b"])


@case
def loaded_batches():
    return load(DataLoader(from_plain(), batch_size=16))


@case
def loaded_batches_of_one_row():
    return load(DataLoader(from_plain(schema_fields=["id", "f"])))


@case
def loaded_batches_over_epochs():
    return load(DataLoader(from_plain(num_epochs=3), batch_size=50))


@case
def loaded_rows():
    fields = ["id", "pixel", "ratio", "flag", "name", "price", "matrix", "png", "count", "packed"]
    rows = from_codecs(*[each for each in fields if each != "packed"])
    return load(DataLoader(rows, batch_size=8))


@case
def loaded_by_a_function():
    def collate(rows):
        return {"sum": sum(int(row["id"]) for row in rows), "rows": len(rows)}

    return load(DataLoader(from_plain(), batch_size=9, collate_fn=collate))


@case
def loaded_twice():
    # Petastorm would repeat the rows of a shorter last batch.
    with DataLoader(from_plain(), batch_size=20) as loader:
        return list(loader) + list(loader)


@case
def loaded_twice_at_once():
    with DataLoader(from_plain(), batch_size=2) as loader:
        first = iter(loader)
        next(first)
        next(iter(loader))


@case
def loaded_strings():
    return load(DataLoader(from_plain(schema_fields=["id", "text"])))


@case
def loaded_nulls():
    return load(DataLoader(from_codecs("id", "maybe")))


@case
def loaded_in_batches():
    return load(BatchedDataLoader(from_plain(), batch_size=16))


@case
def loaded_in_batches_of_rows():
    return load(BatchedDataLoader(from_codecs("id", "matrix", "flag"), batch_size=16))


@case
def loaded_in_batches_by_a_function():
    def to_tensor(values):
        return torch.as_tensor(values).double() + 1

    return load(BatchedDataLoader(from_plain(), batch_size=16, transform_fn=to_tensor))


@case
def shuffled_in_batches():
    torch.manual_seed(11)
    return load(BatchedDataLoader(from_plain(), batch_size=8, shuffling_queue_capacity=20))


@case
def shuffled_ids():
    with DataLoader(from_plain(), batch_size=8, shuffling_queue_capacity=20) as loader:
        batches = list(loader)
    ids = sorted(int(each) for batch in batches for each in batch["id"])
    return [ids, [len(batch["id"]) for batch in batches], ids == list(range(60))]


@case
def shuffled_rows():
    batches = read(make_batch_reader, PLAIN, ["id"], shuffle_rows=True, **IN_ORDER)
    assert [row for each in batches for row in each.id.tolist()] != list(range(60))
    return [sorted(each.id.tolist()) for each in batches]


def tensors(reader):
    from petastorm.tf_utils import make_petastorm_dataset

    with reader:
        return list(make_petastorm_dataset(reader))


@case
def tensorflow_batches():
    columns = [*NUMBERS, "text", "price", "moment", "day"]
    return tensors(from_plain(schema_fields=[each for each in columns if each != "price"]))


@case
def tensorflow_rows():
    fields = ["id", "pixel", "count", "name", "price", "flag", "matrix", "png", "words"]
    return tensors(from_codecs(*fields))


@case
def tensorflow_nulls():
    return tensors(from_codecs("id", "maybe"))


@case
def tensorflow_twice():
    from petastorm.tf_utils import make_petastorm_dataset

    with from_plain() as reader:
        dataset = make_petastorm_dataset(reader)
        return list(dataset) + list(dataset)


@case
def partitions():
    return [
        [each.id, sorted(set(map(str, each.year))), sorted(set(map(str, each.code)))]
        for each in read(make_batch_reader, PARTITIONED, **IN_ORDER)
    ]


@case
def an_unknown_pool():
    return read(make_reader, CODECS, reader_pool_type="none")


@case
def an_unknown_cache():
    return read(make_reader, CODECS, cache_type="none")


def run_case(function):
    try:
        return {"result": describe(function())}
    except Exception as error:
        return {"error": type(error).__name__}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name, function in CASES.items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            print(json.dumps({"case": name, **run_case(function)}), flush=True)
