# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training that reads from tf.data's service, which workers of another job hold."""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
with tf_data_service(config, hvd.rank()) as address:
    dataset = tf.data.Dataset.range(40).batch(4)
    dataset = dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode="distributed_epoch", service=address, job_name="training"
        )
    )
    seen = [int(value) for batch in dataset for value in batch]
everything = sorted(value for part in hvd.allgather_object(seen) for value in part)
assert everything == list(range(40)), everything
if hvd.rank() == 0:
    config.compute_client(verbose=1).shutdown()
print("done", hvd.rank())
