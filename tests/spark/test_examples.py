# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The examples, as a stranger runs them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(650)
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, directory, **env):
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / name)]
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def promised(name):
    """Returns the least scores that the text at the top of an example states."""
    told = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    return [float(number) for number in re.findall(r"at\s+least\s+(\d\.\d+)", told)]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("spark_torch_passengers.py", [0.8, 0.75]),
        ("token_sequences_no_spark.py", [0.85]),
        ("images_no_spark.py", [0.9]),
        ("image_checkpoint_no_spark.py", [0.7, 0.1]),
    ],
)
def test_an_example_states_the_score_that_it_reaches(name, least):
    assert promised(name) == least


def test_the_demo_shows_progress_accuracy_the_reloaded_model_history_and_paths(tmp_path):
    done = run("spark_torch_digits.py", tmp_path)
    assert "epoch 20/20" in done.stderr
    lines = done.stdout.splitlines()
    accuracy = re.fullmatch(r"test accuracy (\d\.\d+)", lines[0])
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert lines[1] == "predictions identical after save/load"
    assert lines[2].split() == [
        "epoch",
        "loss",
        "accuracy",
        "val_loss",
        "val_accuracy",
        "seconds",
        "rows",
    ]
    paths = dict(line.rsplit(maxsplit=1) for line in lines[23:-1])
    assert list(paths) == ["training data", "validation data", "checkpoint", "logs"]
    assert all(Path(path.removeprefix("file://")).exists() for path in paths.values())
    assert lines[-1].startswith("see the run in the browser: ")
    assert lines[-1].endswith(" -m farandole ui farandole-demo")


def test_a_function_averages_a_number_over_two_processes_of_spark(tmp_path):
    done = run("spark_run.py", tmp_path)
    assert done.stdout.splitlines() == [
        f"rank {rank} of 2: the mean of all ranks is 0.5" for rank in range(2)
    ]


def test_parquet_is_trained_on_without_spark(tmp_path):
    done = run("fit_on_parquet_no_spark.py", tmp_path)
    assert "epoch 10/10" in done.stderr
    assert len(done.stdout.splitlines()) == 11


@pytest.mark.slow
def test_a_table_with_categories_is_learned_and_its_history_drawn(tmp_path):
    done = run("spark_torch_tabular.py", tmp_path)
    assert (
        "the model gets [store_index, day_of_week_index, state_holiday_index] -> int64 (rows, 3)"
        in done.stderr
    )
    error = re.fullmatch(r"relative error on later days (\d\.\d+)", done.stdout.splitlines()[0])
    assert error is not None
    assert float(error[1]) < 0.15  # the table's own noise is 0.05
    assert (tmp_path / "farandole-tabular" / "history.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_a_table_with_words_and_holes_is_learned_without_preparation_by_hand(tmp_path):
    done = run("spark_torch_passengers.py", tmp_path)
    assert "the model gets [Pclass, Sex, Embarked] -> int64 (rows, 3)" in done.stderr
    assert "'Sex': ['female', 'male']" in done.stdout
    area, accuracy = (
        re.search(rf"{name} (\d\.\d+)", done.stdout)
        for name in ("by Spark ML", "accuracy on passengers never seen")
    )
    assert area is not None
    assert accuracy is not None
    least = promised("spark_torch_passengers.py")
    assert len(least) == 2
    assert float(area[1]) >= least[0]
    assert float(accuracy[1]) >= least[1]  # a third of the passengers are saved
    assert done.stdout.splitlines()[-1] == accuracy[0]


@pytest.mark.slow
def test_token_sequences_are_learned_from_without_spark(tmp_path):
    done = run("token_sequences_no_spark.py", tmp_path)
    accuracy = re.search(r"validation accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None
    # with as many words of both it is a guess
    assert float(accuracy[1]) >= promised("token_sequences_no_spark.py")[0]
    assert done.stdout.splitlines()[-1] == accuracy[0]


@pytest.mark.slow
def test_images_are_decoded_and_learned_from_without_spark(tmp_path):
    done = run("images_no_spark.py", tmp_path)
    accuracy = re.search(r"validation accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= promised("images_no_spark.py")[0]
    assert done.stdout.splitlines()[-1] == accuracy[0]


@pytest.mark.slow
def test_a_checkpoint_of_images_is_better_than_random_weights(tmp_path):
    done = run("image_checkpoint_no_spark.py", tmp_path)
    found = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()[-2:]]
    assert found[1] >= promised("image_checkpoint_no_spark.py")[0]
    assert found[1] - found[0] >= promised("image_checkpoint_no_spark.py")[1]


@pytest.mark.slow
def test_a_lightning_module_recognises_digits(tmp_path):
    done = run("spark_lightning_digits.py", tmp_path)
    lines = done.stdout.splitlines()
    accuracy = re.fullmatch(r"test accuracy (\d\.\d+)", lines[0])
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.9
    assert lines[1].split() == ["epoch", "loss", "val_loss", "val_accuracy", "seconds", "rows"]


@pytest.mark.slow
def test_the_keras_estimator_recognises_digits_and_its_model_is_saved(tmp_path):
    done = run("spark_keras_digits.py", tmp_path, KERAS_BACKEND="tensorflow")
    assert "epoch 15/15" in done.stderr
    lines = done.stdout.splitlines()
    accuracy = re.fullmatch(r"test accuracy (\d\.\d+)", lines[0])
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert lines[1] == "predictions identical after save/load"
    assert lines[2].split() == ["epoch", "accuracy", "loss", "val_accuracy", "val_loss"]
    assert [line.rsplit(maxsplit=1)[0].strip() for line in lines[-4:]] == [
        "training data", "validation data", "checkpoint", "logs",
    ]  # fmt: skip


@pytest.mark.slow
def test_embeddings_and_numbers_forecast_sales_in_a_pipeline(tmp_path):
    done = run("spark_keras_tabular.py", tmp_path, KERAS_BACKEND="torch")
    assert "[promotion, distance] -> float32 (rows, 2)" in done.stderr
    error = re.match(r"test error (\d\.\d+)", done.stdout)
    assert error is not None
    assert float(error[1]) < 0.2  # half of it is noise
