# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reads batches as datasets of TensorFlow."""

import sys

import numpy as np
import tensorflow as tf

from farandole.data import GlobalBatchLoader, ParquetLoader

path, texts, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
loader = ParquetLoader(path, 64, tail="pad")
dataset = loader.as_tf_dataset()
assert dataset.element_spec["v"].shape == (64, 2)
assert dataset.element_spec["_weights"].dtype == tf.float32
epochs = [[batch["id"].numpy().tolist() for batch in dataset] for _ in range(2)]
assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
assert epochs[0] != epochs[1]
assert {row for batch in epochs[1] for row in batch} == set(range(rows))
try:
    ParquetLoader(path, 64, framework="torch").as_tf_dataset()
except ValueError as error:
    assert 'framework="numpy"' in str(error)
else:
    raise AssertionError("tensors of torch are none of TensorFlow")
(batch,) = ParquetLoader(texts, 2, columns=["s", "b"], shuffle=False).as_tf_dataset()
assert batch["s"].dtype == tf.string
assert batch["s"].numpy().tolist() == [b"a", "ü".encode()]
assert batch["b"].numpy().tolist() == [b"\0", b""]
ranks = [GlobalBatchLoader(path, 7, columns=["id"], rank=rank, size=2) for rank in range(2)]
pairs = [
    [(len(batch["id"]), float(factor)) for batch, factor in one.as_tf_dataset()] for one in ranks
]
for step in zip(*pairs, strict=True):
    counted = [count if factor else 0 for count, factor in step]
    wanted = [2 * count / sum(counted) for count in counted]
    assert np.allclose([factor for _, factor in step], wanted), step
print("all of it")
