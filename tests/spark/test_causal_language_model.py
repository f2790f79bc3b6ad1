# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`CausalLanguageModel` on Spark: prompts and answers in, generated texts and perplexities out."""

from __future__ import annotations

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as sf
from tests.pages import blocks_of
from tests.text_checkpoints import BAD_WORDS, GOOD_WORDS, write_causal_checkpoint

from farandole.spark.transformers import CausalLanguageModel, TextGenerator

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_causal_checkpoint(tmp_path_factory.mktemp("checkpoint"), "gpt2")


@pytest.fixture(scope="module")
def questions(spark):
    rows = [(f"{word} film", "nice") for word in GOOD_WORDS]
    rows += [(f"the {word} song", "was awful") for word in BAD_WORDS]
    schema = "question string, `the.answer` string"
    return spark.createDataFrame(rows * 16, schema).repartition(2)


def test_a_language_model_is_fitted_saved_in_a_pipeline_and_answers(
    checkpoint, questions, tmp_path
):
    language_model = CausalLanguageModel(
        checkpoint=checkpoint, prompt_col="question", answer_col="the.answer", epochs=16,
        batch_size=16, learning_rate=0.01, random_seed=1, num_proc=2, verbose=0,
        store=str(tmp_path / "store"),
    )  # fmt: skip
    model = Pipeline(stages=[language_model]).fit(questions)
    stage = model.stages[0].setMaxNewTokens(4)
    rows = model.transform(questions).collect()
    assert rows[0].__fields__ == ["question", "the.answer", "generated"]
    assert all(row.generated == row[1] for row in rows)
    model.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    assert [row.generated for row in loaded.transform(questions).collect()] == [
        row.generated for row in rows
    ]
    spark = questions.sparkSession
    asked = questions.where("question = 'the awful song'").limit(1)
    assert asked.select(stage.udf()(sf.col("question"))).first()[0] == "was awful"
    stage.register(spark, "answer")
    assert spark.sql("SELECT answer('good film')").first()[0] == "nice"
    measured = loaded.stages[0].setPerplexityCol("perplexity").transform(questions)
    assert measured.columns == ["question", "the.answer", "perplexity"]
    assert all(1 < row.perplexity < 2 for row in measured.collect())
    with pytest.raises(ValueError, match=r"feature column 'the\.answer' is not in the DataFrame"):
        loaded.stages[0].transform(questions.select("question"))
    with pytest.raises(ValueError, match="DataFrame already has an output column: generated"):
        model.transform(model.transform(questions))
    with pytest.raises(ValueError, match="text column 'question' has type int: texts are needed"):
        stage.transform(questions.withColumn("question", sf.lit(1)))


def test_nulls_in_prompts_are_errors_unless_they_are_filled(checkpoint, spark):
    rows = spark.createDataFrame([(None,), ("good film",)], "text string")
    generator = TextGenerator(checkpoint=checkpoint, text_col="text", max_new_tokens=2)
    with pytest.raises(Exception, match="column 'text' has nulls"):
        generator.transform(rows).collect()
    generator.setFill({"text": "good film"})
    first, second = generator.transform(rows).collect()
    assert first.generated == second.generated


def test_the_examples_of_the_page_run(checkpoint, questions, tmp_path):
    script = "\n".join(
        block.text
        for block in blocks_of("docs/spark/transformers.md")
        if block.kind == "python" and block.why_not is None and "/models/gpt" in block.text
    )
    script = script.replace('"/models/gpt"', repr(checkpoint))
    script = script.replace('"/data/farandole"', repr(str(tmp_path)))
    script = script.replace("max_new_tokens=40", "max_new_tokens=4")
    script = script.replace("setMaxNewTokens(40)", "setMaxNewTokens(4)")
    names = {"df": questions.withColumnRenamed("the.answer", "answer")}
    exec(script, names)
    assert names["answered"].columns[2:] == ["generated"]
    assert names["measured"].columns[2:] == ["perplexity"]
    assert all(row.perplexity > 1 for row in names["measured"].collect())
    assert names["continued"].columns[2:] == ["generated"]
