# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SynapseML's DeepVisionClassifier on a ResNet with random weights: fit, transform, save,
load.

SynapseML asks torchvision for pretrained weights. torchvision takes them from the directory of its
downloads, where this program puts random ones.
"""

import os
import sys
from pathlib import Path

import torch
from horovod.spark.common.store import LocalStore
from PIL import Image
from pyspark.sql import SparkSession
from synapse.ml.dl import DeepVisionClassifier, DeepVisionModel
from torchvision.models import ResNet18_Weights, resnet18

MAX_WRONG_IMAGES = 4


def put_random_weights():
    torch.manual_seed(0)
    folder = Path(os.environ["TORCH_HOME"]) / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    name = ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    torch.save(resnet18(weights=None).state_dict(), folder / name)


def make_images(folder):
    folder.mkdir()
    rows = []
    for number in range(24):
        label = number % 2
        shade = 120 + 5 * number
        path = folder / f"{number}.png"
        Image.new("RGB", (72, 72), (shade, 0, 0) if label else (0, 0, shade)).save(path)
        rows.append((str(path), label))
    return rows


def predictions(frame):
    rows = frame.select("image", "label", "prediction").collect()
    return sorted((row.image, row.label, row.prediction) for row in rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    put_random_weights()
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    frame = spark.createDataFrame(make_images(folder / "images"), ["image", "label"])
    classifier = DeepVisionClassifier(
        backbone="resnet18",
        num_classes=2,
        additional_layers_to_train=1,
        input_shapes=[[-1, 3, 64, 64]],
        num_proc=2,
        use_gpu=False,
        store=LocalStore(str(folder / "store")),
        batch_size=4,
        epochs=40,
        random_seed=1,
        validation=0.25,
        verbose=0,
    )
    # A saved estimator cannot be loaded, also with Horovod: its class needs arguments.
    classifier.write().overwrite().save(str(folder / "classifier"))
    fitted = classifier.fit(frame)
    assert type(fitted) is DeepVisionModel
    found = predictions(fitted.transform(frame))
    wrong = [row for row in found if row[1] != row[2]]
    # The order of rows, the crops and the statistics of one rank's small batches are random, so a
    # few may be wrong. Guesses would be right for 12.
    assert len(wrong) <= MAX_WRONG_IMAGES, wrong
    fitted.write().overwrite().save(str(folder / "model"))
    assert predictions(DeepVisionModel.load(str(folder / "model")).transform(frame)) == found
    print(f"at least {len(found) - MAX_WRONG_IMAGES} of {len(found)} images are right")
    spark.stop()
