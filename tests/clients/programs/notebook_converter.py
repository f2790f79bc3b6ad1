# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A notebook for Databricks: petastorm's converter, HorovodRunner and a network of PyTorch, first
on the driver, then on Spark.
"""

import sys

import numpy as np
from petastorm import TransformSpec
from petastorm.spark import SparkDatasetConverter, make_spark_converter
from pyspark.sql import SparkSession
from pyspark.sql.functions import col
from sklearn.datasets import load_digits
from sparkdl import HorovodRunner

BATCH_SIZE, EPOCHS = 32, 3

# COMMAND ----------

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{sys.argv[1]}/cache")
digits = load_digits()
rows = [
    (pixels.tolist(), int(label)) for pixels, label in zip(digits.data, digits.target, strict=True)
]
frame = spark.createDataFrame(rows, "features array<float>, label long")
frame = frame.filter(col("label") < 10).repartition(4)
train_frame, validation_frame = frame.randomSplit([0.9, 0.1], seed=12345)
converter_train = make_spark_converter(train_frame)
converter_validation = make_spark_converter(validation_frame)
print(f"train: {len(converter_train)}, validation: {len(converter_validation)}")

# COMMAND ----------


def scale_pixels(batch):
    """Converts a batch, which is a pandas DataFrame, in the reader's workers."""
    batch["features"] = batch["features"].map(lambda pixels: np.asarray(pixels, "float32") / 16)
    return batch


def get_transform_spec():
    fields = [("features", np.float32, (64,), False), ("label", np.int64, (), False)]
    return TransformSpec(scale_pixels, edit_fields=fields, selected_fields=["features", "label"])


def train_and_evaluate_hvd(lr):
    import horovod.torch as hvd
    import torch
    from sparkdl.horovod import log_to_driver

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    shard = {
        "cur_shard": hvd.rank(),
        "shard_count": hvd.size(),
        "batch_size": BATCH_SIZE,
        "transform_spec": get_transform_spec(),
    }
    steps = len(converter_train) // (BATCH_SIZE * hvd.size())
    validation_steps = max(1, len(converter_validation) // (BATCH_SIZE * hvd.size()))
    with (
        converter_train.make_torch_dataloader(**shard) as train_loader,
        converter_validation.make_torch_dataloader(**shard) as validation_loader,
    ):
        train_batches, validation_batches = iter(train_loader), iter(validation_loader)
        for epoch in range(EPOCHS):
            model.train()
            for _ in range(steps):
                batch = next(train_batches)
                optimizer.zero_grad()
                loss = criterion(model(batch["features"]), batch["label"])
                loss.backward()
                optimizer.step()
            model.eval()
            correct = 0.0
            with torch.no_grad():
                for _ in range(validation_steps):
                    batch = next(validation_batches)
                    found = model(batch["features"]).argmax(1)
                    correct += (found == batch["label"]).float().mean().item()
            accuracy = hvd.allreduce(torch.tensor(correct / validation_steps)).item()
            if hvd.rank() == 0:
                log_to_driver(f"epoch {epoch}: accuracy {accuracy:.3f}")
    return accuracy


# COMMAND ----------

accuracy = HorovodRunner(np=-1).run(train_and_evaluate_hvd, lr=0.1)
assert accuracy > 0.8, accuracy

# COMMAND ----------

accuracy = HorovodRunner(np=2).run(train_and_evaluate_hvd, lr=0.05)
assert accuracy > 0.8, accuracy

# COMMAND ----------

converter_train.delete()
converter_validation.delete()
print("done")
spark.stop()
