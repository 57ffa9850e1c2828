"""Trained heads that draft: what they propose is what the published maths gives, and no answer changes. Tiny random models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from slipstream import LLM, SamplingParams
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.ops import OpSet
from slipstream.kernels.weights.forms import Linear, ScaledLinear
from slipstream.model.draft_heads import target_ids
from slipstream.spec.description import read_spec
from slipstream.spec.drafts.head_readers import read_head
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.draft.host_chain import head_scheme
from tests.engine.drafts.test_speculation import PROMPTS, SETTINGS, SIZES, answers
from tests.support import draft_heads, forked_ranks, mtp_layers, tiny_models
from tests.support.naive_heads import fused, medusa_states, naive_drafts
from tests.support.waiting import wait_for

K = 3
SOME = PROMPTS[:5]
"""One more than run at a time."""
HEADS = {  # the method, and how a head is written
    **draft_heads.BY_KIND,
    "fc-norm": ("eagle3", lambda path: draft_heads.eagle(path, fc_norm=True)),
    "norm-output": ("eagle3", lambda path: draft_heads.eagle(path, norm_output=True, wrapped=True)),
    "no-d2t": ("eagle3", lambda path: draft_heads.eagle(path, drop="d2t")),
    "shared-medusa": ("medusa", lambda path: draft_heads.medusa(path, shared=True)),
    "eagle31-speculators": ("eagle3", lambda path: draft_heads.eagle31(path, speculators=True)),
    "peagle-joint-norm": ("peagle", lambda path: draft_heads.joint_norm(path, masks=True)),
    "peagle-fc-norm": ("peagle", lambda path: draft_heads.eagle31(path, masks=True)),
    "speculators": ("eagle3", lambda path: draft_heads.eagle(path, speculators=True)),
    "eagle-speculators": (
        "eagle",
        lambda path: draft_heads.eagle1(path, speculators=True, bias=False),
    ),
    "peagle-speculators": (
        "peagle",
        lambda path: draft_heads.eagle(path, masks=True, speculators=True),
    ),
    "dflash-speculators": ("dflash", lambda path: draft_heads.dflash(path, speculators=True)),
    "converted": ("medusa", lambda path: draft_heads.medusa(path, converted=True)),
    "mtp": ("mtp", draft_heads.mtp),
}
HYBRID = {"mtp-hybrid": ("mtp", mtp_layers.add)}
"""A layer that drafts for a model with recurrent layers. `test_mtp` compares its drafts with the published maths."""


MODELS: dict[str, tuple[Any, dict[tuple[int, ...], list[Any]]]] = {}
"""Models by family and size, which many heads share: transformers' model, and the states that it
gave."""


class Setup:
    """A model, as transformers has it, and its head."""

    def __init__(self, folder, kind, family="llama", **more):
        self.family = family = {"mtp": "deepseek_v3", "mtp-hybrid": "qwen3_5_moe_text"}.get(
            kind, family
        )
        more |= {"num_hidden_layers": 6} if family == "llama" else {}
        self.path, self.kind = str(folder / "model"), kind
        if (called := repr((family, more))) not in MODELS:
            MODELS[called] = (
                tiny_models.build(folder / "as transformers has it", family, **more),
                {},
            )
        self.model, self.states = MODELS[called]  # of the longest text that goes on from one
        tiny_models.write(folder / "model", family, **more)
        method, write = (HEADS | HYBRID)[kind]
        self.config = {"method": method, "num_speculative_tokens": K}
        self.tensors = write(folder / ("model" if method == "mtp" else "head"))
        self.head = (
            json.loads((folder / "head" / "config.json").read_text()) if method != "mtp" else {}
        )
        self.naive: dict[
            tuple[int, ...], list[int]
        ] = {}  # drafts by the published maths behind tokens, and how many
        if method != "mtp":
            self.config |= {"model": str(folder / "head"), "quantization": "none"}

    def llm(self, *, plain=False, config=None, **more):
        return LLM(
            self.path,
            speculative_config=None if plain else config or self.config,
            **{**SIZES, **more},
        )


@pytest.fixture(
    scope="module",
    params=["eagle", "eagle3", "eagle31", "peagle", "dflash", "medusa", "mtp", *HYBRID],
)
def setup(request, tmp_path_factory):
    return Setup(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=HEADS)
def any_setup(request, tmp_path_factory):
    """A head of each kind, also in the other ways of writing one down."""
    return Setup(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def plain_answers():
    """Answers by family, whose model is the same with every head."""
    return {}


@pytest.fixture(scope="module")
def plain(setup, plain_answers):
    if setup.family not in plain_answers:
        with setup.llm(plain=True) as llm:
            plain_answers[setup.family] = {
                name: answers(llm, sampling, SOME) for name, sampling in SETTINGS.items()
            }
    return plain_answers[setup.family]


# --- The maths --------------------------------------------------------------------------------------------------------


def proposals(llm, sampling, prompts):
    """Proposals as pairs (tokens so far, drafts)."""
    draft, found = llm.core.executor.runner.draft, []
    write = draft.write_drafts

    def noted(plan, rows):
        wanted = [s for s in plan.scheduled if s.drafts]
        before = [
            rows.tokens[rows.rows[s.request_id].index, : s.num_computed_tokens + 1].tolist()
            for s in wanted
        ]
        drafted, ends = write(plan, rows), 0
        proposed = draft.tokens_of(drafted, rows) if drafted else None
        for s, tokens in zip(wanted, before, strict=True):
            found.append((tokens, proposed[ends : ends + len(s.drafts)].tolist()))
            ends += len(s.drafts)
        return drafted

    draft.write_drafts = noted
    llm.generate(prompts, sampling)
    return found


def test_drafts_go_on_from_blocks_of_a_disk(setup, tmp_path):
    """A later engine that loads the blocks proposes what this one does behind its own."""
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (66, 82)]
    found, more = [], dict(kv_disk_bytes=2**26, kv_disk_path=str(tmp_path), max_model_len=128)
    for first in (True, False):
        with setup.llm(**more) as llm:
            if first:
                llm.generate(prompts, sampling)
            hits = llm.stats().prefix_hits
            found.append(proposals(llm, sampling, prompts))
            # A busy disk leaves out the last blocks: 120 of 144 were seen.
            assert llm.stats().prefix_hits - hits >= 96
            assert (llm.stats().tiers.disk_hit_tokens >= 96) != first
            wait_for(lambda: not llm.core.tend(), "blocks are not stored")
    assert len(found[0]) > 4
    assert sorted(found[0]) == sorted(found[1])


BOTH = [*((kind, "cpu") for kind in HEADS), *((kind, "torch") for kind in draft_heads.BY_KIND)]
"""Other ways of writing a head down are other ways of reading one, and none of computing."""


@torch.no_grad()
@pytest.mark.parametrize(("any_setup", "kernels"), sorted(BOTH), indirect=["any_setup"])
def test_drafts_are_those_of_the_published_maths(any_setup, kernels):
    """Drafts are compared after prompts in chunks, after rejections, and of several requests at once."""
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with any_setup.llm(kernels=kernels, max_num_batched_tokens=24) as llm:
        found = proposals(llm, sampling, PROMPTS[:3])
    assert len(found) > 20
    states = any_setup.states
    for tokens, drafts in sorted(found, key=lambda pair: -len(pair[0])):
        if (known := any_setup.naive.get((*tokens, len(drafts)))) is not None:
            assert drafts == known
            continue
        known = (hidden for whole, hidden in states.items() if list(whole[: len(tokens)]) == tokens)
        if (hidden := next(known, None)) is None:
            output = any_setup.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
            hidden = states[tuple(tokens)] = [
                h[0] for h in output.hidden_states
            ]  # the last one is normed
        hidden = [h[: len(tokens) - 1] for h in hidden]
        expected = any_setup.naive[*tokens, len(drafts)] = naive_drafts(
            any_setup, hidden, tokens, len(drafts)
        )
        assert drafts == expected


@torch.no_grad()
@pytest.mark.parametrize(
    ("kernels", "quantization", "error"),
    [("cpu", "none", 1e-5), ("cpu", "int8", 0.03), ("torch", "none", 1e-5)],
)
@pytest.mark.parametrize("kind", ["eagle3", "fc-norm", "eagle31-speculators", "joint-norm"])
def test_states_are_those_of_the_published_maths(tmp_path, kind, kernels, quantization, error):
    """The states between layers that steps keep for the head are compared, for prompts in chunks and for decodes."""
    setup, compared = Setup(tmp_path, kind), 0
    config = setup.config | {"quantization": quantization}
    with setup.llm(kernels=kernels, config=config, max_num_batched_tokens=24) as llm:
        draft = llm.core.executor.runner.draft
        write = draft.write_drafts

        def noted(plan, rows):
            nonlocal compared
            for s in (s for s in plan.scheduled if s.drafts):
                row, places = rows.rows[s.request_id].index, np.arange(s.num_computed_tokens)
                table = np.asarray(rows.block_tables[0][row])
                tokens = torch.as_tensor(rows.tokens[row])
                size = draft.block_size
                states = draft.states.floats(
                    table[places // size].astype(np.int64) * size + places % size
                )
                output = setup.model(tokens[None, : len(places)].long(), output_hidden_states=True)
                expected = fused(setup, [output.hidden_states[i][0] for i in (1, 2, 4)])
                assert (torch.from_numpy(states) - expected).norm() < error * expected.norm()
                compared += len(places)
            return write(plan, rows)

        draft.write_drafts = noted
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert compared > 200


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("kind", "family", "more"),
    [
        ("eagle", "cohere", {}),
        ("eagle", "granite", {}),
        ("eagle", "gemma2", {"final_logit_softcapping": 2.0}),
        ("shared-medusa", "gemma2", {"final_logit_softcapping": 2.0}),
        ("medusa", "cohere", {}),
    ],
)
def test_drafts_are_drawn_from_the_models_logits(tmp_path, kind, family, more, kernels):
    """An output head that is the model's scales and caps as the model does. A head's own does not."""
    setup, given, found = Setup(tmp_path, kind, family, **more), [], []
    config, rows = setup.model.config, setup.model.get_output_embeddings().weight
    scale = {"cohere": 0.0625, "granite": 0.25, "gemma2": 1.0}[family]
    assert scale == getattr(config, "logit_scale", 1 / getattr(config, "logits_scaling", 1.0))
    with setup.llm(kernels=kernels, plain=True) as llm:
        plain = [answers(llm, SETTINGS[name], PROMPTS[:4]) for name in ("greedy", "drawn")]
    with setup.llm(kernels=kernels) as llm:
        draft = llm.core.executor.runner.draft
        write, sample = draft.write, draft.sample

        def noted_write(hidden, sampled, rows, place=0):
            given.append((torch.as_tensor(hidden).clone(), place))
            write(hidden, sampled, rows, place)

        def noted_sample(logits, params):
            found.append(torch.as_tensor(logits).clone())
            return sample(logits, params)

        greedy = answers(llm, SETTINGS["greedy"], PROMPTS[:4])
        draft.write, draft.sample = noted_write, noted_sample
        assert [greedy, answers(llm, SETTINGS["drawn"], PROMPTS[:4])] == plain
    assert len(found) == len(given) > 20
    for (hidden, place), logits in zip(given, found, strict=True):
        expected = hidden @ rows.T * scale
        if kind == "shared-medusa":
            expected = medusa_states(setup, hidden, place) @ rows.T
        elif kind == "medusa":
            expected = medusa_states(setup, hidden, place) @ setup.tensors[f"{place}.2.weight"].T
        if more:
            expected = 2.0 * (expected / 2.0).tanh()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_chains_of_several_lengths_are_those_op_by_op(any_setup):
    """Greedy chains are programs on a CPU (`worker.draft.host_chain`). Here requests want different numbers of drafts, and
    a prompt's pairs come in the same step as a few of another's."""
    if any_setup.config["method"] in ("peagle", "dflash", "medusa"):
        pytest.skip("all places in one pass")
    found = []
    for host in (True, False):
        with any_setup.llm(
            config={**any_setup.config, "num_speculative_tokens": 5}, max_num_seqs=3
        ) as llm:
            draft = llm.core.executor.runner.draft
            assert draft.host is not None
            draft.host = draft.host if host else None
            sampling = [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 16, 9, 12)
            ]
            found.append(proposals(llm, sampling, PROMPTS[:4]))
    assert found[0] == found[1]
    assert {len(drafts) for _, drafts in found[0]} >= {1, 2, 5}


def test_a_head_is_rounded_on_a_cpu_unless_told_otherwise(tmp_path):
    setup = Setup(tmp_path, "eagle3")

    def forms(**changes):
        with setup.llm(
            config={k: v for k, v in (setup.config | changes).items() if v is not None}
        ) as llm:
            draft = llm.core.executor.runner.draft
            return {part.kind for part in draft.head.head.parts}, draft.weights_bytes

    (rounded, num_bytes), (plain, most) = forms(quantization=None), forms(quantization="none")
    assert (rounded, plain) == ({native.I8}, {native.F32})
    assert num_bytes < 0.45 * most  # norms and the rotary table stay float32


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_drafts_read_a_shared_output_head_in_the_eight_bits_of_their_layers(tmp_path, quantization):
    setup = Setup(tmp_path, "eagle")
    with setup.llm(
        config={**setup.config, "quantization": quantization}, kernels="reference"
    ) as llm:
        runner = llm.core.executor.runner
        models, drafts = runner.model.decoder.head, runner.draft.head.head
    assert type(models) is Linear
    assert (drafts is models) == (quantization == "none")
    assert isinstance(drafts, ScaledLinear) == (quantization == "int8")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            "int4",
            "'int4' needs inputs in multiples of 128, and fc.weight has 96; take another scheme, or 'none'",
        ),
        ("mxfp4", "'mxfp4' rounds experts alone"),
    ],
)
def test_a_scheme_that_does_not_fit_a_head(tmp_path, quantization, message):
    setup = Setup(tmp_path, "eagle3")
    with pytest.raises(ConfigError, match=message):
        setup.llm(config={**setup.config, "quantization": quantization}, kernels="reference")


def test_eight_bits_of_a_head_by_rows(tmp_path):
    """A head's rows need no padding on a CPU: only a GPU's library wants multiples of some number."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.eagle(tmp_path / "head")
    head = read_head("eagle3", tmp_path / "head", read_spec(tmp_path / "model"))

    def scheme(quantization, rows):
        speculation: Any = SimpleNamespace(quantization=quantization)
        return head_scheme(speculation, head, "fp8", rows=rows)

    assert (scheme(None, 16), scheme(None, 48), scheme("none", 48)) == (SCHEMES["fp8"], None, None)
    with pytest.raises(
        ConfigError, match=r"'fp8' needs outputs in multiples of 48, and fc\.weight has 32"
    ):
        scheme("fp8", 48)


def test_op_sets_say_what_eight_bits_need(tmp_path, monkeypatch):
    from slipstream.kernels.triton import (
        TritonOps,
    )  # not above: tests/kernels imports it for its interpreter

    cpu = torch.device("cpu")
    assert [ops.eight_bits(cpu) for ops in (NativeOps(), CpuOps(), TritonOps())] == [
        "int8",
        None,
        None,
    ]
    assert (OpSet.output_multiple, TritonOps.output_multiple) == (1, 16)
    monkeypatch.setattr(CpuOps, "output_multiple", 48)
    setup = Setup(tmp_path, "eagle3")
    with pytest.raises(ConfigError, match=r"'int8' needs outputs in multiples of 48"):
        setup.llm(config={**setup.config, "quantization": "int8"}, kernels="torch")


# --- The answers ------------------------------------------------------------------------------------------------------


def test_answers_are_the_same(setup, plain):
    """Answers with drafts equal those without, for each sampling setting and after prefix hits. The tokens
    after drafts do not depend on the head: one with
    a chain and one of the model's own have all settings."""
    several = (
        SETTINGS if setup.kind in ("eagle3", "mtp", *HYBRID) else ("greedy", "drawn", "several")
    )
    with setup.llm() as llm:
        for name in (*several, "greedy", "penalised"):
            before = llm.core.stats().spec_draft_tokens
            assert (name, answers(llm, SETTINGS[name], SOME)) == (name, plain[name])
            stats = llm.core.stats()
            assert stats.spec_draft_tokens > before
            assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_answers_with_one_norm_of_all_states(tmp_path, kernels):
    setup = Setup(tmp_path, "joint-norm")
    with setup.llm(plain=True, kernels=kernels) as llm:
        expected = [answers(llm, SETTINGS[name], SOME) for name in ("greedy", "drawn")]
    with setup.llm(kernels=kernels) as llm:
        assert [answers(llm, SETTINGS[name], SOME) for name in ("greedy", "drawn")] == expected
        assert llm.core.stats().spec_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("greedy", {"num_threads": 2}),  # a step is under way while the next is planned
        ("greedy", {"kernels": "torch"}),
        ("penalised", {"kv_cache_dtype": "int8"}),
        ("greedy", {"quantization": "int8"}),
        ("several", {"max_num_mixed_tokens": 6, "max_num_batched_tokens": 16}),
        ("drawn", {"enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_with_all_that_the_engine_does_beside(setup, name, more):
    if setup.kind == "mtp" and {"kv_cache_dtype", "quantization"} & more.keys():
        pytest.skip("latent attention has no 8-bit cache, and tiny latents no 8-bit products")
    if setup.kind in HYBRID and "kv_cache_dtype" in more:
        pytest.skip(
            "with heads of 16, a step of several tokens reads an 8-bit cache in another rounding"
        )
    with setup.llm(plain=True, **more) as llm:
        expected = answers(llm, SETTINGS[name])
    with setup.llm(**more) as llm:
        assert answers(llm, SETTINGS[name]) == expected
        assert llm.core.stats().spec_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("eagle3", "joint-norm", "shared-medusa", "mtp"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "peagle", "dflash")),
    ],
)
def test_each_of_two_ranks_has_the_head(tmp_path, kind):
    """The head reads sums over the ranks, and embeddings and an output head that are shared out. It proposes what it does on
    one device, so as many drafts are right."""
    setup, found = Setup(tmp_path, kind), []
    for ranks in (1, 2):
        with forked_ranks.used(), setup.llm(tensor_parallel_size=ranks) as llm:
            own = [answers(llm, SETTINGS[name], SOME[:2]) for name in ("greedy", "drawn")]
            stats = llm.stats()
            found.append(
                (own, stats.spec_num_drafts, stats.spec_draft_tokens, stats.spec_accepted_tokens)
            )
    assert found[0] == found[1]
    assert found[0][2] > 30


def test_a_head_sleeps_with_its_model(setup, plain):
    with setup.llm() as llm:
        llm.sleep()
        llm.wake_up()
        assert answers(llm, SETTINGS["greedy"], SOME) == plain["greedy"]
        assert llm.core.stats().spec_draft_tokens > 0


@pytest.mark.slow
def test_preempted_requests_draft_on(setup, plain):
    with setup.llm(enable_prefix_caching=False) as llm:
        ledger = llm.ledger
    room = 12 * 4 * ledger.block_bytes
    more: dict[str, Any] = {"kv_cache_bytes": room}
    if setup.kind in HYBRID:
        slot = ledger.state_bytes // ledger.num_states
        more = {"kv_cache_bytes": room + 22 * slot, "state_slots": 22}
    with setup.llm(enable_prefix_caching=False, max_model_len=96, **more) as llm:
        assert answers(llm, SETTINGS["greedy"], SOME) == plain["greedy"]
        assert llm.core.stats().num_preemptions > 0


def test_the_number_of_drafts_is_chosen_by_what_pays(setup, plain):
    config = {key: value for key, value in setup.config.items() if key != "num_speculative_tokens"}
    with setup.llm(config=config) as llm:
        assert answers(llm, SETTINGS["greedy"], SOME) == plain["greedy"]
        limit = llm.config.speculation.limit
    assert limit == {"medusa": 3, "dflash": 7, "mtp-hybrid": 10}.get(setup.kind, 16)


def test_a_head_is_in_the_ledger(setup):
    with setup.llm(plain=True) as llm:
        before = llm.ledger
    with setup.llm() as llm:
        draft, ledger = llm.core.executor.runner.draft, llm.ledger
    tensors = {
        n: t for n, t in setup.tensors.items() if n not in ("d2t", "t2d", "embed_tokens.weight")
    }
    share = (ledger.weights_bytes - before.weights_bytes) / (
        4 * sum(t.numel() for t in tensors.values())
    )
    assert 1 <= share < 1.2  # with a rotary table, and rows filled up to 16
    cached = {
        "medusa": 0,
        "mtp": 24 + 8,
        "peagle": 4 * 16,
        "dflash": 4 * 16,
        "mtp-hybrid": 4 * 16,
    }.get(setup.kind, 2 * 16)
    assert ledger.block_bytes - before.block_bytes == draft.block_bytes == 4 * 4 * (32 + cached)


def test_drafts_that_are_right(tmp_path):
    """An MTP layer's guesses count where the model draws the same: with a head that knows the answer. Its layer adds nothing,
    and its join passes the token's embedding, so it guesses that a token comes twice."""
    model = tiny_models.build(tmp_path, "deepseek_v3")
    new = draft_heads.mtp(tmp_path)
    del model
    for name, tensor in new.items():
        if name.startswith(("self_attn.o_proj", "mlp.experts", "mlp.shared_experts")):
            tensor.zero_()
    new["eh_proj.weight"].zero_()[:, :32] = torch.eye(32)
    new["enorm.weight"].fill_(1.0), new["shared_head.norm.weight"].fill_(1.0)
    new["shared_head.head.weight"] = F.normalize(new["embed_tokens.weight"], dim=-1)
    from safetensors.torch import load_file, save_file

    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        stored | {f"model.layers.3.{n}": t.contiguous() for n, t in new.items()},
        tmp_path / "model.safetensors",
    )
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={7: 1000.0})
    with LLM(
        str(tmp_path), speculative_config={"method": "mtp", "num_speculative_tokens": 4}, **SIZES
    ) as llm:
        found = llm.generate(PROMPTS[:1], sampling)[0].outputs[0]
        stats = llm.core.stats()
    assert list(found.token_ids) == [7] * 20
    assert found.num_accepted == stats.spec_accepted_tokens == stats.spec_draft_tokens > 12
    assert stats.spec_accepted_by_position[0] >= stats.spec_accepted_by_position[-1] > 0


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def refused(path, head, match, method="eagle3", **more):
    with pytest.raises(SlipstreamError, match=match) as caught:
        LLM(path, speculative_config={"method": method, "model": str(head), **more}, **SIZES)
    assert isinstance(caught.value, (ConfigError, CheckpointError))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size = 64"),
        ({"vocab_size": 300}, "vocab_size = 300"),
        ({"num_hidden_layers": 2}, "lacks layers.1.self_attn.q_proj.weight"),
        ({"draft_vocab_size": 100}, "lm_head.weight' has shape"),
        (
            {"intermediate_size": 40},
            r"down_proj.weight' has shape \[32, 48\], and the config asks for \[32, 40\]",
        ),
        ({"parallel_drafting": True}, "P-EAGLE.*use method 'peagle'"),
        ({"norm_before_fc": 1}, "norm_before_fc = 1"),
        (
            {"norm_before_fc": True, "fc_norm": True},
            "fc_norm = True: norm_before_fc is true as well",
        ),
        ({"norm_before_fc": True, "drop": "input_norm.weight"}, "lacks input_norm.weight"),
        ({"fc_norm": 1}, "fc_norm = 1"),
        ({"norm_output": "yes"}, "norm_output = 'yes'"),
        ({"fc_norm": True, "num_fc_norms": 2}, "lacks fc_norm.2.weight"),
        (
            {"fc_norm": True, "num_fc_norms": 4},
            "tensor 'fc_norm.3.weight' that the draft head has no place for",
        ),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states = 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight' has shape \[32, 96\]"),
        ({"drop": "midlayer"}, None),
    ],
    ids=str,
)
def test_an_eagle_head_that_does_not_fit(tmp_path, changes, message):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    if message is None:
        draft_heads.eagle(tmp_path / "head", drop="self_attn.o_proj.weight")
        message = "lacks midlayer.self_attn.o_proj.weight"
    else:
        draft_heads.eagle(tmp_path / "head", **changes)
    refused(str(tmp_path / "model"), tmp_path / "head", message)


def test_other_heads_that_do_not_fit(tmp_path):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    path = str(tmp_path / "model")
    draft_heads.medusa(tmp_path / "medusa", medusa_choices=[[0]], num_experts=2)
    refused(path, tmp_path / "medusa", "num_experts = 2", "medusa")
    draft_heads.medusa(tmp_path / "three")
    refused(path, tmp_path / "three", "drafts 3; lower it", "medusa", num_speculative_tokens=4)
    draft_heads.eagle(tmp_path / "no-map", drop="d2t t2d")
    refused(path, tmp_path / "no-map", "lacks d2t and t2d, one of which must map its 128 tokens")
    refused(path, tmp_path / "model", "num_hidden_layers|eagle_aux")
    with pytest.raises(ConfigError, match="method 'mtp' is for checkpoints with layers that draft"):
        LLM(path, speculative_config={"method": "mtp"}, **SIZES)
    with pytest.raises(ConfigError, match="takes no 'model'"):
        LLM(path, speculative_config={"method": "mtp", "model": path}, **SIZES)
    with pytest.raises(ConfigError, match="needs 'model', a text"):
        LLM(path, speculative_config={"method": "eagle3"}, **SIZES)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"d2t": [0, 2, 2, 2], "t2d": [1, 0, 0, 1, 1, 0]}, "'t2d' must name 4 of 6 tokens"),
        ({"t2d": [1, 0, 0, 1, 1, 0]}, "'t2d' must name 4 of 6 tokens"),
        ({"t2d": [1, 0, 1, 1, 1]}, "'t2d' must name 4 of 6 tokens"),
        ({"d2t": [0, 2, 2, 2], "t2d": [1, 1, 0, 0, 1, 1]}, "'t2d' and 'd2t' disagree"),
        ({"d2t": [0, 2, 2, 3]}, "'d2t' names tokens beyond the model's 6, or some twice"),
        ({"d2t": [0, 2, 1, 1]}, "'d2t' names tokens beyond the model's 6, or some twice"),
        ({"d2t": [0, 2, 2]}, "'d2t' must be 4 whole numbers"),
        ({"d2t": [0.0, 2.0, 2.0, 1.0]}, "'d2t' must be 4 whole numbers"),
    ],
)
def test_maps_of_tokens_that_do_not_fit(maps, message):
    spec: Any = SimpleNamespace(vocab_size=6, draft_vocab_size=4)
    with pytest.raises(CheckpointError, match=message):
        target_ids(spec, {name: np.array(x) for name, x in maps.items()})


def test_maps_of_tokens():
    spec: Any = SimpleNamespace(vocab_size=6, draft_vocab_size=4)
    d2t, t2d = np.array([0, 2, 2, 2]), np.array([1, 0, 0, 1, 1, 1], bool)
    assert target_ids(spec, {}) is None
    for maps in ({"d2t": d2t}, {"t2d": t2d}, {"d2t": d2t, "t2d": t2d}):
        assert target_ids(spec, maps).tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        ("eagle1", {"vocab_size": 300}, "vocab_size = 300"),
        ("eagle1", {"model_type": "gemma"}, "model_type = 'gemma'"),
        ("eagle1", {"num_hidden_layers": 2}, "lacks layers.1.self_attn.q_proj.weight"),
        (
            "eagle1",
            {"eagle_fc_bias": False},
            "tensor 'fc.bias' that the draft head has no place for",
        ),
        ("eagle1", {"speculators": True, "layernorms": True}, "layernorms = True"),
        ("eagle", {"masks": True, "ptd_token_id": None}, "mask_token_id = None"),
        ("eagle", {"masks": True, "ptd_token_id": 1000}, "must be one of the model's"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("dflash", {"num_target_layers": 7}, "num_target_layers = 7"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 5]}},
            "target_layer_ids.*from -1 to 4",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4], "causal": True}},
            "dflash_config.causal",
        ),
        ("dflash", {"speculators": True, "sample_from_anchor": True}, "sample_from_anchor = True"),
        (
            "dflash",
            {"speculators": True, "speculators_model_type": "dspark"},
            "speculators_model_type = 'dspark'",
        ),
    ],
    ids=str,
)
def test_heads_of_other_layouts_are_refused(tmp_path, write, changes, message):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    getattr(draft_heads, write)(tmp_path / "head", **changes)
    method = {"eagle1": "eagle", "eagle": "peagle", "dflash": "dflash"}[write]
    refused(str(tmp_path / "model"), tmp_path / "head", message, method)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash", "medusa"])
def test_a_head_of_another_kind_is_named(tmp_path, kind):
    """The error names the kind, which the config and the names of the tensors tell."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.BY_METHOD[kind](tmp_path / "head")
    other = "medusa" if kind == "eagle3" else "eagle3"
    refused(str(tmp_path / "model"), tmp_path / "head", f"a head of .*use method '{kind}'", other)


def test_a_head_that_is_a_pickle_is_refused(tmp_path):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.eagle1(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    refused(str(tmp_path / "model"), tmp_path / "head", "safetensors", "eagle")


def test_a_config_as_vllm_wraps_it(tmp_path):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.eagle1(tmp_path / "head")
    target = read_spec(tmp_path / "model")
    expected = read_head("eagle", tmp_path / "head", target)
    path = tmp_path / "head" / "config.json"
    inner = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "eagle", "model": {**inner, "eagle_fc_bias": True}}))
    assert read_head("eagle", tmp_path / "head", target) == expected
    path.write_text(json.dumps({"model_type": "eagle", "model": inner, "logit_scale": 2.0}))
    with pytest.raises(SlipstreamError, match="logit_scale"):
        read_head("eagle", tmp_path / "head", target)


def test_layers_that_draft_are_left_out_without_the_method(tmp_path):
    """A model without such layers gives an error that says so."""
    tiny_models.write(tmp_path, "glm4_moe")
    with pytest.raises(ConfigError, match="num_nextn_predict_layers = 0"):
        LLM(str(tmp_path), speculative_config={"method": "mtp"}, **SIZES)
    with LLM(str(tmp_path), **SIZES) as llm:
        expected = answers(llm, SETTINGS["greedy"])
    draft_heads.mtp(tmp_path)
    with LLM(str(tmp_path), **SIZES) as llm:
        assert answers(llm, SETTINGS["greedy"]) == expected
    with LLM(
        str(tmp_path), speculative_config={"method": "mtp", "num_speculative_tokens": 2}, **SIZES
    ) as llm:
        assert answers(llm, SETTINGS["greedy"]) == expected
        assert llm.core.stats().spec_accepted_tokens > 0


def test_layers_by_their_other_names(tmp_path):
    """`eagle_config` counts the states behind layers; default layers are a low, a middle and a high one."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=8)
    target = read_spec(tmp_path / "model")
    for name, changes, expected in (
        ("plain", {"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
        (
            "inner",
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            },
            (2, 4, 6),
        ),
    ):
        draft_heads.eagle(tmp_path / name, **changes)
        assert read_head("eagle3", tmp_path / name, target).spec.aux_layers == expected
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["draft_vocab_size"] == draft_heads.DRAFT_VOCAB


MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
"""`eagle_config` as ModelOpt writes it, without the numbers of layers."""


def test_fields_of_eagle_config(tmp_path):
    """Are read as those beside it, or refused by name."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=8)
    target, numbers = read_spec(tmp_path / "model"), "eagle_aux_hidden_state_layer_ids"

    def read(**eagle_config):
        draft_heads.eagle(
            tmp_path / "head", **{numbers: None}, eagle_config={**MODELOPT, **eagle_config}
        )
        return read_head("eagle3", tmp_path / "head", target).spec

    assert (read(**{numbers: [0, 1, 3]}).aux_layers, read().fc_norm) == ((1, 2, 4), None)
    assert read(norm_before_fc=True).fc_norm == "joint"
    draft_heads.eagle(tmp_path / "head", eagle_config={**MODELOPT, "norm_before_fc": True})
    assert read_head("eagle3", tmp_path / "head", target).spec.aux_layers == (1, 2, 4)
    for key, value in MODELOPT.items():
        if key != "parallel_draft_heads_num_layers":
            with pytest.raises(SlipstreamError, match=f"eagle_config.{key} = "):
                read(**{key: (not value) if isinstance(value, bool) else 2})
    with pytest.raises(SlipstreamError, match=r"eagle_config\.fc_norm = True"):
        read(fc_norm=True)
    draft_heads.eagle(tmp_path / "head", eagle_config={numbers: [1, 2, 3]})
    with pytest.raises(SlipstreamError, match="is given twice"):
        read_head("eagle3", tmp_path / "head", target)


SPECULATORS = {
    "norm_before_residual": False, "norm_before_fc": True, "fc_norm": False, "norm_output": True, "embed_requires_grad": False,
    "target_hidden_size": None, "has_no_defaults_at_init": False, "tie_word_embeddings": False, "transformers_version": "5.0",
}  # fmt: skip
"""Every field of the format's config that `draft_heads.eagle` leaves out."""


def test_fields_of_speculators(tmp_path):
    """Each is honoured, has no effect here, or is refused by name with a value that is not computed."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    target = read_spec(tmp_path / "model")

    def read(change=lambda config, tensors: None, **changes):
        tensors = draft_heads.eagle(
            tmp_path / "head", speculators=True, **{**SPECULATORS, **changes}
        )
        config = json.loads((tmp_path / "head" / "config.json").read_text())
        change(config, tensors)
        draft_heads.write(tmp_path / "head", config, tensors, "layers.0.")
        return read_head("eagle3", tmp_path / "head", target).spec

    def in_layer(**changes):
        return lambda config, tensors: config["transformer_layer_config"].update(changes)

    def own_embedding(config, tensors):
        tensors["embed_tokens.weight"] = torch.zeros(tiny_models.VOCAB, 32)

    def all_tokens(config, tensors):
        own_embedding(config, tensors)
        del config["draft_vocab_size"], tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]

    found = read()
    assert (found.fc_norm, found.norm_output, found.norm_before_residual, found.own_embedding) == (
        "joint",
        True,
        False,
        False,
    )
    assert read(norm_before_residual=True).norm_before_residual
    assert read(own_embedding, embed_requires_grad=True).own_embedding
    assert (
        read(
            in_layer(layer_types=["full_attention"], sliding_window=None, use_sliding_window=False)
        )
        == found
    )
    for change, changes, message in (
        (None, {"target_hidden_size": 64}, "target_hidden_size = 64"),
        (
            None,
            {"embed_requires_grad": True},
            "embed_requires_grad = True.*lacks embed_tokens.weight",
        ),
        (
            all_tokens,
            {"tie_word_embeddings": True},
            "tie_word_embeddings = True.*needs its own lm_head.weight",
        ),
        (None, {"num_experts": 2}, "num_experts = 2"),
        (in_layer(layer_types=["sliding_attention"]), {}, "transformer_layer_config.layer_types"),
        (in_layer(model_type="qwen3"), {}, "transformer_layer_config.model_type = 'qwen3'"),
        (in_layer(hidden_size=64), {}, "transformer_layer_config.hidden_size = 64"),
    ):
        with pytest.raises(SlipstreamError, match=message):
            read(*([] if change is None else [change]), **changes)


@pytest.mark.parametrize("name", ["fc.bias", "input_norm.weight", "fc_norm.0.weight"])
def test_tensors_that_the_config_does_not_promise(tmp_path, name):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    tensors = draft_heads.eagle(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    draft_heads.write(tmp_path / "head", config, {**tensors, name: torch.zeros(32)}, "midlayer.")
    refused(
        str(tmp_path / "model"),
        tmp_path / "head",
        f"tensor '{name}' that the draft head has no place for",
    )
