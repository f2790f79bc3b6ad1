# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators of images on Spark: bytes, paths and structs in, classes and probabilities out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as sf
from tests.image_checkpoints import (
    SIZE,
    encode_image,
    make_pictures,
    make_pixels,
    write_checkpoint,
)
from tests.pages import blocks_of

from farandole.spark.vision import ImageClassifier

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
ROWS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of images, whose names begin with the class."""
    path = tmp_path_factory.mktemp("images")
    for index, (pixels, name) in enumerate(zip(*make_pixels(ROWS), strict=True)):
        (path / f"{name}-{index}.png").write_bytes(encode_image(pixels))
    return path


@pytest.fixture(scope="module")
def frames(spark, directory):
    """DataFrames with a column of images of each kind, by kind."""
    frame = spark.createDataFrame(make_pictures(ROWS).to_pandas()).repartition(2)
    files = spark.read.format("image").load(str(directory))
    name = sf.element_at(sf.split("image.origin", "/"), -1)
    paths = files.select(name.alias("picture"), sf.split(name, "-")[0].alias("half"))
    structs = files.select(sf.col("image").alias("picture"), sf.split(name, "-")[0].alias("half"))
    return {"bytes": frame.drop("number"), "paths": paths, "structs": structs}


def make_classifier(store, **options):
    known = {
        "image_col": "picture",
        "label_col": "half",
        "batch_size": 16,
        "learning_rate": 0.005,
        "random_seed": 1,
        "num_proc": 1,
        "verbose": 0,
    }
    return ImageClassifier(store=str(store), **known | options)


@pytest.fixture(scope="module")
def named(frames):
    """Structs in a column with a dot in its name, and classes with spaces."""
    half = sf.concat(sf.lit("the "), "half")
    return frames["structs"].select(sf.col("picture").alias("a.picture"), half.alias("half"))


@pytest.fixture(scope="module")
def fitted(checkpoint, named, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    return make_classifier(store, checkpoint=checkpoint, image_col="a.picture").fit(named)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("bytes", marks=pytest.mark.slow),
        pytest.param("paths", marks=pytest.mark.slow),
        "structs",
    ],
)
def test_a_classifier_is_fitted_saved_in_a_pipeline_and_predicts(
    checkpoint, directory, frames, tmp_path, kind
):
    # Steps of 16 rows and a total learning rate of 0.005, for any number of processes.
    processes = 2 if kind == "bytes" else 1
    classifier = make_classifier(
        tmp_path / "store", checkpoint=checkpoint, epochs=8,
        image_root=str(directory) if kind == "paths" else None,
        num_proc=processes, batch_size=16 // processes, learning_rate=0.005 / processes,
    )  # fmt: skip
    model = Pipeline(stages=[classifier]).fit(frames[kind])
    rows = model.transform(frames[kind]).collect()
    assert rows[0].__fields__ == [
        "picture", "half", "half__output", "half__probability", "half__predicted",
    ]  # fmt: skip
    assert np.mean([row.half == row.half__predicted for row in rows]) > 0.95
    assert model.stages[0].evaluate(frames[kind])["accuracy"] > 0.95
    model.write().overwrite().save(str(tmp_path / "saved"))
    again = PipelineModel.load(str(tmp_path / "saved")).transform(frames[kind]).collect()
    found = np.array([row.half__output.toArray() for row in rows])
    assert np.allclose([row.half__output.toArray() for row in again], found, atol=1e-4)


def test_a_saved_network_by_name_holds_no_pickle(frames, tmp_path, monkeypatch):
    named = {"backbone": "torchvision:squeezenet1_1", "image_size": 32, "epochs": 1}
    fitted = make_classifier(tmp_path / "store", **named).fit(frames["bytes"])
    fitted.write().overwrite().save(str(tmp_path / "saved"))
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")
    loaded = type(fitted).load(str(tmp_path / "saved"))
    found, wanted = (
        [row.half__output.toArray() for row in one.transform(frames["bytes"]).collect()]
        for one in (loaded, fitted)
    )
    assert np.allclose(found, wanted, atol=1e-5)


def test_a_model_of_images_is_a_function_of_a_column(spark, fitted, named, tmp_path):
    rows = fitted.transform(named).select("half__output", "half__predicted").collect()
    wanted = np.array([row.half__output.toArray() for row in rows])
    assert {row.half__predicted for row in rows} <= {"the bottom", "the top"}
    found = named.select(fitted.udf("half__output")("`a.picture`").alias("logits")).collect()
    assert np.allclose([row.logits for row in found], wanted, atol=1e-5)
    fitted.register(spark, "name_half", "half__predicted")
    named.createOrReplaceTempView("pictures")
    found = spark.sql("SELECT name_half(`a.picture`) AS name FROM pictures").collect()
    assert [row.name for row in found] == [row.half__predicted for row in rows]
    fitted.export(tmp_path / "model.pt2", named)
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.zeros(3, 3, SIZE, SIZE, dtype=torch.uint8))[0].shape == (3, 2)


def test_a_task_without_rows_and_a_row_without_an_image(fitted, named):
    one = named.limit(1).repartition(3)
    assert len(fitted.transform(one).select("half__predicted").collect()) == 1
    nulls = named.select(
        sf.lit(None).cast(named.schema["a.picture"].dataType).alias("a.picture"), "half"
    )
    with pytest.raises(Exception, match=r"column 'a\.picture' has nulls"):
        fitted.transform(nulls).collect()


def test_rows_that_do_not_fit_are_named(spark, checkpoint, frames, fitted, tmp_path):
    classifier = make_classifier(tmp_path / "store", checkpoint=checkpoint)
    numbers = frames["bytes"].withColumn("picture", sf.lit(1))
    with pytest.raises(ValueError, match="image column 'picture' has type int: images are bytes"):
        classifier.fit(numbers)
    with pytest.raises(ValueError, match="feature column 'picture' is not in the DataFrame"):
        classifier.fit(frames["bytes"].drop("picture"))
    lost = frames["bytes"].withColumn("half", sf.lit(None).cast("string"))
    with pytest.raises(Exception, match="half"):
        classifier.fit(lost)
    fitted = fitted.copy().setImageCol("picture")
    with pytest.raises(ValueError, match="image column 'picture' has type int: images are bytes"):
        fitted.transform(numbers)
    broken = frames["bytes"].withColumn("picture", sf.unhex(sf.lit("89504e47")))
    with pytest.raises(Exception, match="column 'picture', row 0 of a batch: cannot decode"):
        fitted.transform(broken).collect()
    invalid = spark.createDataFrame(
        [(("file:/a.png", -1, -1, -1, -1, b""),)], frames["structs"].select("picture").schema
    )
    with pytest.raises(Exception, match="it has -1 rows of -1 pixels, as Spark marks a file"):
        fitted.transform(invalid).collect()


def test_the_examples_of_the_page_run(checkpoint, frames, tmp_path):
    torch.manual_seed(0)
    network = torchvision.models.get_model("squeezenet1_1", weights=None)
    torch.save(network.state_dict(), tmp_path / "squeezenet1_1.pth")
    script = "\n".join(
        block.text
        for block in blocks_of("docs/spark/vision.md")
        if block.kind == "python" and block.why_not is None
    )
    paths = {
        "/models/vit": checkpoint,
        "/models/squeezenet1_1.pth": str(tmp_path / "squeezenet1_1.pth"),
        "/data/farandole": str(tmp_path / "store"),
        "/models/species": str(tmp_path / "species"),
    }
    for written, used in paths.items():
        script = script.replace(f'"{written}"', repr(used))
    names = {"df": frames["bytes"].toDF("photo", "species")}
    exec(script, names)
    assert names["predicted"].columns[2:] == [
        "species__output",
        "species__probability",
        "species__predicted",
    ]
    assert {row.species__predicted for row in names["predicted"].collect()} <= {"bottom", "top"}
    assert (tmp_path / "species" / "preprocessor_config.json").exists()
