"""GGUF files that `compress` writes: blocks as the gguf package reads them, mixtures, whole files that run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from fnmatch import fnmatchcase

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.compress.calibrate import InputStats, Stream
from slipstream.compress.gguf.blocks import WRITABLE, round_blocks
from slipstream.compress.gguf.budget import measure_types
from slipstream.compress.gguf.metadata import SAMPLES, numbered_ends, same_model, tokenizer_keys
from slipstream.compress.gguf.mix import GGUF, MIXES, SINGLE, plan_blocks
from slipstream.compress.planning import plan
from slipstream.compress.recipe import more_bits, parse, preset
from slipstream.compress.run import compress
from slipstream.engine.text.gguf_tokenizer import SPLITS
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.model.stored.gguf_quants import dequantize_tensor
from slipstream.spec.description import read_spec
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_types import TYPES
from tests.model.harness import load, run
from tests.support import tiny_models

CPU = torch.device("cpu")


def theirs(blocks, kind):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def weight_and_stats(rows=6, inner=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, inner, generator=generator)
    x = (x + x.roll(1, 1)) * torch.rand(inner, generator=generator).mul(3).exp()
    stats = InputStats.empty(inner, CPU)
    stats.add(x, 1.0)
    return torch.randn(rows, inner, generator=generator) * 0.1, stats


@pytest.mark.parametrize("kind", sorted(WRITABLE))
@pytest.mark.parametrize("damping", [None, 0.01], ids=["nearest", "gptq"])
def test_blocks_are_what_the_gguf_package_reads(kind, damping):
    weight, stats = weight_and_stats()
    weight[0, :300] = 0  # whole blocks of zeros
    weight[1] = weight[1].abs()  # one sign
    blocks, made = round_blocks(weight, kind, stats, damping=damping)
    np.testing.assert_array_equal(
        made.numpy().view(np.uint32) & 0x7FFFFFFF,  # a zero may have either sign
        theirs(blocks, kind).view(np.uint32) & 0x7FFFFFFF,
    )
    assert made[0, :256].abs().max() < 1e-30


@pytest.mark.parametrize("kind", sorted(WRITABLE - {"Q8_0"}))
def test_importance_and_gptq_each_lower_the_outputs_error(kind):
    weight, stats = weight_and_stats(rows=16)
    plain, weighed, compensated = (
        stats.energy(round_blocks(weight, kind, given, damping=damping)[1] - weight)
        for given, damping in ((None, None), (stats, None), (stats, 0.01))
    )
    assert compensated < 0.9 * weighed < 0.9 * plain


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_plain_blocks_err_no_more_than_the_gguf_packages(kind):
    weight, _ = weight_and_stats(rows=32)
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    usual = np.square(theirs(packed, kind) - weight.numpy()).sum()
    ours = (round_blocks(weight, kind, None, damping=None)[1] - weight).square().sum()
    assert ours <= usual


def test_a_grid_that_a_weight_is_on_is_found_again():
    codes = torch.randint(0, 16, (8, 256), generator=torch.Generator().manual_seed(1))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = codes * 0.125 - 1.0
    _, made = round_blocks(weight, "Q4_1", None, damping=None)
    torch.testing.assert_close(made, weight, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(
        folder,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        head_dim=16,
        initializer_range=0.1,
    )
    return folder


WINDOWS = [list(range(3 + i, 67 + i)) for i in range(4)]


def written(model, out, **settings):
    recipe = parse([{"gguf": settings}])
    compress(read_spec(model), recipe, out, windows=WINDOWS, device=CPU, dtype=torch.float32)
    return out / f"{out.name}.gguf"


@pytest.mark.parametrize("kind", ["Q4_K_M", "IQ4_XS", "Q8_0", "F16"])
def test_a_folder_becomes_a_file_that_runs(kind, model, tmp_path):
    path = written(model, tmp_path / "out", type=kind)
    source, made = read_spec(model), read_spec(tmp_path / "out")
    assert same_model(source, made)
    planned = {tensor.name: tensor for tensor in plan_blocks(source, GGUF(type=kind))}
    oracle = gguf.GGUFReader(path)
    assert {t.name: t.tensor_type.name for t in oracle.tensors} == {
        name: tensor.type for name, tensor in planned.items()
    }
    for tensor in oracle.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = dequantize_tensor(GGUFFile(path), tensor.name, "float32")
        np.testing.assert_array_equal(found, expected.reshape(found.shape))
    ours, again = Tokenizer.for_model(source), Tokenizer.for_model(made)
    assert [again.encode(text) for text in SAMPLES] == [ours.encode(text) for text in SAMPLES]
    assert set(again.eos_token_ids) == {*ours.eos_token_ids, 3}  # GGUF's readers know <|im_end|>
    expected, found = (run(load(p), WINDOWS[0]) for p in (model, path))
    error = (found - expected).norm() / expected.norm()
    assert error < {"Q4_K_M": 0.2, "IQ4_XS": 0.25, "Q8_0": 0.02, "F16": 1e-3}[kind]
    about = json.loads((tmp_path / "out" / "slipstream-products.json").read_text())
    assert about["blk.0.ffn_down.weight"]["format"] == planned["blk.0.ffn_down.weight"].type
    assert (kind == "F16") == ("error" not in about["blk.0.ffn_down.weight"])


def test_a_file_becomes_another_file_and_an_interrupted_run_goes_on(model, tmp_path, monkeypatch):
    first = written(model, tmp_path / "first", type="F16")
    source = read_spec(first)
    recipe, seen = parse(preset("gguf:q4_k_m")), []

    def stop(done, total):
        seen.append(done)
        if done == 2 and seen.count(2) == 1:
            raise KeyboardInterrupt

    def go(out):
        compress(
            source, recipe, out, windows=WINDOWS, device=CPU, dtype=torch.float32, progress=stop
        )

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "made")
    assert not (tmp_path / "made").exists()
    go(tmp_path / "made")
    seen[:] = [2]
    go(tmp_path / "at-once")
    made, again = (tmp_path / name / f"{name}.gguf" for name in ("made", "at-once"))
    assert made.read_bytes() == again.read_bytes()
    assert same_model(source, read_spec(made))
    metadata = GGUFFile(made).metadata
    assert metadata["tokenizer.ggml.merges"] == GGUFFile(first).metadata["tokenizer.ggml.merges"]
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A model whose middle layer adds next to nothing."""
    folder = tmp_path_factory.mktemp("uneven")
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=3, head_dim=16)
    tiny_models.write_with_tokenizer(folder, **sizes, initializer_range=0.1)
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"] *= 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_budget_of_bits_is_kept_and_spent_where_it_counts(uneven, tmp_path):
    path = written(uneven, tmp_path / "out", bits=5.0)
    held = GGUFFile(path).tensors
    matrices = {name: t for name, t in held.items() if len(t.shape) > 1}
    bits = 8 * sum(t.nbytes for t in matrices.values()) / sum(t.numel for t in matrices.values())
    assert 4.7 < bits <= 5.0
    unused = {"blk.1.ffn_down.weight": "Q2_K", "blk.1.attn_output.weight": "MXFP4"}
    assert {name: matrices[name].quant.name for name in unused} == unused
    about = json.loads((tmp_path / "out" / "slipstream-products.json").read_text())
    assert {name: note["format"] for name, note in about.items() if name in matrices} == {
        name: t.quant.name for name, t in matrices.items()
    }
    costs = {name: note["kl"] for name, note in about.items() if name in matrices}
    assert max(costs[name] for name in unused) < 1e-3 * sum(costs.values())
    assert same_model(read_spec(uneven), read_spec(path))


def test_costs_of_a_budget_are_near_the_divergence(uneven, tmp_path):
    source, step = read_spec(uneven), GGUF(bits=4.5, rounding="nearest")
    planned = plan_blocks(source, step)
    costs = measure_types(
        source, step, planned, WINDOWS, device=CPU, dtype=torch.float32, progress=lambda done: None
    )
    for i, pattern in enumerate(("*", "token_embd*", "blk.*.attn_v*")):
        types = {"*": "F16", pattern: "Q4_0"}
        made = written(uneven, tmp_path / str(i), rounding="nearest", types=types)
        measured = 0.0
        for tokens in WINDOWS:
            p, q = (run(load(path), tokens).log_softmax(-1) for path in (uneven, made))
            measured += float((p.exp() * (p - q)).sum(-1).mean()) / len(WINDOWS)
        expected = sum(kl["Q4_0"] for name, kl in costs.items() if fnmatchcase(name, pattern))
        assert 0.4 < expected / measured < 2.5, pattern


def test_a_budget_costs_less_than_one_type_of_its_bits(uneven, tmp_path):
    tokens = WINDOWS[0]
    expected = run(load(uneven), tokens).log_softmax(-1)

    def kl(**settings):
        made = run(load(written(uneven, tmp_path / str(len(settings)), **settings)), tokens)
        return float((expected.exp() * (expected - made.log_softmax(-1))).sum(-1).mean())

    budget = kl(bits=4.5, choices=["MXFP4", "Q4_0", "Q5_0", "Q8_0"])
    assert budget < 0.9 * kl(types={"*": "Q4_0"})


def test_a_budget_is_allocated_once_when_a_run_goes_on(uneven, tmp_path, monkeypatch):
    recipe, steps = parse(preset("gguf:4.75bpw")), []

    def stop(done, total):
        steps.append(done)
        if done == 6 and steps.count(6) == 1:
            raise KeyboardInterrupt

    def go():
        compress(
            read_spec(uneven), recipe, tmp_path / "out",
            windows=WINDOWS, device=CPU, dtype=torch.float32, progress=stop,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go()
    monkeypatch.setattr("slipstream.compress.gguf.write.measure_types", None)
    go()
    assert (tmp_path / "out" / "out.gguf").is_file()


def test_a_budget_that_no_types_keep_to_is_refused_at_once(model):
    with pytest.raises(ConfigError, match="256 does not divide rows of 64") as caught:
        plan_blocks(read_spec(model), GGUF(bits=3.3))
    assert caught.value.field == "bits"
    kept = plan_blocks(read_spec(model), GGUF(bits=8.5, types={"*": "Q8_0"}))
    assert {t.type for t in kept} == {"F32", "Q8_0"}


def test_experts_are_rounded_one_by_one(tmp_path):
    tiny_models.write_with_tokenizer(
        tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64
    )
    path = written(tmp_path / "model", tmp_path / "out", type="Q8_0")
    expected, found = (run(load(p), WINDOWS[0]) for p in (tmp_path / "model", path))
    assert (found - expected).norm() / expected.norm() < 0.1
    assert "blk.0.ffn_up_exps.weight" in GGUFFile(path).tensors


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {"use_sliding_window": False, "layer_types": None}),
        ("qwen3", {}),
        ("mistral", {}),
    ],
)
def test_other_families_are_written(family, more, tmp_path):
    tiny_models.write_with_tokenizer(tmp_path / "model", family, **more)
    if family == "mistral":  # which is a Llama if it says that it has no windows
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(
            json.dumps({**config, "sliding_window": None})
        )
    path = written(tmp_path / "model", tmp_path / "out", type="Q8_0")
    expected, found = (run(load(p), WINDOWS[0]) for p in (tmp_path / "model", path))
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("family", "field"), [("mistral", "model_type"), ("granitemoe", "model_type")]
)
def test_a_config_that_can_not_be_said_is_refused_by_name(family, field, tmp_path, monkeypatch):
    """Never a file that describes another model, and no work before the error."""
    tiny_models.write_with_tokenizer(tmp_path / "model", family)
    monkeypatch.setattr("slipstream.compress.gguf.write._write_layer", lambda *given: 1 / 0)
    with pytest.raises(UnsupportedModelError) as caught:
        written(tmp_path / "model", tmp_path / "out", type="Q8_0")
    assert caught.value.field == field
    assert not (tmp_path / "out").exists()


def with_normalizer(folder, normalizer):
    """A folder whose tokenizer splits as Qwen's does."""
    tiny_models.write_with_tokenizer(folder, "qwen3")
    data = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    (regex,) = SPLITS["qwen2"].patterns
    spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {**split, "pattern": {"Regex": regex}},
            {**spell, "use_regex": False},
        ],
    }
    data["normalizer"] = normalizer
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return read_spec(folder)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-a-sequence"])
def test_qwens_normalizer_is_left_out_with_a_warning(inside, tmp_path, caplog):
    form = {"type": "NFC"}
    source = with_normalizer(
        tmp_path / "model", {"type": "Sequence", "normalizers": [form]} if inside else form
    )
    assert tokenizer_keys(source)["tokenizer.ggml.pre"] == "qwen2"
    assert "NFC" in caplog.text
    written(tmp_path / "model", tmp_path / "out", type="F16")


def test_another_normalizer_is_refused_by_its_own_name(tmp_path):
    source = with_normalizer(tmp_path / "model", {"type": "NFKC"})
    with pytest.raises(UnsupportedModelError, match=r"normalizer \(NFKC\) has no form"):
        tokenizer_keys(source)


def test_a_split_that_differs_in_one_kind_of_letter_has_no_name(tmp_path):
    with_normalizer(tmp_path / "model", None)
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace("?\\\\p{L}+", "?[\\\\p{L}\\\\p{M}]+", 1))
    with pytest.raises(UnsupportedModelError, match="way to split text"):
        tokenizer_keys(read_spec(tmp_path / "model"))


LLAMA3 = {1: "<|end_of_text|>", 8: "<|eom_id|>", 9: "<|eot_id|>"}


@pytest.mark.parametrize(
    ("ends", "main", "texts", "expected"),
    [
        ((1, 8, 9), 9, LLAMA3, {"eos": 9, "eot": 9, "eom": 8}),
        ((1, 8, 9), 1, LLAMA3, {"eos": 1, "eot": 9, "eom": 8}),
        ((3,), None, {3: "</s>"}, {"eos": 3}),
        ((3, 4, 5), 3, {3: "a", 4: "b", 5: "c"}, {"eos": 3, "eot": 4, "eom": 5}),
        ((), None, {}, {}),
    ],
)
def test_ends_are_numbered_by_their_names(ends, main, texts, expected, model):
    assert numbered_ends(read_spec(model), ends, main, texts) == expected


def test_all_ends_are_in_the_file_or_one_is_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    tiny_models.write_with_tokenizer(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 3, 10, 11]}))
    made = read_spec(written(folder, tmp_path / "out", type="F16"))
    assert set(Tokenizer.for_model(made).eos_token_ids) == {1, 3, 10, 11}
    path.write_text(json.dumps({"eos_token_id": [1, 3, 10, 11, 12]}))
    with pytest.raises(UnsupportedModelError, match="token 12") as caught:
        written(folder, tmp_path / "more", type="F16")
    assert caught.value.field == "eos_token_id"


def test_a_file_without_an_end_or_the_template_is_not_the_same_model(model, tmp_path):
    made = read_spec(written(model, tmp_path / "out", type="F16"))
    source = read_spec(model)
    assert same_model(source, made)
    assert not same_model(dataclasses.replace(source, eos_token_ids=(1, 40)), made)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    path = other / "tokenizer_config.json"
    path.write_text(path.read_text().replace("assistant", "model"))
    assert not same_model(read_spec(other), made)


def test_llama_3s_frequencies_are_written(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    tiny_models.write_with_tokenizer(tmp_path / "model", rope_parameters=scaling, head_dim=16)
    path = written(tmp_path / "model", tmp_path / "out", type="F16")
    assert "rope_freqs.weight" in GGUFFile(path).tensors
    expected, found = (run(load(p), WINDOWS[0]) for p in (tmp_path / "model", path))
    assert (found - expected).norm() / expected.norm() < 5e-3


def test_the_command_says_types_and_bytes(model, tmp_path, capsys):
    words = ["compress", str(model), "--recipe", "gguf:Q4_K_M", "--out", str(tmp_path / "x")]
    assert main([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["products"]["blk.0.ffn_down.weight"] == "Q4_K"
    assert told["products"]["blk.0.attn_q.weight"] == "Q5_0"  # 64 inputs: no superblocks
    assert told["bytes_after"] == sum(
        tensor.num_bytes for tensor in plan_blocks(read_spec(model), GGUF())
    )
    assert main([*words, "--dry-run"]) == 0
    assert "Q5_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"type": "Q9_K"}, "steps[0].gguf.type"),
        ({"types": {"x": "Q8_K"}}, "steps[0].gguf.types.x"),
        ({"importance": False}, "steps[0].gguf.importance"),
        ({"damping": 0.0}, "steps[0].gguf.damping"),
        ({"bits": 9.0}, "steps[0].gguf.bits"),
        ({"bits": 4.0, "type": "Q4_0"}, "steps[0].gguf.bits"),
        ({"bits": 4.0, "choices": ["Q4_K_M"]}, "steps[0].gguf.choices"),
        ({"choices": ["Q4_0"]}, "steps[0].gguf.choices"),
        ({"bits": 4.0, "importance": False, "rounding": "nearest"}, "steps[0].gguf.importance"),
    ],
)
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(ConfigError) as caught:
        parse([{"gguf": settings}])
    assert caught.value.field == field


def test_a_pattern_without_a_tensor_and_two_ways_to_round_are_refused(model):
    with pytest.raises(ConfigError, match="names no matrix"):
        plan_blocks(read_spec(model), GGUF(types={"blk.*.nothing": "Q8_0"}))
    with pytest.raises(ConfigError, match="gguf rounds by itself"):
        parse([{"quantize": {}}, {"gguf": {}}])


def header(tmp_path, layers, family="llama", **more):
    """A model's description without weights, with 4 query heads of a key head."""
    shape = dict(hidden_size=512, intermediate_size=512, head_dim=64, num_attention_heads=8)
    tiny_models.write_with_tokenizer(tmp_path, family, **shape, num_key_value_heads=2, **more)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return read_spec(tmp_path)


def types_of(source, part, **step):
    """The types of the layers' tensors as runs: [(type, layers), ...]."""
    planned = [t for t in plan_blocks(source, GGUF(**step)) if part in t.name]
    planned.sort(key=lambda t: int(t.name.split(".")[1]))
    return [(kind, len(list(run))) for kind, run in itertools.groupby(t.type for t in planned)]


MORE = [("Q6_K", 4), *[("base", 2), ("Q6_K", 1)] * 8, ("Q6_K", 4)]
"""llama.cpp's use_more_bits of 32 layers: 0 to 3, 6, 9, … 27, 28 to 31."""


def runs(pairs, base):
    named = (name.replace("base", base) for name, n in pairs for _ in range(n))
    return [(kind, len(list(run))) for kind, run in itertools.groupby(named)]


@pytest.fixture(scope="module")
def of_32(tmp_path_factory):
    return header(tmp_path_factory.mktemp("of-32"), 32)


@pytest.mark.parametrize(
    ("kind", "value", "down", "output", "head"),
    [
        ("Q2_K", [("Q4_K", 32)], [("Q3_K", 32)], "Q3_K", "Q6_K"),
        ("Q3_K_S", [("Q3_K", 32)], [("Q3_K", 32)], "Q3_K", "Q6_K"),
        ("Q3_K_M", [("Q5_K", 2), ("Q4_K", 30)], [("Q5_K", 2), ("Q4_K", 30)], "Q4_K", "Q6_K"),
        ("IQ4_XS", [("Q5_K", 32)], [("IQ4_XS", 32)], "IQ4_XS", "Q6_K"),
        ("IQ4_NL", [("Q5_K", 32)], [("IQ4_NL", 32)], "IQ4_NL", "Q6_K"),
        ("Q4_0", [("Q4_0", 32)], [("Q4_1", 4), ("Q4_0", 28)], "Q4_0", "Q6_K"),
        ("Q4_1", [("Q4_1", 32)], [("Q4_1", 32)], "Q4_1", "Q6_K"),
        ("Q4_K_S", [("Q5_K", 4), ("Q4_K", 28)], [("Q5_K", 4), ("Q4_K", 28)], "Q4_K", "Q6_K"),
        ("Q4_K_M", runs(MORE, "Q4_K"), runs(MORE, "Q4_K"), "Q4_K", "Q6_K"),
        ("Q5_0", [("Q5_0", 32)], [("Q5_1", 4), ("Q5_0", 28)], "Q5_0", "Q6_K"),
        ("Q5_1", [("Q5_1", 32)], [("Q5_1", 32)], "Q5_1", "Q6_K"),
        ("Q5_K_S", [("Q5_K", 32)], [("Q5_K", 32)], "Q5_K", "Q6_K"),
        ("Q5_K_M", runs(MORE, "Q5_K"), runs(MORE, "Q5_K"), "Q5_K", "Q6_K"),
        ("Q6_K", [("Q6_K", 32)], [("Q6_K", 32)], "Q6_K", "Q6_K"),
        ("Q8_0", [("Q8_0", 32)], [("Q8_0", 32)], "Q8_0", "Q8_0"),
        ("F16", [("F16", 32)], [("F16", 32)], "F16", "F16"),
    ],
)
def test_a_name_gives_tensors_the_types_that_llama_cpp_gives_them(
    kind, value, down, output, head, of_32
):
    assert types_of(of_32, "attn_v.", type=kind) == value
    assert types_of(of_32, "ffn_down", type=kind) == down
    assert types_of(of_32, "attn_output", type=kind) == [(output, 32)]
    made = {t.name: t.type for t in plan_blocks(of_32, GGUF(type=kind))}
    assert made["output.weight"] == head
    base = MIXES[kind].base
    assert {made[f"blk.9.{n}.weight"] for n in ("attn_q", "attn_k", "ffn_up")} == {base}
    assert made["token_embd.weight"] == base


def test_types_depend_on_importances_where_llama_cpps_do(of_32):
    plain = {"importance": False, "rounding": "nearest"}
    assert types_of(of_32, "ffn_down", type="Q4_0", **plain) == [("Q4_0", 32)]
    expected = [("Q5_K", 4), ("IQ4_XS", 28)]
    assert types_of(of_32, "ffn_down", type="IQ4_XS", **plain) == expected


def test_a_mixture_of_eight_and_a_model_of_eighty_layers_have_more_bits(tmp_path):
    mixture = header(tmp_path / "8", 32, "qwen3_moe", num_experts=8)
    for part, kind in (("attn_v.", "Q8_0"), ("attn_k.", "Q8_0"), ("attn_output", "Q5_K")):
        assert types_of(mixture, part, type="Q4_K_M") == [(kind, 32)]
    large = header(tmp_path / "80", 80)
    assert {kind for kind, _ in types_of(large, "attn_v.", type="Q3_K_M")} == {"Q5_K"}
    assert {kind for kind, _ in types_of(large, "attn_v.", type="Q4_K_M")} == {"Q5_K", "Q6_K"}


def test_mxfp4_is_for_experts_and_refused_without(tmp_path, of_32):
    mixture = header(tmp_path, 32, "qwen3_moe", num_experts=4)
    made = {t.name: t.type for t in plan_blocks(mixture, GGUF(type="MXFP4"))}
    assert made["blk.0.ffn_down_exps.weight"] == "MXFP4"
    rest = {kind for name, kind in made.items() if "_exps" not in name}
    assert rest == {"Q8_0", "F32"}
    with pytest.raises(ConfigError, match="mixtures of experts") as caught:
        plan_blocks(of_32, GGUF(type="MXFP4"))
    assert caught.value.field == "type"
    forced = plan_blocks(of_32, GGUF(type="MXFP4", types={"blk.*": "MXFP4"}))
    assert {t.type for t in forced} == {"MXFP4", "Q8_0", "F32"}


def test_all_types_of_mixes_are_read_and_written():
    assert {t.name for t in TYPES.values()} >= SINGLE
    assert SINGLE - {"F16"} <= WRITABLE


def test_a_type_for_some_tensors_of_a_file_in_f16_is_rounded_with_the_text(model, tmp_path):
    step = {"type": "F16", "types": {"blk.*.ffn_down.weight": "Q4_K"}}
    assert plan(read_spec(model), parse([{"gguf": step}])).needs_text
    assert not plan(read_spec(model), parse([{"gguf": {"type": "F16"}}])).needs_text
    written(model, tmp_path / "out", **step)
    about = json.loads((tmp_path / "out" / "slipstream-products.json").read_text())
    assert about["blk.0.ffn_down.weight"]["rounding"] == "gptq"
    assert "rounding" not in about["blk.0.ffn_up.weight"]


def test_experts_without_tokens_are_said_to_have_the_nearest_codes(tmp_path, caplog, monkeypatch):
    tiny_models.write_with_tokenizer(
        tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64
    )
    observe = Stream.observe

    def without_first(*given, **named):
        return {n: s for n, s in observe(*given, **named).items() if not n.endswith("@0")}

    monkeypatch.setattr(Stream, "observe", without_first)
    written(tmp_path / "model", tmp_path / "out", type="Q8_0")
    about = json.loads((tmp_path / "out" / "slipstream-products.json").read_text())
    assert "experts, else nearest" in about["blk.0.ffn_up_exps.weight"]["rounding"]
    assert about["blk.0.attn_q.weight"]["rounding"] == "gptq"
    assert "nearest codes" in caplog.text
    assert "token_embd" not in caplog.text


def test_backing_off_takes_types_of_more_bits():
    kinds = [made.one(GGUF).type for made in more_bits(parse(preset("gguf:Q4_K_S")))]
    assert kinds == ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    bits = [made.one(GGUF).bits for made in more_bits(parse(preset("gguf:7.2bpw")))]
    assert bits == [7.7, 8.2]
    assert list(MIXES).index("Q3_K_M") < list(MIXES).index("Q4_K_M")


def test_the_command_measures_the_file_and_the_engine_runs_it(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"hello {i} the other letter in\n\n" for i in range(800)))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"- calibrate: {{text: {text}, num_windows: 2, context: 32}}\n- gguf: {{type: Q6_K}}\n"
    )
    out = tmp_path / "out"
    words = ["compress", str(model), "--recipe", str(recipe), "--out", str(out), "--json"]
    assert main([*words, "--text", str(text), "--eval-windows", "2", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"]["kl"]["mean"] < 0.05
    assert told["report"]["compressed"]["file_bytes"] == (out / "out.gguf").stat().st_size
    assert {path.name for path in out.iterdir()} >= {
        *("out.gguf", "slipstream-report.json", "slipstream-recipe.json"),
    }
    with LLM(str(out), device="cpu", max_model_len=64) as llm:
        answers = llm.generate(["hello the"], SamplingParams(temperature=0, max_tokens=4))
        assert answers[0].outputs[0].token_ids
