# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Images and sounds: from bytes and from paths to arrays, in loaders and in estimators."""

from __future__ import annotations

import builtins
import io
import threading
import time
import zlib

import numpy as np
import PIL.EpsImagePlugin
import PIL.Image
import pyarrow as pa
import pytest
import soundfile
import torch
from tests.single.training import Here

from farandole.data import Audio, Decode, Image, ParquetLoader, prepare_data
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator

pytestmark = pytest.mark.timeout(300)


def picture(seed, height=24, width=32):
    """Smooth, so that a JPEG is close to it."""
    random = np.random.default_rng(seed)
    small = PIL.Image.fromarray(random.integers(0, 256, (3, 4, 3), np.uint8))
    return np.asarray(small.resize((width, height), PIL.Image.Resampling.BICUBIC))


def stored(pixels, kind="png", **options):
    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def sound(rate=8000, seconds=0.5, tone=440.0, channels=1):
    decode_single = 0.5 * np.sin(2 * np.pi * tone * np.arange(int(rate * seconds)) / rate)
    return np.stack([decode_single / (channel + 1) for channel in range(channels)], axis=1)


def recorded(samples, rate=8000, kind="wav"):
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind)
    return out.getvalue()


def decode_single(how, blob):
    return how.decode([blob], "x")[0]


@pytest.mark.parametrize(
    ("pool", "framework"), [("thread", "torch"), ("process", "numpy"), ("dummy", "numpy")]
)
def test_a_loader_decodes_bytes_beside_other_columns(tmp_path, pool, framework):
    blobs = [stored(picture(row)) for row in range(12)]
    url = prepare_data(pa.table({"image": blobs, "id": range(12)}), tmp_path).train_url
    loader = ParquetLoader(
        url, 5, ["image", "id"], framework=framework, transform_pool=pool,
        transformation_fn=Decode({"image": Image(24, 32, mean=[0.5, 0.4, 0.3],
            std=[0.2, 0.2, 0.1])}),
    )  # fmt: skip
    rows = 0
    for batch in loader:
        assert isinstance(batch["image"], torch.Tensor if framework == "torch" else np.ndarray)
        assert batch["image"].shape[1:] == (3, 24, 32)
        for row, found in zip(batch["id"].tolist(), np.asarray(batch["image"]), strict=True):
            wanted = (picture(row) / 255.0 - [0.5, 0.4, 0.3]) / [0.2, 0.2, 0.1]
            np.testing.assert_allclose(found, wanted.transpose(2, 0, 1), atol=1e-4)
            rows += 1
    assert rows == 12
    loader.close()


def test_images_are_fitted_turned_and_converted():
    pixels = picture(0, 40, 80)
    blob = stored(pixels)
    raw = decode_single(Image(40, 80, dtype="uint8", channels_last=True), blob)
    assert raw.dtype == np.uint8
    assert raw.tolist() == pixels.tolist()
    middle = decode_single(Image(40, fit="crop", dtype="uint8", channels_last=True), blob)
    assert middle.tolist() == pixels[:, 20:60].tolist()
    padded = decode_single(Image(80, fit="pad", dtype="uint8", channels_last=True), blob)
    assert not padded[:20].any()
    assert padded[20:60].tolist() == pixels.tolist()
    assert decode_single(Image(20, 40), blob).mean() == pytest.approx(pixels.mean() / 255, abs=0.01)
    gray = decode_single(Image(40, 80, mode="L"), blob)
    assert gray.shape == (1, 40, 80)
    assert decode_single(Image(40, 80, mode="RGBA"), blob)[3].min() == 1.0
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # the camera was turned by a quarter
    upright = decode_single(
        Image(80, 40, dtype="uint8", channels_last=True), stored(pixels, exif=turned)
    )
    assert upright.tolist() == np.rot90(pixels, -1).tolist()
    large = picture(1, 480, 640)
    small = decode_single(
        Image(30, 40, dtype="uint8", channels_last=True), stored(large, "jpeg", quality=95)
    ).astype(float)
    wanted = np.asarray(
        PIL.Image.fromarray(large).resize((40, 30), PIL.Image.Resampling.BILINEAR)
    ).astype(float)
    assert np.abs(small - wanted).mean() < 2.0


def chunked(width, height, depth, color, rows, *more):
    """A PNG, row by row: kinds that Pillow does not write."""

    def chunk(name, data):
        return (
            len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
        )

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, color, 0, 0, 0])
    packed = zlib.compress(b"".join(b"\0" + row for row in rows))
    body = [
        chunk(b"IHDR", header),
        *(chunk(*decode_single) for decode_single in more),
        chunk(b"IDAT", packed),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def common_kinds():
    """Files that need no Pillow, by name."""
    pixels = picture(0, 60, 90)
    gray, alpha = pixels[..., 0], pixels[..., 1:2]
    few = PIL.Image.fromarray(pixels).quantize(16)
    kinds = {
        "jpeg 4:4:4": stored(pixels, "jpeg", quality=90, subsampling=0),
        "jpeg 4:2:2": stored(pixels, "jpeg", quality=90, subsampling=1),
        "jpeg 4:2:0": stored(pixels, "jpeg", quality=90, subsampling=2),
        "jpeg, progressive": stored(pixels, "jpeg", quality=90, progressive=True),
        "jpeg, restarts": stored(pixels, "jpeg", quality=90, restart_marker_blocks=3),
        "jpeg, gray": stored(gray, "jpeg", quality=90),
        "png": stored(pixels),
        "png, gray": stored(gray),
        "png, one bit": stored(gray > 128),
        "png, 16 bits": stored(gray.astype(np.uint16) * 257),
        "png, alpha": stored(np.concatenate([pixels, alpha], axis=2)),
        "png, 48 bits": chunked(
            90, 60, 16, 2, [np.stack([row, row // 2], axis=2).tobytes() for row in pixels]
        ),
        "png, gray, four bits": chunked(
            90, 60, 4, 0, [(row[::2] & 0xF0 | row[1::2] >> 4).tobytes() for row in gray]
        ),
        "png, gray, a clear value": chunked(
            90, 60, 8, 0, [row.tobytes() for row in gray], (b"tRNS", b"\0\x80")
        ),
    }
    for name, image in (
        ("palette", few),
        ("gray and alpha", PIL.Image.fromarray(pixels[..., :2], "LA")),
    ):
        out = io.BytesIO()
        image.save(
            out, "png", **({"transparency": bytes(range(0, 256, 16))} if name == "palette" else {})
        )
        kinds[f"png, {name}"] = out.getvalue()
    return kinds


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_common_png_and_jpeg_are_decoded_without_pillow_and_look_the_same(monkeypatch, mode, fit):
    kinds = common_kinds()
    how = Image(37, 52, mode=mode, fit=fit, dtype="uint8", channels_last=True)
    wanted = {
        name: np.asarray(how._resize_with_pillow(blob, 52)).reshape(37, 52, -1).astype(int)
        for name, blob in kinds.items()
    }
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("Pillow was asked"))
    found = how.decode(list(kinds.values()), "x").astype(int)
    for name, pixels in zip(kinds, found, strict=True):
        difference = np.abs(pixels - wanted[name])
        # Two decoders of JPEG round differently; resizing rounds once more.
        most, mean = (8, 1.0) if name.startswith("jpeg") else (2, 0.3)
        assert difference.max() <= most, (name, difference.max())
        assert difference.mean() <= mean, (name, difference.mean())


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_every_exif_orientation_is_turned_upright_without_pillow(monkeypatch, kind):
    pixels, how = picture(0, 40, 56), Image(48, 48, dtype="uint8", channels_last=True)
    blobs = []
    for orientation in range(1, 10):
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        blobs.append(stored(pixels, kind, exif=exif, **({"quality": 95} if kind == "jpeg" else {})))
    wanted = [np.asarray(how._resize_with_pillow(blob, 48)).astype(int) for blob in blobs]
    assert not np.array_equal(wanted[0], wanted[5])
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("Pillow was asked"))
    for orientation, (decode_single, other) in enumerate(
        zip(how.decode(blobs, "x").astype(int), wanted, strict=True), 1
    ):
        assert np.abs(decode_single - other).mean() < 1.0, orientation


def test_rare_kinds_are_pillows_and_give_what_it_gives():
    pixels = picture(0, 60, 90)
    adobe = io.BytesIO()
    PIL.Image.fromarray(pixels).convert("CMYK").save(adobe, "jpeg", quality=95)
    large = picture(1, 400, 600)
    xmp = b'<x:xmpmeta xmlns:tiff="http://ns.adobe.com/tiff/1.0/"><a tiff:Orientation="6"/></x:xmpmeta>'  # noqa: E501
    animation = io.BytesIO()
    first, second = (PIL.Image.fromarray(picture(seed, 60, 90)) for seed in (0, 1))
    first.save(animation, "png", save_all=True, append_images=[second])
    how = Image(40, 50, dtype="uint8", channels_last=True)
    rare = {
        "Adobe": adobe.getvalue(),
        "a part of its size": stored(large, "jpeg"),
        "XMP": stored(pixels, "jpeg", xmp=xmp),
        "an animation": animation.getvalue(),
        "neither a PNG nor a JPEG": stored(pixels, "bmp"),
    }
    _, left = how._decode_natively(list(rare.values()))
    for (row, reason), (number, told) in zip(left, enumerate(rare), strict=True):
        assert row == number
        assert told in reason
    found = how.decode(list(rare.values()), "x")
    for name, blob, image in zip(rare, rare.values(), found, strict=True):
        assert image.tolist() == np.asarray(how._resize_with_pillow(blob, 50)).tolist(), name
    assert np.abs(found[0].astype(int) - found[3]).mean() < 8.0
    clear = how.decode([stored(np.dstack([pixels, np.full((60, 90), 7, np.uint8)]))], "x")[0]
    assert np.abs(clear.astype(int) - found[3]).max() <= 2, "alpha is left out, not blended"
    seen = Image(60, 90, mode="RGBA", dtype="uint8", channels_last=True)
    assert set(
        decode_single(seen, stored(np.dstack([pixels, np.full((60, 90), 7, np.uint8)])))[
            ..., 3
        ].flat
    ) == {7}


def test_an_image_of_each_decoder_is_scaled_alike():
    pixels = picture(0)
    for channels_last in (False, True):
        how = Image(24, 32, mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.1], channels_last=channels_last)
        found = how.decode([stored(pixels), stored(pixels, "bmp")], "x")
        assert found.dtype == np.float32
        assert found.flags.writeable
        assert found[0].tolist() == found[1].tolist()
    assert Image(24, 32).decode([], "x").shape == (0, 3, 24, 32)


@pytest.mark.timing
def test_other_threads_run_while_images_are_decoded():
    blobs, how, call = [stored(picture(0, 600, 800), "jpeg")] * 100, Image(400), []

    def decode():
        begun = time.perf_counter()
        how.decode(blobs, "x")
        call.extend((begun, time.perf_counter()))

    thread = threading.Thread(target=decode)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    begun, ended = call
    during = [tick for tick in ticks if begun < tick < ended]
    assert len(during) > 20, (len(during), ended - begun)


def test_files_that_are_cut_or_too_large_are_errors_that_name_column_and_row(monkeypatch):
    pixels = picture(0, 60, 90)
    how = Image(16)
    for kind, options in (("png", {}), ("jpeg", {}), ("jpeg", {"progressive": True})):
        whole = stored(pixels, kind, **options)
        for length in range(20, len(whole) - 30, len(whole) // 19):
            with pytest.raises(
                ValueError, match="column 'x', row 1 of a batch: cannot decode the image: "
            ):
                how.decode([whole, whole[:length]], "x")
    huge = chunked(60_000, 60_000, 8, 2, [])
    with pytest.raises(
        ValueError,
        match=r"column 'x', row 0 of a batch: cannot decode the image: Image size \(36000000",
    ):
        decode_single(how, huge)
    real = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__",
        lambda name, *args,
        **more: (_ for _ in ()).throw(ImportError(name)) if name.startswith("PIL")
        else real(name, *args, **more),
    )  # fmt: skip
    assert decode_single(how, stored(pixels)).shape == (3, 16, 16)
    with pytest.raises(
        ImportError, match=r"\(column 'x', row 0 of a batch: it has 60000 x 60000 pixels, more than"
    ):
        decode_single(how, huge)


def test_gray_images_of_sixteen_bits_keep_their_high_byte():
    gray = picture(0)[..., 0]
    deep = gray.astype(np.uint16) * 256 + 200
    big = io.BytesIO()
    PIL.Image.frombytes("I;16B", (32, 24), deep.astype(">u2").tobytes()).save(big, "tiff")
    for blob in (stored(deep), stored(deep, "tiff"), big.getvalue()):
        assert (
            decode_single(Image(24, 32, mode="L", dtype="uint8"), blob)[0].tolist() == gray.tolist()
        )
        colours = decode_single(Image(24, 32, dtype="uint8"), blob)
        assert colours.tolist() == [gray.tolist()] * 3
    for kind, told in ((np.int32, "32-bit integers"), (np.float32, "floats")):
        batch = pa.record_batch(
            {"image": [stored(gray, "tiff"), stored(gray.astype(kind), "tiff")]}
        )
        with pytest.raises(
            ValueError, match=f"column 'image', row 1 of a batch: cannot decode .*: it is of {told}"
        ):
            Decode({"image": Image(8)})(batch)


def test_formats_for_which_pillow_runs_other_programs_are_not_opened(monkeypatch):
    pixels = picture(0)
    how = Image(24, 32, dtype="uint8", channels_last=True)
    for kind in ("png", "webp", "gif", "bmp", "tiff"):
        options = {"lossless": True} if kind == "webp" else {}
        assert (
            np.abs(
                decode_single(how, stored(pixels, kind, **options)).astype(float) - pixels
            ).mean()
            < 8.0
        )
    ran = []
    monkeypatch.setattr(PIL.EpsImagePlugin, "Ghostscript", lambda *given, **_: ran.append(given))
    for kind in ("eps", "ppm"):
        with pytest.raises(
            ValueError,
            match="column 'x', row 0 of a batch: cannot decode the image: cannot identify",
        ):
            decode_single(how, stored(pixels, kind))
    assert not ran


def test_columns_of_paths_are_read_from_a_directory_or_a_store(tmp_path):
    (tmp_path / "in").mkdir()
    for row in range(3):
        (tmp_path / "in" / f"{row}.png").write_bytes(stored(picture(row)))
    batch = pa.record_batch({"path": ["in/0.png", "in/2.png"], "y": [1, 2]})
    how = {"path": Image(24, 32, dtype="uint8", channels_last=True)}
    for root in (tmp_path, f"file://{tmp_path}"):
        found = Decode(how, root=root)(batch)
        assert found["path"].tolist() == [picture(0).tolist(), picture(2).tolist()]
        assert found["y"].tolist() == [1, 2]
    whole = pa.record_batch({"path": [str(tmp_path / "in" / "1.png")]})
    assert Decode(how)(whole)["path"].tolist() == [picture(1).tolist()]
    with pytest.raises(FileNotFoundError, match=r"3\.png"):
        Decode(how, root=tmp_path)(pa.record_batch({"path": ["in/3.png"]}))


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
def test_sounds_are_cut_padded_and_mixed(kind):
    samples = sound()
    found, lengths = Audio(5000, 8000).decode(
        [recorded(samples, kind=kind), recorded(samples[:1000], kind=kind)], "x"
    )
    assert found.shape == (2, 5000)
    assert found.dtype == np.float32
    assert lengths.tolist() == [4000, 1000]
    assert not found[1, 1000:].any()
    close = 1e-3 if kind != "ogg" else 0.1  # Ogg loses a little
    np.testing.assert_allclose(found[0, :4000], samples[:, 0], atol=close)
    both = recorded(sound(channels=2), kind=kind)
    np.testing.assert_allclose(
        decode_single(Audio(4000, 8000), both)[0], sound()[:, 0] * 0.75, atol=close
    )
    assert decode_single(Audio(100, 8000, channels=2), both).shape == (1, 2, 100)


def test_sounds_of_other_rates_are_resampled():
    for rate in (16000, 44100):
        found, lengths = Audio(3000, 8000).decode([recorded(sound(rate), rate)], "x")
        assert lengths.tolist() == [3000]
        np.testing.assert_allclose(found[0, 200:2800], sound()[200:2800, 0], atol=0.01)


class Colour(torch.nn.Module):
    """A class by the mean of each channel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, image):
        return self.last(image.mean((2, 3)))


def test_an_estimator_learns_from_images(tmp_path):
    random = np.random.default_rng(0)
    label = random.integers(0, 2, 64)
    shades = [np.full((8, 8, 3), 60, np.uint8) for _ in label]
    for shade, red in zip(shades, label, strict=True):
        shade[..., 0 if red else 2] = random.integers(150, 255)
    table = pa.table({"image": [stored(shade) for shade in shades], "label": label})
    model = Colour()
    fitted = TorchEstimator(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        store=LocalStore(str(tmp_path)), backend=Here(), feature_cols=["image"],
        label_cols=["label"], batch_size=16,
        epochs=8, verbose=0, input_shapes=[[-1, 3, 8, 8]],
        transformation_fn=Decode({"image": Image(8)}),
    ).fit(table)  # fmt: skip
    assert fitted.history_frame()["loss"].iloc[-1] < 0.3


def test_an_invalid_argument_names_the_column_the_row_or_the_option(monkeypatch):
    batch = pa.record_batch(
        {"image": [stored(picture(0)), b"no image"], "sound": [recorded(sound())] * 2}
    )
    with pytest.raises(
        ValueError,
        match="column 'image', row 1 of a batch: cannot decode the image: cannot identify",
    ):
        Decode({"image": Image(8)})(batch.select(["image"]))
    cut = pa.record_batch({"image": [stored(picture(0), "jpeg")[:300]]})
    with pytest.raises(
        ValueError, match=r"(?i)column 'image', row 0 of a batch: cannot .*truncated"
    ):
        Decode({"image": Image(8)})(cut)
    with pytest.raises(
        ValueError, match="column 'sound', row 0 of a batch: cannot decode the sound: "
    ):
        Decode({"sound": Audio(8, 8000)})(pa.record_batch({"sound": [b"no sound"]}))
    with pytest.raises(ValueError, match=r"column 'sound', row 0 .* it has 1 channels, not 2"):
        Decode({"sound": Audio(8, 8000, 2)})(batch.select(["sound"]))
    with pytest.raises(ValueError, match="there is no column 'picture' to decode: image, sound"):
        Decode({"picture": Image(8)})(batch)
    with pytest.raises(
        ValueError, match="column 'image', row 0 of a batch: int is neither bytes nor a path"
    ):
        Decode({"image": Image(8)})(pa.record_batch({"image": [1]}))
    with pytest.raises(
        ValueError, match="the data made column sound of binary, which is neither a number"
    ):
        Decode({"image": Image(8)})(batch.slice(0, 1))
    with pytest.raises(
        TypeError, match="column 'image' must be decoded by an Image or an Audio: int"
    ):
        Decode({"image": 8})
    for wrong, told in (
        ({"height": 0}, "height of an image must be a whole number, 1 or more: 0"),
        ({"height": 8, "mode": "HSV"}, "mode of an image must be one of RGB, RGBA, L: 'HSV'"),
        (
            {"height": 8, "fit": "cover"},
            "fit of an image must be one of stretch, crop, pad: 'cover'",
        ),
        (
            {"height": 8, "mean": [1, 2]},
            r"mean of an image must be one number or 3, one for each channel: \[1, 2\]",
        ),
        ({"height": 8, "std": 0.0}, "std of an image must not be 0"),
        (
            {"height": 8, "dtype": "uint8", "mean": 0.5},
            "mean and std of an image need dtype='float32'",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            Image(**wrong)
    with pytest.raises(ValueError, match="rate of a sound must be a whole number, 1 or more: 0"):
        Audio(8, 0)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("PIL", "soundfile"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    told = (
        r"decoding images needs Pillow: pip install 'farandole\[images\]' .*row 0 .*: it is "
        r"neither a PNG nor a JPEG"
    )
    with pytest.raises(ImportError, match=told):
        decode_single(Image(8), b"")
    with pytest.raises(
        ImportError, match=r"decoding sounds needs soundfile: pip install 'farandole\[audio\]'"
    ):
        decode_single(Audio(8, 8000), b"")
