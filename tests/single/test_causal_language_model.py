# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`CausalLanguageModel` and `TextGenerator` without Spark: tokens, packing, steps, new texts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.parity.gang import StandingGang
from tests.text_checkpoints import (
    BAD_WORDS,
    GOOD_WORDS,
    LENGTH,
    OTHER_WORDS,
    WORDS,
    make_causal_network,
    make_network,
    make_plain_tokenizer,
    make_tokenizer,
    write_causal_checkpoint,
)
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from farandole.spark.common import LocalBackend
from farandole.spark.torch.saving.state_bytes import unpack_state
from farandole.spark.transformers import CausalLanguageModel, TextGenerator
from farandole.spark.transformers.causal_network import (
    CausalNetwork,
    TokenMeanLoss,
    check_network,
    pack_texts,
)
from farandole.spark.transformers.causal_tokenization import (
    CausalTokenization,
    find_special_tokens,
)
from farandole.spark.transformers.tokenization import PADDING_TOKEN

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
GANGS = {size: StandingGang(size) for size in (1, 2)}
QUESTIONS = ["good film", "awful the film is a song", "nice book"]
ID_OF = {word: number for number, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_causal_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", autouse=True)
def standing_processes():
    yield
    for gang in GANGS.values():
        gang.close()


def make_questions(count, good_answer="nice", bad_answer="was awful"):
    """Prompts of different lengths whose answer follows from their first word."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(count):
        mood = int(draw.integers(0, 2))
        word = str(draw.choice(GOOD_WORDS if mood else BAD_WORDS))
        others = draw.choice(OTHER_WORDS, draw.integers(1, 6)).tolist()
        answer = good_answer if mood else bad_answer
        rows.append({"question": " ".join([word, *others]), "answer": answer})
    return pa.Table.from_pylist(rows)


def make_texts(count, longest=LENGTH + 2):
    draw = np.random.default_rng(1)
    return pa.table(
        {
            "text": [
                " ".join(draw.choice(WORDS[5:], draw.integers(0, longest)).tolist())
                for _ in range(count)
            ]
        }
    )


def make_language_model(checkpoint, store, processes=1, **options):
    known = {
        "learning_rate": 0.01, "batch_size": 16, "random_seed": 1, "verbose": 0,
        "backend": GANGS[processes],
    }  # fmt: skip
    if "text_col" not in options:
        known |= {"prompt_col": "question", "answer_col": "answer"}
    return CausalLanguageModel(checkpoint=checkpoint, store=str(store), **known | options)


def make_tokenization(tokenizer=None, **options):
    tokenizer = tokenizer or make_plain_tokenizer(eos_token="[SEP]")
    known = {"text_col": "text", "max_length": LENGTH, "length_multiple": 4}
    return CausalTokenization(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        **find_special_tokens(tokenizer)._asdict(),
        **known | options,
    )


def teach_opposite_answers(checkpoint, directory, epochs):
    """Writes a checkpoint that answers the wrong way round. Adapters can change its answers, but
    not the answers of random weights, whose head they leave as it is.
    """
    fitted = make_language_model(
        checkpoint, directory / "teaching", processes=2, epochs=epochs
    ).fit(make_questions(96, good_answer="was awful", bad_answer="nice"))
    fitted.save_pretrained(directory / "taught")
    taught = TextGenerator(
        checkpoint=str(directory / "taught"), text_col="question", max_new_tokens=5
    )
    answers = predict(taught, question=QUESTIONS)["generated"]
    assert answers == ["was awful", "nice", "was awful"]
    return str(directory / "taught")


def predict(fitted, **columns):
    """Returns the columns that a task adds to some rows, by name."""
    ready = fitted._prepare_prediction()
    predictor = ready._create_predictor(SimpleNamespace(columns=list(columns), sparkSession=None))
    arrays = [pa.array(values, pa.string()) for values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=[str(number) for number in range(len(arrays))])
    (made,) = predictor.predict_batches(iter([batch]))
    added = made.columns[len(arrays) :]
    return {name: one.to_pylist() for name, one in zip(fitted._added_columns(), added, strict=True)}


def text_losses(network, ids):
    """Returns the losses of one text, by transformers."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = network.eval()(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")


def hide(words):
    return [-2 - ID_OF[word] for word in words.split()]


def ids_of(words):
    return [ID_OF[word] for word in words.split()]


def test_tokens_of_prompts_are_not_learned_and_answers_end():
    made = make_tokenization(answer_col="answer")(
        {
            "text": np.array(["the film", "", "a"], dtype=object),
            "answer": np.array(["was good", "bad", ""], dtype=object),
        }
    )
    wanted = [
        [*hide("the film"), *ids_of("was good [SEP]"), *[PADDING_TOKEN] * 3],
        [*ids_of("bad [SEP]"), *[PADDING_TOKEN] * 6],
        [*hide("a"), *ids_of("[SEP]"), *[PADDING_TOKEN] * 6],
    ]
    assert made["text"].tolist() == wanted
    assert made["answer"] is made["text"]


@pytest.mark.parametrize(
    ("prompt", "answer", "wanted"),
    [
        ("a the film is", "good", [*hide("a the film is"), *ids_of("good [SEP]")]),
        ("a the film is", "good and nice", [*hide("film is"), *ids_of("good and nice [SEP]")]),
        ("a the is", "good and bad and fine", [*hide("is"), *ids_of("good and bad and fine")]),
        ("film", "good and nice and fine was", [*hide("film"), *ids_of("good and nice and fine")]),
        ("", "good and nice and fine was a", ids_of("good and nice and fine was")),
    ],
)  # fmt: skip
def test_long_prompts_lose_their_beginning_and_long_answers_their_end(prompt, answer, wanted):
    tokenization = make_tokenization(answer_col="answer", max_length=6, length_multiple=1)
    made = tokenization.tokenize_answers([prompt], [answer])
    assert made.tolist() == [wanted]
    complete = len(prompt.split()) + len(answer.split()) + 1 <= 6
    assert tokenization.counts.truncated == (not complete)


@pytest.mark.parametrize(
    ("tokenizer", "beginning", "ending", "start"),
    [
        (make_plain_tokenizer(), [], [], None),
        (make_plain_tokenizer(eos_token="[SEP]"), [], [3], 3),
        (make_plain_tokenizer(eos_token="[SEP]", bos_token="[CLS]"), [], [3], 2),
        (make_tokenizer(eos_token="[PAD]"), [2], [3], 0),
    ],
)
def test_the_tokens_around_a_text_follow_from_the_tokenizer(tokenizer, beginning, ending, start):
    found = find_special_tokens(tokenizer)
    assert found == (tuple(beginning), tuple(ending), start)
    made = make_tokenization(tokenizer).tokenize_texts(["good film", ""])
    wanted = [[*beginning, *ids_of("good film"), *ending], [*beginning, *ending]]
    assert [row[: len(one)] for row, one in zip(made.tolist(), wanted, strict=True)] == wanted


@pytest.mark.parametrize(("side", "wanted"), [("right", "a the film"), ("left", "is good [SEP]")])
def test_a_long_text_loses_its_end_or_its_beginning(side, wanted):
    tokenization = make_tokenization(max_length=3, truncation_side=side)
    assert tokenization.tokenize_texts(["a the film is good"]).tolist() == [ids_of(wanted)]
    assert (tokenization.counts.texts, tokenization.counts.truncated) == (1, 1)


@pytest.mark.parametrize(("value", "error"), [(None, "has a null"), (3, "has values of type int")])
def test_values_that_are_no_texts_are_named(value, error):
    tokenization = make_tokenization(answer_col="answer")
    with pytest.raises((ValueError, TypeError), match=f"text column 'answer' {error}"):
        tokenization.tokenize_answers(["good"], [value])


def test_texts_are_packed_into_few_blocks():
    packed = pack_texts([3, 8, 0, 5, 2], 8, torch.device("cpu"))
    rows = torch.arange(5 * 8).reshape(5, 8)
    assert packed.sources.tolist() == [
        rows[1].tolist(),
        [*rows[3, :5].tolist(), *rows[0, :3].tolist()],
        [*rows[4, :2].tolist(), *[-1] * 6],
    ]
    assert packed.positions.tolist() == [
        list(range(8)), [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5],
    ]  # fmt: skip
    assert packed.places[0].tolist() == [13, 14, 15, *[-1] * 5]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("packs_texts", [True, False])
def test_losses_of_a_batch_are_the_losses_of_each_text_alone(kind, packs_texts):
    network = make_causal_network(kind)
    module = CausalNetwork(network, 0, packs_texts=packs_texts).eval()
    texts = ["", "good", *make_texts(14)["text"].to_pylist()]
    tokens = torch.tensor(make_tokenization(length_multiple=1).tokenize_texts(texts))
    if packs_texts:
        lengths = (tokens >= 0).sum(dim=1).tolist()
        assert len(pack_texts(lengths, LENGTH, tokens.device).sources) < len(texts) - 2
    losses = module(tokens).detach()
    for row, found in zip(tokens.tolist(), losses, strict=True):
        ids = [one for one in row if one >= 0]
        wanted = torch.zeros(len(row))
        if len(ids) > 1:
            wanted[1 : len(ids)] = text_losses(network, ids)
        assert torch.allclose(found, wanted, atol=1e-5)
    count = sum(max(sum(one >= 0 for one in row) - 1, 0) for row in tokens.tolist())
    assert TokenMeanLoss()(losses, tokens) == pytest.approx(float(losses.sum()) / count)


def test_packed_and_padded_texts_have_the_same_gradients():
    tokens = torch.tensor(make_tokenization().tokenize_texts(make_texts(12)["text"].to_pylist()))
    gradients = []
    for packs_texts in (True, False):
        module = CausalNetwork(make_causal_network(), 0, packs_texts=packs_texts)
        module(tokens).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for packed, padded in zip(*gradients, strict=True):
        assert torch.allclose(packed, padded, atol=1e-4)


def make_mamba():
    return MambaForCausalLM(
        MambaConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, state_size=4)
    )


def test_networks_are_packed_only_if_they_keep_texts_apart():
    for kind in ("gpt2", "llama"):
        for network in (make_causal_network(kind), make_causal_network(kind).train()):
            module = CausalNetwork(network, 0)
            is_training = network.training
            assert check_network(module, len(WORDS), LENGTH)
            assert network.training == is_training
            assert not module.packs_texts
    assert not check_network(CausalNetwork(make_mamba(), 0), len(WORDS), LENGTH)
    bert = BertLMHeadModel(make_network().config)
    with pytest.raises(ValueError, match="BertLMHeadModel looks at later tokens, so it cannot"):
        check_network(CausalNetwork(bert, 0), len(WORDS), LENGTH)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lora", [None, 4])
def test_a_model_learns_answers_and_transformers_reads_it(tmp_path, kind, lora):
    checkpoint = write_causal_checkpoint(tmp_path / "checkpoint", kind)
    questions, epochs = QUESTIONS, 150 if kind == "gpt2" else 20
    if lora:
        checkpoint = teach_opposite_answers(checkpoint, tmp_path, epochs)
    adapters = peft.LoraConfig(r=lora, target_modules="all-linear") if lora else None
    fitted = make_language_model(
        checkpoint, tmp_path / "store", processes=2, epochs=epochs, lora=adapters
    ).fit(make_questions(96))
    fitted.setMaxNewTokens(5)
    answers = predict(fitted, question=questions)["generated"]
    losses = [entry["train"]["loss"] for entry in fitted.getHistory()]
    assert losses[-1] < losses[0] * 0.5
    assert answers == ["nice", "was awful", "nice"]
    fitted.save_pretrained(tmp_path / "saved")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens = torch.tensor([ids_of(questions[1])])
    made = network.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made[0, tokens.shape[1] :].tolist() in (
        ids_of(answers[1]),
        ids_of(f"{answers[1]} [SEP]"),
    )
    again = TextGenerator(checkpoint=str(tmp_path / "saved"), text_col="question", max_new_tokens=5)
    assert predict(again, question=questions)["generated"] == answers
    values = {param.name: value for param, value in fitted._paramMap.items() if value is not None}
    plain, parts = fitted.write().split_plain_and_packed(values)
    loaded = TextGenerator(**{name: plain[name] for name in plain if name != "outputs"})
    TextGenerator.read().restore_packed_parts(loaded, parts, "saved")
    assert predict(loaded, question=questions)["generated"] == answers
    if lora:
        fitted.save_adapter(tmp_path / "adapter")
        assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").task_type == "CAUSAL_LM"


def test_perplexities_are_measured_of_texts_and_of_answers(checkpoint):
    network = AutoModelForCausalLM.from_pretrained(checkpoint)
    generator = TextGenerator(checkpoint=checkpoint, text_col="text", perplexity_col="perplexity")
    texts = ["good film", "", "the song was fine and great"]
    found = predict(generator, text=texts)
    losses = [text_losses(network, ids_of(f"{text} [SEP]")) for text in (texts[0], texts[2])]
    wanted = [float(one.mean().exp()) for one in losses]
    assert list(found) == ["perplexity"]
    assert [found["perplexity"][0], found["perplexity"][2]] == pytest.approx(wanted, rel=1e-5)
    assert found["perplexity"][1] is None  # one token, with nothing before it
    generator.setAnswerCol("answer").setGeneratedCol("more").setMaxNewTokens(2)
    found = predict(generator, text=["good film"], answer=["was nice"])
    losses = text_losses(network, ids_of("good film was nice [SEP]"))[1:]
    assert list(found) == ["more", "perplexity"]
    assert found["perplexity"] == pytest.approx([float(losses.mean().exp())], rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_texts_generated_in_a_batch_are_the_texts_of_each_prompt_alone(tmp_path, kind):
    checkpoint = write_causal_checkpoint(tmp_path, kind)
    generator = TextGenerator(checkpoint=checkpoint, text_col="text", max_new_tokens=6)
    prompts = ["good", "the film is a song", "", "awful book and", "a " * 40]
    together = predict(generator, text=prompts)["generated"]
    generator.setBatchSize(1)
    assert predict(generator, text=prompts)["generated"] == together
    network = AutoModelForCausalLM.from_pretrained(checkpoint)
    for prompt, made in zip(prompts, together, strict=True):
        ids = (ids_of(prompt) or [3])[-(LENGTH - 6) :]
        tokens = network.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )[0, len(ids) :]
        assert ids_of(made) == [one for one in tokens.tolist() if one not in (0, 1, 3)]


def test_drawn_texts_are_the_same_in_a_repeated_task(checkpoint):
    generator = TextGenerator(
        checkpoint=checkpoint, text_col="text", generation={"do_sample": True, "temperature": 2.0}
    ).setMaxNewTokens(6)
    prompts = ["good", "the film is"]
    before = torch.random.get_rng_state()
    drawn = predict(generator, text=prompts)["generated"]
    assert predict(generator, text=prompts)["generated"] == drawn
    assert torch.equal(torch.random.get_rng_state(), before)
    generator.setGeneration({})
    assert predict(generator, text=prompts)["generated"] != drawn


@pytest.mark.parametrize("text_col", [None, "text"])
def test_two_processes_train_what_one_trains(checkpoint, tmp_path, text_col):
    # Texts of 0 to 17 tokens: the processes have different numbers of tokens in each step.
    rows = make_questions(52) if text_col is None else make_texts(52)
    found, options = {}, {} if text_col is None else {"text_col": text_col}
    for processes, size, rate in ((1, 16, 0.01), (2, 8, 0.005)):
        fitted = make_language_model(
            checkpoint, tmp_path / str(processes), processes=processes, batch_size=size,
            learning_rate=rate, epochs=2, packing=processes == 2, **options,
        ).fit(rows)  # fmt: skip
        found[processes] = fitted.getHistory()[-1]["train"]["loss"], fitted.getModel().state_dict()
    assert found[1][0] == pytest.approx(found[2][0], rel=1e-4)
    for name, value in found[1][1].items():
        assert torch.allclose(value, found[2][1][name], atol=2e-3), name


def test_the_first_loss_is_a_mean_over_the_learned_tokens_of_all_processes(checkpoint, tmp_path):
    rows, network = make_texts(40), AutoModelForCausalLM.from_pretrained(checkpoint)
    fitted = make_language_model(
        checkpoint, tmp_path, processes=2, text_col="text", learning_rate=1e-9
    ).fit(rows)  # fmt: skip
    texts = [ids_of(f"{text} [SEP]")[:LENGTH] for text in rows["text"].to_pylist()]
    losses = torch.cat([text_losses(network, ids) for ids in texts if len(ids) > 1])
    assert fitted.getHistory()[0]["train"]["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


@pytest.mark.parametrize("lora", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_like_an_uninterrupted_one(checkpoint, tmp_path, lora):
    rows, found = make_questions(40), {}
    for name, lengths in (("at once", [2]), ("resumed", [1, 2])):
        for epochs in lengths:
            fitted = make_language_model(
                checkpoint, tmp_path / name, lora=lora, run_id="run", epochs=epochs
            ).fit(rows)
        found[name] = dict(fitted.getModel().state_dict())
    for name, value in found["at once"].items():
        assert torch.equal(value, found["resumed"][name]), name


def test_adapters_alone_are_in_checkpoints(checkpoint, tmp_path):
    fitted = make_language_model(checkpoint, tmp_path, lora=2, run_id="run").fit(make_questions(20))
    state = unpack_state((tmp_path / "runs" / "run" / "checkpoint").read_bytes())
    assert state["model"]
    assert all("lora_" in name for name in state["model"])
    base = fitted.getModel().network.get_base_model()
    assert torch.equal(base.lm_head.weight, make_causal_network().lm_head.weight)


def test_files_are_read_as_they_are(checkpoint, tmp_path):
    pq.write_table(make_texts(32), tmp_path / "rows.parquet")
    language_model = make_language_model(checkpoint, tmp_path / "store", text_col="text")
    from_files = language_model.fit_on_parquet(path=str(tmp_path / "rows.parquet"))
    assert from_files.getHistory()[0]["rows"] == 32
    assert from_files.getHistory()[0]["train"]["loss"] > 0


def test_a_network_that_cannot_pack_is_padded_and_long_texts_are_counted(tmp_path, capsys):
    rows = make_texts(24)
    long = sum(len(text.split()) + 1 > 8 for text in rows["text"].to_pylist())
    CausalLanguageModel(
        checkpoint=(make_mamba(), make_plain_tokenizer(eos_token="[SEP]")), text_col="text",
        max_length=8, store=str(tmp_path), random_seed=1, backend=LocalBackend(1, verbose=0),
    ).fit(rows)  # fmt: skip
    said = capsys.readouterr().err
    assert "texts are padded and not packed: MambaForCausalLM cannot keep" in said
    assert f"{long} of 24 texts have more than max_length=8 tokens" in said


def test_a_tokenizer_without_special_tokens_trains_and_generates(tmp_path):
    tokenizer = make_plain_tokenizer()  # no token for padding, for the beginning, or for the end
    checkpoint = write_causal_checkpoint(tmp_path / "checkpoint", "llama", tokenizer)
    rows = pa.table({"text": ["good film was nice", "", "bad", "the " * 40]})
    fitted = make_language_model(checkpoint, tmp_path / "store", text_col="text").fit(rows)
    made = predict(fitted.setMaxNewTokens(3), text=["good film", "the " * 40])["generated"]
    assert len(made) == 2
    with pytest.raises(ValueError, match="column 'text' has a prompt without tokens, such as"):
        predict(fitted, text=["good", ""])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_col": "text"}, "either text_col is required, or prompt_col and answer_col"),
        ({"answer_col": None}, "either text_col is required, or prompt_col and answer_col"),
        ({"answer_col": "question"}, "prompt_col and answer_col are the same column: 'question'"),
        ({"label_col": "answer"}, "label_col cannot be set: a text has many tokens to learn"),
        ({"loss": torch.nn.MSELoss()}, "loss cannot be set: a text has many tokens to learn"),
        ({"loss_reduction": "sum"}, "loss_reduction cannot be set: the loss is a mean"),
        ({"max_length": LENGTH + 1}, f"max_length={LENGTH + 1} is more than the checkpoint"),
        ({"answer_col": "reply"}, "label column 'reply' is not in the table"),
        ({"checkpoint": None}, "checkpoint is required"),
    ],
)
def test_options_that_do_not_fit_are_named(checkpoint, tmp_path, options, message):
    known = {"prompt_col": "question", "answer_col": "answer", "checkpoint": checkpoint}
    language_model = CausalLanguageModel(
        **known | options, store=str(tmp_path), verbose=0, backend=GANGS[1]
    )
    with pytest.raises(ValueError, match=message):
        language_model.fit(make_questions(8))


def test_rows_without_a_token_to_learn_end_the_fit(tmp_path):
    tokenizer = make_plain_tokenizer()
    checkpoint = write_causal_checkpoint(tmp_path / "checkpoint", "llama", tokenizer)
    rows = pa.table({"question": ["good film"] * 8, "answer": [""] * 8})
    with pytest.raises(Exception, match="column 'answer' has no token to learn"):
        make_language_model(checkpoint, tmp_path / "store").fit(rows)
    nulls = pa.table({"question": ["good film"] * 8, "answer": [None, *["bad"] * 7]})
    with pytest.raises(Exception, match="answer"):
        make_language_model(checkpoint, tmp_path / "store").fit(nulls)


def test_a_network_that_sees_later_tokens_is_refused_before_work_starts(tmp_path):
    config = BertConfig(**copy.deepcopy(make_network().config.to_dict()))
    given = BertLMHeadModel(config), make_plain_tokenizer(eos_token="[SEP]")
    with pytest.raises(ValueError, match="BertLMHeadModel looks at later tokens"):
        make_language_model(given, tmp_path).fit(make_questions(8))
    with pytest.raises(ValueError, match="looks at later tokens"):
        predict(TextGenerator(checkpoint=given, text_col="text"), text=["good"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": LENGTH}, f"max_new_tokens={LENGTH} leaves no token for a text"),
        ({"perplexity_col": "new", "generated_col": "new"}, "are the same column: 'new'"),
        ({"thresholds": [0.5, 0.5]}, "thresholds cannot be set: a text has no class"),
        ({"text_col": None}, "text_col is required"),
    ],
)
def test_options_of_predictions_that_do_not_fit_are_named(checkpoint, options, message):
    known = {"checkpoint": checkpoint, "text_col": "text", "max_new_tokens": 4}
    generator = TextGenerator(**known | options)
    with pytest.raises(ValueError, match=message):
        predict(generator, text=["good"])
    with pytest.raises(ValueError, match="generation cannot have max_new_tokens, which follows"):
        TextGenerator(generation={"max_new_tokens": 3})
    with pytest.raises(ValueError, match="a text has no class: set perplexity_col"):
        generator.evaluate(None)
