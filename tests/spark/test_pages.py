# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The first examples of pages about Spark run.

The pages are README.md, docs/start/index.md, docs/moving.md, torch.md, keras.md, running.md and
plugin.md of docs/spark, and transformers.md of docs/user-guide.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from tests.pages import blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DIGITS = """
from pyspark.ml.functions import array_to_vector
from pyspark.sql import SparkSession
import sklearn.datasets

spark = SparkSession.builder.master("local[2]").getOrCreate()
digits = sklearn.datasets.load_digits()
rows = [(row.tolist(), int(label)) for row,
    label in zip(digits.data[:400] / 16, digits.target[:400])]
df = spark.createDataFrame(rows, "features array<double>, label int")
df = df.withColumn("features", array_to_vector("features"))
"""


def run(tmp_path, *pieces):
    """Returns the output of a script that consists of these pieces."""
    script = "\n".join(pieces)
    for place in ('"/tmp/farandole"', '"/data/farandole"'):
        script = script.replace(place, repr(str(tmp_path / "store")))
    (tmp_path / "page.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def block(page, number):
    """The text of a block in Python."""
    return [block for block in blocks_of(page) if block.kind == "python"][number].text


def test_the_first_example_of_the_readme(tmp_path):
    script = block("README.md", 0)
    frame = next(line for line in script.splitlines() if line.startswith("df = ..."))
    assert "label__output" in run(tmp_path, script.replace(frame, DIGITS))


def test_the_first_steps_with_a_frame(tmp_path):
    assert "y__output" in run(tmp_path, block("docs/start/index.md", 1))


def test_the_first_steps_with_parquet_files_start_no_spark_session(tmp_path):
    check = "from pyspark.sql import SparkSession\nassert SparkSession.getActiveSession() is None\n"
    printed = run(
        tmp_path,
        block("docs/start/index.md", 2).replace('"/tmp/farandole/', f'"{tmp_path}/'),
        check,
    )
    losses = [float(line.split()[2]) for line in printed.splitlines()[1:]]
    assert len(losses) == 5
    assert losses[-1] < min(0.1, losses[0])


def test_the_first_example_of_the_page_about_torch(tmp_path):
    split = "import torch\ntrain, test = df.randomSplit([0.8, 0.2], seed=1)\n"
    script = block("docs/spark/torch.md", 0)
    assert "label__output" in run(tmp_path, DIGITS, split, script, "print(predicted.columns)")


def test_the_first_example_of_the_page_about_keras(tmp_path):
    assert "label__output" in run(tmp_path, DIGITS, block("docs/spark/keras.md", 0))


def test_the_first_example_of_the_page_about_running(tmp_path):
    session = (
        "from pyspark.sql import SparkSession\n"
        'SparkSession.builder.master("local[4]").getOrCreate()\n'
    )
    script = block("docs/spark/running.md", 0)
    called = next(line for line in script.splitlines() if line.startswith("farandole.spark.run("))
    script = script.replace(called, f"print({called.partition('  ')[0]})")
    assert "[0, 1, 2, 3]" in run(tmp_path, session, script)


def test_a_notebook_with_horovod_runner_and_the_same_with_names_of_farandole(tmp_path):
    session = (
        "from pyspark.sql import SparkSession\n"
        'SparkSession.builder.master("local[2]").getOrCreate()\n'
    )
    said = run(tmp_path, session, block("docs/moving.md", 1), block("docs/moving.md", 2))
    lines = said.splitlines()
    messages = [line.partition(", loss ") for line in lines if ", loss " in line]
    assert [message[0] for message in messages[:2]] == ["world size 1", "world size 2"]
    assert all(float(message[2]) < 0.01 for message in messages)
    results = [float(line) for line in lines if line.replace(".", "").replace("e-", "").isdigit()]
    assert len(results) == 4
    assert max(results) < 0.01


def test_the_example_of_the_page_about_the_plugin(tmp_path):
    script = block("docs/spark/plugin.md", 0).replace(
        "SparkSession.builder", 'SparkSession.builder.master("local[1]")'
    )
    said = run(tmp_path, script, 'print(spark.conf.get("spark.plugins"))')
    assert "io.farandole.spark.FarandolePlugin" in said


def test_the_example_about_a_trainer_on_spark(tmp_path):
    blocks = blocks_of("docs/user-guide/transformers.md")
    script = next(each.text for each in blocks if "SparkSession" in each.text)
    said = run(tmp_path, script.replace('"/tmp/farandole/bert"', repr(str(tmp_path / "bert"))))
    # 8 epochs of 256 rows in batches of 16 on each of two ranks
    size, steps, loss = ast.literal_eval(said.splitlines()[-1])
    assert (size, steps) == (2, 64)
    assert loss < 0.5
