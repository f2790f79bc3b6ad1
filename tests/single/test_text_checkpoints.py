# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints of many kinds for texts: heads, positions, adapters, and files that do not fit."""

from __future__ import annotations

import copy
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import peft
import pyarrow as pa
import pytest
import safetensors.torch
import torch
import transformers
from tests.text_checkpoints import LENGTH, WORDS, make_network, make_tokenizer, write_checkpoint
from torch.optim.swa_utils import AveragedModel

from farandole.data.encoding import ColumnEncoding
from farandole.spark.common.model.arrow_arrays import feature_arrays
from farandole.spark.torch.model import TorchModel
from farandole.spark.transformers import (
    TextClassifier,
    TextClassifierModel,
    TextEmbedder,
    TextRegressor,
)
from farandole.spark.transformers.adapters import add_adapter
from farandole.spark.transformers.checkpoint import open_checkpoint
from farandole.spark.transformers.model import create_tokenization
from farandole.spark.transformers.networks import TextNetwork
from farandole.spark.vision.backbones import ModuleBackbone
from farandole.stores.pickle_policy import PickleNotAllowedError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
CLASSIFIER = transformers.AutoModelForSequenceClassification
LONG_TEXT = " ".join(["film"] * 40)
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint")


def write_network(directory, network, tokenizer=None):
    network.save_pretrained(directory)
    (tokenizer or make_tokenizer()).save_pretrained(directory)
    return str(directory)


def make_encoder(kind, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    sizes = SIZES | {"max_position_embeddings": LENGTH + 3, "pad_token_id": 1}
    return getattr(transformers, f"{kind}Model")(config(**sizes | options))


def load_classifier(path, seed=1, **changes):
    with open_checkpoint(path) as opened:
        return opened.load_network(CLASSIFIER, seed, **{"num_labels": 2} | changes)


def load_adapted(path, rank=2):
    loaded = load_classifier(path)
    network = add_adapter(loaded, rank, 1, path)
    return TextNetwork(network, 0, has_adapter=True).eval()


def edit_json(path, name, value):
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_a_missing_text_is_filled_before_a_prediction(kind):
    texts = pa.array([None, "good"], pa.string()).cast(kind)
    batch = pa.RecordBatch.from_arrays([texts], names=["0"])
    encoding = ColumnEncoding(fill={"review": "no text"})
    arrays = feature_arrays(batch, ["review"], ["review"], encoding, texts=True)
    values = [one.decode() if isinstance(one, bytes) else one for one in arrays["review"]]
    assert values == ["no text", "good"]
    with pytest.raises(ValueError, match="column 'review' has nulls: 1 of 2 rows"):
        feature_arrays(batch, ["review"], ["review"], ColumnEncoding(), texts=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_off_on_the_side_of_the_tokenizer(tmp_path, side):
    tokenizer = make_tokenizer(truncation_side=side)
    path = write_network(tmp_path / "checkpoint", make_network(), tokenizer)
    text = "good film book song the a is was and bad"
    with open_checkpoint(path) as opened:
        made = create_tokenization(TextClassifier(text_col="review", max_length=6), opened)
    wanted = transformers.AutoTokenizer.from_pretrained(path)([text], truncation=True, max_length=6)
    assert made.tokenize_texts([text]).tolist() == wanted["input_ids"]


def test_a_network_that_pads_at_the_beginning_is_refused(tmp_path):
    config = transformers.XLNetConfig(
        vocab_size=len(WORDS), d_model=16, n_layer=1, n_head=2, d_inner=32
    )
    path = write_network(tmp_path / "checkpoint", transformers.XLNetModel(config))
    with pytest.raises(ValueError, match=r"checkpoint \S+ is a network of the kind xlnet, which"):
        load_classifier(path)


@pytest.mark.parametrize("wrap", [AveragedModel, torch.nn.Sequential])
def test_a_wrapped_network_keeps_frozen_weights_out_of_its_state(checkpoint, wrap):
    network = load_adapted(checkpoint)
    frozen = set(network.frozen_weights())
    assert frozen
    wrapped = wrap(network)
    state = wrapped.state_dict()
    prefix = "module." if wrap is AveragedModel else "0."
    assert set(state) - {"n_averaged"} == {prefix + name for name in network.state_dict()}
    assert not {prefix + name for name in frozen} & set(state)
    before = {name: value.clone() for name, value in network.frozen_weights().items()}
    other = {name: torch.ones_like(value) for name, value in state.items()}
    wrapped.load_state_dict(other)
    assert all(bool((value == 1).all()) for value in wrapped.state_dict().values())
    inner = wrapped.module if wrap is AveragedModel else network
    for name, value in inner.frozen_weights().items():
        assert torch.equal(value, before[name]), name
    copied = copy.deepcopy(network)
    assert set(copied.state_dict()) == set(network.state_dict())


def test_shared_weights_that_are_frozen_are_in_no_state(tmp_path):
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    network = load_adapted(write_network(tmp_path / "t5", transformers.T5Model(config)))
    assert not [name for name in network.state_dict() if "shared" in name or "embed" in name]


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_peft_reads_saved_adapters(tmp_path, kind):
    path = write_network(tmp_path / "checkpoint", make_encoder(kind))
    network = load_adapted(path)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.requires_grad and "lora_B" in name:
                weight.fill_(0.3)
    network.network.save_pretrained(tmp_path / "adapter")
    base = CLASSIFIER.from_pretrained(path, num_labels=2)
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokens = torch.tensor([[2, 5, 13, 3]])
    with torch.no_grad():
        found = again(tokens, torch.ones_like(tokens)).logits
        assert torch.allclose(found, network(tokens), atol=1e-5)


def prefix_names(directory):
    path = directory / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    named = {f"module.{name}": value for name, value in weights.items()}
    safetensors.torch.save_file(named, path, {"format": "pt"})


UNFIT_FILES = {
    "other names": (prefix_names, r"checkpoint \S+ has no weights for bert.embeddings"),
    "other shapes": (
        lambda directory: edit_json(directory / "config.json", "vocab_size", 30),
        r"has no weights for bert.embeddings.word_embeddings, or weights of another shape",
    ),
    "code from a hub": (
        lambda directory: edit_json(
            directory / "config.json", "attn_implementation", "kernels-community/flash-attn"
        ),
        r"config.json of the checkpoint \S+ asks for attn_implementation='kernels-community",
    ),
    "code from a hub for a part": (
        lambda directory: edit_json(
            directory / "config.json", "part", {"_attn_implementation": {"": "me/mine"}}
        ),
        r"config.json of the checkpoint \S+ asks for _attn_implementation='me/mine'",
    ),
    "adapters": (
        lambda directory: (directory / "adapter_config.json").write_text("{}"),
        r"checkpoint \S+ has adapter_config.json: merge its adapters",
    ),
}


@pytest.mark.parametrize("fault", UNFIT_FILES)
def test_files_that_do_not_fit_are_named(tmp_path, fault):
    change, message = UNFIT_FILES[fault]
    write_checkpoint(tmp_path / "checkpoint")
    change(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=message):
        load_classifier(str(tmp_path / "checkpoint"))


def test_the_attentions_of_transformers_are_taken(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint" / "config.json", "attn_implementation", "eager")
    network = load_classifier(str(tmp_path / "checkpoint")).network
    assert network.config._attn_implementation == "eager"


def write_moods(directory, names):
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(names)), "num_labels": len(names)}
    config = transformers.BertConfig(**SIZES, max_position_embeddings=LENGTH, **labels)
    network = transformers.BertForSequenceClassification(config)
    return write_network(directory, network), network


def load_moods(path, names):
    return load_classifier(path, num_labels=len(names), id2label=dict(enumerate(names)))


def test_the_rows_of_a_head_follow_the_names_of_its_classes(tmp_path):
    path, network = write_moods(tmp_path / "checkpoint", ["sad", "happy", "angry"])
    loaded = load_moods(path, ["angry", "happy", "sad"])
    rows = [2, 1, 0]
    assert torch.equal(loaded.network.classifier.weight, network.classifier.weight[rows])
    assert torch.equal(loaded.network.classifier.bias, network.classifier.bias[rows])
    assert loaded.random_layers == ()
    assert "the rows of classifier are in the order of the classes, angry" in loaded.head_message
    same = load_moods(path, ["sad", "happy", "angry"])
    assert torch.equal(same.network.classifier.weight, network.classifier.weight)
    assert same.head_message == ""


def test_a_head_of_other_classes_begins_at_random(tmp_path):
    path, network = write_moods(tmp_path / "checkpoint", ["sad", "happy"])
    loaded, again = (load_moods(path, ["cold", "warm"]) for _ in range(2))
    weight = loaded.network.classifier.weight
    assert not torch.isclose(weight, network.classifier.weight).any()
    assert torch.equal(weight, again.network.classifier.weight)
    assert loaded.head_message == (
        "the checkpoint has other classes, sad, happy: the weights of classifier are random"
    )


def test_a_head_without_names_keeps_the_order_of_numbers(tmp_path):
    path, network = write_moods(tmp_path / "checkpoint", ["LABEL_0", "LABEL_1"])
    loaded = load_moods(path, ["0", "1"])
    assert torch.equal(loaded.network.classifier.weight, network.classifier.weight)


@pytest.mark.parametrize("kind", ["Bert", "Camembert", "MPNet", "Data2VecText", "XLMRoberta"])
def test_the_longest_text_fits_the_positions(tmp_path, kind):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 10**30
    path = write_network(tmp_path / "checkpoint", make_encoder(kind), tokenizer)
    with open_checkpoint(path) as opened:
        made = create_tokenization(TextClassifier(text_col="review"), opened)
        loaded = opened.load_network(CLASSIFIER, 0)
    tokens = made.tokenize_texts([LONG_TEXT])
    assert tokens.shape == (1, LENGTH + 3 if kind == "Bert" else LENGTH + 1)
    with torch.no_grad():
        assert TextNetwork(loaded.network, 0).eval()(torch.from_numpy(tokens)).isfinite().all()


def test_threads_draw_the_same_weights_of_texts_and_images(checkpoint, monkeypatch):
    images = ModuleBackbone(torch.nn.Sequential(torch.nn.Linear(SIZES["hidden_size"], 5)))

    def head_of(seed):
        if seed % 2:
            return images.load_backbone(("a", "b"), seed).network[0].weight
        return load_classifier(checkpoint, seed).network.classifier.weight

    seeds, found, seed_all = range(1, 5), {}, torch.manual_seed
    wanted = {seed: head_of(seed) for seed in seeds}

    def seed_and_wait(seed):
        seed_all(seed)
        time.sleep(0.05)  # other threads seed now, if they may

    monkeypatch.setattr(torch, "manual_seed", seed_and_wait)
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: head_of(seed)}))
        for seed in seeds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[seed], wanted[seed]) for seed in seeds)


def test_a_token_that_the_network_lacks_is_named(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<gap>"})
    path = write_network(tmp_path / "checkpoint", make_network(), tokenizer)
    message = rf"tokenizer of the checkpoint \S+ has the token '<gap>' with the id {len(WORDS)}"
    with pytest.raises(ValueError, match=message):
        load_classifier(path)


def test_checkpoints_that_cannot_be_are_named(checkpoint, tmp_path):
    network, tokenizer = make_network(), make_tokenizer()
    with pytest.raises(TypeError, match=rf": \({type(tokenizer).__name__}, BertForMaskedLM\)$"):
        TextClassifier(checkpoint=(tokenizer, network))
    adapted = load_adapted(checkpoint).network
    with pytest.raises(ValueError, match="checkpoint has a model with adapters"):
        TextClassifier(checkpoint=(adapted, tokenizer))
    for value, kind, message in (
        (f"{checkpoint}/config.json", NotADirectoryError, "config.json is no directory"),
        ("hf://org/model", ValueError, "hf://org/model is a name of a hub, which is not asked"),
        ("bert-base-uncased", FileNotFoundError, "bert-base-uncased .*no hub is asked"),
    ):
        with pytest.raises(kind, match=message), open_checkpoint(value):
            pass


def test_an_encoder_with_a_decoder_makes_no_embeddings(tmp_path):
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    path = write_network(tmp_path / "t5", transformers.T5Model(config))
    with pytest.raises(ValueError, match=r"\S+ is an encoder and a decoder \(t5\)"):
        TextEmbedder(checkpoint=path, text_col="review").save_pretrained(tmp_path / "saved")


@pytest.fixture
def prepared_embedders(monkeypatch):
    """The embedders that `transform` prepares, without rows."""
    found = []
    monkeypatch.setattr(TorchModel, "_transform", lambda self, _: found.append(self))
    return found


def test_an_embedder_follows_its_setters(checkpoint, tmp_path, prepared_embedders):
    other = write_network(tmp_path / "other", make_encoder("Roberta"))
    embedder = TextEmbedder(checkpoint=checkpoint, text_col="review", max_length=8)
    frame = SimpleNamespace(columns=["review"])
    embedder._transform(frame)
    first = embedder.getModel()
    embedder.setTextCol("title").setLengthMultiple(4)._transform(frame)
    assert embedder.getModel() is first
    embedder.setCheckpoint(other).setMaxLength(12)._transform(frame)
    assert type(embedder.getModel().network).__name__ == "RobertaModel"
    made = [one.getTransformationFn() for one in prepared_embedders]
    assert [(one.text_col, one.max_length, one.length_multiple) for one in made] == [
        ("review", 8, 8),
        ("title", 8, 4),
        ("title", 12, 4),
    ]
    assert [one.getFeatureColumns() for one in prepared_embedders[1:]] == [["title"]] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("outputCols", ["x"]), ("feature_columns", ["x"]), ("transformation_fn", dict)],
)
def test_an_embedder_refuses_what_follows_from_its_columns(checkpoint, name, value):
    embedder = TextEmbedder(checkpoint=checkpoint, text_col="review", **{name: value})
    with pytest.raises(ValueError, match=f"{name} cannot be set: it follows from checkpoint"):
        embedder._transform(SimpleNamespace(columns=["review"]))


def test_an_embedder_is_saved_before_it_has_read_its_checkpoint(checkpoint, tmp_path):
    TextEmbedder(checkpoint=checkpoint, text_col="review").save_pretrained(tmp_path / "saved")
    network = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(
        network.embeddings.word_embeddings.weight,
        make_network().bert.embeddings.word_embeddings.weight,
    )
    with pytest.raises(ValueError, match="checkpoint is required"):
        TextEmbedder(text_col="review").save_pretrained(tmp_path / "none")


def test_a_fitted_model_follows_its_setters(tmp_path):
    path, _ = write_moods(tmp_path / "checkpoint", ["sad", "happy"])
    model = TextClassifierModel(text_col="review")
    with open_checkpoint(path) as opened:
        model.use_checkpoint(opened)
    model.setTextCol("title").setMaxLength(4)
    function = model.getTransformationFn()
    assert model.getFeatureColumns() == ["title"]
    columns = {"title": np.array(["the film is good and fine"], dtype=object)}
    assert function(columns)["title"].shape == (1, 4)
    with pytest.raises(ValueError, match=f"max_length=99 is more than the model takes: {LENGTH}"):
        model.setMaxLength(99).getTransformationFn()


def test_a_reader_refuses_pickled_weights(tmp_path, monkeypatch):
    write_moods(tmp_path / "checkpoint", ["sad", "happy"])
    directory = tmp_path / "checkpoint"
    torch.save(safetensors.torch.load_file(directory / "model.safetensors"),
               directory / "pytorch_model.bin")  # fmt: skip
    (directory / "model.safetensors").unlink()
    parts = {one.name: one.read_bytes() for one in directory.iterdir()}
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "1")
    reader = TextClassifierModel.read()
    reader.restore_packed_parts(TextClassifierModel(), parts, "saved")
    with pytest.raises(PickleNotAllowedError, match="are a pickle, pytorch_model"):
        reader.allow_pickle(False).restore_packed_parts(TextClassifierModel(), parts, "saved")


def test_words_are_no_label_of_a_regressor():
    regressor = TextRegressor(label_col="mood")
    prepared = SimpleNamespace(columns={"mood": SimpleNamespace(dtype="str")})
    with pytest.raises(ValueError, match="label column 'mood' has no numbers"):
        regressor._network_changes(prepared)
