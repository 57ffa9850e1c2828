"""Models in GGUF files as llama.cpp writes them: names, order of rows, norms; and architectures that are not known."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from slipstream.errors import UnsupportedModelError
from slipstream.kernels import native
from slipstream.model.description import read_spec
from slipstream.model.families import FAMILIES
from tests import tiny_models
from tests.model.harness import Paged, load, run


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
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
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
    metadata |= {"attention.value_length": a.head_dim, "rope.dimension_count": a.head_dim, "vocab_size": 288}
    if family == "gemma3_text":
        metadata["attention.sliding_window"] = 6
        metadata["rope.freq_base_swa"] = 5e3
    write(tmp_path / "model.gguf", tensors, arch, **{f"{arch}.{k}": v for k, v in metadata.items()})
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = run(load(tmp_path / "model.gguf"), tokens)
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


LEAST = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def described(path, architecture="llama", **changes):
    metadata = {f"{architecture}.{k}": v for k, v in {**LEAST, **changes}.items() if v is not None}
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, architecture, **metadata)
    return read_spec(path).spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scale_linear", 2.0),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.dimension_count", 4),
        ("rope.freq_base_swa", 1e4),
        ("attention.sliding_window", 16),
        ("attention.value_length", 16),
        ("attention.head_count_kv", [2, 4]),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("expert_count", 8),
        ("tensor_data_layout", "other"),
        ("anything.new", 1),
        *((key, None) for key in LEAST),
    ],
)
def test_metadata_that_could_matter_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(UnsupportedModelError, match=key) as caught:
        described(tmp_path / "x.gguf", **{key: value})
    assert caught.value.field == f"llama.{key}"


def test_metadata_without_effect_is_accepted(tmp_path):
    plain = described(tmp_path / "plain.gguf")
    harmless = {
        "vocab_size": 5,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 32,
        "rope.scale_linear": 1.0,
        "expert_count": 0,
        "attention.causal": True,
        "tensor_data_layout": "Meta AI original pth",
    }
    assert described(tmp_path / "x.gguf", **harmless) == plain


def test_an_unknown_architecture_is_named(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, "mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        read_spec(path)


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q4_0", "Q8_0"), ("Q8_0", "Q5_0")], ids="+".join)
def test_blocks_are_used_as_they_are(tmp_path, kinds):
    """Products in a file's own precision against the same numbers blown up to float32: only the inputs' 8 bits differ. Of a
    product that another type fills in part, nothing is taken."""
    sizes = dict(hidden_size=64, intermediate_size=96, initializer_range=0.1, tie_word_embeddings=True)
    theirs = tiny_models.build(tmp_path / "hf", "llama", **sizes)
    state = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    tensors = {}
    for pattern, name in FAMILIES["llama"].gguf.names.items():
        for i in range(2) if "{i}" in pattern else (0,):
            value = state.get(name.replace("{i}", str(i)))
            if value is None or pattern == "output.weight":
                continue
            kind = "F32" if value.ndim == 1 else kinds[1] if "attn_v" in pattern or "token" in pattern else kinds[0]
            tensors[pattern.replace("{i}", str(i))] = (value, kind)
    metadata = {**LEAST, "block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count_kv": 2}
    write(tmp_path / "model.gguf", tensors, **{f"llama.{k}": v for k, v in metadata.items()})
    ours, exact = load(tmp_path / "model.gguf", kernels="cpu"), load(tmp_path / "model.gguf")
    attention = ours.decoder.layers[1].attention
    assert [p.kind for p in attention.qkv.parts] == {
        "Q4_1": [native.Q4M],  # one type: one part
        "Q8_0": [native.Q4, native.Q4, native.Q8],
        "Q5_0": [native.F32],  # dequantised as a whole
    }[kinds[1]]
    assert [p.kind for p in attention.out.parts] == [native.BLOCK_KINDS[kinds[0]]]
    assert ours.weights_bytes < exact.weights_bytes
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    a, b = run(ours, tokens), run(exact, tokens)
    assert 0 < (a - b).abs().max() / b.abs().max() < 0.05
    alone = run(ours, tokens[:5], (2, 3))
    assert torch.equal(alone, run(ours, tokens[:5], (2, 3)))


def test_a_token_does_not_depend_on_what_else_is_in_the_batch(tmp_path):
    tiny_models.build(tmp_path, "llama", initializer_range=0.1)
    model = load(tmp_path, kernels="cpu", dtype=torch.bfloat16)
    prompts = [[(7 * i + j) % 280 for j in range(n)] for i, n in enumerate((1, 9, 150, 20, 3, 2, 1, 70))]
    batch = Paged(model, len(prompts), 200)
    together = batch.step(list(enumerate(prompts)))
    after = batch.step([(i, [11]) for i in range(len(prompts))])
    for i, prompt in enumerate(prompts):
        single = Paged(model, 1, 200)
        assert torch.equal(single.step([(0, prompt)])[0], together[i])
        assert torch.equal(single.step([(0, [11])])[0], after[i])
