"""Checkpoints that are not plain numbers, without torch: fp8, other numbers of bits, weights without their zeros, scales of the
cache. The answers are those of torch's runner, over the same numbers; and torch is not imported."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.errors import CheckpointError
from slipstream.kernels.cpu import native
from slipstream.model.stored.packing import pack_words
from slipstream.model.stored.parts import (
    array_numbers,
    expanded,
    stored_parts,
    stored_shape,
    unpack_words,
)
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import FORMATS, WeightFormat
from slipstream.spec.stored.quantization_config import StoredFormats
from slipstream.worker.host_loading import HostLoaded
from tests.model.formats import test_block_scales, test_cache_scales
from tests.model.formats.test_compressed import GROUP, SIZES, compress
from tests.model.formats.test_sparse_checkpoints import leave_zeros_out, prune
from tests.support import tiny_models
from tests.worker.test_host_runner import GREEDY, PROMPTS, SCORED, compared, told_without_torch
from tests.worker.test_host_runner import SIZES as SETTINGS

pytestmark = pytest.mark.skipif(
    not native.has_cpu_kernels(), reason="the C++ kernels are not built"
)

GREEDY_AND_SCORED = [GREEDY, SCORED]
OTHER_FORMATS = [
    WeightFormat(bits=3, group_size=32, symmetric=False),  # held in 4 bits
    WeightFormat(bits=2, group_size=64),
    WeightFormat(bits=5, group_size=32, symmetric=False),  # expanded, as all below
    WeightFormat(bits=7),
    WeightFormat(bits=8),
    WeightFormat(bits=4, group_size=16),
    WeightFormat(kind="float", whole=True),
]
IDS = [str(fmt) for fmt in OTHER_FORMATS]


def parts_of(fmt, rows, inner, random):
    """Codes, scales and zero points as a checkpoint of this format has them, of any value that it can hold."""

    def codes(*shape):
        return torch.from_numpy(random.integers(fmt.lowest, fmt.lowest + 2**fmt.bits, shape))

    made = {}
    if fmt.packed:
        made["weight_packed"] = pack_words(codes(rows, inner), fmt.bits)
        made["weight_shape"] = torch.tensor([rows, inner])
    elif fmt.kind == "float":
        made["weight"] = torch.from_numpy(
            random.standard_normal((rows, inner), np.float32) * 100
        ).to(torch.float8_e4m3fn)
    else:
        made["weight"] = codes(rows, inner).to(torch.int8)
    size = 2.0 ** -(fmt.bits if fmt.kind == "int" else 8)
    groups = -(-rows // fmt.block_rows), fmt.groups(inner)
    scales = torch.from_numpy(random.uniform(0.5, 1.0, (1,) if fmt.whole else groups) * size)
    made[fmt.scale] = scales.to(torch.bfloat16)
    if not fmt.symmetric:
        made["weight_zero_point"] = pack_words(
            codes(fmt.groups(inner), rows), fmt.bits
        ).T.contiguous()
    return made


def write(folder, fmt):
    """Rewrite a tiny checkpoint with weights in the format."""
    file, random = folder / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, inner = tensors.pop(name).shape
        made = parts_of(fmt, rows, inner, random)
        tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in made.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    weights = {
        "num_bits": fmt.bits, "type": fmt.kind, "symmetric": fmt.symmetric, "dynamic": False, "group_size": fmt.group_size,
        "strategy": "group" if fmt.group_size else "tensor" if fmt.whole else "channel",
    }  # fmt: skip
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if fmt.packed else "naive-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**GROUP, "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    path.write_text(json.dumps(written))


@pytest.mark.parametrize("fmt", OTHER_FORMATS, ids=IDS)
def test_other_formats_answer_as_with_torch(tmp_path, monkeypatch, fmt):
    tiny_models.write(tmp_path, **SIZES)
    write(tmp_path, fmt)
    compared(tmp_path, monkeypatch, samplings=GREEDY_AND_SCORED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3"])
def test_fp8_checkpoints_answer_as_with_torch(tmp_path, monkeypatch, family, dtype):
    tiny_models.write(tmp_path, family, **SIZES)
    compress(tmp_path, "fp8")
    compared(tmp_path, monkeypatch, samplings=GREEDY_AND_SCORED, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "config"), [("deepseek_v3", ""), ("qwen3_moe", ""), ("qwen3", "compressed")]
)
def test_fp8_in_blocks(tmp_path, monkeypatch, family, config):
    test_block_scales.write(tmp_path, family, config)
    compared(tmp_path, monkeypatch, samplings=GREEDY_AND_SCORED)


@pytest.mark.parametrize("rounded", [None, "int8", "fp8"])
@pytest.mark.parametrize("form", ["sparse-bitmask", "sparse-24-bitmask"])
def test_sparse_checkpoints_answer_as_with_their_zeros(tmp_path, monkeypatch, form, rounded):
    """The answers are those of the checkpoint with its zeros, too."""
    tiny_models.write(tmp_path, **SIZES)
    prune(tmp_path, "2:4" if form == "sparse-24-bitmask" else "90 %")
    if rounded is not None:
        compress(tmp_path, rounded)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)]
    leave_zeros_out(tmp_path, form, **({"format": "dense"} if rounded is None else {}))
    assert read_spec(tmp_path).quantization.sparse
    compared(tmp_path, monkeypatch, samplings=GREEDY_AND_SCORED)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        assert [
            o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)
        ] == expected
        forms = {form.name for form in llm.ledger.forms}
    expands = (
        "avx512-vbmi2" in native.instruction_sets()
    )  # without it half of zeros are too few to be left out
    held = "sparse int8" if expands or form == "sparse-bitmask" else "int8"
    assert forms == ({held, "float32"} if rounded == "int8" else {"float32"})


def test_scales_of_the_cache(tmp_path, monkeypatch):
    test_cache_scales.build(tmp_path, kv_cache_scheme=test_cache_scales.INT)
    test_cache_scales.put(tmp_path, test_cache_scales.scales(size=0.02))
    compared(tmp_path, monkeypatch, samplings=GREEDY_AND_SCORED)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        runner = llm.core.executor.runner
        assert type(runner.loaded) is HostLoaded
        assert all(layer.k.dtype == np.int8 for layer in runner.kv)
        assert [float(k[0]) for k, _ in runner.loaded.kv_scales] == pytest.approx(
            [0.02, 0.06], rel=0.01
        )
        assert "calibrate" not in runner.phases


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4-g32"])
def test_random_weights_are_held_as_the_checkpoints_are(tmp_path, kind):
    tiny_models.write(tmp_path, **SIZES)
    compress(tmp_path, kind)
    forms = []
    for load_format in ("auto", "dummy"):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, load_format=load_format, **SETTINGS
        ) as llm:
            assert type(llm.core.executor.runner.loaded) is HostLoaded
            forms.append({form.name for form in llm.ledger.forms})
    assert ("int8" in forms[0]) == (kind == "int8")
    if (
        kind != "int4-g32"
    ):  # random numbers get a minimum a group, which a symmetric checkpoint has not
        assert forms[0] == forms[1]


# --- Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("num_codes", [1, 31, 32, 33, 96, 100])
def test_words_come_back(bits, num_codes):
    random = np.random.default_rng(bits)
    codes = random.integers(
        -(1 << bits - 1), 1 << bits - 1, (1030, num_codes)
    )  # more than are unpacked together
    words = pack_words(torch.from_numpy(codes), bits).numpy()
    found = unpack_words(words, bits, num_codes)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(unpack_words(np.asfortranarray(words), bits, num_codes), codes)


@pytest.mark.parametrize(
    "fmt", [*OTHER_FORMATS, FORMATS["fp8"], FORMATS["fp8-block"], FORMATS["int8"]], ids=str
)
def test_numbers_are_torchs(fmt):
    """Exactly: both multiply in float32."""
    rows, inner = 144, 192  # of blocks the last are cut off
    given = parts_of(fmt, rows, inner, np.random.default_rng(1))
    assert all(
        fmt.whole or given[p].shape == stored_shape(fmt, p, rows, inner) for p in stored_parts(fmt)
    )
    kinds = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
    }

    def array(x):
        bits, kind = kinds.get(x.dtype, (x.dtype, None))
        return x.view(bits).numpy() if kind is None else x.view(bits).numpy().view(kind)

    ours = array_numbers(fmt, {n: array(x) for n, x in given.items()}, rows, inner)
    assert ours.dtype == np.float32
    codes, scales = given[stored_parts(fmt)[0]], given[fmt.scale].float()
    if fmt.packed:
        codes = torch.from_numpy(unpack_words(codes.numpy(), fmt.bits, inner))
    group = fmt.group_size or inner

    def spread(x):
        return x.repeat_interleave(fmt.block_rows, 0)[:rows].repeat_interleave(group, 1)[:, :inner]

    values = codes.float()
    if not fmt.symmetric:
        words = given["weight_zero_point"].T.numpy()
        values = values - spread(torch.from_numpy(unpack_words(words, fmt.bits, rows)).T.float())
    theirs = values * (scales if fmt.whole else spread(scales))
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_what_does_not_fit_is_named():
    fmt = FORMATS["fp8"]
    formats = StoredFormats(((("Linear",), fmt),))
    given = {
        "a.weight": np.zeros((4, 8), ml_dtypes.float8_e4m3fn),
        "a.weight_scale": np.ones((3, 1), np.float32),
    }
    stored = [(name, x.shape, lambda x=x: x) for name, x in given.items()]
    with pytest.raises(CheckpointError, match=re.escape("a.weight_scale has the shape [3, 1]")):
        list(expanded(stored, formats, lambda module: True))
    with pytest.raises(CheckpointError, match="a has weight, but lacks"):
        list(expanded(stored[:1], formats, lambda module: True))
    assert [name for name, _, _ in expanded(stored, formats, lambda module: False)] == list(given)


# --- Where there is no torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp8", "sparse", "sparse int8"])
def test_no_torch_is_needed(tmp_path, kind):
    tiny_models.write_with_tokenizer(tmp_path, **SIZES)
    if kind == "fp8":
        compress(tmp_path, "fp8")
    else:
        prune(tmp_path, "2:4")
        if kind == "sparse int8":
            compress(tmp_path, "int8")
        leave_zeros_out(
            tmp_path, "sparse-24-bitmask", **({"format": "dense"} if kind == "sparse" else {})
        )
    given = ["run", str(tmp_path), "hello", "--max-tokens", "4", "--json", "--device", "cpu"]
    assert told_without_torch(*given)["text"] is not None
