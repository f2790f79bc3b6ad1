# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predicts a shop's sales of a day from a table: embeddings for categories, numbers side by side, a
date split.

Run it with the path of a CSV file that has the columns `store, day_of_week, promo, state_holiday,
distance, day, sales` (`day` is a date); without one it makes such a table up.
"""

import os
import sys

import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

CATEGORIES = ["store", "day_of_week", "state_holiday"]
NUMBERS = ["distance", "promo", "age"]


def made_up(shops: int = 40, days: int = 300) -> DataFrame:
    """Sales that depend on the shop, the weekday, holidays, promotions and the distance to the
    next competitor.
    """
    table = spark.range(shops * days).select(
        (F.col("id") % shops).cast("int").alias("store"),
        F.expr(f"date_add(date'2024-01-01', cast(id div {shops} as int))").alias("day"),
    )
    return (
        table.withColumn("day_of_week", F.dayofweek("day"))
        .withColumn(
            "state_holiday", F.when(F.dayofyear("day") % 40 == 1, "public").otherwise("none")
        )
        .withColumn("promo", (F.rand(2) < 0.4).cast("int"))
        .withColumn("distance", 100.0 + 90.0 * F.sin("store"))
        .withColumn(
            "sales",
            (
                F.lit(4000.0)
                + 60 * (F.col("store") % 7)
                + 900 * F.col("promo")
                + 2 * F.col("distance")
            )
            * F.when(F.col("day_of_week") == 1, 0.3).otherwise(1.0)
            * F.when(F.col("state_holiday") == "public", 0.5).otherwise(1.0)
            * (1 + 0.05 * F.randn(3)),
        )
    )


table = (
    spark.read.csv(sys.argv[1], header=True, inferSchema=True) if len(sys.argv) > 1 else made_up()
)
table = table.where("sales > 0").select(
    *CATEGORIES,
    F.col("distance").cast("double"),
    F.col("promo").cast("double"),
    (F.datediff("day", F.lit("2024-01-01")) / 365).alias("age"),
    F.log("sales").alias("log_sales"),
    "day",
)
last = table.select(F.date_sub(F.max("day"), 28)).first()[0]
table = table.withColumn("later", F.col("day") > F.lit(last)).drop("day")

preparation = Pipeline(
    stages=[
        StringIndexer(
            inputCols=CATEGORIES,
            outputCols=[f"{name}_index" for name in CATEGORIES],
            handleInvalid="keep",
        ),
        VectorAssembler(inputCols=NUMBERS, outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="numbers", withMean=True),
    ]
).fit(table)
prepared = preparation.transform(table).drop("raw", *CATEGORIES)
sizes = [len(labels) + 1 for labels in preparation.stages[0].labelsArray]


class Sales(torch.nn.Module):
    """An embedding per category, and all of it through two layers."""

    def __init__(self, sizes: list[int], numbers: int) -> None:
        super().__init__()
        widths = [min(16, size // 2 + 1) for size in sizes]
        self.embeddings = torch.nn.ModuleList(map(torch.nn.Embedding, sizes, widths))
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(sum(widths) + numbers, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        embedded = [
            embedding(categories[:, index]) for index, embedding in enumerate(self.embeddings)
        ]
        return 8.0 + self.layers(torch.cat([*embedded, numbers], dim=1))


def error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Root mean squared error, relative to the sales."""
    label = label.reshape(output.shape)
    return ((output.exp() - label.exp()) / label.exp()).square().mean().sqrt()


torch.manual_seed(1)
network = Sales(sizes, len(NUMBERS))
optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
model = TorchEstimator(
    num_proc=2,
    model=network,
    optimizer=optimizer,
    lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    loss=torch.nn.functional.mse_loss,
    metrics=[error],
    feature_cols=[[f"{name}_index" for name in CATEGORIES], "numbers"],
    input_dtypes=["int64", "float32"],
    label_cols=["log_sales"],
    validation="later",
    batch_size=128,
    epochs=8,
    best_checkpoint="val_error",
    random_seed=1,
    store=LocalStore("farandole-tabular"),
).fit(prepared)

predicted = model.transform(prepared.where("later")).withColumn(
    "wrong", F.exp("log_sales__output") / F.exp("log_sales") - 1
)
print(
    "relative error on later days "
    f"{predicted.select(F.sqrt(F.avg(F.col('wrong') ** 2))).first()[0]:.4f}"
)
model.plot_history().save("farandole-tabular/history.svg")
print("history farandole-tabular/history.svg")
spark.stop()
