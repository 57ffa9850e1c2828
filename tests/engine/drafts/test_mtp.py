"""Layers of a checkpoint that draft: what they propose is what the published maths gives, and no answer changes."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.costs.estimate import estimate
from slipstream.errors import CheckpointError, ConfigError, OutOfMemoryError
from slipstream.kernels.cpu import native
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from tests.engine.drafts.test_draft_heads import proposals
from tests.engine.drafts.test_speculation import PROMPTS, SETTINGS, SIZES, answers
from tests.engine.media.test_vision import engine
from tests.model.formats import test_block_scales, test_gguf_models
from tests.model.formats.test_compressed import PRODUCTS, compress, compress_gptq
from tests.support import mtp_layers
from tests.support.vision_models import build_vision, picture, prompt_of

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=mtp_layers.FAMILIES)
def built(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, mtp_layers.build(path, request.param)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_drafts_are_those_of_the_published_maths(built, kernels):
    """Drafts are compared after prompts in chunks, after wrong drafts, and for several requests at once."""
    path, model = built
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sizes = {**SIZES, "max_num_batched_tokens": 24}
    with LLM(str(path), kernels=kernels, speculative_config=MTP, **sizes) as llm:
        found = proposals(llm, sampling, PROMPTS[:3])
    assert len(found) > 20
    for tokens, drafts in found:
        hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        expected = mtp_layers.logits(path, hidden, tokens, len(drafts))
        for draft, logits in zip(drafts, expected, strict=True):
            if draft != int(logits.argmax()):  # a tie, behind which the others part
                assert logits.max() - logits[draft] < 1e-4
                break


# --- Rounded checkpoints ----------------------------------------------------------------------------------------------

WIDE = dict(hidden_size=128, intermediate_size=384, head_dim=32)


def rounded(path: Path, kind: str, family: str = "qwen3_5_text", *, drafting: bool = True) -> None:
    """Writes a checkpoint with rounded products to `path`, and to `path`/dense one with the same numbers unrounded. With
    `drafting` the layer that drafts is rounded, too."""
    more: dict[str, int] = {"moe_intermediate_size": 128} if "moe" in family else {}
    more |= {"linear_value_head_dim": 16} if "qwen3" in family else {}
    more |= {"shared_expert_intermediate_size": 128} if family == "qwen3_5_moe_text" else {}
    mtp_layers.build(path, family, initializer_range=0.06, **WIDE, **more)
    config, stored = mtp_layers.read(path)
    first = mtp_layers.below(config)
    alone = mtp_layers.names(config)["join"] if kind == "gptq" else ""  # GPTQ's tools round layers
    kept = {n: t for n, t in stored.items() if n == alone or (not drafting and n.startswith(first))}
    save_file({n: t for n, t in stored.items() if n not in kept}, path / "model.safetensors")
    dense = dict(stored)
    (path / "dense").mkdir()
    (path / "dense" / "config.json").write_text(json.dumps(config))
    products = [n for n in stored if n.endswith(PRODUCTS) and n not in kept]
    if kind == "fp8-block":
        held = dict(stored)
        for name in products:
            codes, scales = test_block_scales.by_hand(stored[name])
            held[name], held[f"{name}_scale_inv"] = codes, scales
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, inner = codes.shape
            dense[name] = codes.float() * spread[:rows, :inner]
        (path / "config.json").write_text(
            json.dumps({**config, "quantization_config": test_block_scales.CONFIGS["qwen3"]})
        )
    else:
        scheme = SCHEMES["int4-g32" if kind == "gptq" else kind]
        dense |= {n: dequantize(round_linear(stored[n], None, scheme)) for n in products}
        if kind == "gptq":
            compress_gptq(path)
        else:
            compress(path, kind)
        held = load_file(path / "model.safetensors")
    save_file({**held, **kept}, path / "model.safetensors")
    save_file(dense, path / "dense" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "kernels", "family", "drafting"),
    [
        ("fp8-block", "cpu", "qwen3_5_text", True),
        ("fp8-block", "cpu", "qwen3_5_moe_text", True),
        ("fp8-block", "cpu", "qwen3_5_text", False),
        ("fp8", "cpu", "qwen3_5_moe_text", True),
        ("int4-g32", "reference", "qwen3_5_text", True),
        ("int4-g32", "reference", "qwen3_5_moe_text", False),
        ("gptq", "reference", "mimo", True),
        ("gptq", "reference", "mimo", False),
    ],
)
def test_rounded_layers_draft_as_their_numbers_do(tmp_path, kind, kernels, family, drafting):
    """This holds even if only the tensors show that the layer, or the product before it, was left unrounded."""
    rounded(tmp_path, kind, family, drafting=drafting)
    sampling, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for path in (tmp_path, tmp_path / "dense"):
        with LLM(str(path), kernels=kernels, speculative_config=MTP, **SIZES) as llm:
            found.append(proposals(llm, sampling, PROMPTS[:3]))
    assert len(found[0]) > 20
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "family", "form"),
    [
        ("int8", "qwen3_5_text", native.I8),
        ("int8", "glm4_moe", native.I8),
        ("gptq", "mimo", native.W4M32),
    ],
)
def test_rounded_layers_are_held_as_they_are(tmp_path, kind, family, form):
    rounded(tmp_path, kind, family)
    with LLM(str(tmp_path), speculative_config=MTP, **SIZES) as llm:
        draft = llm.core.executor.runner.draft
        kinds = {part.kind for part in draft.head._body.layers[0].attention.out.parts}
        own = answers(llm, SETTINGS["greedy"])
    assert kinds == {form}
    with LLM(str(tmp_path), **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"]) == own


def test_a_checkpoint_without_its_layers_is_named(tmp_path):
    """transformers drops them and keeps their number."""
    mtp_layers.build(tmp_path, "qwen3_5_text")
    _, stored = mtp_layers.read(tmp_path)
    save_file({n: t for n, t in stored.items() if "mtp" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"has no mtp\.pre_fc_norm_embedding\.weight: .* left out"
    ):
        LLM(str(tmp_path), speculative_config=MTP, **SIZES)
    save_file(
        {n: t for n, t in stored.items() if n != "mtp.fc.weight"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"lacks mtp\.fc\.weight"):
        LLM(str(tmp_path), speculative_config=MTP, **SIZES)
    odd = {"mtp.layers.0.odd.weight": stored["mtp.fc.weight"].clone()}
    save_file({**stored, **odd}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"mtp\.layers\.0\.odd\.weight' that the model has no place"
    ):
        LLM(str(tmp_path), speculative_config=MTP, **SIZES)


def stack_experts(path: Path) -> None:
    """Writes all experts of a layer as one tensor, as Qwen 3.5's checkpoints have them."""
    config, stored = mtp_layers.read(path)
    found = {n: t for n, t in stored.items() if ".experts." not in n}
    firsts = [
        n.removesuffix("0.down_proj.weight")
        for n in stored
        if n.endswith(".experts.0.down_proj.weight")
    ]
    for name in firsts:
        experts = [
            {x: stored[f"{name}{e}.{x}_proj.weight"] for x in ("gate", "up", "down")}
            for e in range(config["num_experts"])
        ]
        found[f"{name}gate_up_proj"] = torch.stack(
            [torch.cat((e["gate"], e["up"])) for e in experts]
        )
        found[f"{name}down_proj"] = torch.stack([e["down"] for e in experts])
    assert len(firsts) == 4
    save_file(found, path / "model.safetensors")


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_experts_that_are_stored_as_one_tensor(tmp_path, kernels):
    """The form in which Qwen 3.5 is published."""
    mtp_layers.build(tmp_path, "qwen3_5_moe_text")
    sampling, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for change in (None, stack_experts):
        if change is not None:
            change(tmp_path)
        with LLM(str(tmp_path), kernels=kernels, speculative_config=MTP, **SIZES) as llm:
            found.append(proposals(llm, sampling, PROMPTS[:3]))
    assert len(found[0]) > 20
    assert found[0] == found[1]


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_a_model_that_takes_pictures_drafts(tmp_path, kernels):
    """The model drafts by its own layer, as Qwen 3.5 is published: below `model.language_model` but for `mtp`. Answers to
    pictures are those without drafts, and drafts after text are those of the model without its encoder."""
    build_vision(tmp_path, "qwen3_5_moe", seed=3)
    config, stored = mtp_layers.read(tmp_path)
    new = mtp_layers.drawn({**config["text_config"], "model_type": "qwen3_5_moe_text"}, 0)
    save_file(stored | new, tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in stored)
    prompts = [
        prompt_of("qwen3_5_moe", picture(1), picture(2, 30, 61)),
        prompt_of("qwen3_5_moe", picture(3)),
    ]
    sampling, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for config in (None, MTP):
        with engine(tmp_path, kernels=kernels, speculative_config=config) as llm:
            found.append(answers(llm, sampling, prompts * 2))  # again behind prefix hits
            assert (llm.stats().spec_draft_tokens > 0) == (config is not None)
    assert found[0] == found[1]
    drafts = []
    for most in (4, 0):
        sizes = {**SIZES, "kernels": kernels, "max_images": most}
        with LLM(str(tmp_path), speculative_config=MTP, **sizes) as llm:
            drafts.append(proposals(llm, sampling, PROMPTS[:3]))
    assert drafts[0] == drafts[1]
    with pytest.raises(ConfigError, match="'draft' drafts from text alone"):
        LLM(str(tmp_path), speculative_config={"method": "draft", "model": str(tmp_path)}, **SIZES)


def test_a_layer_in_a_gguf_file(tmp_path):
    """The tensors have the names of the gguf package's table."""
    mtp_layers.build(tmp_path, "glm4_moe", n_group=1, topk_group=1, rms_norm_eps=1e-6)
    config, stored = mtp_layers.read(tmp_path)
    split = {n: t for n, t in stored.items() if ".experts." in n}
    for name in [n for n in split if ".experts.0." in n]:
        parts = [split[name.replace(".0.", f".{e}.")] for e in range(config["n_routed_experts"])]
        stored[name.replace(".experts.0.", ".experts.")] = torch.stack(parts)
    (tmp_path / "stacked").mkdir()
    renamed = {
        n.replace("e_score_correction_bias", "e_score_correction.bias"): t
        for n, t in stored.items()
        if n not in split
    }
    save_file(renamed, tmp_path / "stacked" / "model.safetensors")
    count = config["num_hidden_layers"] + 1
    tensors = test_gguf_models.converted(tmp_path / "stacked", gguf.MODEL_ARCH.GLM4_MOE, count)
    assert f"blk.{count - 1}.nextn.eh_proj.weight" in tensors
    metadata = {
        **test_gguf_models.GLM4_MOE,
        **dict(block_count=count, nextn_predict_layers=1, context_length=256),
        **dict(embedding_length=32, feed_forward_length=config["intermediate_size"]),
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    test_gguf_models.write(
        tmp_path / "model.gguf",
        tensors,
        "glm4moe",
        **{f"glm4moe.{k}": v for k, v in metadata.items()},
    )
    sampling, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for path in (tmp_path / "model.gguf", tmp_path):
        with LLM(str(path), speculative_config=MTP, **SIZES) as llm:
            found.append(proposals(llm, sampling, PROMPTS[:3]))
    assert len(found[0]) > 20
    assert found[0] == found[1]
    with LLM(str(tmp_path / "model.gguf"), **SIZES) as llm:
        plain = answers(llm, SETTINGS["greedy"])
    with LLM(str(tmp_path), **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"]) == plain


def test_a_layer_of_qwen_3_5_in_a_gguf_file(tmp_path):
    """All its norms but the recurrent layers' are stored as one more."""
    mtp_layers.build(tmp_path, "qwen3_5_text")
    config, stored = mtp_layers.read(tmp_path)
    n, apart = config["num_hidden_layers"], dict(mtp_layers.names(config).items())
    parts = ("enorm", "hnorm", "eh_proj", "shared_head_norm")
    around = dict(zip(apart.values(), parts, strict=True))
    tensors = {f"blk.{n}.nextn.{part}.weight": stored.pop(name) for name, part in around.items()}
    tensors = {name: ((t + ("norm" in name)).numpy(), "F32") for name, t in tensors.items()}
    (tmp_path / "renamed").mkdir()
    renamed = {k.replace("mtp.layers.0.", f"model.layers.{n}."): t for k, t in stored.items()}
    save_file(renamed, tmp_path / "renamed" / "model.safetensors")
    tensors |= test_gguf_models.converted(
        tmp_path / "renamed",
        gguf.MODEL_ARCH.QWEN35,
        n + 1,
        lambda name, value: test_gguf_models.of_qwen(config, name, value),
    )
    metadata = {
        **test_gguf_models.QWEN3_NEXT,
        **dict(block_count=n + 1, nextn_predict_layers=1, context_length=256),
        **dict(embedding_length=32, feed_forward_length=config["intermediate_size"]),
    }
    own = {f"qwen35.{k}": v for k, v in metadata.items()}
    test_gguf_models.write(tmp_path / "model.gguf", tensors, "qwen35", **own)
    sampling, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for path in (tmp_path / "model.gguf", tmp_path):
        with LLM(str(path), speculative_config=MTP, **SIZES) as llm:
            found.append(proposals(llm, sampling, PROMPTS[:3]))
    assert len(found[0]) > 20
    assert found[0] == found[1]


# --- Right drafts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["token", "state"])
@pytest.mark.parametrize("family", mtp_layers.FAMILIES)
def test_a_layer_that_knows_the_answer_is_always_right(tmp_path, family, by):
    """The layer knows the answer by the token of a pair or by its state: a draft from another position's would be wrong.
    Prompts come in chunks, and again after prefix hits."""
    mtp_layers.build(tmp_path, family)
    mtp_layers.teach_to_count(tmp_path, by=by)
    starts, sampling = (5, 40, 111), SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    prompts = [{"prompt_token_ids": [9, 8, *range(n, n + 27 + n // 9)]} for n in starts]
    config = {"method": "mtp", "num_speculative_tokens": 5}
    with LLM(
        str(tmp_path), speculative_config=config, **{**SIZES, "max_num_batched_tokens": 24}
    ) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
                first = prompt["prompt_token_ids"][-1] + 1
                assert list(output.outputs[0].token_ids) == list(range(first, first + 31))
                assert output.outputs[0].num_accepted == output.outputs[0].num_drafted == 25
        stats = llm.stats()
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens == 150
    assert stats.spec_num_drafts == 30


# --- States -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "most"), [(None, 10), (14, 1), (28, 3), (100, 16)])
@pytest.mark.parametrize("method", ["mtp", "suffix"])
def test_the_number_of_drafts_follows_the_states_that_there_are(tmp_path, slots, most, method):
    """A step that verifies drafts writes a state for each. Three quarters of the states are for running sequences."""
    mtp_layers.build(tmp_path, "qwen3_5_text")
    sizes = {**SIZES, "state_slots": slots}
    with LLM(str(tmp_path), speculative_config={"method": method}, **sizes) as llm:
        assert llm.ledger.num_states == (slots or 64)
        assert llm.config.speculation.limit == llm.core.config.speculation.limit == most
        own = answers(llm, SETTINGS["greedy"])
    with LLM(str(tmp_path), **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"]) == own


def test_a_fixed_number_of_drafts_needs_its_states(tmp_path):
    mtp_layers.build(tmp_path, "qwen3_5_text")
    with pytest.raises(OutOfMemoryError, match="state_slots=21: 4 sequences need 22"):
        LLM(str(tmp_path), speculative_config=MTP, **SIZES, state_slots=21)
    with LLM(str(tmp_path), speculative_config=MTP, **SIZES, state_slots=22) as llm:
        assert llm.config.speculation.limit == 3


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "family"),
    [("", "qwen3_5_moe_text"), ("", "glm4_moe"), ("int8", "qwen3_5_text"), ("gptq", "mimo")],
)
def test_the_estimate_knows_the_layer(tmp_path, kind, family):
    """The estimate is within a few percent of what an engine holds. A block has the layer's keys and values
    and the states that it reads."""
    if kind:
        rounded(tmp_path, kind, family)
    else:
        mtp_layers.build(tmp_path, family)
    sizes = {k: v for k, v in SIZES.items() if k != "skip_tokenizer_init"}
    found = []
    for config in (None, MTP):
        args = EngineArgs(model=str(tmp_path), speculative_config=config, **sizes)
        ledger = estimate(args, read_spec(tmp_path))[1]
        with LLM(str(tmp_path), speculative_config=config, **SIZES) as llm:
            assert ledger.block_bytes == llm.ledger.block_bytes
            found.append((ledger.weights_bytes, llm.ledger.weights_bytes))
    estimated, held = (b - a for a, b in zip(*found, strict=True))
    assert estimated == pytest.approx(held, rel=0.2)  # rows are filled up, a rotary table is there


def test_info_names_the_layer(tmp_path, capsys):
    mtp_layers.build(tmp_path, "qwen3_5_text")
    new = mtp_layers.drawn(mtp_layers.read(tmp_path)[0], 0)
    assert main(["info", str(tmp_path)]) == 0
    count = sum(tensor.numel() for tensor in new.values())
    assert f"by a layer of its own, {count:,} parameters" in capsys.readouterr().out


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_vllms_names_of_the_method(tmp_path):
    mtp_layers.build(tmp_path, "qwen3_next")
    for method in ("qwen3_next_mtp", "deepseek_mtp"):
        config = {"method": method, "num_speculative_tokens": 2}
        with LLM(str(tmp_path), speculative_config=config, **SIZES) as llm:
            assert llm.config.speculation.method == "mtp"


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_the_layer_is_rounded_when_asked(tmp_path, quantization):
    mtp_layers.build(tmp_path, "qwen3_5_moe_text")
    config = {**MTP, "quantization": quantization}
    with LLM(str(tmp_path), speculative_config=config, **SIZES) as llm:
        layer = llm.core.executor.runner.draft.head._body.layers[0]
        assert {part.kind for part in layer.attention.out.parts} == {
            native.I8 if quantization == "int8" else native.F32
        }
        own = answers(llm, SETTINGS["greedy"])
    with LLM(str(tmp_path), **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"]) == own


def test_a_rounded_layer_is_not_rounded_again(tmp_path):
    rounded(tmp_path, "int8")
    with pytest.raises(
        ConfigError, match="quantization='int4', but the layers that draft are stored rounded"
    ):
        LLM(str(tmp_path), speculative_config={**MTP, "quantization": "int4"}, **SIZES)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "mimo", "nemotron_h"])
def test_random_weights_have_the_layers_of_drafts(tmp_path, family):
    """Random weights are made from the config alone."""
    mtp_layers.build(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    with LLM(str(tmp_path), speculative_config=MTP, load_format="dummy", **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"], PROMPTS[:2])
        assert llm.stats().spec_draft_tokens > 0


def test_the_benchmark_drafts_at_the_acceptance_that_is_said(tmp_path, monkeypatch):
    """`--curve` of the speculation benchmark, as it is run on a GPU."""
    mtp_layers.build(tmp_path, "qwen3_5_moe_text", max_position_embeddings=2048)
    script = Path(__file__).parents[3] / "benchmarks" / "speculation.py"
    options = "--curve 1.93 2.73 --num-seqs 1 2 --max-tokens 16 --rounds 1 --dtype float32 --num-threads 1"
    command = [script, "--study", "speed", tmp_path, *options.split()]
    monkeypatch.setattr(
        sys, "argv", [*map(str, command), "--output", str(tmp_path / "record.json")]
    )
    monkeypatch.syspath_prepend(script.parent)
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    record = json.loads((tmp_path / "record.json").read_text())
    assert "forced to 1.93, 2.73 tokens a verification" in record["label"]
    for runs in record["runs"].values():
        found = [runs[name]["tokens_a_verification"] for name in runs]
        assert found == [1.0, pytest.approx(1.93, abs=0.15), pytest.approx(2.73, abs=0.25)]
