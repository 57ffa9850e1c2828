"""A model in several GGUF files, as llama.cpp's gguf-split writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.compress.report import model_bytes
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError
from slipstream.hub import resolve_model
from slipstream.model.load.packed_cache import checkpoint_stamps
from slipstream.spec.description import read_spec
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_parts import model_files, parts_of
from tests.data.make_tokens import write_gguf
from tests.engine.text.test_tokenizer import GOLDEN
from tests.model.formats.test_gguf import resident_kib

TOKENS = GOLDEN["byte_level"]
ARRAYS = {"tokens", "token_type", "merges"}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def made(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = {"token_embd.weight": made(len(TOKENS["tokens"]), 32)}
    for i in range(2):
        for name, shape in {
            "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32),
            "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
        }.items():  # fmt: skip
            found[f"blk.{i}.{name}.weight"] = made(*shape)
    return {**found, "output_norm.weight": made(32)}


def write_part(path: Path, part: dict[str, np.ndarray], *, head: bool, **split: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if head:
        for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
            value = {"context_length": 64, "block_count": 2, "feed_forward_length": 64}.get(key, 32)
            writer.add_uint32(f"llama.{key}", value)
        writer.add_uint32("llama.attention.head_count", 4)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
        for key, value in {**TOKENS, "pre": "gpt-2"}.items():
            add = writer.add_array if isinstance(value, list) else writer.add_string
            if isinstance(value, int):
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            else:
                add(f"tokenizer.ggml.{key}", value)
    for key, value in split.items():
        key = f"split.{key.replace('_', '.')}"
        (writer.add_int32 if "tensors" in key else writer.add_uint16)(key, value)
    for name, value in part.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_parts(folder: Path, *groups: list[str], **changes: dict[int, int]) -> list[Path]:
    """The model in a part for each list of tensors' names. `changes`: other values of split.* by the number of the part."""
    folder.mkdir(exist_ok=True)
    all_, paths = tensors(), []
    for i, names in enumerate(groups):
        said = {"no": i, "count": len(groups), "tensors_count": len(all_)}
        said |= {key: of[i] for key, of in changes.items() if i in of}
        paths.append(folder / f"m-{i + 1:05d}-of-{len(groups):05d}.gguf")
        write_part(paths[-1], {n: all_[n] for n in names}, head=not i, **said)
    return paths


NAMES = list(tensors())
GROUPS = [], NAMES[:7], NAMES[7:]  # gguf-split can leave the first part without tensors


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_part(tmp_path / "whole.gguf", tensors(), head=True)
    return tmp_path / "whole.gguf"


def answer(path: Path) -> list[int]:
    with LLM(str(path), device="cpu") as llm:
        (found,) = llm.generate(
            "hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
        return list(found.outputs[0].token_ids)


def test_parts_are_one_model_whichever_of_them_is_given(whole, tmp_path, capsys):
    paths = write_parts(tmp_path / "parts", *GROUPS)
    one, expected = GGUFFile(whole), answer(whole)
    for given in (*paths, tmp_path / "parts"):
        assert resolve_model(str(given)) == given
        description = read_spec(given)
        file = description.gguf
        assert file is not None
        assert description.path == file.path == paths[0]
        assert file.files == paths
        assert set(file.tensors) == set(one.tensors)
        for name in one.tensors:
            assert file.raw(name).tobytes() == one.raw(name).tobytes()
            file.let_go(name)
        file.let_go()
        assert description.spec == read_spec(whole).spec
        assert len(checkpoint_stamps(description)) == 3
    assert Tokenizer.from_pretrained(tmp_path / "parts").vocab_size == len(TOKENS["tokens"])
    assert answer(paths[1]) == expected
    assert model_bytes(paths[0]) == sum(path.stat().st_size for path in paths)
    assert main(["info", str(tmp_path / "parts")]) == 0
    assert "llama" in capsys.readouterr().out


def test_template_beside_the_parts_of_one_model_is_its_own(tmp_path):
    write_parts(tmp_path, *GROUPS)
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template([]) == "of the folder"


def test_missing_parts_are_named(tmp_path):
    paths = write_parts(tmp_path, *GROUPS)
    for gone, given in ((2, 0), (0, 1)):
        kept = paths[gone].read_bytes()
        paths[gone].unlink()
        with pytest.raises(CheckpointError, match=rf"3 parts, and {paths[gone].name} is missing"):
            GGUFFile(paths[given])
        paths[gone].write_bytes(kept)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"no": {1: 2}}, "split.no"),
        ({"count": {2: 4}}, "split.no"),
        ({"count": {0: 4}}, "split.count"),
        ({"count": {0: 0}}, "split.count"),
        ({"tensors_count": {0: 99}}, "split.tensors.count"),
    ],
)
def test_part_of_another_model_is_refused_by_its_field(tmp_path, changes, field):
    paths = write_parts(tmp_path, *GROUPS, **changes)
    with pytest.raises(CheckpointError, match=r"split|parts") as caught:
        GGUFFile(paths[0])
    assert caught.value.field == field


def test_tensor_in_two_parts_is_refused(tmp_path):
    paths = write_parts(tmp_path, [], NAMES[:8], NAMES[7:])
    with pytest.raises(CheckpointError, match="another part too") as caught:
        GGUFFile(paths[0])
    assert caught.value.field == NAMES[7]


def test_renamed_part_says_how_parts_are_named(tmp_path):
    (path, *_) = write_parts(tmp_path, *GROUPS)
    moved = path.rename(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"NAME-00001-of-00003\.gguf") as caught:
        GGUFFile(moved)
    assert caught.value.field == "split.count"


def test_file_that_is_alone_keeps_its_name(tmp_path):
    """Such a file is a model of one part, or its name looks like a part's by chance."""
    path = write_gguf(tmp_path / "x-00001-of-00001.gguf", TOKENS | {"pre": "gpt-2"})
    assert GGUFFile(path).files == [path]


@pytest.mark.parametrize("number", [9, 24, 41, 99])
def test_type_that_is_not_read_is_named_with_those_that_are(tmp_path, number):
    path = tmp_path / "x.gguf"
    write_part(path, {"token_embd.weight": np.zeros((4, 32), np.float32)}, head=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="such as Q4_K_M"):
        GGUFFile(path)


def test_pages_of_all_parts_are_let_go(tmp_path):
    file = GGUFFile(write_parts(tmp_path, *GROUPS)[0])
    for name in file.tensors:
        assert file.raw(name).sum() >= 0
    assert all(resident_kib(path) > 0 for path in file.files[1:])
    file.let_go()
    assert all(resident_kib(path) == 0 for path in file.files)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("m-00002-of-00003.gguf", 3),
        ("m-00004-of-00003.gguf", 1),
        ("m-00000-of-00003.gguf", 1),
        ("m-00001-of-04097.gguf", 1),
        ("m-1-of-3.gguf", 1),
        ("m.gguf", 1),
    ],
)
def test_names_of_parts(tmp_path, name, count):
    found = parts_of(tmp_path / name)
    assert len(found) == count
    assert tmp_path / name in found
    if count > 1:
        assert found[0].name == "m-00001-of-00003.gguf"


def test_models_of_a_folder_are_in_the_order_of_their_names(tmp_path):
    for name in ("z.gguf", "b-00002-of-00002.gguf", "a.gguf", "b-00001-of-00002.gguf", "c.bin"):
        (tmp_path / name).touch()
    found = [path.name for path in model_files(tmp_path)]
    assert found == ["a.gguf", "b-00001-of-00002.gguf", "z.gguf"]


def test_missing_file_that_is_alone_is_not_called_a_part(tmp_path):
    with pytest.raises(CheckpointError, match="can't be read"):
        GGUFFile(tmp_path / "m.gguf")


def test_file_that_says_it_is_one_part_of_one_is_read(tmp_path):
    for said in ({"no": 0, "count": 1}, {"count": 1}, {"count": 0}):
        write_part(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, head=True, **said)
        assert list(GGUFFile(tmp_path / "m.gguf").tensors) == ["t"]
