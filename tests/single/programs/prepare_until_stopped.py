# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prepares data, and sleeps after the partition at which the test kills it."""

import sys
import time

from farandole.data import prepare, prepare_data

prepare.PARTITION_TARGET_BYTES = 1 << 16
written = prepare._PartitionedWrite._finish_partition


def finish(self, partition, part, *, last):
    written(self, partition, part, last=last)
    print(partition, flush=True)
    if len(sys.argv) > 3 and partition == int(sys.argv[3]):
        time.sleep(600)


prepare._PartitionedWrite._finish_partition = finish
done = prepare_data(sys.argv[1], sys.argv[2], validation=0.2, threads=1)
print("done", done.index, done.resumed, done.train_rows + done.val_rows)
