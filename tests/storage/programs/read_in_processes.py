# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reads and writes HDFS in forked processes and in those of a fork server."""

import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from farandole.data import ParquetLoader
from farandole.spark.common import Store

if __name__ == "__main__":
    store = Store.create(sys.argv[1])
    table = pa.table({"x": np.arange(1000)})
    pq.write_table(table, store.get_train_data_path() + "/0.parquet", filesystem=store.fs)
    data = ParquetLoader(store.get_train_data_path(), 100, framework="torch").as_torch_dataset()
    for start in ("forkserver", "fork"):
        try:
            loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
            print(start, sum(len(batch["x"]) for batch in loader))
        except OSError as error:
            print(start, "start it by spawn or forkserver" in str(error))
    child = os.fork()
    if child == 0:
        store.write_text(store.prefix_path + "/child", "y")
        os._exit(0 if store.exists(store.prefix_path + "/child") else 1)
    print("writes", os.waitpid(child, 0)[1])
