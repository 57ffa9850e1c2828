"""Recipes carried out: what is written is what was computed with, whole or not there, and taken up where it was left."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.compress import run as run_module
from slipstream.compress.calibrate import FakeInputs, InputStats, ObservingOps, Stream, load_ends
from slipstream.compress.checkpoint import Attempts, Names, WorkFolder
from slipstream.compress.planning import plan
from slipstream.compress.quantize.rounding import gptq, nearest
from slipstream.compress.quantize_step import Quantize
from slipstream.compress.recipe import PRESETS, parse, preset
from slipstream.compress.run import compress
from slipstream.errors import BudgetError, CheckpointError, ConfigError, UnsupportedModelError
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import FORMATS
from slipstream.spec.stored.quantization_config import COLUMNS_NAME
from tests.model.harness import load, run
from tests.support import mtp_layers, tiny_models, vision_models

CPU = torch.device("cpu")
SIZES = dict(hidden_size=64, intermediate_size=192, head_dim=16)
WINDOWS = [
    torch.randint(4, 280, (24,), generator=torch.Generator().manual_seed(i)).tolist()
    for i in range(4)
]
MIXED = {
    "ignore": ["layers.0.mlp.*"],
    "overrides": {
        "layers.1.attention.qkv": {"bits": 6, "group_size": "channel"},
        "layers.1.mlp.down": {"bits": 2},
    },
}
RECIPES = {
    **{
        name: preset(name)
        for name in PRESETS
        if name not in ("2:4", "lora") and not name.startswith("draft:")
    },
    "int4-learned": [{"quantize": {**preset("int4-learned")[0]["quantize"], "num_steps": 3}}],
    "int8 plain": [{"quantize": {"bits": 8, "inputs": "int8"}}],
    "fp8 gptq": [{"quantize": {"bits": 8, "kind": "float", "inputs": "fp8", "rounding": "gptq"}}],
    "outliers": [{"quantize": {"bits": 8, "inputs": "int8", "outliers": 1.5}}],
    "caught up": [{"quantize": {"group_size": 32, "rounding": "gptq", "catch_up": 1.0}}],
    "learned, caught up": [
        {"quantize": {"group_size": 32, "rounding": "learned", "num_steps": 3, "catch_up": 0.5}}
    ],
    "int8 tensor": [{"quantize": {"bits": 8, "inputs": "int8", "group_size": "tensor"}}],
    **{f"w{bits}": [{"quantize": {"bits": bits, "group_size": 32}}] for bits in (2, 3, 6, 8)},
    "w4 rows": [{"quantize": {"group_size": "channel", "rounding": "gptq", "act_order": False}}],
    "w4 64": [{"quantize": {"group_size": 64}}],
    **{
        f"w{bits} zeros": [{"quantize": {"bits": bits, "group_size": 32, "symmetric": False}}]
        for bits in (2, 3, 4, 8)
    },
    "awq and gptq": [
        {
            "quantize": {
                "bits": 3,
                "group_size": 32,
                "scaling": "awq",
                "rounding": "gptq",
                "true_sequential": False,
            }
        }
    ],
    "learned": [{"quantize": {"bits": 3, "group_size": 32, "rounding": "learned", "num_steps": 3}}],
    "mixed": [{"quantize": {"group_size": 32, **MIXED}}],
    "cache": ["kv_cache"],
}


def written(source, out, steps, **settings):
    return compress(
        source,
        parse(steps),
        out,
        **{"windows": WINDOWS, "device": CPU, "dtype": torch.float32, **settings},
    )


def fake_logits(source, folder, formats, recipe_plan, tokens):
    """Logits of dense layers made of the written codes by `Names.read`, with inputs rounded as the formats say. It has
    no loader and no kernels for rounded weights."""
    stream = Stream(source, [tokens], device=CPU, dtype=torch.float32)
    names = Names(source)
    whole = names.read(folder / "model.safetensors", formats, device=CPU)
    columns = read_spec(folder).split_columns()
    for i in range(source.spec.num_layers):
        prefix = f"layers.{i}."
        values = {n.removeprefix(prefix): v for n, v in whole.items() if n.startswith(prefix)}
        fakes = {
            p.name.removeprefix(prefix): FakeInputs(
                p.fmt.inputs, columns=columns.get(f"{p.name}.weight", ())
            )
            for p in recipe_plan.weights
            if p.name.startswith(prefix) and p.fmt is not None and p.fmt.inputs is not None
        }
        stream.states = stream.run(i, values, ObservingOps(inputs=fakes))
    ends = load_ends(source, device=CPU, dtype=torch.float32)
    return ends.logits(ends.finished(stream.states[0], None))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(folder, "llama", **SIZES)
    return read_spec(folder)


@pytest.fixture(scope="module")
def exact(model):
    """The original's logits of each window."""
    loaded = load(model.path)
    return [run(loaded, window) for window in WINDOWS]


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_written_is_what_was_computed_with(tmp_path, model, exact, name):
    done = written(model, tmp_path / "out", RECIPES[name])
    again = read_spec(tmp_path / "out")
    assert again.quantization is not None
    formats = again.quantization.formats
    if name == "cache":
        assert again.kv_cache == "fp8"
        assert formats is None
        return
    found = run(load(tmp_path / "out"), WINDOWS[0])
    assert bool(again.split_columns()) == ("outliers" in name)
    expected = fake_logits(model, tmp_path / "out", formats, done, WINDOWS[0])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert (found - exact[0]).abs().max() > 0.01
    files = (tmp_path / "out").iterdir()
    assert {"tokenizer.json", "slipstream-recipe.json", "config.json", "model.safetensors"} <= {
        f.name for f in files
    }
    assert (
        json.loads((tmp_path / "out" / "slipstream-recipe.json").read_text())
        == parse(RECIPES[name]).as_data()
    )
    sizes = [
        t.nbytes
        for n, t in load_file(tmp_path / "out" / "model.safetensors").items()
        if not n.endswith("_shape")
    ]
    assert done.bytes_after == plan(model, parse(RECIPES[name])).bytes_after
    by_module = "tensor" in str(RECIPES[name]) or name.startswith("nvfp4")
    # a scale a module, not a product
    assert 0 <= sum(sizes) - done.bytes_after < 200 * by_module + 1


def test_columns_beside_the_weights_must_fit_them(tmp_path, model):
    written(model, tmp_path / "out", RECIPES["outliers"])
    file = tmp_path / "out" / COLUMNS_NAME
    columns = json.loads(file.read_text())
    module = "model.layers.1.self_attn.k_proj"
    assert len(columns[module]) % 16 == 0
    for wrong in ({module: []}, {module: [-1]}, {module: ["1"]}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError):
            read_spec(tmp_path / "out")
    # Of k but not of q; beyond the last; of no module.
    for wrong in ({module: columns[module]}, {m: [64] for m in columns}, {"model.layers.1": [1]}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError):
            read_spec(tmp_path / "out").split_columns()


def test_products_catch_up_with_what_was_rounded_before(tmp_path, model, exact):
    """The last layer's state is nearer to the original's, on the text that it was fitted to, than without."""
    errors = []
    for share in (0.0, 1.0):
        steps = [{"quantize": {"bits": 3, "group_size": 32, "rounding": "gptq", "catch_up": share}}]
        written(model, tmp_path / f"{share}", steps)
        made = load(tmp_path / f"{share}")
        found = torch.cat([run(made, w) - whole for w, whole in zip(WINDOWS, exact, strict=True)])
        errors.append(float(found.square().mean()))
    assert errors[1] < errors[0]


SIZES_OF = {
    "qwen3_next": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {"linear_value_head_dim": 16},
    "falcon_h1": {"mamba_d_head": 8, "mamba_d_ssm": 64},
}
"""Inputs of products that groups of 32 divide."""


@pytest.mark.parametrize(("family", "steps"), [
    ("qwen3_moe", [{"quantize": {"group_size": 32, "rounding": "gptq"}}]),
    ("qwen3_moe", [{"quantize": {"bits": 8, "inputs": "int8", "scaling": "smoothquant"}}]),
    ("gpt_neox", [{"quantize": {"group_size": 32, "rounding": "gptq", "head": True}}]),
    ("gemma2", [{"quantize": {"group_size": 32, "scaling": "awq"}}, {"kv_cache": {"form": "int8", "per": "head"}}]),
    ("opt", [{"quantize": {"group_size": 32, "scaling": "awq"}}]),
    ("phi3", [{"quantize": {"group_size": 32, "rounding": "gptq"}}]),
    ("qwen3_next", [{"quantize": {"group_size": 32, "rounding": "gptq"}}]),
    ("qwen3_5_text", [{"quantize": {"group_size": 32, "scaling": "awq"}}, {"kv_cache": {"form": "int8"}}]),
    ("falcon_h1", [{"quantize": {"group_size": 32, "scaling": "awq"}}]),
    ("falcon_h1", [{"quantize": {"group_size": 32, "symmetric": False}}]),
    ("jamba", [{"quantize": {"group_size": 32, "rounding": "gptq"}}]),
    ("lfm2", [{"quantize": {"bits": 8, "inputs": "int8", "scaling": "smoothquant"}}]),
])  # fmt: skip
def test_other_families_are_quantized_and_run(tmp_path, family, steps):
    """Experts, rows in another order, folded norms with an offset, biases, fused tensors, recurrent layers, multipliers."""
    tiny_models.write(tmp_path / "model", family, **SIZES_OF.get(family, {}))
    source = read_spec(tmp_path / "model")
    done = written(source, tmp_path / "out", steps)
    found = run(load(tmp_path / "out"), WINDOWS[0])
    expected = fake_logits(
        source, tmp_path / "out", read_spec(tmp_path / "out").quantization.formats, done, WINDOWS[0]
    )
    if steps[0]["quantize"].get("head"):
        assert (found - expected).abs().max() > 1e-3  # `fake_logits` has the head as it was
        assert "embed_out.weight_packed" in load_file(tmp_path / "out" / "model.safetensors")
    else:
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_a_model_inside_another_one_keeps_its_names_and_the_rest(tmp_path, family):
    """The image encoder is taken over as it is, and what is written is loaded with it."""
    vision_models.build_vision(tmp_path / "model", family)
    source = read_spec(tmp_path / "model")
    steps = [{"quantize": {"bits": 8, "group_size": "channel", "rounding": "gptq"}}]
    done = written(source, tmp_path / "out", steps)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert {n.replace("weight_packed", "weight") for n in after} >= before.keys()
    seeing = [n for n in before if n in after and ("visual" in n or "vision" in n)]
    assert len(seeing) > 8
    assert all(torch.equal(before[n], after[n]) for n in seeing)
    assert read_spec(tmp_path / "out").spec.media == source.spec.media is not None
    formats = read_spec(tmp_path / "out").quantization.formats
    found = run(load(tmp_path / "out"), WINDOWS[0])
    blind = source.taking_media(0)
    expected = fake_logits(blind, tmp_path / "out", formats, done, WINDOWS[0])
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)
    with pytest.raises(ConfigError, match="image encoder"):
        plan(source, parse([{"rotate": {}}, *steps]))


def test_layers_that_draft_stay_with_a_rounded_model(tmp_path):
    mtp_layers.build(tmp_path / "model", "qwen3_5_text", linear_value_head_dim=16)
    mtp_layers.teach_to_count(tmp_path / "model", by="token")
    written(read_spec(tmp_path / "model"), tmp_path / "out", [{"quantize": {"group_size": 32}}])
    config = {"method": "mtp", "num_speculative_tokens": 3}
    settings = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64)
    with LLM(str(tmp_path / "out"), speculative_config=config, **settings) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [9, 8, *range(20, 30)]}], sampling)
        assert llm.stats().spec_num_drafts > 0


@pytest.mark.parametrize("damaged", [False, True])
def test_an_interrupted_run_goes_on(tmp_path, model, monkeypatch, damaged):
    steps = [{"quantize": {"group_size": 32, "rounding": "gptq"}}]
    written(model, tmp_path / "whole", steps)
    done = []
    real = run_module.compress_layer

    def stop_at_one(run, index, *more):
        done.append(index)
        if index == 1 and done.count(1) == 1:
            raise KeyboardInterrupt
        return real(run, index, *more)

    monkeypatch.setattr(run_module, "compress_layer", stop_at_one)
    with pytest.raises(KeyboardInterrupt):
        written(model, tmp_path / "out", steps)
    assert [f.name for f in tmp_path.iterdir() if f.name.lstrip(".").startswith("out")] == [
        ".out.partial"
    ]
    with pytest.raises(ConfigError, match="--restart"):
        written(model, tmp_path / "out", [{"quantize": {"group_size": 64}}])
    if damaged:  # a power cut: it is made again
        layer = tmp_path / ".out.partial" / "layer-00000.safetensors"
        layer.write_bytes(layer.read_bytes()[:-8])
    written(model, tmp_path / "out", steps)
    assert done == ([0, 1, 0, 1] if damaged else [0, 1, 1])
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (tmp_path / ".out.partial").exists()


def test_a_layer_is_calibrated_on_the_outputs_of_rounded_ones(tmp_path, model, monkeypatch):
    seen, real = [], run_module.compress_layer

    def watch(run, index, text, sparsity):
        seen.append(torch.cat(text.states))
        return real(run, index, text, sparsity)

    monkeypatch.setattr(run_module, "compress_layer", watch)
    written(
        model, tmp_path / "out", [{"quantize": {"bits": 2, "group_size": 32, "rounding": "gptq"}}]
    )
    formats = read_spec(tmp_path / "out").quantization.formats
    values = Names(model).read(tmp_path / "out" / "model.safetensors", formats, device=CPU)
    stream = Stream(model, WINDOWS, device=CPU, dtype=torch.float32)
    torch.testing.assert_close(seen[0], torch.cat(stream.states))
    layer = {n.removeprefix("layers.0."): v for n, v in values.items() if n.startswith("layers.0.")}
    torch.testing.assert_close(seen[1], torch.cat(stream.run(0, layer, ObservingOps())))


def test_what_is_refused_at_the_end_is_not_written(tmp_path, model):
    def refuse(folder):
        assert (folder / "config.json").is_file()
        raise BudgetError("too much", field="max_kl")

    with pytest.raises(BudgetError):
        written(model, tmp_path / "out", PRESETS["fp8"], finish=refuse)
    assert not (tmp_path / "out").exists()
    assert WorkFolder(tmp_path / "out", {}, restart=True).note("layer-00000") is None


def test_what_can_not_be_done_is_named(tmp_path, model):
    for steps, field in (
        ([{"quantize": {"ignore": ["layers.0.mpl.up"]}}], "ignore or overrides"),
        ([{"quantize": {"ignore": ["layers.*"]}}], "ignore"),
        ([{"quantize": {"group_size": 128}}], "group_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            written(model, tmp_path / "out", steps)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="windows"):
        written(model, tmp_path / "out", preset("int4-gptq"), windows=[])
    tiny_models.write(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UnsupportedModelError, match="c_attn"):
        plan(read_spec(tmp_path / "gpt2"), parse(preset("fp8")))
    written(model, tmp_path / "out", preset("fp8"), windows=[])
    with pytest.raises(CheckpointError, match="already"):
        plan(read_spec(tmp_path / "out"), parse(preset("fp8")))
    with pytest.raises(ConfigError) as caught:
        written(model, tmp_path / "out", preset("fp8"))
    assert caught.value.field == "out"


def test_the_command_shows_its_plan_and_writes_a_smaller_model(tmp_path, model, capsys):
    common = [
        "compress",
        str(model.path),
        "--recipe",
        "int4-awq",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    assert main([*common, "--dry-run"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["out"] is None
    assert said["bytes_after"] < said["bytes_before"]
    assert not (tmp_path / "out").exists()
    (tmp_path / "text.txt").write_text(
        "".join(f"{i} words and then some more of them, and again\n\n" for i in range(2000))
    )
    recipe = tmp_path / "r.yaml"
    text = f"- calibrate: {{text: {tmp_path / 'text.txt'}, num_windows: 2, context: 32}}"
    recipe.write_text(text + "\n- quantize: {scaling: awq}\n")
    command = ["compress", str(model.path), "--out", str(tmp_path / "out"), "--json"]
    assert main([*command, "--recipe", str(recipe), "--no-report"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_weight"] == pytest.approx(4.25, abs=0.3)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a few", "choices": [" words", " more"], "answer": 0}\n' * 3)
    command[command.index("--out") + 1] = str(tmp_path / "asked")
    command += [
        "--recipe",
        str(recipe),
        "--eval-windows",
        "1",
        "--text",
        str(tmp_path / "text.txt"),
        "--tasks",
        str(questions),
    ]
    assert (
        main([*command, "--limit", "2", "--allow-any-quality"]) == 0
    )  # of random weights little is left
    (task,) = json.loads(capsys.readouterr().out)["report"]["tasks"]
    assert (task["num_questions"], task["metric"]) == (2, "acc_norm")
    for more, field in (
        (["--no-report"], "tasks"),
        (["--tasks", "nowhere.jsonl"], "tasks"),
        (["--text", "nowhere.txt"], "text"),
        (["--eval-windows", "0"], "num_windows"),
        (["--max-kl", "nan"], "max_kl"),
        (["--out", "/proc/nowhere"], "out"),
    ):  # before any work is done
        assert main([*command, "--out", str(tmp_path / "late"), *more]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["field"] == field
    assert not list(tmp_path.glob("*late*"))
    assert (
        main(
            [
                "compress",
                str(model.path),
                "--recipe",
                "int5",
                "--out",
                str(tmp_path / "o"),
                "--json",
            ]
        )
        == 2
    )
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "recipe"


def test_text_is_cut_to_the_models_context(tmp_path, capsys):
    """The model has a table of positions, which ends there."""
    tiny_models.write_with_tokenizer(tmp_path / "model", "opt", max_position_embeddings=16)
    source = read_spec(tmp_path / "model")
    steps = [{"quantize": {"group_size": 32, "rounding": "gptq"}}]
    written(source, tmp_path / "long", steps)
    written(source, tmp_path / "cut", steps, windows=[w[:16] for w in WINDOWS])
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("long", "cut"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    rows = [
        json.dumps({"text": f"{i} words that are more than a few"}) for i in range(20)
    ]  # not 512 tokens
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    calibrate = {"text": str(tmp_path / "text.jsonl"), "num_windows": 1}
    (tmp_path / "r.yaml").write_text(json.dumps([{"calibrate": calibrate}, *steps]))
    command = [
        "compress",
        str(source.path),
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--no-report", "--json", "--device", "cpu"]) == 0, capsys.readouterr()


def test_the_command_backs_off(tmp_path, model, capsys):
    """The command tries recipes until the divergence is within the limit. The report names those tried."""
    text = "".join(f"{i} words of a text that goes on for some time\n\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(text)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("- quantize: {bits: 2, group_size: 32}\n")
    measured = ["--json", "--eval-windows", "2", "--text", str(tmp_path / "text.txt")]
    command = ["compress", str(model.path), "--recipe", str(recipe), *measured]
    assert main([*command, "--out", str(tmp_path / "a"), "--max-kl", "0.2"]) == 1
    assert not (tmp_path / "a").exists()
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "max_kl"
    assert main([*command, "--out", str(tmp_path / "b"), "--max-kl", "0.2", "--back-off"]) == 0
    said = json.loads(capsys.readouterr().out)["report"]
    kept = json.loads((tmp_path / "b" / "slipstream-report.json").read_text())
    assert {key: said[key] for key in ("kl", "tried", "recipe")} == {
        key: kept[key] for key in ("kl", "tried", "recipe")
    }
    assert said["kl"]["mean"] <= 0.2 < said["tried"][-1]["kl_mean"]
    assert said["tried"][0]["what"] == "r.yaml"


def test_backing_off_goes_on_after_an_interruption(tmp_path, model, capsys, monkeypatch):
    """A scheme that cost too much is not tried again, and half-done work is not begun again,
    unless the limit has changed."""
    text = "".join(f"{i} words of a text that goes on for some time\n\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "r.yaml").write_text("- quantize: {bits: 6, group_size: 32}\n")
    command = [
        "compress",
        str(model.path),
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    command += ["--text", str(tmp_path / "text.txt"), "--back-off", "--eval-windows"]
    done, real = [], run_module.compress_layer

    def stop_in_the_second(run, index, *more):
        bits = run.recipe.one(Quantize).bits
        if (bits, index) == (7, 1) and (7, 1) not in done:
            done.append((bits, index))
            raise KeyboardInterrupt
        done.append((bits, index))
        return real(run, index, *more)

    monkeypatch.setattr(run_module, "compress_layer", stop_in_the_second)
    assert main([*command, "2", "--max-kl", "1e-9"]) == 130
    assert done == [(6, 0), (6, 1), (7, 0), (7, 1)]
    done[:] = [(7, 1)]
    assert main([*command, "2", "--max-kl", "1e-9"]) == 1
    assert done[1:] == [(7, 1), (8, 0), (8, 1)]
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error["field"] == "max_kl"
    assert "r.yaml: " in error["message"]
    assert "r.yaml with 8 bits: " in error["message"]
    done[:] = [(7, 1)]
    assert main([*command, "2", "--max-kl", "1e-9"]) == 1
    assert done == [(7, 1)]
    done[:] = [(7, 1)]
    capsys.readouterr()
    assert main([*command, "2", "--max-kl", "100"]) == 0
    assert done[1:] == [(6, 0), (6, 1)]
    assert json.loads(capsys.readouterr().out)["report"]["tried"] == []
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_attempts_are_told_by_their_conditions(tmp_path):
    out = tmp_path / "out"
    Attempts(out, restart=False).add({"text": ["a", 1]}, 0.5)
    again = Attempts(out, restart=False)
    assert again.cost({"text": ["a", 1]}) == 0.5
    assert again.cost({"text": ["a", 2]}) is None
    assert Attempts(out, restart=True).cost({"text": ["a", 1]}) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("fp8", "fp8-static", "int8", "int4-awq", "w3", "w2", "w6", "w8", "w4 rows", "mixed"),
        *("nvfp4-gptq", "mxfp4"),
    ],
)
def test_transformers_loads_it_with_the_same_logits(tmp_path, model, name):
    """Logits are equal only nearly where transformers rounds inputs otherwise (one scale for all,
    or int8 on 127.5). Zero points are not tried: compressed-tensors 0.20 writes them packed, and
    transformers then expects them unpacked."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    written(model, tmp_path / "out", RECIPES[name])
    dtype = torch.bfloat16 if "fp4" in name else torch.float32  # theirs expand to bfloat16 only
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        logits = theirs(torch.tensor([WINDOWS[0]])).logits[0]
    ours = run(load(tmp_path / "out"), WINDOWS[0])
    if name in ("fp8-static", "int8", "nvfp4-gptq", "mxfp4"):
        assert (ours - logits).abs().mean() < 0.2 * ours.std()
    else:
        torch.testing.assert_close(ours, logits, atol=2e-3 if name == "fp8" else 2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-gptq", "mxfp4"])
def test_4_bit_floats_are_what_compressed_tensors_makes_of_them(tmp_path, model, name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    written(model, tmp_path / "out", RECIPES[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    tool = BaseCompressor.get_value_from_registry(scheme.format)
    formats = read_spec(tmp_path / "out").quantization.formats
    file = tmp_path / "out" / "model.safetensors"
    ours = Names(model).read(file, formats, device=CPU)
    tensors = load_file(file)
    for at, target in (("mlp.up_proj", "mlp.up"), ("self_attn.o_proj", "attention.out")):
        stem = f"model.layers.1.{at}."
        parts = {n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)}
        theirs = tool.decompress(parts, scheme)["weight"]
        value = ours[f"layers.1.{target}.weight"][-len(theirs) :]
        assert torch.equal(value.to(theirs.dtype), theirs)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-gptq", "mxfp4"])
def test_4_bit_floats_are_what_modelopt_reads(tmp_path, model, name):
    """Runs where nvidia-modelopt is installed, which needs more than the tests do."""
    tools = pytest.importorskip("modelopt.torch.quantization.qtensor")
    written(model, tmp_path / "out", RECIPES[name])
    formats = read_spec(tmp_path / "out").quantization.formats
    file = tmp_path / "out" / "model.safetensors"
    ours, tensors = Names(model).read(file, formats, device=CPU), load_file(file)
    for at, target in (("mlp.up_proj", "mlp.up"), ("self_attn.o_proj", "attention.out")):
        stem = f"model.layers.1.{at}."
        packed, scale = tensors[f"{stem}weight_packed"], tensors[f"{stem}weight_scale"]
        shape = torch.Size((len(packed), 2 * packed.shape[1]))
        if name == "mxfp4":
            held = tools.MXFP4QTensor(shape, torch.float32, packed)
            theirs = held.dequantize(scale=scale, block_sizes={-1: 32})
        else:
            whole = 1 / tensors[f"{stem}weight_global_scale"]
            held = tools.NVFP4QTensor(shape, torch.float32, packed)
            theirs = held.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16})
        value = ours[f"layers.1.{target}.weight"][-len(theirs) :]
        assert torch.equal(value.bfloat16(), theirs.bfloat16())


def test_4_bit_floats_of_less_error_are_found():
    """A search of scales beats the largest magnitude's, and GPTQ both, where inputs are alike."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(64, 256), torch.randn(512, 64) @ torch.randn(64, 256)
    stats = InputStats.empty(256, CPU)
    stats.add(inputs, 1.0)
    exact = inputs @ weight.T
    for fmt in (FORMATS["nvfp4"], FORMATS["mxfp4-all"]):
        plain, searched, best = (
            (inputs @ r.dequantized().T - exact).norm()
            for r in (
                nearest(weight, fmt, torch.float32, clip=False),
                nearest(weight, fmt, torch.float32, clip=True),
                gptq(weight, fmt, torch.float32, stats),
            )
        )
        assert best < searched < plain < 0.2 * exact.norm()


@pytest.mark.parametrize("bits", [3, 4])
def test_zero_points_are_as_compressed_tensors_writes_them(tmp_path, model, bits):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    written(model, tmp_path / "out", RECIPES[f"w{bits} zeros"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]["group_0"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    module = "model.layers.1.mlp.up_proj"
    parts = {
        n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")
    }
    theirs = PackedQuantizationCompressor.decompress(parts, QuantizationScheme(**config))["weight"]
    formats = read_spec(tmp_path / "out").quantization.formats
    ours = Names(model).read(tmp_path / "out" / "model.safetensors", formats, device=CPU)[
        "layers.1.mlp.up.weight"
    ]
    torch.testing.assert_close(ours[192:], theirs, atol=1e-6, rtol=1e-5)
