# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the arguments of the public functions and methods of the petastorm of this process, as
JSON: for each, its positional arguments with the text of their defaults, in order, and whether it
takes more by name.
"""

import importlib
import inspect
import json

FUNCTIONS = {
    "petastorm": ["make_reader", "make_batch_reader", "TransformSpec"],
    "petastorm.codecs": [
        "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec", "ScalarCodec",
        "NdarrayCodec.encode", "NdarrayCodec.decode", "NdarrayCodec.spark_dtype",
    ],
    "petastorm.etl.dataset_metadata": ["materialize_dataset", "get_schema_from_dataset_url"],
    "petastorm.predicates": [
        "in_lambda", "in_set", "in_negate", "in_reduce", "in_pseudorandom_split",
    ],
    "petastorm.pytorch": ["DataLoader", "BatchedDataLoader", "decimal_friendly_collate"],
    "petastorm.spark": [
        "make_spark_converter", "SparkDatasetConverter", "SparkDatasetConverter.__len__",
        "SparkDatasetConverter.make_torch_dataloader", "SparkDatasetConverter.make_tf_dataset",
        "SparkDatasetConverter.delete",
    ],
    "petastorm.transform": ["edit_field", "transform_schema"],
    "petastorm.unischema": [
        "Unischema", "Unischema.create_schema_view", "Unischema.make_namedtuple",
        "Unischema.as_spark_schema", "dict_to_spark_row", "insert_explicit_nulls",
        "match_unischema_fields",
    ],
    "petastorm.utils": ["decode_row"],
}  # fmt: skip


def describe_arguments(function):
    described, takes_more = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "self":
            plain = isinstance(parameter.default, bool | int | float | str | None)
            default = repr(parameter.default) if plain else "..."
            described.append([parameter.name, default])
    return {"arguments": described, "takes_more": takes_more}


found = {}
for name, functions in FUNCTIONS.items():
    module = importlib.import_module(name)
    for function in functions:
        value = module
        for part in function.split("."):
            value = getattr(value, part)
        found[f"{name}.{function}"] = describe_arguments(value)
print(json.dumps(found))
