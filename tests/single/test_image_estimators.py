# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators of images without Spark: backbones, fits, adapters, errors before work starts."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import safetensors.torch
import torch
import torchvision
from tests.image_checkpoints import (
    CLASSES,
    SIZE,
    SPARK_IMAGE_TYPE,
    change_json,
    encode_image,
    make_network,
    make_pictures,
    make_pixels,
    make_processor,
    make_spark_image,
    write_checkpoint,
)
from tests.parity.gang import StandingGang
from tests.single.training import Here
from torchvision.transforms import v2
from transformers import AutoImageProcessor, AutoModelForImageClassification

from farandole.spark.torch.saving.state_bytes import unpack_state
from farandole.spark.transformers.checkpoint import open_checkpoint
from farandole.spark.vision import ImageClassifier, ImageClassifierModel
from farandole.spark.vision.checkpoint import CheckpointBackbone, ImageCheckpoint

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
BACKENDS = {1: Here(), 2: StandingGang(2)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", autouse=True)
def standing_processes():
    yield
    BACKENDS[2].close()


class SmallNetwork(torch.nn.Module):
    """A convolution with a batch norm, and a linear head.

    Args:
        outputs: number of outputs of the head.
        channels: number of channels of images.
    """

    def __init__(self, outputs=5, channels=3):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(8 * 7 * 7, outputs)

    def forward(self, pixels):
        return self.head(self.body(pixels).flatten(1))


def make_classifier(store, processes=1, **options):
    known = {
        "image_col": "picture",
        "label_col": "half",
        "learning_rate": 0.005,
        "batch_size": 16,
        "random_seed": 1,
        "verbose": 0,
        "backend": BACKENDS[processes],
    }
    return ImageClassifier(store=str(store), **known | options)


def predict(fitted, table, column="picture"):
    frame = SimpleNamespace(columns=["0", column], sparkSession=None)
    images = table[column].combine_chunks()
    batch = pa.RecordBatch.from_arrays([pa.array(range(len(images))), images], names=["0", "1"])
    (found,) = fitted._create_predictor(frame).predict_outputs(batch)
    return found


def save_and_load(fitted):
    values = {param.name: value for param, value in fitted._paramMap.items() if value is not None}
    plain, parts = fitted.write().split_plain_and_packed(values)
    loaded = ImageClassifierModel(**{name: plain[name] for name in plain if name != "outputs"})
    ImageClassifierModel.read().allow_pickle().restore_packed_parts(loaded, parts, "saved")
    return loaded, parts


def test_a_checkpoint_learns_words_and_transformers_reads_what_it_saves(checkpoint, tmp_path):
    rows = make_pictures(64)
    fitted = make_classifier(tmp_path / "store", checkpoint=checkpoint, epochs=8).fit(rows)
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.2
    fitted.save_pretrained(tmp_path / "saved")
    network = AutoModelForImageClassification.from_pretrained(tmp_path / "saved").eval()
    assert network.config.label2id == {"bottom": 0, "top": 1}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    images = [PIL.Image.fromarray(one) for one in make_pixels(64)[0]]
    with torch.no_grad():
        wanted = network(**processor(images, return_tensors="pt")).logits
    found = predict(fitted, rows)
    assert found == pytest.approx(wanted.numpy(), abs=1e-4)
    classes = [CLASSES[index] for index in found.argmax(axis=1)]
    assert np.mean(np.array(classes) == np.array(rows["half"])) > 0.95
    loaded, parts = save_and_load(fitted)
    assert set(parts) >= {"config.json", "model.safetensors", "preprocessor_config.json"}
    assert "objects" not in parts
    assert predict(loaded, rows) == pytest.approx(found, abs=1e-5)


def test_a_fit_is_a_plain_loop_of_torch(checkpoint, tmp_path):
    pixels, names = make_pixels(32)
    fitted = make_classifier(tmp_path, checkpoint=checkpoint, shuffle=False, epochs=4).fit(
        make_pictures(32)
    )
    with open_checkpoint(checkpoint, kind=ImageCheckpoint) as opened:
        network = CheckpointBackbone(opened).load_backbone(CLASSES, 1).network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.005, weight_decay=0.01)
    images = [PIL.Image.fromarray(one) for one in pixels]
    wanted = make_processor()(images, return_tensors="pt")["pixel_values"]
    labels = torch.tensor([CLASSES.index(one) for one in names])
    for entry in fitted.getHistory():
        losses = []
        for first in range(0, 32, 16):
            optimizer.zero_grad()
            found = network(wanted[first : first + 16]).logits
            loss = torch.nn.functional.cross_entropy(found, labels[first : first + 16])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert entry["train"]["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    for name, value in fitted.getModel().network.state_dict().items():
        assert torch.allclose(value, network.state_dict()[name], atol=1e-3), name


def test_two_processes_train_as_one_does(checkpoint, tmp_path):
    rows, weights = make_pictures(32), {}
    flips = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomAffine(10)])
    for processes in (1, 2):
        # Two processes have 7 and 8 rows of a step.
        fitted = make_classifier(
            tmp_path / str(processes), processes, checkpoint=checkpoint, epochs=2,
            augmentations=flips, learning_rate=0.002, global_batch_size=15,
        ).fit(rows)  # fmt: skip
        weights[processes] = fitted.getModel().state_dict()
    for name, value in weights[1].items():
        assert torch.allclose(value, weights[2][name], atol=1e-4), name


def test_an_exported_model_takes_pixels(checkpoint, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = make_pictures(8)
    fitted = make_classifier(tmp_path / "store", checkpoint=checkpoint, epochs=2).fit(rows)
    fitted.export(tmp_path / "model.pt2")
    fitted.export(tmp_path / "model.onnx")
    pixels = np.moveaxis(make_pixels(8)[0], -1, 1)
    program = torch.export.load(tmp_path / "model.pt2").module()
    (found,) = program(torch.from_numpy(pixels.copy()))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (same,) = session.run(["half__output"], {"picture": pixels})
    wanted = predict(fitted, rows)
    assert found.detach().numpy() == pytest.approx(wanted, abs=1e-4)
    assert same == pytest.approx(wanted, abs=1e-4)


def test_a_model_comes_back_from_mlflow(mlflow, checkpoint, tmp_path):
    rows = make_pictures(8)
    fitted = make_classifier(tmp_path / "store", checkpoint=checkpoint, mlflow=True).fit(rows)
    (run,) = mlflow.search_runs(output_format="list")
    (logged,) = mlflow.MlflowClient().search_logged_models([run.info.experiment_id])
    loaded = ImageClassifierModel.from_mlflow(logged.model_uri, allow_pickle=True)
    assert predict(loaded, rows) == pytest.approx(predict(fitted, rows), abs=1e-6)
    assert loaded.getClasses() == ["bottom", "top"]
    assert loaded.explain() == fitted.explain()
    loaded.save_pretrained(tmp_path / "saved")
    assert AutoImageProcessor.from_pretrained(tmp_path / "saved").size["height"] == SIZE


def test_augmentations_change_the_training_and_not_the_validation(checkpoint, tmp_path):
    rows = make_pictures(32)
    rows = rows.append_column("held", pa.array([False, True] * 16))
    darker = v2.Lambda(torch.zeros_like)
    options = {"checkpoint": checkpoint, "validation": "held", "learning_rate": 1e-12}
    plain, dark = (
        make_classifier(tmp_path / name, augmentations=one, **options).fit(rows).getHistory()[0]
        for name, one in (("plain", None), ("dark", darker))
    )
    assert dark["validation"]["loss"] == pytest.approx(plain["validation"]["loss"], abs=1e-5)
    assert dark["train"]["loss"] != pytest.approx(plain["train"]["loss"], abs=1e-5)


def test_a_resumed_run_ends_like_an_uninterrupted_one(checkpoint, tmp_path):
    rows, found = make_pictures(24), {}
    flips = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomAffine(10)])
    options = {"checkpoint": checkpoint, "run_id": "run"}
    for name, lengths in (("at once", [2]), ("resumed", [1, 2])):
        for epochs in lengths:
            classifier = make_classifier(
                tmp_path / name, epochs=epochs, augmentations=copy.deepcopy(flips), **options
            )
            fitted = classifier.fit(rows)
        found[name] = fitted.getModel().state_dict()
    for name, value in found["at once"].items():
        assert torch.equal(value, found["resumed"][name]), name
    other = v2.RandomHorizontalFlip(0.25)
    with pytest.raises(ValueError, match="augmentations"):
        make_classifier(tmp_path / "resumed", epochs=3, augmentations=other, **options).fit(rows)


def test_adapters_alone_are_trained_and_checkpointed(checkpoint, tmp_path):
    rows = make_pictures(64)
    fitted = make_classifier(
        tmp_path / "store", checkpoint=checkpoint, lora=2, epochs=12, learning_rate=0.03,
        run_id="adapters",
    ).fit(rows)  # fmt: skip
    state = unpack_state((tmp_path / "store" / "runs" / "adapters" / "checkpoint").read_bytes())
    assert all("lora_" in name or ".modules_to_save." in name for name in state["model"])
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.4
    found = predict(fitted, rows)
    fitted.save_pretrained(tmp_path / "saved")
    fitted.save_adapter(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    loaded, _ = save_and_load(fitted)
    assert predict(loaded, rows) == pytest.approx(found, abs=1e-4)
    assert predict(fitted.merge_adapter(), rows) == pytest.approx(found, abs=1e-4)
    with pytest.raises(ValueError, match="the model has no adapters"):
        fitted.save_adapter(tmp_path / "adapter")


def test_a_frozen_backbone_stays_as_it_is(tmp_path, capfd):
    network = SmallNetwork()
    network.body[1].running_mean.fill_(0.25)
    fitted = make_classifier(
        tmp_path, backbone=network, image_size=SIZE, freeze_backbone=True, epochs=8, run_id="run",
        verbose=1,
    ).fit(make_pictures(64))  # fmt: skip
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.3
    trained = fitted.getModel().network
    for name, value in network.body.state_dict().items():
        assert torch.equal(trained.body.state_dict()[name], value), name
    state = unpack_state((tmp_path / "runs" / "run" / "checkpoint").read_bytes())
    names = {name for name in state["model"] if "running" not in name and "tracked" not in name}
    assert names == {"network.head.weight", "network.head.bias"}
    said = capfd.readouterr().err
    assert "head had 5 outputs: it is random, with 2" in said
    assert "786 of 1,026 parameters are trained (76.6%)" in said
    assert network.head.out_features == 5


def test_a_module_of_gray_images_is_fitted_and_saved_with_a_pickle(tmp_path):
    rows = make_pictures(32)
    fitted = make_classifier(
        tmp_path, backbone=SmallNetwork(2, channels=1), image_size=SIZE, label_col="number"
    ).fit(rows)
    assert fitted.getTransformationFn().mode == "L"
    assert fitted.getClasses() == [0, 1]
    loaded, parts = save_and_load(fitted)
    assert "objects" in parts
    assert predict(loaded, rows) == pytest.approx(predict(fitted, rows), abs=1e-5)
    with pytest.raises(ValueError, match="save_pretrained needs a network of transformers"):
        fitted.save_pretrained(tmp_path / "saved")


def write_named_weights(path, **options):
    torch.manual_seed(3)
    network = torchvision.models.get_model("squeezenet1_1", weights=None, **options)
    if path.suffix == ".pth":
        torch.save(network.state_dict(), path)
    else:
        safetensors.torch.save_file(network.state_dict(), path)
    return network


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_network_by_name_takes_weights_and_is_saved_without_a_pickle(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    given = write_named_weights(path)
    rows = make_pictures(8)
    fitted = make_classifier(
        tmp_path / "store", backbone="torchvision:squeezenet1_1", backbone_weights=str(path),
        image_size=32, freeze_backbone=True,
    ).fit(rows)  # fmt: skip
    name = "features.0.weight"
    assert torch.equal(fitted.getModel().network.state_dict()[name], given.state_dict()[name])
    loaded, parts = save_and_load(fitted)
    assert list(parts) == ["backbone.safetensors"]
    assert predict(loaded, rows) == pytest.approx(predict(fitted, rows), abs=1e-5)


def test_a_network_of_timm_states_its_scale(tmp_path):
    timm = pytest.importorskip("timm")
    rows = make_pictures(8)
    fitted = make_classifier(tmp_path, backbone="timm:test_resnet", image_size=32).fit(rows)
    config = timm.models.get_pretrained_cfg("test_resnet")
    assert fitted.getImageMean() == list(config.mean)
    loaded, parts = save_and_load(fitted)
    assert list(parts) == ["backbone.safetensors"]
    assert predict(loaded, rows) == pytest.approx(predict(fitted, rows), abs=1e-5)


def test_files_paths_and_structs_train_alike(checkpoint, tmp_path):
    pixels, names = make_pixels(16)
    paths = []
    for index, one in enumerate(pixels):
        (tmp_path / f"{index}.png").write_bytes(encode_image(one))
        paths.append(f"{index}.png")
    structs = pa.array([make_spark_image(one) for one in pixels], SPARK_IMAGE_TYPE)
    columns = {"files": make_pictures(16)["picture"], "paths": pa.array(paths), "structs": structs}
    losses = {}
    for name, column in columns.items():
        table = pa.table({"picture": column, "half": names})
        root = str(tmp_path) if name == "paths" else None
        fitted = make_classifier(
            tmp_path / name, checkpoint=checkpoint, image_root=root, shuffle=False, epochs=2
        ).fit(table)
        losses[name] = [entry["train"]["loss"] for entry in fitted.getHistory()]
        assert len(predict(fitted, table)) == 16
    assert losses["paths"] == losses["files"] == losses["structs"]


def test_a_checkpoint_in_memory_trains_like_its_directory(checkpoint, tmp_path):
    given = {"directory": checkpoint, "memory": (make_network(), make_processor())}
    losses = {
        name: make_classifier(tmp_path / name, checkpoint=value)
        .fit(make_pictures(16))
        .getHistory()[0]["train"]["loss"]
        for name, value in given.items()
    }
    assert losses["memory"] == losses["directory"]


def test_a_checkpoint_that_does_not_fit_is_named(checkpoint, tmp_path):
    rows, copies = make_pictures(8), {}
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        copies[name] = tmp_path / name.partition(".")[0]
        copies[name].mkdir()
        for path in Path(checkpoint).iterdir():
            if path.name != name:
                (copies[name] / path.name).write_bytes(path.read_bytes())
        with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
            make_classifier(tmp_path / "store", checkpoint=str(copies[name])).fit(rows)
    path = copies["preprocessor_config.json"] / "preprocessor_config.json"
    for content in ("[]", "{", json.dumps({"size": {"longest": 3}}), json.dumps({})):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"preprocessor_config\.json of the checkpoint .*"):
            make_classifier(tmp_path / "store", checkpoint=str(path.parent)).fit(rows)
    make_processor().save_pretrained(path.parent)
    change_json(path, size={"height": 32, "width": 32})
    with pytest.raises(ValueError, match=r"does not take images of \(3, 32, 32\), as image_size"):
        make_classifier(tmp_path / "store", checkpoint=str(path.parent)).fit(rows)
    with pytest.raises(FileNotFoundError, match="the checkpoint does not exist: /no/such"):
        make_classifier(tmp_path / "store", checkpoint="/no/such").fit(rows)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "one of checkpoint and backbone is required, and not both"),
        ({"backbone": "torchvision:resnet19"}, "no network for images of the name 'resnet19', sim"),
        ({"backbone": "keras:resnet18"}, "backbone must be torchvision:NAME, timm:NAME"),
        ({"backbone": SmallNetwork(), "backbone_weights": "a.pth"}, "backbone_weights needs a"),
        ({"backbone": SmallNetwork(), "lora": 2}, "lora needs a checkpoint of transformers"),
        ({"backbone": SmallNetwork(channels=2)}, "takes images of 2 channels: 1, 3 and 4 are"),
        ({"backbone": SmallNetwork(), "image_mean": [0.1, 0.2]}, "image_mean needs one number"),
        ({"backbone": SmallNetwork(), "model": SmallNetwork()}, "model cannot be set: it follows"),
        ({"backbone": SmallNetwork(), "augmentations": v2.CenterCrop(4)}, "augmentations must ret"),
        ({"backbone": SmallNetwork(), "augmentations": int}, "augmentations do not take an"),
        ({"backbone": torch.nn.Flatten()}, "must return a logit for each of 2 classes"),
        ({"backbone": "torchvision:squeezenet1_1", "backbone_weights": "/no/such.pth"},
         "there is no file /no/such.pth"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(tmp_path, options, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        make_classifier(tmp_path, image_size=SIZE, **options).fit(make_pictures(8))


def test_weights_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "weights.safetensors"
    named = {"backbone": "torchvision:squeezenet1_1", "backbone_weights": str(path)}
    safetensors.torch.save_file({"conv.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="are not weights of torchvision:squeezenet1_1, they dif"):
        make_classifier(tmp_path, **named).fit(make_pictures(8))
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="backbone_weights must be safetensors, or a state_dict"):
        make_classifier(tmp_path, **named).fit(make_pictures(8))


def test_values_that_cannot_be_are_named():
    for name, value, reason in (
        ("checkpoint", 3, "checkpoint must be the path of a directory, or .model, image processor"),
        ("backbone", "resnet18", "backbone must be torchvision:NAME, timm:NAME, or a torch.nn.M"),
        ("image_size", [1, 2, 3], "image_size must be one number, or height and width"),
        ("image_size", 0, "image_size must be .*: 0"),
        ("image_std", 0.0, "image_std must not be 0"),
        ("image_mean", [float("nan")], "image_mean must have finite numbers"),
        ("resize_mode", "zoom", "resize_mode must be .*"),
    ):
        with pytest.raises((TypeError, ValueError), match=reason):
            ImageClassifier(**{name: value})


def replace_column(rows, name, values):
    return rows.set_column(rows.column_names.index(name), name, pa.array(values))


def test_rows_that_do_not_fit_are_named(checkpoint, tmp_path):
    rows = make_pictures(8)
    files, halves = rows["picture"].to_pylist(), rows["half"].to_pylist()
    wrong = {
        "image column 'picture' has type int64: images are bytes": ("picture", [1] * 8),
        "column picture has nulls": ("picture", [None, *files[1:]]),
        "column 'picture', row 1 of a batch: cannot decode": (
            "picture", [files[0], b"", *files[2:]]),
        "label column 'half' has nulls in 1 of 8 rows": ("half", [None, *halves[1:]]),
        "label column 'half' has one class, top": ("half", ["top"] * 8),
    }  # fmt: skip
    for index, (reason, change) in enumerate(wrong.items()):
        with pytest.raises(Exception, match=reason):
            make_classifier(tmp_path / str(index), checkpoint=checkpoint, shuffle=False).fit(
                replace_column(rows, *change)
            )


def test_the_parameters_of_the_user_stay_as_they_are(checkpoint, tmp_path):
    classifier = make_classifier(tmp_path, checkpoint=checkpoint)
    before = {param.name: value for param, value in classifier._paramMap.items()}
    classifier.fit(make_pictures(8))
    assert {param.name: value for param, value in classifier._paramMap.items()} == before
