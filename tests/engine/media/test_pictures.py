"""Pictures as they come: scaled as transformers' processors do, in every format and mode, or refused."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from slipstream.engine.media import pictures
from slipstream.engine.media.picture_files import measured
from slipstream.engine.media.pictures import PictureProcessor, opened
from slipstream.engine.media.prepared import MediaPiece, placed
from slipstream.errors import RequestError
from slipstream.spec.description import read_spec
from tests.support.vision_models import IMAGE, build_vision, picture, their_processor

FAMILIES = (
    "smolvlm",
    "gemma3",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma4",
    "mistral3",
    "internvl",
    "llava",
    "llava_next",
    "glm4v",
    "kimi_k25",
    "lfm2_vl",
    "aya_vision",
    "cohere2_vision",
    "paligemma",
    "llava_onevision",
)


@pytest.fixture(scope="module")
def processors(tmp_path_factory) -> dict[str, PictureProcessor]:
    made = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        build_vision(path, family)
        found = read_spec(path)
        assert found.spec.media is not None
        assert found.processing is not None
        made[family] = PictureProcessor(found.spec.media, found.processing, 16)
    return made


def normalised(processor: PictureProcessor, piece: MediaPiece) -> np.ndarray:
    """[3, height, width], as the worker makes them."""
    p = processor.processing
    raw = (
        np.frombuffer(piece.data, np.uint8).reshape(piece.height, piece.width, 3).astype(np.float32)
    )
    return ((raw * np.float32(p.scale) - np.float32(p.mean)) / np.float32(p.std)).transpose(2, 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(width=st.integers(1, 200), height=st.integers(1, 200), seed=st.integers(0, 9))
def test_pixels_equal_those_of_transformers(processors, family, width, height, seed):
    if family.startswith(("qwen", "glm")) and max(width, height) > 200 * min(width, height):
        return
    if family == "mistral3" and max(width, height) > 60 * min(width, height):
        return  # transformers scales to no pixels and fails; ours has one
    if family.startswith("llava_") and max(width, height) > 20 * min(width, height):
        return  # it finds no size
    ours = processors[family].prepare(picture(seed, width, height))
    image = picture(seed, width, height)
    made = their_processor(family)(
        [[image]] if family == "smolvlm" else [image], return_tensors="np"
    )
    theirs = made["pixel_values"]
    own = [normalised(processors[family], piece) for piece in ours.pieces]
    if family == "smolvlm":
        assert len(own) == theirs.shape[1]
        theirs = list(theirs[0])
    elif family.startswith("llava_"):  # the base, and the tiles of the whole row by row
        base, large = own
        cut = large.reshape(3, large.shape[1] // 24, 24, large.shape[2] // 24, 24)
        own = [base, *cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3, 24, 24)]
        theirs = list(theirs[0])
        if family == "llava_onevision":  # the second of two
            pair = their_processor(family)([[picture(0), image]], return_tensors="np")
            assert ours.among is not None
            own += [normalised(processors[family], piece) for piece in ours.among.pieces]
            theirs = [x[:, :24, :24] for x in (*theirs, *pair["pixel_values"][1])]
    elif family.startswith(("qwen", "glm")):
        (piece,) = ours.pieces
        rows, columns = piece.height // 8, piece.width // 8
        assert made["image_grid_thw"].tolist() == [[1, rows * 2, columns * 2]]
        patches = theirs.reshape(rows, columns, 2, 2, 3, 2, 4, 4)[
            :, :, :, :, :, 0
        ]  # both frames are the same
        theirs = [patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, piece.height, piece.width)]
    elif family == "lfm2_vl":
        found, counts = [], made["pixel_attention_mask"].sum(1)
        for patches, count, (rows, columns) in zip(
            theirs, counts, made["spatial_shapes"], strict=True
        ):
            cut = patches[:count].reshape(rows, columns, 4, 4, 3).transpose(4, 0, 2, 1, 3)
            found.append(cut.reshape(3, rows * 4, columns * 4))
        theirs = found
    elif family == "kimi_k25":
        (piece,) = ours.pieces
        rows, columns = piece.height // 4, piece.width // 4
        assert made["image_grid_thw"].tolist() == [[1, rows, columns]]
        whole = theirs.reshape(rows, columns, 3, 4, 4).transpose(2, 0, 3, 1, 4)
        theirs = [whole.reshape(3, piece.height, piece.width)]
    elif family == "gemma4":
        (piece,) = ours.pieces
        rows, columns = piece.height // 4, piece.width // 4
        assert made["num_soft_tokens_per_image"] == [piece.num_tokens]
        patches = 2 * (theirs[0, : rows * columns] - 0.5)  # as the model's code begins
        pixels = patches.reshape(rows, columns, 4, 4, 3).transpose(4, 0, 2, 1, 3)
        theirs = [pixels.reshape(3, piece.height, piece.width)]
    for a, b in zip(own, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)  # the same bytes from Pillow; then float32


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_picture_is_that_of_transformers(processors, family):
    for width, height in ((50, 37), (64, 64), (20, 90), (200, 10)):
        ours = processors[family].prepare(picture(1, width, height))
        count = ours.pieces[0].num_tokens
        if family == "mistral3":
            piece = ours.pieces[0]
            lines = ["[IMG]" * piece.columns] * piece.rows
            assert ours.text == "[IMG_BREAK]".join(lines) + "[IMG_END]"
        elif family == "gemma3":
            assert (
                ours.text
                == "\n\n<start_of_image>" + "<image_soft_token>" * count + "<end_of_image>\n\n"
            )
        elif family == "gemma4":
            assert ours.text == "<|image>" + "<|image|>" * count + "<image|>"
        elif family.startswith(("qwen", "glm", "kimi")):
            assert ours.text == IMAGE[family] * count
        elif family == "aya_vision":
            run = "<|IMG_PATCH|>" * 9
            num = their_processor(family).get_number_of_image_patches(
                height, width, {"crop_to_patches": True}
            )
            tiles = "".join(f"TILE_{i}{run}" for i in range(1, num))
            assert ours.text == f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{run}<|END_OF_IMG|>"
        elif family == "cohere2_vision":
            num = len(their_processor(family).pieces(picture(1, width, height)))
            tile = "<|IMG_PATCH|>" * 9 + "<|IMG_LINE_BREAK|>"
            assert ours.text == f"<|START_OF_IMG|>{tile * num}<|END_OF_IMG|>"
        elif family == "lfm2_vl":
            from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

            names = ("image_start", "image_end", "image_thumbnail")
            shown = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
            named = {f"{x}_token": y for x, y in zip(names, shown, strict=True)}
            _, rows, columns = their_processor(family).pieces(picture(1, width, height))
            wanted = Lfm2VlProcessor._build_image_tokens(
                SimpleNamespace(image_token="<image>", **named),
                *(rows, columns, 9, ours.pieces[-1].num_tokens, True, True),
            )
            assert ours.text == wanted
        elif family == "llava_onevision":
            from transformers.models.llava_onevision.processing_llava_onevision import (
                LlavaOnevisionProcessor as Theirs,
            )

            theirs = SimpleNamespace(
                image_processor=their_processor(family),
                num_image_tokens=36,
                vision_aspect_ratio="anyres_max_3",
            )
            theirs._get_unpadded_features = partial(Theirs._get_unpadded_features, theirs)
            num = Theirs._get_number_of_features(theirs, height, width, 26, 26)
            assert ours.text == "<image>" * num
            assert ours.among is not None
            assert ours.among.text == "<image>" * 37
        elif family == "llava_next":
            from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

            theirs = SimpleNamespace(
                image_processor=their_processor(family),
                patch_size=4,
                num_additional_image_tokens=0,
                _get_unpadded_features=partial(LlavaNextProcessor._get_unpadded_features, None),
            )
            num = LlavaNextProcessor._get_number_of_features(theirs, height, width, 24, 24)
            assert ours.text == "<image>" * num
        elif family == "paligemma":
            assert ours.text == "<image>" * 64
        elif family == "llava":
            assert ours.text == "<image>" * 36
        elif family == "internvl":
            given = {"crop_to_patches": True}
            num = their_processor(family).get_number_of_image_patches(height, width, given)
            assert ours.text == "<img>" + "<IMG_CONTEXT>" * (4 * num) + "</img>"
        else:
            from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

            made = their_processor(family)(
                [[picture(1, width, height)]], return_tensors="np", return_row_col_info=True
            )

            class Named:
                fake_image_token = "<fake_token_around_image>"
                image_token = "<image>"
                global_image_token = "<global-img>"
                global_image_tag, image_seq_len = "<global-img>", count

            wanted = SmolVLMProcessor.replace_image_token(
                Named(), {"rows": made["rows"], "cols": made["cols"]}, 0
            )
            assert ours.text == wanted


def test_low_detail_makes_a_smaller_picture(processors):
    wide = picture(1, 200, 60)
    assert len(processors["smolvlm"].prepare(wide).pieces) > 1
    assert len(processors["smolvlm"].prepare(wide, "low").pieces) == 1
    assert processors["qwen2_5_vl"].prepare(wide, "low").pieces[0].height
    with pytest.raises(RequestError, match="leave detail out"):
        processors["gemma3"].prepare(wide, "low")
    with pytest.raises(RequestError, match="detail must be"):
        processors["gemma3"].prepare(wide, "middle")  # type: ignore[arg-type]


def saved(image: Image.Image, kind: str, **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def whole(source):
    """The picture in its own size."""
    return opened(source).scaled()


def test_formats_and_modes():
    image = picture(2, 40, 30)
    exact = np.asarray(image)
    for kind in ("PNG", "BMP", "WEBP"):
        found = whole(saved(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
        np.testing.assert_array_equal(np.asarray(found), exact)
    cmyk = whole(saved(image.convert("CMYK"), "JPEG", quality=100))
    assert cmyk.mode == "RGB"
    assert np.abs(np.asarray(cmyk).astype(int) - exact).mean() < 12
    palette = whole(saved(image.quantize(16), "PNG"))
    np.testing.assert_array_equal(
        np.asarray(palette), np.asarray(image.quantize(16).convert("RGB"))
    )
    grey = whole(saved(image.convert("L"), "PNG"))
    assert np.asarray(grey).shape == (30, 40, 3)
    deep = Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16) << 8) | 7)
    np.testing.assert_array_equal(
        np.asarray(whole(saved(deep, "PNG")))[..., 0], np.asarray(image.convert("L"))
    )
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert (np.asarray(whole(saved(clear, "PNG"))) == 255).all()


def test_a_turned_photo_is_set_upright():
    image = picture(3, 40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    found = whole(saved(image, "PNG", exif=exif))
    assert found.size == (30, 40)
    np.testing.assert_array_equal(
        np.asarray(found), np.asarray(image.transpose(Image.Transpose.ROTATE_270))
    )


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it is large."""

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def test_what_can_not_be_read_is_refused():
    frames = [picture(i, 20, 20) for i in range(3)]
    good = saved(picture(1, 200, 200), "PNG")
    for data, why in (
        (bomb(60_000, 60_000), "more than"),
        (bomb(10_000, 8_000), "more than"),
        (bomb(100, 100), "can't be read"),
        (good[: len(good) // 2], "can't be read"),
        (saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), "moves"),
        (saved(frames[0], "PNG", save_all=True, append_images=frames[1:]), "moves"),
        (saved(frames[0], "TIFF"), "formats"),
        (saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "formats"),
        (b"no picture", "formats"),
        (b"", "formats"),
        (b"GIF89a" + b"\xff" * 40, "read|formats|pixels|more than"),
        ("text", "bytes"),
        (np.zeros((4, 4), np.uint8), "array"),
        (np.zeros((4, 4, 3), np.float32), "array"),
        (
            Image.fromarray(np.ones((4, 4), np.float32)),
            "^a picture: its pixels are numbers of 32 bits",
        ),
        ("cat.png", "read the file"),
        (Path("cat.png"), "read the file"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            whole(data)
        assert caught.value.field == "image"


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=300),
    at=st.integers(0, 400),
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]),
)
def test_broken_files_are_pictures_or_refused(data, at, kind):
    good = saved(picture(4, 24, 24), kind)
    broken = good[: at % len(good)] + data + good[at % len(good) + len(data) :]
    try:
        found = whole(broken)
    except RequestError:
        return
    assert found.mode == "RGB"


def test_a_narrow_picture_is_refused_where_proportions_are_kept(processors):
    with pytest.raises(RequestError, match="200 times"):
        processors["qwen2_5_vl"].prepare(Image.new("RGB", (900, 4)))


@pytest.mark.parametrize("size", [(300, 1), (1, 300)], ids=["flat", "tall"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_piece_of_a_line_has_tokens_unless_it_is_refused(processors, family, size):
    try:
        found = processors[family].prepare(picture(1, *size))
    except RequestError:
        return
    assert all(piece.num_tokens for piece in found.pieces)


def test_keys_tell_pictures_apart(processors):
    one, same, other = (processors["gemma3"].prepare(picture(i)) for i in (1, 1, 2))
    assert one.pieces[0].key == same.pieces[0].key != other.pieces[0].key


def test_pictures_are_shared_within_a_salt(processors):
    """The keys are those of the embeddings that the worker keeps; requests with another salt must not notice them."""
    processor = processors["gemma3"]
    ready = processor.prepare(picture(1))
    tokens = [processor.spec.token_id] * sum(piece.num_tokens for piece in ready.pieces)
    salts = ("", "a", "b")
    keys = {
        tuple(span.key for span in placed(tokens, [ready], processor.spec, salt))
        for salt in (*salts, *salts)
    }
    assert len(keys) == len(salts)
    assert tuple(piece.key for piece in ready.pieces) in keys


def test_rows_of_a_picture_have_text_between_them_and_nowhere_else(processors):
    processor = processors["mistral3"]
    spec, ready = processor.spec, processor.prepare(picture(1, 40, 30))
    (piece,) = ready.pieces
    row = [spec.token_id] * piece.columns
    good = [1, 2, *([*row, 0] * piece.rows), 3]
    (span,) = placed(good, [ready], spec)
    assert (span.offset, span.end) == (2, len(good) - 1)
    counts = [span.num_embeddings(i) for i in range(span.end - span.offset + 1)]
    are_embedded = [token == spec.token_id for token in good[2:-1]]
    assert counts == [sum(are_embedded[:i]) for i in range(len(are_embedded) + 1)]
    for wrong in (
        [*row * piece.rows, 0],
        good[2:-2],
        [*row[1:], 0, spec.token_id, *good[2 + len(row) : -1]],
    ):
        with pytest.raises(RequestError, match="placeholders are not those"):
            placed(wrong, [ready], spec)


def exif(orientation: int, *, entries: int = 1, num_bytes: int = 0) -> bytes:
    """TIFF's structure with an orientation, and with so many more entries that all point to the same bytes."""
    tags = [struct.pack("<HHII", 0x0112, 3, 1, orientation)]
    tags += [struct.pack("<HHII", 0x8000 + i, 7, num_bytes, 8) for i in range(entries - 1)]
    return (
        b"II*\0" + struct.pack("<IH", 8, entries) + b"".join(tags) + b"\0\0\0\0" + bytes(num_bytes)
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes) -> bytes:
    good = saved(picture(1, 40, 30), "PNG")
    return good[:33] + b"".join(chunks) + good[33:]


def jpeg_with(*segments: tuple[int, bytes]) -> bytes:
    good = saved(picture(1, 40, 30), "JPEG")
    parts = (bytes((0xFF, kind)) + struct.pack(">H", len(b) + 2) + b for kind, b in segments)
    return good[:2] + b"".join(parts) + good[2:]


def exif_jpeg() -> bytes:
    """Many segments of EXIF, which Pillow joins, and whose entries it copies for the resolution."""
    data = exif(6, entries=1000, num_bytes=600_000)
    return jpeg_with(
        *((0xE1, b"Exif\0\0" + data[i : i + 60_000]) for i in range(0, len(data), 60_000))
    )


def commented_gif() -> bytes:
    good = saved(picture(1, 40, 30).quantize(8), "GIF")
    at = good.index(b"\x2c")
    return good[:at] + b"\x21\xfe" + (b"\xff" + b"c" * 255) * 8000 + b"\0" + good[at:]


@pytest.mark.parametrize(
    "data",
    [
        png_with(chunk(b"eXIf", exif(6, entries=1000, num_bytes=600_000))),
        png_with(*[chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900_000)))] * 60),
        png_with(chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(900_000)))),
        exif_jpeg(),
        jpeg_with(*[(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))] * 60),
        commented_gif(),
    ],
    ids=["png-exif", "png-text", "png-profile", "jpeg-exif", "jpeg-profile", "gif-comment"],
)
def test_what_a_file_says_besides_its_pixels_costs_nothing(data):
    tracemalloc.start()
    try:
        found = opened(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert min(found.width, found.height) == 30
    assert peak < 3 * len(data) + 2**20
    assert len(measured(data).data) < 10_000


def test_the_orientation_is_read_in_every_format():
    image = picture(3, 40, 30)
    upright = np.asarray(image.transpose(Image.Transpose.ROTATE_270))
    turned = Image.Exif()
    turned[0x0112] = 6
    for kind, more in (("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 100})):
        found = np.asarray(whole(saved(image, kind, exif=turned, **more))).astype(int)
        assert np.abs(found - upright).mean() < (12 if kind == "JPEG" else 1e-9)
    for order in range(1, 9):
        turned[0x0112] = order
        data = saved(image, "PNG", exif=turned)
        theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(np.asarray(whole(data)), np.asarray(theirs))


def test_a_large_picture_is_flattened_in_strips_to_the_same_pixels(monkeypatch):
    monkeypatch.setattr(pictures, "_STRIP_PIXELS", 100)
    rng = np.random.default_rng(0)
    clear = Image.fromarray(rng.integers(0, 256, (33, 27, 4), np.uint8), "RGBA")
    white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
    expected = np.asarray(Image.alpha_composite(white, clear).convert("RGB"))
    for source in (saved(clear, "PNG"), saved(clear, "WEBP", lossless=True, exact=True), clear):
        np.testing.assert_array_equal(np.asarray(whole(source)), expected)
    assert clear.getextrema()[3] != (255, 255)  # the caller's own picture is not changed
    grey = clear.convert("LA")
    expected = np.asarray(Image.alpha_composite(white, grey.convert("RGBA")).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(whole(saved(grey, "PNG"))), expected)
    inks = saved(clear.convert("RGB").convert("CMYK"), "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(inks)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(whole(inks)), expected)


def test_sizes_are_refused_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *args, **more: pytest.fail("it was opened"))
    webp = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0\xff\x3f\0"
    gif = b"GIF89a\x01\0\x01\0\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 65_000, 65_000, 0)
    bmp = b"BM" + bytes(12) + struct.pack("<Iii", 40, 20_000, -20_000)
    jpeg = b"\xff\xd8\xff\xc0\0\x11\x08" + struct.pack(">HH", 20_000, 20_000) + b"\3" + bytes(9)
    scans = jpeg_with()[:-2] + b"\xff\xda" * 200
    for data, why in (
        (bomb(100_000_000, 1), "a side may have 65535"),
        (bomb(1, 100_000_000), "a side may have 65535"),
        (bomb(60_000, 60_000), "make it smaller"),
        (webp, "make it smaller"),
        (gif, "make it smaller"),
        (bmp, "make it smaller"),
        (jpeg + b"\xff\xda", "make it smaller"),
        (scans, "scans; send it as baseline"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "formats PNG, JPEG"),
    ):
        with pytest.raises(RequestError, match=why):
            opened(data)


def test_formats_whose_decoders_hold_a_picture_more_than_once_count_so():
    image = picture(1, 40, 30)
    for data, times in (
        (saved(image, "PNG"), 1),
        (saved(image, "JPEG"), 1),
        (saved(image, "JPEG", progressive=True), 2),
        (saved(image, "WEBP"), 3),
    ):
        assert measured(data).num_pixels == 40 * 30 * times


def test_pixels_in_decoding_are_bounded_and_of_two_clients(processors):
    pool = processors["gemma3"]._pool
    assert pool.max_weight > pool.client_weight >= pictures.MAX_PIXELS
    assert pool.num_threads > pool.per_client
