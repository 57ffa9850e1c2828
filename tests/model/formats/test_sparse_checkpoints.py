"""Pruned checkpoints: as compressed-tensors writes them without their zeros they are the same as with them, and the C++ kernels
of a CPU leave the zeros out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.kernels.arrays import to_array, to_tensor
from slipstream.kernels.cpu import native
from slipstream.model.load.loader import load_model
from slipstream.model.stored.bitmasks import made_dense
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from tests.model.formats.test_compressed import SIZES, compress, log_probabilities
from tests.model.harness import run
from tests.support import tiny_models


def prune(folder, pattern="2:4"):
    """Zeros in every projection: two of each four, or 90 % anywhere, which every instruction set leaves out."""
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        order = torch.rand(tensors[name].shape, generator=generator)
        keep = (
            order > 0.9
            if pattern != "2:4"
            else order.unflatten(1, (-1, 4)).argsort(-1).flatten(1) < 2
        )
        tensors[name] = (tensors[name] * keep).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def leave_zeros_out(folder, form, stem=lambda name: name.removesuffix(".weight"), **config):
    """Rewrite the projections as compressed-tensors does: `form` is a format of its sparsity_config."""
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        mask = weight != 0
        if form == "sparse-24-bitmask":  # two of each four, zeros or not
            top = weight.float().unflatten(1, (-1, 4)).abs().topk(2, dim=-1).indices
            mask = (
                torch.zeros(*top.shape[:2], 4, dtype=torch.bool).scatter_(2, top, True).flatten(1)
            )
        values = weight[mask]
        counts = mask.sum(1)
        tensors[f"{stem(name)}.compressed"] = (
            values.view(len(weight), -1) if form == "sparse-24-bitmask" else values
        )
        tensors[f"{stem(name)}.bitmask"] = torch.from_numpy(
            np.packbits(mask.numpy(), axis=-1, bitorder="little")
        )
        tensors[f"{stem(name)}.shape"] = torch.tensor(weight.shape)
        if form == "sparse-bitmask":
            tensors[f"{stem(name)}.row_offsets"] = counts.cumsum(0) - counts
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads(path.read_text())
    sparsity = {
        "format": form,
        "global_sparsity": 0.5,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
    }
    given = written.get("quantization_config", {"quant_method": "compressed-tensors"})
    written["quantization_config"] = {**given, "sparsity_config": sparsity, **config}
    path.write_text(json.dumps(written))


@pytest.mark.parametrize("form", ["sparse-bitmask", "sparse-24-bitmask"])
@pytest.mark.parametrize("rounded", [False, True])
def test_without_zeros_is_the_same(tmp_path, form, rounded):
    tiny_models.write(tmp_path, "llama", **SIZES)
    prune(tmp_path)
    if rounded:
        compress(tmp_path, "int8")
    expected = log_probabilities(tmp_path)
    leave_zeros_out(tmp_path, form, **({} if rounded else {"format": "dense"}))
    description = read_spec(tmp_path)
    assert (description.scheme, description.quantization.sparse) == (
        "int8" if rounded else None,
        True,
    )
    assert log_probabilities(tmp_path) == expected


def test_older_names_are_read_too(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    prune(tmp_path)
    expected = log_probabilities(tmp_path)
    leave_zeros_out(tmp_path, "sparse-bitmask", stem=lambda name: name)
    assert log_probabilities(tmp_path) == expected


def test_float8_without_zeros():
    weight = (torch.randn(6, 20) * (torch.rand(6, 20) > 0.5)).to(torch.float8_e4m3fn)
    mask = weight.float() != 0
    parts = {
        "a.compressed": weight.view(torch.uint8)[mask].view(torch.float8_e4m3fn),
        "a.bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
        "a.shape": torch.tensor([[6], [20]]),
    }
    ((name, shape, read),) = made_dense(
        (n, tuple(t.shape), lambda t=t: to_array(t)) for n, t in parts.items()
    )
    assert (name, shape) == ("a.weight", (6, 20))
    assert torch.equal(to_tensor(read()).float(), weight.float())


def test_what_does_not_fit_is_named(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    prune(tmp_path)
    leave_zeros_out(tmp_path, "sparse-bitmask")
    file, stem = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    for part, value in (
        ("bitmask", None),
        ("shape", torch.tensor([3, 5])),
        ("compressed", tensors[f"{stem}.compressed"][1:]),
    ):
        changed = {n: t for n, t in {**tensors, f"{stem}.{part}": value}.items() if t is not None}
        save_file({n: t.contiguous() for n, t in changed.items()}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=stem.replace(".", r"\.")):
            log_probabilities(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("sparse-bitmask", "sparse-spiral"))
    with pytest.raises(UnsupportedModelError, match=r"sparsity_config\.format"):
        log_probabilities(tmp_path)


@pytest.mark.skipif(native.library_path() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_are_found_at_load_and_left_out(tmp_path, dtype):
    """The products become sparse with quantization='int8'. The ledger says so and counts their
    bytes."""
    tiny_models.write(tmp_path, "llama", **{**SIZES, "hidden_size": 128, "intermediate_size": 256})
    settings = dict(
        kernels="cpu", dtype=dtype, quantization="int8", max_num_seqs=8
    )  # with more they are held dense, too
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64, **settings
    ) as llm:
        dense = {form.name: form for form in llm.ledger.forms}
    assert (set(dense), dense["int8"].num_products) == ({"int8", dtype}, 8)
    prune(tmp_path, "90 %")
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64, **settings
    ) as llm:
        sparse = {form.name: form for form in llm.ledger.forms}
        assert f"8 sparse int8 ({sparse['sparse int8'].num_bytes:,} B)" in "\n".join(
            llm.ledger.describe()
        )
        total = llm.ledger.weights_bytes
    assert (set(sparse), sparse["sparse int8"].num_products) == ({"sparse int8", dtype}, 8)
    weights = load_file(tmp_path / "model.safetensors")
    count = sum(w.numel() for n, w in weights.items() if n.endswith("_proj.weight"))
    assert (
        0.225 < sparse["sparse int8"].num_bytes / count < 0.3
    )  # 0.1 + 1/8, scales, and where panels begin
    model = load_with(tmp_path, getattr(torch, dtype), sparse_from=2.0)
    assert total == model.weights_bytes - dense["int8"].num_bytes + sparse["sparse int8"].num_bytes


def load_with(folder, dtype, **options):
    from slipstream.kernels.cpu.ops import NativeOps

    settings = dict(
        device=torch.device("cpu"), dtype=dtype, max_model_len=64, scheme=SCHEMES["int8"]
    )
    return load_model(folder, ops=NativeOps(1, **options), **settings)


@pytest.mark.skipif(native.library_path() is None, reason="the C++ kernels are not built")
def test_both_forms_give_the_same_logits(tmp_path):
    tiny_models.write(tmp_path, "qwen2", **SIZES)
    prune(tmp_path, "90 %")
    ours, theirs = (load_with(tmp_path, torch.float32, sparse_from=share) for share in (0.5, 2.0))
    assert [{f.name for f in m.forms} for m in (ours, theirs)] == [
        {"sparse int8", "float32"},
        {"int8", "float32"},
    ]
    assert torch.equal(run(ours, range(3, 40)), run(theirs, range(3, 40)))
