"""Structured pruning: what is worth nothing goes without a trace; what is left is an ordinary checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.compress.dense import load_dense
from slipstream.compress.prune import _count, importances, measure, next_token_loss, prune
from slipstream.compress.steps import PruneSettings
from slipstream.compress.structure import (
    PruneSelection,
    Units,
    axes,
    cut_parameters,
    num_units,
    split_experts,
)
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.spec.description import read_spec
from slipstream.spec.parameters import parameters as shapes
from tests.model.families.test_families import CASES, TOKENS
from tests.support import tiny_models

CPU = torch.device("cpu")
BATCHES = [
    SequenceBatch.of([TOKENS[:20], TOKENS[20:32]], CPU),
    SequenceBatch.of([TOKENS[30:]], CPU),
]


def loaded(path):
    return load_dense(path, dtype=torch.float32, device=CPU)


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return WholeModel(model.spec, model.parameters, max_len=64)(SequenceBatch.of([tokens], CPU))


HEADS_REFUSED = {
    "gptj",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "falcon",
    "gptj-whole",
    "gpt2-untied",
}
HEADS_REFUSED |= {
    "bigcode-mha",
    "neox-in-turn",
    "opt-350m",
    "bloom-6-heads",
    "mpt-clip",
    "falcon-40b",
    "falcon2-11b",
}
HEADS_REFUSED |= {"falcon-rw", "phi3-long", "phi4-mini", "phi-normed"}
HEADS_REFUSED |= {"codegen", "gpt_neo", "helium", "olmoe", "olmoe-normalised"}
HEADS_REFUSED |= {"stablelm", "stablelm-12b", "cohere_compass_text"}
# latent attention, experts with biases, layers that share keys
NOT_YET = (
    "gemma3n",
    "minicpm3",
    "deepseek",
    "gpt_oss",
    "gpt-oss",
    "glm4_moe_lite",
    "longcat_flash",
    "glm-flash",
    "mistral4",
    "gemma4",
    "glm_moe_dsa",
    "youtu",
    "sarvam_mla",
    "axk1",
    "axk2",
    "mimo_v2_flash",
    "minimax_m3",
    "kimi",
    "bailing",
    "zamba2",
)
HEADS_REFUSED |= {"persimmon", "persimmon-bare", "phimoe-long", "xglm", "dbrx", "openai_gpt"}
CHANNELS_REFUSED = {"openai_gpt", "dbrx", "bloom", "bloom-6-heads", "mpt", "mpt-clip"}
CHANNELS_REFUSED |= {"granitemoeshared", "granitemoe_swa", "hunyuan_v1_moe"}
CHANNELS_REFUSED |= {"cohere2_moe", "cohere2-moe-summed", "llama4_text", "llama4-maverick"}
CHANNELS_REFUSED |= {"granitemoehybrid"}
# Norms of what the output products read. That of attention is as wide as the model.
HEADS_REFUSED |= {"bitnet"}
CHANNELS_REFUSED |= {"bitnet"}
WITHOUT = {"mamba", "falcon_mamba", "mamba2"}
"""Models without heads of attention and MLPs."""
LAYERS_REFUSED = {"gpt_neo", "ernie-moe-some", "xglm"}
LAYERS_REFUSED |= {"granite_swa", "granitemoe_swa"}
LAYERS_REFUSED |= {"jamba", "olmo_hybrid", "minimax"}
HEADS_REFUSED |= {"olmo_hybrid"}
WIDTH_REFUSED = (
    HEADS_REFUSED | WITHOUT | {"lfm2", "lfm2_moe", "lfm3", "bamba", "jamba", "granitemoehybrid"}
)
HEADS_REFUSED = HEADS_REFUSED | {"minimax", "diffllama", "diffllama-biased"}
# What a layer of DiffLlama subtracts follows from its number.
LAYERS_REFUSED |= {"diffllama", "diffllama-biased"}


VARIANTS = [n for n, (f, _) in CASES.items() if f in tiny_models.RECURRENT and n != f]


PRUNED = [n for n in CASES if n not in VARIANTS]


@pytest.fixture(scope="module", params=PRUNED)
def case(request, tmp_path_factory):
    """(name, checkpoint)"""
    family, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.write(folder, family, **overrides)
    return request.param, folder


def parts():
    """All parts of each family. Of its variants two by turns, and the others where time is no matter."""
    for i, name in enumerate(PRUNED):
        for j, part in enumerate(("heads", "channels", "hidden", "layers")):
            is_quick = name == CASES[name][0] or j % 2 == i % 2
            yield pytest.param(name, part, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("case", "part"), parts(), indirect=["case"])
def test_a_pruned_checkpoint_loads_in_transformers(case, part, tmp_path):
    """A written checkpoint has Slipstream's logits. Families whose configs can't express the pruned model refuse."""
    name, folder = case
    if any(kind in name for kind in NOT_YET):
        with pytest.raises(UnsupportedModelError, match="can't be compressed yet"):
            loaded(folder)
        return
    refused = {
        "heads": HEADS_REFUSED,
        "channels": CHANNELS_REFUSED,
        "hidden": WIDTH_REFUSED,
        "layers": LAYERS_REFUSED,
    }[part]
    model, settings = loaded(folder), PruneSettings(**{part: 0.5}, multiple=4)
    if name in WITHOUT and part in ("heads", "channels"):
        with pytest.raises(ConfigError, match="this model has none"):
            prune(model, settings, BATCHES)
        return
    if name in refused:
        with pytest.raises(
            UnsupportedModelError, match=r"config can't express|ALiBi|norms what|subtract"
        ):
            prune(model, settings, BATCHES)
        return
    small = prune(model, settings, BATCHES).model
    assert small.spec.num_parameters < model.spec.num_parameters
    assert {n: tuple(p.shape) for n, p in small.parameters.items()} == shapes(small.spec)
    small.write(tmp_path / "small")
    assert read_spec(tmp_path / "small").spec == small.spec
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    corrections = tiny_models.correction_buffers(theirs)
    assert sum(p.numel() for p in (*theirs.parameters(), *corrections)) == small.spec.num_parameters
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(
        logits(small), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
    )


def test_the_last_layers_of_diffllama_go_and_others_are_refused(tmp_path):
    """Layers of DiffLlama stay in their places: a layer's number says what it subtracts."""
    tiny_models.write(tmp_path, "diffllama")
    model = loaded(tmp_path)
    with pytest.raises(UnsupportedModelError, match="config can't express"):
        prune(model, PruneSettings(drop_layers=(0,)))
    prune(model, PruneSettings(drop_layers=(1,))).model.write(tmp_path / "small")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(
        logits(loaded(tmp_path / "small")),
        expected,
        rtol=1e-4,
        atol=1e-4 * expected.abs().max().item(),
    )


# --- What is worth nothing ----------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=["llama-tied-biased", "gemma2-capped", "qwen3_moe", "starcoder2", "phi", "mixtral"],
)
def model(request, tmp_path_factory):
    family, overrides = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    tiny_models.write(path, family, **overrides)
    return loaded(path)


def silence(spec, values, kind, keep):
    """Make all units of a kind but `keep` of each layer have no effect; the units that keep theirs."""
    parts = split_experts(spec, values)
    left = {}
    for key, count in num_units(spec).items():
        if key.kind == kind:
            left[key] = (
                torch.randperm(count, generator=torch.Generator().manual_seed(key.layer))[:keep]
                .sort()
                .values
            )
    for name, weight in parts.items():
        rows, columns = axes(spec, name)
        for dim, axis in enumerate((rows, columns)):
            reads = (
                dim == 1 or kind == "hidden"
            )  # the residual's dimensions are read and written; embeddings fill them
            if axis is not None and axis[0] in left and reads and weight.dim() > dim:
                silent = ~torch.isin(axis[1], left[axis[0]])
                if weight.dim() == 2 or name.endswith(".bias"):
                    weight.index_fill_(
                        dim, silent.nonzero()[:, 0], 0.0
                    )  # a view's parameter changes too
    return left


@pytest.mark.parametrize("importance", ["activation", "taylor", "wactigrad"])
@pytest.mark.parametrize(
    ("kind", "share", "keep"), [("heads", 0.5, 1), ("channels", 0.5, 32), ("hidden", 0.25, 24)]
)
def test_units_worth_nothing_go_without_a_trace(model, importance, kind, share, keep):
    values = {name: value.clone() for name, value in model.parameters.items()}
    if kind == "heads":
        keep = {2: 1, 4: 2}[num_units(model.spec)[Units("heads", 0)]]
    left = silence(model.spec, values, kind, keep)
    model = replace(model, parameters=values)
    result = prune(
        model, PruneSettings(importance=importance, multiple=8, **{kind: share}), BATCHES
    )
    assert {key: units.tolist() for key, units in result.kept.units.items()} == {
        k: u.tolist() for k, u in left.items()
    }
    before, after = logits(model), logits(result.model)
    # A norm's epsilon weighs more over fewer dimensions; layer norms take the mean off, over more dimensions before.
    if kind != "hidden":
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    elif next(iter(model.spec.layers[0].norms.values())).kind == "rms":
        torch.testing.assert_close(after, before, rtol=5e-3, atol=5e-3 * before.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "olmo2", "phi", "granite"])
def test_layers_that_do_nothing_go_first(name, tmp_path):
    family, overrides = CASES[name]
    tiny_models.write(tmp_path, family, **{**overrides, "num_hidden_layers": 5})
    model = loaded(tmp_path)
    for i in (1, 3):
        for stem, values in model.parameters.items():
            # Nothing of these two reaches the residual: through a norm after it, or out of its last product.
            if stem.startswith(f"layers.{i}.") and (
                "post_" in stem or ".out." in stem or ".down." in stem
            ):
                values.zero_()
    result = prune(model, PruneSettings(layers=0.4), BATCHES)
    assert result.kept.layers == (0, 2, 4)
    assert [result.influence[i] for i in (1, 3)] == pytest.approx([0, 0], abs=1e-6)
    assert min(result.influence[i] for i in (0, 2, 4)) > 1e-3
    torch.testing.assert_close(logits(result.model), logits(model), rtol=1e-4, atol=1e-4)
    named = prune(model, PruneSettings(drop_layers=(3, 1)))
    assert torch.equal(logits(named.model), logits(result.model))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that has learnt some of a text."""
    path = tmp_path_factory.mktemp("trained")
    tiny_models.write(
        path, "llama", num_attention_heads=8, num_key_value_heads=8, initializer_range=0.05
    )
    model = loaded(path)
    whole = WholeModel(model.spec, model.parameters, max_len=64)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for _ in range(12):
        optimizer.zero_grad()
        next_token_loss(whole(BATCHES[0]), BATCHES[0]).backward()
        optimizer.step()
    whole.requires_grad_(False)
    return model


@pytest.mark.parametrize("importance", ["magnitude", "activation", "taylor", "wactigrad"])
@pytest.mark.parametrize("kind", ["heads", "channels", "hidden"])
def test_the_important_matter_more(trained, kind, importance):
    """The trained model loses less without its least important half than without the other."""
    model = trained
    result = prune(
        model, PruneSettings(importance=importance, multiple=8, **{kind: 0.5}), BATCHES[:1]
    )
    units = {}
    for key, kept in result.kept.units.items():
        count = num_units(model.spec)[key]
        units[key] = torch.tensor([i for i in range(count) if i not in kept.tolist()])
    worse = cut_parameters(
        model.spec, model.parameters, PruneSelection(layers=result.kept.layers, units=units)
    )
    losses = []
    for values in (result.model.parameters, worse):
        with torch.no_grad():
            small = WholeModel(result.model.spec, values, max_len=64)
            losses.append(next_token_loss(small(BATCHES[0]), BATCHES[0]).item())
    assert losses[0] < losses[1]


def test_measured_energies_and_gradients_are_what_they_say(tmp_path):
    tiny_models.write(tmp_path, "qwen3_moe")
    model = loaded(tmp_path)
    name = "layers.1.attention.out.weight"
    whole = WholeModel(model.spec, model.parameters, max_len=64)
    found = measure(model.spec, model.parameters, BATCHES, gradients=True)
    states = []
    with torch.no_grad():
        for batch in BATCHES:
            whole.hidden(batch, lambda i, state: states.append(state) if i == 2 else None)
    torch.testing.assert_close(found.energy["final_norm.weight"], torch.cat(states).square().sum(0))
    total = 0
    for batch in BATCHES:
        whole.zero_grad()
        next_token_loss(whole(batch), batch).backward()
        total = total + (whole.get_parameter(name).grad * model.parameters[name]).abs()
    torch.testing.assert_close(found.taylor[name], total)
    experts = [name for name in found.taylor if ".experts.up.weight#" in name]
    assert len(experts) == 2 * 6
    sums = importances(model.spec, model.parameters, "taylor", found)
    assert sums[Units("channels", 0, 3)].shape == (64,)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "nothing to prune"),
        ({"heads": 1.0}, "share from 0 to below 1"),
        ({"heads": 0.5, "importance": "random"}, "must be one of"),
        ({"heads": 0.1}, "removes none of 2, in steps of 1"),
        ({"channels": 0.1}, "removes none of 64, in steps of 32"),
        ({"layers": 0.1}, "removes none of 2"),
        ({"layers": 0.5, "drop_layers": (0,)}, "one of layers, a share to rank"),
        ({"drop_layers": (7,)}, "no layer 7"),
        ({"drop_layers": (0, 1)}, "every layer"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(settings, match, tiny_model):
    with pytest.raises(ConfigError, match=match):
        prune(loaded(tiny_model), PruneSettings(**settings), BATCHES)


def test_importances_of_text_need_text(tiny_model):
    with pytest.raises(ConfigError, match="need calibration text"):
        prune(loaded(tiny_model), PruneSettings(heads=0.5))
    small = prune(loaded(tiny_model), PruneSettings(heads=0.5, importance="magnitude")).model
    assert [layer.attention.num_heads for layer in small.spec.layers] == [2, 2]


@pytest.mark.parametrize(
    ("whole", "share", "multiple", "stay"),
    [(64, 0.0, 16, 64), (64, 0.3, 16, 48), (64, 0.99, 16, 16), (10, 0.1, 16, 10), (7, 0.5, 1, 4)],
)
def test_the_nearest_multiple_of_units_stays_and_no_more_than_there_are(
    whole, share, multiple, stay
):
    assert _count(whole, share, multiple) == stay


def test_first_tokens_of_sequences_have_no_loss():
    batch = SequenceBatch.of([(1, 2, 3), (4, 0)], torch.device("cpu"))
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    losses = [-logits[i].log_softmax(0)[token] for i, token in ((0, 2), (1, 3), (3, 0))]
    torch.testing.assert_close(next_token_loss(logits, batch), torch.stack(losses).mean())
