# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reads a pickled converter with TensorFlow. Prints the shapes of a column in all batches, and the
ids in the order of the files and shuffled.
"""

import json
import pickle
import sys

converter = pickle.loads(bytes.fromhex(sys.argv[1]))
options = {"num_epochs": 1, "shuffle_row_groups": False}
with converter.make_tf_dataset(16, **options) as dataset:
    batches = list(dataset)
with converter.make_tf_dataset(16, shuffling_queue_capacity=20, **options) as dataset:
    shuffled = list(dataset)
print(json.dumps([batch.pair.shape.as_list() for batch in batches]))
for each in (batches, shuffled):
    print(json.dumps([int(row) for batch in each for row in batch.id]))
