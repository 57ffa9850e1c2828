"""Training of draft heads: it computes what drafting will, and what it writes drafts."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from torch.nn import functional as F

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.compress.recipe import parse, preset
from slipstream.compress.steps import DraftHead
from slipstream.compress.training.draft import RECEIPT_NAME, HeadTraining, frequent_tokens, kind_of
from slipstream.compress.training.heads import (
    DECAY,
    EagleNet,
    MedusaNet,
    eagle_for,
    eagle_start,
    losses,
    medusa_for,
    medusa_start,
)
from slipstream.compress.training.teacher import Example
from slipstream.errors import ConfigError
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.model.draft_heads import build_head
from slipstream.platform import platform_of
from slipstream.spec.description import read_spec
from slipstream.spec.drafts.head_readers import read_head
from tests.engine.drafts.test_speculation import SIZES
from tests.model.harness import load
from tests.support import tiny_models

DRAFT_VOCAB = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(folder, num_hidden_layers=6)
    return folder


@torch.no_grad()
@pytest.mark.parametrize(
    "norms",
    [{}, {"fc_norm": "each"}, {"fc_norm": "joint"}, {"fc_norm": "each", "norm_output": True}],
)
def test_training_sees_what_drafting_will(path, norms):
    """Step s at place p is the draft that a chain makes at p, from the model's states up to p and its own behind."""
    model = load(path)
    head = eagle_for(model.spec, DRAFT_VOCAB, **norms)
    parameters = {n: torch.randn(s) * 0.2 for n, s in head.shapes.items()}
    embed, length, steps = torch.randn(tiny_models.VOCAB, 32), 9, 4
    tokens = torch.randint(0, tiny_models.VOCAB, (2, length))
    aux = torch.randn(2, length, 32 * len(head.aux_layers))
    found = EagleNet(head, {n: p.clone() for n, p in parameters.items()}, embed, max_len=32)(
        tokens, aux, steps
    )
    model.decoder.embed = embed
    chain = build_head(
        head, {n: p.clone() for n, p in parameters.items()}, model.decoder, max_model_len=32
    )
    states = None
    for layer, part in zip(head.aux_layers, aux.flatten(0, 1).split(32, -1), strict=True):
        states = chain.tap.add(model.decoder.ops, states, layer, part, None)
    states = states.unflatten(0, (2, length))
    for row in range(2):
        for place in range(length - 1):
            kv = [LayerKV(*(torch.zeros(2, 2, 32, 8) for _ in range(2)))]
            meta = single_sequence(
                0, place + 1, block_size=32, platform=platform_of(torch.device("cpu"))
            )
            hidden, following = chain.forward(
                tokens[row, 1 : place + 2], states[row, : place + 1], kv, meta
            )
            torch.testing.assert_close(found[0][row, place], hidden[-1])
            for step in range(1, min(steps, length - place - 1)):
                at = place + step
                meta = single_sequence(
                    at, 1, block_size=32, platform=platform_of(torch.device("cpu"))
                )
                hidden, following = chain.forward(
                    tokens[row, at + 1 : at + 2], following[-1:], kv, meta
                )
                torch.testing.assert_close(found[step][row, place], hidden[-1])


def test_the_loss_is_the_cross_entropy_to_the_model(path):
    """The sum is over the head's tokens at places that count; each further step counts less."""
    head = eagle_for(read_spec(path).spec, DRAFT_VOCAB)
    net = EagleNet(
        head,
        {n: torch.randn(s) * 0.2 for n, s in head.shapes.items()},
        torch.randn(288, 32),
        max_len=32,
    )
    hidden = [torch.randn(2, 7, 32) for _ in range(3)]
    wanted, counted = torch.randn(2, 7, DRAFT_VOCAB), torch.rand(2, 7) < 0.6
    loss, hits, counts = losses(net, hidden, wanted, counted)
    expected = torch.zeros(())
    for step, h in enumerate(hidden):
        terms, right = [], 0
        for row in range(2):
            for place in range(7 - step - 1):
                if counted[row, place + step + 1]:
                    logits = net.get_parameter("head.weight") @ h[row, place]
                    target = wanted[row, place + step + 1]
                    terms.append(F.cross_entropy(logits, target.softmax(-1)))
                    right += int(logits.argmax() == target.argmax())
        expected = expected + DECAY**step * torch.stack(terms).mean()
        assert (int(hits[step]), int(counts[step])) == (right, len(terms))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert net.get_parameter("head.weight").grad.abs().sum() > 0


def test_it_begins_with_the_model(path):
    """An EAGLE head with the model's last layer and rows of its output head; Medusa heads that say what the model says."""
    model = load(path)
    head = eagle_for(model.spec, DRAFT_VOCAB)
    values = {f"layers.5.{n}": torch.randn(s) for n, s in model.spec.layers[-1].shapes(32).items()}
    rows = torch.randn(DRAFT_VOCAB, 32)
    start = eagle_start(head, model.spec, values, rows, 0)
    assert {n: tuple(v.shape) for n, v in start.items()} == head.shapes
    assert torch.equal(start["head.weight"], rows)
    assert torch.equal(start["layers.0.mlp.down.weight"], values["layers.5.mlp.down.weight"])
    for kind in ("each", "joint"):
        normed = eagle_for(model.spec, DRAFT_VOCAB, fc_norm=kind)
        start = eagle_start(
            normed, model.spec, values | {"final_norm.weight": torch.full((32,), 2.0)}, rows, 0
        )
        assert {n: tuple(v.shape) for n, v in start.items()} == normed.shapes
        norms = torch.cat([start[f"{name}.weight"] for name in normed.aux_norms])
        assert norms.unflatten(0, (-1, 32)).mean(-1).tolist() == [1, 2]
    medusa = medusa_for(model.spec, 2)
    for changes in ({}, {"logit_scale": 0.25}, {"logit_scale": 0.5, "logit_softcap": 2.0}):
        spec = dataclasses.replace(model.spec, **changes)
        scaled = rows * spec.logit_scale
        assert torch.equal(eagle_start(head, spec, values, rows, 0)["head.weight"], scaled)
        net, states = MedusaNet(medusa, medusa_start(medusa), rows, spec), torch.randn(1, 4, 32)
        expected = states @ scaled.T
        if spec.logit_softcap is not None:
            expected = 2 * (expected / 2).tanh()
        for place, hidden in enumerate(net(torch.zeros(1, 4, dtype=torch.int64), states, 2)):
            torch.testing.assert_close(net.logits(hidden, place), expected)


def test_answers_that_no_batch_holds(path):
    examples = [
        Example(token_ids=(1, 2, 3), num_context=1),
        Example(token_ids=(5,) * 9, num_context=3),
    ]
    with pytest.raises(
        ConfigError,
        match="none of 2 questions with its answer has 4 to 8 tokens: raise batch_tokens",
    ):
        HeadTraining(
            read_spec(path), examples, DraftHead(kind="eagle3", batch_tokens=8), torch.device("cpu")
        )


def test_answers_without_a_token_of_the_heads(path):
    """A batch of them alone teaches nothing, and ends nothing."""
    examples = [
        Example(token_ids=(1, 2, 3, 9, 9, 9), num_context=3),
        Example(token_ids=(1, 2, 3, 4, 5, 6), num_context=3),
    ]
    settings = DraftHead(
        kind="eagle3", batch_tokens=6, num_steps=4, num_places=2, draft_vocab_size=1
    )
    training = HeadTraining(read_spec(path), examples, settings, torch.device("cpu"))
    first, second = (
        record["step"] for record in training.run(time.perf_counter() + 60, lambda *_: None)
    )
    assert (first, second) in ((0, 2), (0, 3), (1, 2), (1, 3))


def test_frequent_tokens_are_the_commonest_in_order():
    examples = [
        Example(token_ids=(9, 9, 9, 5, 5, 4), num_context=3),
        Example(token_ids=(1, 7, 7, 7), num_context=1),
    ]
    assert frequent_tokens(examples, 10, 2).tolist() == [5, 7]
    assert frequent_tokens(examples, 10, 5).tolist() == [0, 1, 4, 5, 7]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("```\nx\n```", "code"),
        ("1. a\n2. b\n3. c", "lists"),
        ("- a\n- b", "prose"),
        ("Yes.", "prose"),
    ],
)
def test_kinds_of_answers(text, kind):
    assert kind_of(text) == kind


def test_presets_of_drafts_have_their_settings_and_wrong_ones_are_refused():
    assert parse(preset("draft:eagle3")).one(DraftHead).kind == "eagle3"
    assert preset("draft:small") == preset("draft:1/3")
    head = DraftHead(kind="medusa")
    assert (head.limit(on_gpu=True), head.limit(on_gpu=False), head.vocab_size(49_152)) == (
        9.0,
        50.0,
        12_288,
    )
    assert (head.vocab_size(50_257), head.vocab_size(50)) == (12_560, 16)
    assert DraftHead(kind="eagle3", draft_vocab_size=77).vocab_size(288) == 77
    with pytest.raises(ConfigError, match=r"steps\[0\].draft_head.kind"):
        parse([{"draft_head": {"kind": "eagle2"}}])
    with pytest.raises(ConfigError, match="only step"):
        parse([{"draft_head": {"kind": "eagle3"}}, "quantize"])
    with pytest.raises(
        ConfigError, match="norm_output=True must be false: Medusa has no such norm"
    ):
        parse([{"draft_head": {"kind": "medusa", "norm_output": True}}])
    with pytest.raises(ConfigError, match="norm_before_fc=True must be false: with fc_norm"):
        parse([{"draft_head": {"kind": "eagle3", "fc_norm": True, "norm_before_fc": True}}])
    with pytest.raises(ConfigError, match="num_places"):
        parse([{"draft_head": {"kind": "eagle3", "num_places": 0}}])


@pytest.mark.parametrize(
    ("kind", "norms"),
    [("eagle3", {}), ("eagle3", {"norm_before_fc": True, "norm_output": True}), ("medusa", {})],
)
def test_a_head_from_the_command(path, tmp_path, capsys, kind, norms):
    """The head learns, its folder can be used for drafting, and the receipt has its acceptance."""
    text = tmp_path / "text.jsonl"
    turns = [
        [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}]
        for w in map(str, range(40))
    ]
    text.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    settings = {
        "num_answers": 12,
        "max_tokens": 16,
        "num_steps": 12,
        "learning_rate": 0.01,
        "num_places": 2,
        "draft_vocab_size": 64,
        **norms,
    }
    more = {"text": str(text), "num_questions_held_out": 3, "warmup_steps": 0, "minutes": 5}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps([{"draft_head": {"kind": kind, **settings, **more}}]))
    out = tmp_path / "head"
    assert (
        main(
            [
                "compress",
                str(path),
                "--recipe",
                str(recipe),
                "--out",
                str(out),
                "--device",
                "cpu",
                "--json",
            ]
        )
        == 0
    )
    receipt = json.loads((out / RECEIPT_NAME).read_text())
    assert json.loads(capsys.readouterr().out)["receipt"]["training"] == receipt["training"]
    history = receipt["training"]["history"]
    assert len(history) == 12
    assert history[-1]["loss"] < history[0]["loss"]
    found = receipt["acceptance"]
    assert found["num_prompts"] == sum(x["num_prompts"] for x in found["by_text"].values()) == 3
    assert found["accepted_length"] == pytest.approx(1 + sum(found["by_position"]), abs=2e-3)
    assert not list(tmp_path.glob(".head*"))
    if kind == "eagle3":
        head = read_head("eagle3", out, read_spec(path)).spec
        assert (head.fc_norm, head.norm_output) == ("joint" if norms else None, bool(norms))
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(path), **SIZES) as llm:
        expected = llm.generate(prompts, sampling)[0].outputs[0].token_ids
    config = {"method": kind, "model": str(out), "num_speculative_tokens": 2}
    with LLM(str(path), speculative_config=config, **SIZES) as llm:
        assert llm.generate(prompts, sampling)[0].outputs[0].token_ids == expected
        assert llm.core.stats().spec_draft_tokens > 0


def test_options_of_reports_are_refused(path, tmp_path, capsys):
    args = ["compress", str(path), "--recipe", "draft:eagle3", "--out", str(tmp_path / "x")]
    assert main([*args, "--max-kl", "1"]) != 0
    assert "max_kl is for smaller models" in capsys.readouterr().err
    assert main([*args, "--dry-run"]) == 0
    assert "50 minutes" in capsys.readouterr().out
