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
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_types import TYPES

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
    if kind == "NVFP4":
        return blocks
    if kind == "IQ1_M":  # the scale's highest four bits
        blocks[:, 55] &= 0xBF
        return blocks
    both = {name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
    scales = {
        **both,
        "Q6_K": [208],
        "Q2_K": [80, 82],
        "Q3_K": [108],
        "TQ1_0": [52],
        "TQ2_0": [64],
    }.get(kind, [0])
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


def test_metadata_of_every_type_is_read(written: Path) -> None:
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


def test_tensors_equal_the_gguf_packages(written: Path) -> None:
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


def test_a_file_that_was_changed_is_no_longer_current(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(written.read_bytes())
    file = GGUFFile(path)
    assert file.is_current
    path.unlink()
    assert not file.is_current
    path.write_bytes(written.read_bytes())
    assert not file.is_current, "another file of the same content"


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
    fails(good.replace(b"a.text", b"a.bool"), "'a.bool' appears twice")
    fails(good.replace(b"t.Q4_0", b"t.Q4_1"), "'t.Q4_1' appears twice")
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
    fails(good[: at + 20] + struct.pack("<I", 41) + good[at + 24 :], "'plain' has the type Q1_0")
    fails(
        good[: at + 20] + struct.pack("<I", 999) + good[at + 24 :],
        "'plain' has the type number 999",
    )
    fails(
        good[: at + 20] + struct.pack("<I", 8) + good[at + 24 :], "rows of Q8_0 are multiples of 32"
    )
    fails(good[: at + 24] + struct.pack("<Q", 2**50) + good[at + 32 :], "'plain' ends at byte")
    fails(good[: at + 24] + struct.pack("<Q", 4) + good[at + 32 :], "'plain' starts at 4")


def test_alignments_are_kept_or_refused(tmp_path: Path) -> None:
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
    """One header ends on an aligned byte already."""
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


# --- The bounds of the header, on files of a few bytes ----------------------------------------------


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def entry(name: str, dims: tuple[int, ...] = (4,), offset: int = 0, kind: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def tiny(
    path: Path,
    *tensors: bytes,
    metadata: tuple[bytes, ...] = (),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(16),
) -> Path:
    """A file with this header, and `data` from the next multiple of 32 on."""
    counts = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*metadata, *tensors))
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def wrong(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    return caught.value


@pytest.mark.parametrize(("version", "read"), [(1, False), (2, True), (3, True), (4, False)])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int, read: bool) -> None:
    path = tiny(tmp_path / "x", entry("t"), version=version)
    assert GGUFFile(path).tensors if read else f"version {version} is not" in str(wrong(path))


@pytest.mark.parametrize(
    ("dims", "read"), [((), False), ((4,), True), ((1, 1, 2, 2), True), ((1, 1, 1, 2, 2), False)]
)
def test_tensors_have_one_to_four_dimensions(
    tmp_path: Path, dims: tuple[int, ...], read: bool
) -> None:
    path = tiny(tmp_path / "x", entry("t", dims))
    if read:
        assert GGUFFile(path).tensors["t"].shape == dims[::-1]
    else:
        assert (f"has {len(dims)} dimensions" in str(wrong(path)), wrong(path).field) == (True, "t")


@pytest.mark.parametrize(("dims", "read"), [((32, 3), True), ((3, 32), False), ((32, 0), False)])
def test_rows_are_whole_blocks(tmp_path: Path, dims: tuple[int, ...], read: bool) -> None:
    path = tiny(tmp_path / "x", entry("t", dims, kind=8), data=bytes(102))
    if read:
        assert GGUFFile(path).raw("t").shape == (3, 34)
    else:
        assert "rows of Q8_0 are multiples of 32" in str(wrong(path))


def test_tensor_may_end_with_the_file_and_not_after_it(tmp_path: Path) -> None:
    assert GGUFFile(tiny(tmp_path / "x", entry("t"))).raw("t").nbytes == 16
    path = tiny(tmp_path / "x", entry("t"), data=bytes(15))
    assert "cut off" in str(wrong(path))


def test_tensors_that_share_bytes_are_refused_and_neighbours_are_not(tmp_path: Path) -> None:
    both = entry("a", (8,)), entry("b", (8,), 32)
    assert len(GGUFFile(tiny(tmp_path / "x", *both, data=bytes(64))).tensors) == 2
    many = [entry(f"t{i}", (32,)) for i in range(4)]
    assert "overlap" in str(wrong(tiny(tmp_path / "x", *many, data=bytes(128))))


@pytest.mark.parametrize(("alignment", "read"), [(8, True), (64, True), (4, False), (12, False)])
def test_alignment_is_a_multiple_of_8(tmp_path: Path, alignment: int, read: bool) -> None:
    given = text("general.alignment") + struct.pack("<II", 4, alignment)
    path = tiny(tmp_path / "x", entry("t"), metadata=(given,), data=bytes(128))
    if read:
        assert GGUFFile(path).tensors["t"].offset % alignment == 0
    else:
        assert wrong(path).field == "general.alignment"


def test_counts_must_fit_into_the_file_with_their_entries(tmp_path: Path) -> None:
    """A count that is below the number of bytes left, with entries that are not."""
    assert "number of tensors is 3" in str(wrong(tiny(tmp_path / "x", entry("t"), counts=(3, 0))))
    found = str(wrong(tiny(tmp_path / "x", entry("t"), counts=(1, 7))))
    assert "number of metadata entries is 7" in found
    strings = text("s") + struct.pack("<IIQ", 9, 8, 12) + bytes(40)
    assert "length of s is 12" in str(wrong(tiny(tmp_path / "x", metadata=(strings,), data=b"")))
    numbers = text("n") + struct.pack("<IIQ", 9, 10, 6) + bytes(8)
    assert "length of n is 6" in str(wrong(tiny(tmp_path / "x", metadata=(numbers,), data=b"")))


def test_numbers_of_names_and_of_entries_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.spec.stored.gguf._MAX_NAMES", 2)
    monkeypatch.setattr("slipstream.spec.stored.gguf._MAX_ENTRIES", 2)
    keys = [text(name) + struct.pack("<II", 4, 1) for name in "abc"]
    tensors = [entry(name) for name in "abc"]
    array = [text("a") + struct.pack("<IIQ", 9, 4, n) + bytes(4 * n) for n in (2, 3)]
    file = GGUFFile(
        tiny(tmp_path / "x", *tensors[:2], metadata=(keys[1], array[0]), data=bytes(64))
    )
    assert file.metadata == {"b": 1, "a": [0, 0]}
    assert "has 3 tensors; at most 2" in str(wrong(tiny(tmp_path / "x", *tensors)))
    assert "3 metadata entries; at most 2" in str(wrong(tiny(tmp_path / "x", metadata=(*keys,))))
    assert "a has 3 entries; at most 2" in str(wrong(tiny(tmp_path / "x", metadata=(array[1],))))


@pytest.mark.parametrize(("depth", "read"), [(4, True), (5, False)])
def test_arrays_of_arrays_are_read_to_a_depth(tmp_path: Path, depth: int, read: bool) -> None:
    nested = text("n") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * (depth - 1)
    nested += struct.pack("<IQB", 0, 1, 7)
    path = tiny(tmp_path / "x", metadata=(nested,))
    if read:
        assert str(GGUFFile(path).metadata["n"]) == "[" * depth + "7" + "]" * depth
    else:
        assert wrong(path).field == "n"


@pytest.mark.parametrize("kind", ["text", "array"])
def test_string_that_ends_after_the_file_is_cut_off(tmp_path: Path, kind: str) -> None:
    one = struct.pack("<I", 8) if kind == "text" else struct.pack("<IIQ", 9, 8, 1)
    given = text("key") + one + struct.pack("<Q", 9) + b"eight by"
    path = tiny(tmp_path / "x", metadata=(given,), data=b"")
    path.write_bytes(path.read_bytes()[: 24 + len(given)])  # without the padding
    assert re.search("key.* cut off", str(wrong(path)))


def test_pages_of_a_tensor_are_let_go_with_its_neighbors(tmp_path: Path) -> None:
    """A kernel with large folios maps them with the tensor, also after they were let go."""
    mib = 2**20
    tensors = entry("a", (8,)), entry("b", (mib,), 32), entry("c", (2 * mib,), 32 + 4 * mib)
    file = GGUFFile(tiny(tmp_path / "x", *tensors, data=bytes(range(256)) * (2**14 * 3 + 1)))
    before = {name: file.raw(name).tobytes() for name in file.tensors}
    held = resident_kib(tmp_path / "x")
    file.let_go("a")
    assert 0 < resident_kib(tmp_path / "x") <= held - 2048
    file.let_go("c", 2 * mib)  # of 8 MiB from 4 MiB on: those from 4 MiB on
    assert resident_kib(tmp_path / "x") <= 2048
    file.let_go("c", mib, mib + 1)
    assert resident_kib(tmp_path / "x") < 2048
    assert before == {name: file.raw(name).tobytes() for name in file.tensors}
    with pytest.raises(CheckpointError, match="no tensor 'd'"):
        file.let_go("d")
