# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Images of estimators: decoded, augmented, scaled, and refused with the column and the row."""

from __future__ import annotations

import os
import threading

import cloudpickle
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest
import torch
from tests.image_checkpoints import (
    SIZE,
    SPARK_IMAGE_TYPE,
    encode_image,
    make_pixels,
    make_processor,
    make_spark_image,
)
from torchvision.transforms import v2
from transformers import ConvNextImageProcessor, ViTImageProcessor

from farandole._native.store import Store as NativeStore
from farandole.data import prepare_data
from farandole.data.encoding import ColumnEncoding
from farandole.data.inputs.spark_images import pack_spark_images
from farandole.spark.common.data.batch_source import BatchSource
from farandole.spark.common.model.arrow_arrays import feature_arrays
from farandole.spark.common.model.column_function import _series_as_array
from farandole.spark.common.transform import UserTransformation
from farandole.spark.vision.decoding import ImageDecoding
from farandole.spark.vision.networks import ImageNetwork
from farandole.spark.vision.preprocessing import (
    ImagePreprocessing,
    change_processor_config,
    read_processor_config,
)

pytestmark = pytest.mark.timeout(120)
PIXELS, _ = make_pixels(5)


def make_decoding(**options):
    known = {"image_col": "picture", "height": SIZE, "width": SIZE}
    return ImageDecoding(**known | options)


def as_channels_first(pixels):
    return np.moveaxis(pixels, -1, 1)


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_files_become_pixels_beside_other_columns(threads):
    files = np.array([*[encode_image(one) for one in PIXELS], None], dtype=object)[:-1]
    columns = {"picture": files, "half": np.arange(5)}
    made = make_decoding(threads=threads)(columns)
    assert made["picture"].dtype == np.uint8
    assert made["picture"].tolist() == as_channels_first(PIXELS).tolist()
    assert made["half"].tolist() == list(range(5))


def test_paths_are_read_from_any_store(tmp_path):
    url = f"memory://images-{os.getpid()}/photos"
    store, file = NativeStore(url), encode_image(PIXELS[0])
    store.write("in/a.png", file)
    (tmp_path / "a.png").write_bytes(file)
    wanted = as_channels_first(PIXELS[:1]).tolist()
    for root, path in (
        (None, str(tmp_path / "a.png")),
        (None, f"{url}/in/a.png"),
        (url, "in/a.png"),
    ):
        assert make_decoding(root=root).decode_images([path]).tolist() == wanted
    store.delete_all()
    with pytest.raises(FileNotFoundError, match=r"column 'picture', row 1 of a batch: .*b\.png"):
        make_decoding().decode_images([str(tmp_path / "a.png"), str(tmp_path / "b.png")])


def test_orientation_gray_alpha_and_16_bits_become_pixels():
    tall = np.zeros((SIZE, 2 * SIZE, 3), np.uint8)
    tall[:, :SIZE] = 255
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # the camera was turned by a quarter
    (upright,) = make_decoding().decode_images([encode_image(tall, "jpeg", exif=turned)])
    assert upright[:, :7].min() > 250
    assert upright[:, 9:].max() < 5
    gray, alpha = PIXELS[0, :, :, 0], np.full((SIZE, SIZE, 1), 7, np.uint8)
    for file in (encode_image(gray), encode_image(gray.astype(np.uint16) * 257)):
        (found,) = make_decoding().decode_images([file])
        assert [channel.tolist() for channel in found] == [gray.tolist()] * 3
    (found,) = make_decoding().decode_images(
        [encode_image(np.concatenate([PIXELS[0], alpha], axis=2))]
    )
    assert found.tolist() == as_channels_first(PIXELS[:1])[0].tolist()
    (found,) = make_decoding(mode="L").decode_images([encode_image(gray)])
    assert found.tolist() == [gray.tolist()]


def broken_files():
    file = encode_image(PIXELS[0], "jpeg")
    return {
        "cut off": file[: len(file) // 2],
        "empty": b"",
        "no image": b"<svg></svg>",
        "a float image": encode_image(PIXELS[0, :, :, 0].astype(np.float32), "tiff"),
    }


@pytest.mark.parametrize("kind", ["cut off", "empty", "no image", "a float image"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_cannot_be_decoded_is_named(kind, threads):
    files = [*[encode_image(one) for one in PIXELS[:3]], broken_files()[kind]]
    with pytest.raises(ValueError, match="column 'picture', row 3 of a batch: cannot decode"):
        make_decoding(threads=threads).decode_images(files)


def test_values_that_are_no_images_are_named():
    for value in (None, 3, 2.5):
        with pytest.raises(ValueError, match="column 'picture', row 0 of a batch: "):
            make_decoding().decode_images([value])


def pack(*images):
    return pack_spark_images(pa.array(images, SPARK_IMAGE_TYPE)).to_pylist()


def test_images_of_spark_have_the_pixels_of_files():
    gray = PIXELS[:, :, :, :1]
    alpha = np.concatenate([PIXELS, 255 - gray], axis=3)
    files = pack(*[make_spark_image(one) for one in PIXELS])
    assert make_decoding().decode_images(files).tolist() == as_channels_first(PIXELS).tolist()
    found = make_decoding().decode_images(pack(*[make_spark_image(one) for one in gray]))
    assert found.tolist() == as_channels_first(gray.repeat(3, axis=3)).tolist()
    found = make_decoding(mode="RGBA").decode_images(
        pack(*[make_spark_image(one) for one in alpha])
    )
    assert found.tolist() == as_channels_first(alpha).tolist()
    assert pack(None) == [None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"height": -1, "width": -1, "nChannels": -1, "mode": -1, "data": b""}, "it has -1 rows"),
        ({"height": 0, "data": b""}, "it has 0 rows of 16 pixels"),
        ({"mode": 5}, "its mode is 5 with 3 channels, known are 0 .1., 16 .3., 24 .4."),
        ({"height": 17}, "it has 768 bytes, not 17 x 16 x 3"),
        ({"nChannels": None}, "its mode is 16 with -1 channels"),
    ],
)
def test_images_of_spark_that_cannot_be_are_named(changes, reason):
    good = make_spark_image(PIXELS[0])
    with pytest.raises(ValueError, match=f"column 'picture', row 1 of a batch: .*{reason}"):
        make_decoding().decode_images(pack(good, good | changes))


def test_structs_of_a_prediction_are_packed():
    structs = pa.array([make_spark_image(one) for one in PIXELS], SPARK_IMAGE_TYPE)
    batch = pa.RecordBatch.from_arrays([structs], ["0"])
    columns = feature_arrays(batch, ["picture"], ["picture"], ColumnEncoding(), texts=True)
    assert make_decoding()(columns)["picture"].tolist() == as_channels_first(PIXELS).tolist()


FLIPS = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomAffine(20)])


def augment(pixels, seed=1, number=0, augmentations=FLIPS):
    decoding = make_decoding(augmentations=augmentations)
    return decoding.augment_rows({"picture": pixels}, seed, number)["picture"]


def test_augmentations_follow_from_image_seed_and_pass_alone():
    pixels = np.ascontiguousarray(as_channels_first(PIXELS))
    before, state = pixels.copy(), torch.get_rng_state()
    found = augment(pixels)
    assert torch.equal(torch.get_rng_state(), state)
    assert pixels.tolist() == before.tolist()
    assert found.tolist() != before.tolist()
    assert augment(pixels[::-1])[::-1].tolist() == found.tolist()
    assert augment(pixels[3:4])[0].tolist() == found[3].tolist()
    assert augment(pixels, seed=2).tolist() != found.tolist()
    assert augment(pixels, number=1).tolist() != found.tolist()
    again = cloudpickle.loads(cloudpickle.dumps(make_decoding(augmentations=FLIPS)))
    assert again.augment_rows({"picture": pixels}, 1, 0)["picture"].tolist() == found.tolist()
    assert augment(pixels, augmentations=None).tolist() == before.tolist()


@pytest.mark.parametrize(
    ("augmentations", "reason"),
    [
        (v2.ToDtype(torch.float32, scale=True), "they returned float32 of"),
        (v2.CenterCrop(8), r"uint8 of the shape \(3, 16, 16\), they returned uint8 of \(3, 8, 8\)"),
        (v2.ToPILImage(), "they returned Image"),
    ],
)
def test_augmentations_that_change_the_form_are_refused(augmentations, reason):
    with pytest.raises(ValueError, match=reason):
        augment(np.ascontiguousarray(as_channels_first(PIXELS)), augmentations=augmentations)


@pytest.mark.parametrize("in_memory", [False, True])
def test_each_pass_of_the_training_augments_the_rows_anew(tmp_path, in_memory):
    files = [encode_image(one) for one in PIXELS]
    url = prepare_data(pa.table({"picture": pa.array(files, pa.binary())}), tmp_path).train_url
    decoding = make_decoding(augmentations=FLIPS)
    source = BatchSource(
        url, {"picture": None}, batch_size=2, seed=1, in_memory=in_memory,
        transformation=UserTransformation(decoding), augmentation=decoding.augment_rows,
    )  # fmt: skip
    plain = np.ascontiguousarray(as_channels_first(PIXELS))
    assert source._transformation.reads_ahead
    for number in range(3):
        batches = [batch.columns["picture"] for batch in source.iterate_epoch_batches(number, 3)]
        found = np.concatenate(batches)[:5]
        assert found.tolist() == augment(plain, number=number).tolist()


def test_processors_of_transformers_give_size_and_scale():
    vit = make_processor().to_dict()
    assert read_processor_config(vit) == ImagePreprocessing(
        SIZE, SIZE, "stretch", pytest.approx((0.5,) * 3), pytest.approx((0.5,) * 3)
    )
    cropped = {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": 32}
    found = read_processor_config(cropped)
    assert (found.height, found.width, found.resize_mode) == (32, 32, "crop")
    for edge, mode in ((224, "crop"), (384, "stretch")):
        convnext = {"size": {"shortest_edge": edge}, "crop_pct": 0.875}
        assert read_processor_config(convnext).resize_mode == mode
    unscaled = {"size": 8, "do_rescale": False, "image_mean": 51.0, "image_std": 255.0}
    found = read_processor_config(unscaled)
    assert (found.mean, found.std) == (pytest.approx((0.2,)), pytest.approx((1.0,)))
    with pytest.raises(ValueError, match="rescale_offset is not supported"):
        read_processor_config({"size": 8, "rescale_offset": True})
    with pytest.raises(ValueError, match="it has no size: set image_size"):
        read_processor_config({})


@pytest.mark.parametrize("mode", ["stretch", "crop"])
def test_a_changed_preprocessing_is_written_for_transformers(mode):
    used = ImagePreprocessing(24, 24, mode, (0.25,) * 3, (0.125,) * 3)
    changed = change_processor_config(make_processor().to_dict(), used)
    assert read_processor_config(changed) == used
    same = make_processor().to_dict()
    assert change_processor_config(same, read_processor_config(same)) is same


@pytest.mark.parametrize(
    "make_processor_of_crops",
    [
        lambda: ViTImageProcessor(
            size={"shortest_edge": 32}, do_center_crop=True, crop_size={"height": 16, "width": 16}
        ),
        lambda: ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=0.5),
    ],
)
def test_a_processor_that_crops_from_a_larger_image_is_saved_as_the_training_cropped(
    make_processor_of_crops,
):
    used = read_processor_config(make_processor_of_crops().to_dict())
    assert (used.height, used.width, used.resize_mode) == (16, 16, "crop")
    changed = change_processor_config(make_processor_of_crops().to_dict(), used)
    saved = type(make_processor_of_crops()).from_dict(changed)
    pixels = np.random.default_rng(1).integers(0, 255, (16, 20, 3), np.uint8)
    network = ImageNetwork(torch.nn.Identity(), used.mean, used.std)
    decoded = make_decoding(resize_mode="crop").decode_images([encode_image(pixels)])
    found = network(torch.from_numpy(decoded))
    wanted = saved(PIL.Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_size_or_scale_of_the_user_stands_for_a_missing_one():
    content = {"do_center_crop": False, "rescale_offset": True}
    chosen = {"height": 8, "width": 9, "mean": (0.5,), "std": (0.25,)}
    used = read_processor_config(content, chosen)
    assert used == ImagePreprocessing(8, 9, "stretch", (0.5,), (0.25,))
    assert read_processor_config(change_processor_config(content, used)) == used
    with pytest.raises(ValueError, match="do_flip_channel_order is not supported"):
        read_processor_config({"size": 8, "do_flip_channel_order": True})


def test_pixels_are_scaled_as_the_processor_of_transformers_scales_them():
    used = read_processor_config(make_processor().to_dict())
    network = ImageNetwork(torch.nn.Identity(), used.mean, used.std)
    files = [encode_image(one) for one in PIXELS]
    found = network(torch.from_numpy(make_decoding().decode_images(files)))
    images = [PIL.Image.fromarray(one) for one in PIXELS]
    wanted = make_processor()(images, return_tensors="pt")["pixel_values"]
    assert torch.allclose(found, wanted, atol=1e-5)


class SlowDecoding(ImageDecoding):
    """Remembers the threads that call it."""

    threads_seen = ()

    def __call__(self, columns):
        type(self).threads_seen += (threading.current_thread().name,)
        return super().__call__(columns)


def test_the_next_batch_is_decoded_meanwhile_and_a_broken_one_is_an_error_in_its_turn(tmp_path):
    files = [encode_image(one) for one in PIXELS[:4]]
    table = pa.table({"picture": pa.array([*files, b"", files[0]], pa.binary())})
    url = prepare_data(table, tmp_path).train_url
    decoding = SlowDecoding(image_col="picture", height=SIZE, width=SIZE)
    source = BatchSource(
        url, {"picture": None}, batch_size=2, transformation=UserTransformation(decoding)
    )
    batches = source.iterate_epoch_batches(0, 3)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(ValueError, match="column 'picture', row 0 of a batch: cannot decode"):
        next(batches)
    early = source.iterate_epoch_batches(1, 3)
    next(early)
    early.close()
    assert {name.partition("_")[0] for name in SlowDecoding.threads_seen} == {"farandole-batches"}
    assert not [one for one in threading.enumerate() if "farandole-batches" in one.name]


def test_structs_that_an_older_spark_passes_to_functions_are_packed():
    rows = [make_spark_image(PIXELS[0]), dict.fromkeys(field.name for field in SPARK_IMAGE_TYPE)]
    arrays = _series_as_array(pd.DataFrame(rows))
    packed = pack_spark_images(arrays).to_pylist()
    assert packed == [*pack_spark_images(pa.array(rows[:1], SPARK_IMAGE_TYPE)).to_pylist(), None]
