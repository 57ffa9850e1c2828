"""Products that a start rounded are read back at the next, bit for bit, and made anew whenever anything differs."""

from __future__ import annotations

import logging
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.hub import resolve_model
from slipstream.kernels.cpu.native import instruction_sets
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.model.load import packed_cache
from slipstream.model.load.loader import load_model
from slipstream.spec.scheme import SCHEMES
from tests.model.formats.test_compressed import compress
from tests.model.harness import run
from tests.support import tiny_models

SIZES = dict(hidden_size=64, intermediate_size=192, head_dim=16)
CPU = torch.device("cpu")


def load(path, folder, scheme="int8", ops=None, dtype=torch.float32):
    chosen = SCHEMES[scheme] if scheme else None
    model = load_model(
        path, ops=ops or NativeOps(), device=CPU, dtype=dtype, scheme=chosen, weights_folder=folder
    )
    if model.writer is not None:
        model.writer.join()
    return model


def logits(model):
    return run(model, list(range(3, 40)))


@pytest.fixture(autouse=True)
def even_tiny(monkeypatch):
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)


@pytest.fixture
def rounded(monkeypatch):
    """Counts products that are rounded or repacked rather than read."""
    counted = SimpleNamespace(num=0)

    def counting(own):
        def prepare(self, weight, *args, **more):
            counted.num += not hasattr(weight, "parts")
            return own(self, weight, *args, **more)

        return prepare

    for name in ("quantize_weight", "pack_weight", "quantize_experts", "pack_experts"):
        monkeypatch.setattr(NativeOps, name, counting(getattr(NativeOps, name)))
    return counted


@pytest.mark.parametrize(
    ("family", "scheme", "dense"),
    [("llama", "int8", 1), ("qwen2", "int4-g32", 1), ("gpt2", "int8", 1), ("mixtral", "int8", 3)],
)
def test_the_next_start_reads_what_the_first_rounded(tmp_path, rounded, family, scheme, dense):
    tiny_models.write(tmp_path / "m", family, **(SIZES if family in ("llama", "qwen2") else {}))
    first = load(tmp_path / "m", tmp_path / "kept", scheme)
    (file,) = (tmp_path / "kept").iterdir()
    assert file.name.startswith("m-")
    rounded.num = 0
    second = load(tmp_path / "m", tmp_path / "kept", scheme)
    assert rounded.num == dense  # the head, and routers
    assert second.forms == first.forms
    assert second.weights_bytes == first.weights_bytes
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
def test_checkpoints_that_are_repacked(tmp_path, rounded, kind):
    tiny_models.write(tmp_path / "m", "qwen2", **SIZES)  # with biases
    compress(tmp_path / "m", kind)
    first = load(tmp_path / "m", tmp_path / "kept", None)
    rounded.num = 0
    second = load(tmp_path / "m", tmp_path / "kept", None)
    assert rounded.num == 1
    assert torch.equal(logits(first), logits(second))


def test_the_file_is_a_safetensors_file(tmp_path):
    tiny_models.write(tmp_path / "m", **SIZES)
    load(tmp_path / "m", tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    with safe_open(file, framework="pt") as opened:
        assert "layers.0.attention.qkv.weight:0" in opened.keys()  # noqa: SIM118
        assert opened.get_tensor("layers.0.attention.qkv.weight:0").dtype == torch.uint8


def test_what_differs_is_made_anew(tmp_path, rounded):
    path, folder = tmp_path / "m", tmp_path / "kept"
    tiny_models.write(path, **SIZES)
    load(path, folder)
    (first,) = folder.iterdir()
    changed = load_file(path / "model.safetensors")
    save_file(
        {n: t * 2 for n, t in changed.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    os.utime(path / "model.safetensors", ns=(1, 1))
    rounded.num = 0
    load(path, folder)
    assert rounded.num > 1
    (second,) = folder.iterdir()  # in the other's stead
    assert first != second
    load(path, folder, "int4-g32")
    load(path, folder, dtype=torch.bfloat16)
    assert len([*folder.iterdir()]) == 3  # each beside the others
    if len(isas := instruction_sets()) > 1:
        rounded.num = 0
        load(path, folder, ops=NativeOps(isa=isas[0]))
        assert rounded.num > 1
    rounded.num = 0
    load(path, folder)
    assert rounded.num == 1


@pytest.mark.parametrize("harm", ["cut", "header", "empty", "type", "span"])
def test_a_damaged_file_is_made_anew(tmp_path, caplog, harm):
    tiny_models.write(tmp_path / "m", **SIZES)
    first = load(tmp_path / "m", tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    file.write_bytes(
        {
            "cut": whole[:-70],
            "header": b"\xff" * 20 + whole[20:],
            "empty": b"",
            "type": whole.replace(b"float32", b"floot32", 1),
            "span": re.sub(rb"\[0, (\d+)\d\]", rb"[0, \1 ]", whole, count=1),
        }[harm]
    )
    with caplog.at_level(logging.WARNING):
        second = load(tmp_path / "m", tmp_path / "kept")
    assert "can't be read" in caplog.text
    assert torch.equal(logits(first), logits(second))
    assert file.read_bytes() == whole


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, caplog, monkeypatch):
    tiny_models.write(tmp_path / "m", **SIZES)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        load(tmp_path / "m", tmp_path / "kept")
    assert "1,000 bytes are free" in caplog.text
    assert not [*(tmp_path / "kept").iterdir()]

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.kernels.cpu.packed_file.os.fsync", full)
    load(tmp_path / "m", tmp_path / "kept")
    assert "No space left" in caplog.text
    assert not [*(tmp_path / "kept").iterdir()]


def test_what_cannot_be_read_is_rounded(tmp_path, caplog, monkeypatch):
    """Another user's file, say; it is left alone."""
    tiny_models.write(tmp_path / "m", **SIZES)
    first = load(tmp_path / "m", tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask()

    def refused(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(NativeOps, "read_products", refused)
    second = load(tmp_path / "m", tmp_path / "kept")
    assert "Permission denied" in caplog.text
    assert torch.equal(logits(first), logits(second))
    assert file.is_file()


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def test_what_a_killed_start_left_behind_goes(tmp_path):
    tiny_models.write(tmp_path / "m", **SIZES)
    load(tmp_path / "m", tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    old, new = (file.with_name(f".{file.name}.{number}") for number in (1, 2))
    old.write_bytes(b"half")
    new.write_bytes(b"half")  # may be another process's
    os.utime(old, (1, 1))
    file.unlink()
    load(tmp_path / "m", tmp_path / "kept")
    assert {*(tmp_path / "kept").iterdir()} == {file, new}


def test_scales_that_nobody_uses_are_passed_over_again(tmp_path, rounded):
    """One part of qkv is left out, so that it is expanded, and the others' input scales remain."""
    tiny_models.write(tmp_path / "m", **SIZES)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj"
    compress(tmp_path / "m", "int8", ignore=["lm_head", name])
    stored = load_file(tmp_path / "m" / "model.safetensors")
    left = {n: t.clone() for n, t in stored.items() if not n.startswith(name)}
    left[f"{name}.weight"] = weights[f"{name}.weight"].clone()
    left["model.layers.1.self_attn.k_scale"] = torch.ones(1)
    save_file(left, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    first, second = (load(tmp_path / "m", tmp_path / "kept", None) for _ in range(2))
    assert torch.equal(logits(first), logits(second))
    assert second.forms == first.forms


def test_nothing_is_kept_where_nothing_is_gained(tmp_path):
    tiny_models.write(tmp_path / "m", **SIZES)
    load(tmp_path / "m", tmp_path / "kept", None)  # packed as fast as it is read
    load(tmp_path / "m", tmp_path / "kept", None, ops=CpuOps())  # without a layout
    assert not (tmp_path / "kept").exists()


def test_of_a_small_model_nothing_is_kept(tmp_path, monkeypatch):
    tiny_models.write(tmp_path / "m", **SIZES)
    monkeypatch.undo()
    assert packed_cache.MIN_BYTES > 0
    load(tmp_path / "m", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_an_engine_keeps_and_reads(tmp_path, rounded, caplog):
    tiny_models.write_with_tokenizer(tmp_path / "m", **SIZES)
    asked = dict(
        device="cpu",
        quantization="int8-head",
        kernels="cpu",
        max_model_len=64,
        download_dir=str(tmp_path / "cache"),
    )
    texts = []
    for cache, expected in (("off", 0), ("auto", 1), ("auto", 1)):
        rounded.num = 0
        with LLM(str(tmp_path / "m"), weights_cache=cache, **asked) as llm:
            texts.append(
                llm.generate("hello", SamplingParams(max_tokens=8, temperature=0))[0]
                .outputs[0]
                .token_ids
            )
            if (writer := llm.core.executor.runner.model.writer) is not None:
                writer.join()
        assert len([*(tmp_path / "cache").glob("weights/*")]) == expected
    assert rounded.num == 0
    assert texts[0] == texts[1] == texts[2]


def test_a_gguf_file_rounded_keeps_its_head_as_stored(tmp_path):
    """The cache keeps the rounded products alone."""
    path = resolve_model("smollm2")
    first = load(path, tmp_path / "kept", dtype=torch.bfloat16)
    second = load(path, tmp_path / "kept", dtype=torch.bfloat16)
    assert {f.name for f in first.forms} == {"int8", "Q8_0"}
    table = first.decoder.layers[0].attention.heads.cos_sin
    assert first.weights_bytes - table.nbytes == first.description.gguf_bytes(2, SCHEMES["int8"])
    head = load(path, None, "int8-head", dtype=torch.bfloat16)
    assert head.weights_bytes - table.nbytes == head.description.gguf_bytes(2, SCHEMES["int8-head"])
    assert second.forms == first.forms
    assert torch.equal(logits(first), logits(second))
    (file,) = (tmp_path / "kept").iterdir()
    with safe_open(file, framework="pt") as opened:
        assert not any(name.startswith(("head", "embed")) for name in opened.keys())  # noqa: SIM118


def test_an_int8_head_is_near_the_unrounded_one(tmp_path):
    tiny_models.write(tmp_path / "m", vocab_size=256, **SIZES)
    model = load(tmp_path / "m", None, "int8-head")
    (form,) = model.forms
    assert form.name == "int8"
    rest = logits(load(tmp_path / "m", None, "int8"))
    assert 0 < (logits(model) - rest).norm() < 0.02 * rest.norm()
