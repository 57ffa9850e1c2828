"""GGUF files: our reader against the `gguf` package, damaged files, and models written as llama.cpp writes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import tiny_models
from tests.model.harness import load, run

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.model.description import read_spec
from slipstream.model.families import FAMILIES
from slipstream.model.gguf import GGUFFile
from slipstream.model.gguf_quants import BLOCKS, dequantize_blocks


@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantised_bit_for_bit(kind):
    elements, size = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(0, 256, (50, size), dtype=np.uint8)
    if elements == 1:  # random bytes would make NaNs
        raw = np.random.default_rng(0).standard_normal(50).astype(np.float32)
        raw = {"F32": raw, "F16": raw.astype(np.float16), "BF16": (raw.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        raw = raw.view(np.uint8).reshape(50, size)
    else:
        for at in {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q6_K": (208,)}.get(kind, (0, 2)):
            scale = np.random.default_rng(at).standard_normal(50).astype(np.float16)
            raw[:, at : at + 2] = scale[:, None].view(np.uint8)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(50, elements)
    np.testing.assert_array_equal(dequantize_blocks(kind, raw), expected)


def write(path, tensors, architecture="llama", **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, (value, kind) in tensors.items():
        value = np.ascontiguousarray(value, dtype=np.float32)
        if kind == "F32":
            writer.add_tensor(name, value)
        else:
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    values = np.random.default_rng(0).standard_normal((6, 64))
    write(
        path,
        {"a": (values, "F32"), "b": (values, "Q8_0")},
        some__list=["x", "yä", ""],
        some__numbers=[1, 2, 3],
        some__flag=True,
        some__float=0.5,
    )
    return path


def test_reads_what_was_written(small):
    file = GGUFFile(small)
    assert file.metadata["some.list"] == ["x", "yä", ""]
    assert file.metadata["some.numbers"] == [1, 2, 3]
    assert file.metadata["some.flag"] is True
    assert file.metadata["some.float"] == 0.5
    assert (file.tensors["b"].shape, file.tensors["b"].type) == ((6, 64), "Q8_0")
    a, b = file.dequantize("a", torch.float32), file.dequantize("b", torch.bfloat16)
    assert b.dtype == torch.bfloat16
    assert (a - b.float()).abs().max() < 0.05


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_refused_and_nothing_worse(small, tmp_path_factory, data):
    content = bytearray(small.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, min(len(content) - 1, 700)))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(content[:cut] or b"x")
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.dequantize(name, torch.float32)
    except CheckpointError:
        pass


CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "query_pre_attn_scalar": 16,
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_as_llama_cpp_writes_it(case, tmp_path):
    family, overrides = CASES[case]
    theirs = tiny_models.build(tmp_path / "hf", family, **overrides)
    spec, table = read_spec(tmp_path / "hf").spec, FAMILIES[family].gguf
    state = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    tensors = {}
    for pattern, name in table.names.items():
        for i in range(spec.num_layers) if "{i}" in pattern else (0,):
            value = state.get(name.replace("{i}", str(i)))
            if value is None or (name == "lm_head.weight" and spec.tied_embeddings):
                continue
            attention = spec.layers[i].attention
            if case.startswith("llama") and ("attn_q." in pattern or "attn_k." in pattern):  # llama.cpp's order of rows
                heads = attention.num_heads if "attn_q" in pattern else attention.num_kv_heads
                value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            if family == "gemma3_text" and pattern.endswith("norm.weight"):
                value = value + 1
            tensors[pattern.replace("{i}", str(i))] = (value, "F32")
    arch, a = table.architecture, spec.layers[0].attention
    metadata = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.layers[0].mlp.intermediate_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": next(x.attention.position.theta for x in spec.layers if x.attention.window is None),
    }
    if family == "gemma3_text":
        metadata["attention.sliding_window"] = 6
    write(tmp_path / "model.gguf", tensors, arch, **{f"{arch}.{k}": v for k, v in metadata.items()})
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = run(load(tmp_path / "model.gguf"), tokens)
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


def test_an_unknown_architecture_and_type_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, "mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        read_spec(path)
    path.write_bytes(
        path.read_bytes().replace(
            b"\x20\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\0\0\0\0", b"\x20\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x17\0\0\0"
        )
    )
    with pytest.raises(CheckpointError, match=r"token_embd\.weight.*IQ4_XS"):
        GGUFFile(path).dequantize("token_embd.weight", torch.float32)


def test_pieces_join_up(small, monkeypatch):
    """A tensor larger than one piece is the same as in one piece."""
    file = GGUFFile(small)
    whole = {name: file.dequantize(name, torch.float32) for name in file.tensors}
    monkeypatch.setattr("slipstream.model.gguf._CHUNK", 96)
    for name, expected in whole.items():
        assert torch.equal(file.dequantize(name, torch.float32), expected)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_refused(small, tmp_path, version):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + version.to_bytes(4, "little") + small.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="version"):
        GGUFFile(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\2\0\0\0" + small.read_bytes()[8:])
    assert GGUFFile(tmp_path / "x.gguf").tensors == GGUFFile(small).tensors
