"""GGUF files, with the gguf package as writer and oracle; a damaged file ends in a CheckpointError, whatever it is."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import CheckpointError
from slipstream.kernels.arrays import to_tensor
from slipstream.model.stored.gguf_quants import dequantize, dequantize_tensor
from slipstream.spec.gguf import TYPES, GGUFFile

QUANTS = {t.name: number for number, t in TYPES.items()}


def random_blocks(kind: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bits, but with finite scales."""
    rng = np.random.default_rng(seed)
    quant = TYPES[QUANTS[kind]]
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal((num_blocks, 1)).astype(np.float32))
        values = values.to(
            {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        )
        return values.view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, (num_blocks, quant.block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, num_blocks, dtype=np.uint8)
        return blocks
    both = {name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
    scales = {**both, "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}.get(kind, [0])
    for at in scales:
        blocks[:, at : at + 2] = (
            (rng.standard_normal((num_blocks, 1)) / 8).astype(np.float16).view(np.uint8)
        )
    return blocks


@pytest.mark.parametrize("kind", sorted(QUANTS))
def test_every_type_agrees_with_the_gguf_package_bit_for_bit(kind: str) -> None:
    blocks = random_blocks(kind, 4500)  # more than one chunk for the formats of 256
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(QUANTS[kind])).reshape(-1)
    assert np.isfinite(expected).all()
    ours = dequantize(blocks, kind, np.float32)
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))
    for dtype in (torch.bfloat16, torch.float16):
        found = to_tensor(dequantize(blocks, kind, np.dtype(str(dtype).removeprefix("torch."))))
        assert torch.equal(found, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("kind", sorted(QUANTS))
def test_chunks_join_seamlessly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(kind, 37, seed=1)
    whole = dequantize(blocks, kind, np.float32)
    monkeypatch.setattr("slipstream.model.stored.gguf_quants._CHUNK_VALUES", 1024)
    assert np.array_equal(dequantize(blocks, kind, np.float32), whole)


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_int64("an.int", -5)
    writer.add_float64("a.double", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "naïve 🙂")
    writer.add_array("some.ints", [1, -2, 3])
    writer.add_array("some.bools", [True, False])
    writer.add_array("some.text", ["a", "", "Ġb"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    for number, quant in TYPES.items():
        if quant.block_size > 1:
            blocks = random_blocks(quant.name, 4).reshape(2, -1)
            writer.add_tensor(
                f"t.{quant.name}", blocks, raw_dtype=gguf.GGMLQuantizationType(number)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata(written: Path) -> None:
    metadata = GGUFFile(written).metadata
    assert metadata == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "an.int": -5,
        "a.double": 0.5,
        "a.bool": True,
        "a.text": "naïve 🙂",
        "some.ints": [1, -2, 3],
        "some.bools": [True, False],
        "some.text": ["a", "", "Ġb"],
        "nested": [[1, 2], [3]],
    }
    assert type(metadata["a.bool"]) is bool
    assert all(type(v) is int for v in metadata["some.ints"])


def test_tensors(written: Path) -> None:
    file, oracle = GGUFFile(written), gguf.GGUFReader(written)
    assert list(file.tensors) == [t.name for t in oracle.tensors]
    for theirs in oracle.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.shape, ours.type, ours.nbytes) == (
            tuple(int(n) for n in theirs.shape[::-1]),
            theirs.tensor_type.name,
            int(theirs.n_bytes),
        )
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(ours.shape)
        np.testing.assert_array_equal(dequantize_tensor(file, theirs.name, np.float32), expected)
        assert file.raw(theirs.name).tobytes() == theirs.data.tobytes()
        assert file.raw(theirs.name).shape == (
            ours.numel // ours.quant.block_size,
            ours.quant.block_bytes,
        )


def test_a_dequantised_tensor_is_a_copy(written: Path) -> None:
    file = GGUFFile(written)
    dequantize_tensor(file, "plain", np.float32)[:] = 0
    assert dequantize_tensor(file, "plain", np.float32).sum() == 15


def resident_kib(path: Path) -> int:
    """KiB of a mapped file's pages in this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_pages_are_let_go(written: Path) -> None:
    file = GGUFFile(written)
    before = file.raw("plain").tobytes()
    assert resident_kib(written) > 0
    file.let_go()
    assert resident_kib(written) == 0
    assert file.raw("plain").tobytes() == before


def test_what_is_wrong_is_named(written: Path, tmp_path: Path) -> None:
    good = written.read_bytes()

    def fails(data: bytes, match: str) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            GGUFFile(path)

    with pytest.raises(CheckpointError, match="can't be read"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        dequantize_tensor(GGUFFile(written), "nope", np.float32)
    fails(b"", "the file is empty")
    fails(b"PK\x03\x04" + good[4:], "not a GGUF file")
    fails(good[:4] + struct.pack("<I", 1) + good[8:], "version 1")
    fails(good[:4] + struct.pack(">I", 3) + good[8:], "big-endian")
    fails(good[:8] + struct.pack("<Q", 2**63) + good[16:], "number of tensors is")
    fails(good[:16] + struct.pack("<Q", 2**40) + good[24:], "number of metadata entries is")
    for cut in range(1, good.index(b"t.Q6_K")):
        fails(good[:cut], "not a GGUF file|cut off")
    fails(good[:-100], "ends at byte .* cut off")
    fails(good.replace(b"a.text", b"a.bool"), "'a.bool' stands there twice")
    fails(good.replace(b"t.Q4_0", b"t.Q4_1"), "'t.Q4_1' stands there twice")
    fails(good.replace("naïve".encode(), b"na\xff\xffve"), "a.text is not UTF-8")
    at = good.index(b"some.text") + 9 + 4 + 4
    fails(good[:at] + struct.pack("<Q", 2**60) + good[at + 8 :], "length of some.text is")
    fails(good[: at + 8] + struct.pack("<Q", 2**60) + good[at + 16 :], "ends within some.text")
    at = good.index(b"plain") + 5
    fails(
        good[:at] + struct.pack("<I", 2**31) + good[at + 4 :], "'plain' has 2147483648 dimensions"
    )
    fails(good[: at + 4] + struct.pack("<Q", 2**62) + good[at + 12 :], "'plain' ends at byte")
    fails(good[: at + 4] + struct.pack("<Q", 0) + good[at + 12 :], "'plain' has shape")
    fails(good[: at + 20] + struct.pack("<I", 23) + good[at + 24 :], "'plain' has the type IQ4_XS")
    fails(
        good[: at + 20] + struct.pack("<I", 999) + good[at + 24 :],
        "'plain' has the type number 999",
    )
    fails(
        good[: at + 20] + struct.pack("<I", 8) + good[at + 24 :], "rows of Q8_0 are multiples of 32"
    )
    fails(good[: at + 24] + struct.pack("<Q", 2**50) + good[at + 32 :], "'plain' ends at byte")
    fails(good[: at + 24] + struct.pack("<Q", 4) + good[at + 32 :], "'plain' starts at 4")


def test_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert dequantize_tensor(GGUFFile(tmp_path / "x.gguf"), "b", np.float32).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    good = (tmp_path / "x.gguf").read_bytes()
    at = good.index(b"general.alignment") + len("general.alignment") + 4
    for alignment in (0, 4, 12):
        (tmp_path / "x.gguf").write_bytes(good[:at] + struct.pack("<I", alignment) + good[at + 4 :])
        with pytest.raises(CheckpointError, match=r"general\.alignment"):
            GGUFFile(tmp_path / "x.gguf")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_noticed_or_harmless(
    data: st.DataObject, written: Path, tmp_path: Path
) -> None:
    """Bytes changed anywhere, the end cut off: every tensor can still be read, or a CheckpointError says why not."""
    content = bytearray(written.read_bytes())
    header = content.index(b"t.Q6_K") + 40
    changes = st.lists(
        st.tuples(st.integers(0, header), st.integers(0, 255)), min_size=1, max_size=4
    )
    for at, value in data.draw(changes):
        content[at] = value
    cut = data.draw(st.just(0) | st.integers(1, len(content)))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: len(content) - cut])
    try:
        file = GGUFFile(path)
    except CheckpointError:
        return
    for name, tensor in file.tensors.items():
        assert dequantize_tensor(file, name, np.float32).shape == tensor.shape


def test_an_empty_file_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        GGUFFile(path)


@pytest.mark.parametrize("padding", range(40))
def test_data_starts_at_the_next_aligned_byte_whatever_the_header_is_long(
    tmp_path: Path, padding: int
) -> None:
    """Also where the header ends on an aligned byte already."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "n" * padding)
    values = np.arange(8, dtype=np.float32)
    writer.add_tensor("t", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(path).tensors["t"]
    found = path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    np.testing.assert_array_equal(np.frombuffer(found, np.float32), values)
