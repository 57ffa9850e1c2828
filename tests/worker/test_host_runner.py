"""Steps without torch give what torch's runner gives: tokens, draws for a seed, log-probabilities; and torch is not imported.

Both run the same C++ kernels over the same packed weights, and one sampler. Tokens must be equal. What NumPy computes beside
(log-probabilities) is float32 in another order of sums: 1e-5.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.config import EngineArgs
from slipstream.costs.estimate import estimate
from slipstream.errors import CheckpointError
from slipstream.kernels.cpu import native
from slipstream.model.load.checkpoint import random_arrays
from slipstream.spec.description import read_spec
from slipstream.spec.parameters import parameters
from slipstream.spec.reason import Reason
from slipstream.worker.forward.forward_paths import torch_reason
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.thread_governor import ThreadGovernor
from slipstream.worker.torch_loading import TorchLoaded
from tests.model.formats.test_compressed import AWQ_SIZES, compress, compress_awq, compress_gptq
from tests.model.formats.test_compressed import SIZES as ROUNDED_SIZES
from tests.support import draft_heads, tiny_models, vision_models
from tests.support.waiting import free_port
from tests.worker import without_torch

pytestmark = pytest.mark.skipif(
    not native.has_cpu_kernels(), reason="the C++ kernels are not built"
)

SIZES = dict(
    device="cpu",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    num_threads=1,
    kv_cache_bytes=2**20,
)
NOT_COVERED = {"family": "opt", "word_embed_proj_dim": 16}  # by the C++ program
PROMPTS = [
    {"prompt_token_ids": ids}
    for ids in ([5, 9, 200, 41, 7, 7, 3], [11] * 20, [4, 8], [30, 31, 32, 33, 34])
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=30, min_p=0.02, seed=5, max_tokens=12, ignore_eos=True
)
PENALISED = SamplingParams(
    temperature=1.0,
    seed=2,
    max_tokens=12,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    min_tokens=5,
)
BIASED = SamplingParams(
    temperature=0.8,
    seed=9,
    max_tokens=8,
    logit_bias={7: 4.0, 9: -100.0},
    allowed_token_ids=[7, 9, 40, 50],
)
SCORED = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
SAMPLINGS = [GREEDY, DRAWN, PENALISED, BIASED, SCORED]


def answers(llm, samplings=SAMPLINGS):
    return [llm.generate(PROMPTS, s, progress=False) for s in samplings]


def compared(model, monkeypatch, runner=HostLoaded, samplings=SAMPLINGS, **settings):
    """Answers by both runners are the same."""
    settings = {**SIZES, "skip_tokenizer_init": True, **settings}
    with LLM(str(model), **settings) as llm:
        assert type(llm.core.executor.runner.loaded) is runner
        ours = answers(llm, samplings)
        stats = llm.stats()
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
        with LLM(str(model), **settings) as llm:
            assert type(llm.core.executor.runner.loaded) is TorchLoaded
            theirs = answers(llm, samplings)
    for a, b in zip(chain(*ours), chain(*theirs), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(positions(a), positions(b), strict=True):
            assert [e.token_id for e in x] == [e.token_id for e in y]
            np.testing.assert_allclose(
                [e.logprob for e in x], [e.logprob for e in y], rtol=0, atol=1e-5
            )
            assert [e.rank for e in x] == [e.rank for e in y]
    return stats


def positions(output):
    found = [
        *(output.outputs[0].logprobs or ()),
        *(p for p in output.prompt_logprobs or () if p is not None),
    ]
    return [(p.chosen, *p.top) for p in found]


WITHOUT_PROGRAM = (
    "gemma3n_text",
    "mimo_v2_flash",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "kolibri1",
    "laguna",
    "diffllama",
)


@pytest.mark.parametrize("family", [f for f in tiny_models.FAMILIES if f not in WITHOUT_PROGRAM])
def test_every_family_answers_as_with_torch(tmp_path, monkeypatch, family):
    tiny_models.write(tmp_path, family)
    compared(tmp_path, monkeypatch, samplings=[GREEDY, DRAWN, SCORED])


@pytest.mark.parametrize("family", WITHOUT_PROGRAM)
def test_a_family_without_a_program_runs_with_torch(tmp_path, family):
    tiny_models.write(tmp_path, family)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES) as llm:
        assert not isinstance(llm.core.executor.runner.loaded, HostLoaded)
        assert all(
            len(o.outputs[0].token_ids) == GREEDY.max_tokens for o in answers(llm, [GREEDY])[0]
        )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 6},
        {"speculative_model": "ngram", "num_speculative_tokens": 3},
        {"quantization": "int8"},
        {"num_threads": 2, "block_size": 4},
    ],
    ids=lambda s: next(iter(s), "whole"),
)
def test_hybrid_program_answers_as_the_loop_over_its_layers(tmp_path, monkeypatch, settings):
    """Recurrent states of both: prompts in parts, decodes, drafts, and prompts that the prefix cache has."""
    tiny_models.write(tmp_path, "qwen3_next")
    settings = {**SIZES, "skip_tokenizer_init": True, **settings}

    def twice(llm):
        return [answers(llm, [GREEDY, SCORED]) for _ in range(2)]

    with LLM(str(tmp_path), **settings) as llm:
        assert type(llm.core.executor.runner.loaded) is HostLoaded
        ours = twice(llm)
    monkeypatch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
    eager = lambda decoder: Reason("the loop runs it")
    monkeypatch.setattr("slipstream.worker.forward.forwards.compile_program", eager)
    with LLM(str(tmp_path), **settings) as llm:
        assert llm.core.executor.runner.forwards.base.name == "eager"
        theirs = twice(llm)
    for a, b in zip(chain(*chain(*ours)), chain(*chain(*theirs)), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(positions(a), positions(b), strict=True):
            np.testing.assert_allclose(
                [e.logprob for e in x], [e.logprob for e in y], rtol=0, atol=1e-4
            )


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"max_num_batched_tokens": 6},
        {
            "kv_cache_bytes": 24 * 2**10,
            "block_size": 4,
            "max_model_len": 36,
        },  # too few blocks for all four: some begin again
        {"quantization": "int8"},
        {"quantization": "int4-g32"},
        {"speculative_model": "ngram", "num_speculative_tokens": 3},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
        {"num_threads": 2},
    ],
    ids=lambda s: next(iter(s)),
)
def test_every_sampling_answers_as_with_torch(tmp_path, monkeypatch, settings):
    tiny_models.write(tmp_path, hidden_size=64)
    stats = compared(tmp_path, monkeypatch, **settings)
    assert (stats.num_preemptions > 0) == (settings.get("block_size") == 4)


@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize("kind", [*draft_heads.BY_KIND, "mtp", "draft"])
def test_drafts_are_torchs(tmp_path, monkeypatch, kind, block_size):
    """The same tokens, as many drafts, and as many of them right."""
    model, folder = tmp_path / "model", tmp_path / "drafts"
    method, write = draft_heads.BY_KIND.get(kind, (kind, None))
    tiny_models.write(
        model, **({"family": "deepseek_v3"} if method == "mtp" else {"num_hidden_layers": 6})
    )
    speculation = {
        "method": method,
        "num_speculative_tokens": 3,
        "model": str(folder),
        "quantization": "none",
    }
    if method == "mtp":
        draft_heads.mtp(model)
        del speculation["model"], speculation["quantization"]
    elif method == "draft":
        tiny_models.write(folder, seed=1, num_hidden_layers=1)
        del speculation["quantization"]
    else:
        write(folder)
    settings = {
        "speculative_config": speculation,
        "max_num_batched_tokens": 16,
        "block_size": block_size,
    }
    counts = []
    for runner in ("ours", "torchs"):
        with monkeypatch.context() as patch:
            if runner == "torchs":
                patch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
                patch.setattr(HostLoaded, "allocate", None)
            with LLM(str(model), skip_tokenizer_init=True, **{**SIZES, **settings}) as llm:
                assert type(llm.core.executor.runner.loaded) is (
                    HostLoaded if runner == "ours" else TorchLoaded
                )
                found = [
                    [o.outputs[0].token_ids for o in outputs] for outputs in answers(llm, SAMPLINGS)
                ]
                stats = llm.stats()
                counts.append((found, stats.spec_draft_tokens, stats.spec_accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_what_the_program_lacks_is_torchs(tmp_path, caplog):
    tiny_models.write(tmp_path, **NOT_COVERED)
    caplog.set_level("INFO", logger="slipstream.engine")
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES) as llm:
        assert type(llm.core.executor.runner.loaded) is TorchLoaded
    assert any(
        m.startswith("torch runs the steps: ") and "embed_size" in m for m in caplog.messages
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"kernels": "reference"}, "kernels='reference'"), ({"enable_lora": True}, "enable_lora")],
)
def test_settings_that_torch_is_needed_for_are_named(tmp_path, caplog, settings, why):
    tiny_models.write(tmp_path)
    caplog.set_level("INFO", logger="slipstream.engine")
    with LLM(str(tmp_path), skip_tokenizer_init=True, **{**SIZES, **settings}) as llm:
        assert type(llm.core.executor.runner.loaded) is TorchLoaded
    assert any(why in m for m in caplog.messages)
    config = estimate(
        EngineArgs(model=str(tmp_path), **{**SIZES, **settings}), read_spec(tmp_path)
    )[0]
    assert why in str(torch_reason(config, read_spec(tmp_path)))


def test_random_weights_depend_on_the_seed_alone(config_only):
    settings = {**SIZES, "load_format": "dummy", "skip_tokenizer_init": True}
    found = []
    for seed in (1, 1, 2):
        with LLM(str(config_only), seed=seed, quantization="int8", **settings) as llm:
            runner = llm.core.executor.runner
            assert type(runner.loaded) is HostLoaded
            found.append(
                [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)]
            )
    assert found[0] == found[1] != found[2]
    norms = runner.model.decoder.final_norm
    products = random_arrays(parameters(runner.model.description.spec), "float32", 2).values
    assert (norms.weight == 1).all()
    assert np.std(products["layers.0.mlp.down.weight"]) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_that_hold_rounded_weights(tmp_path, monkeypatch, kind, dtype):
    tiny_models.write(tmp_path, **ROUNDED_SIZES)
    compress(tmp_path, kind)
    compared(tmp_path, monkeypatch, samplings=[GREEDY, SCORED], dtype=dtype)


def test_zero_points_of_4_bits(tmp_path, monkeypatch):
    tiny_models.write(tmp_path, **ROUNDED_SIZES)
    compress(tmp_path, "int4-g32")
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    for stem in [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]:
        (rows, groups), whole = tensors[f"{stem}.weight_scale"].shape, np.iinfo(np.int32)
        words = random.integers(whole.min, whole.max, (rows // 8, groups), np.int32)
        tensors[f"{stem}.weight_zero_point"] = words
    save_file({n: np.asarray(t) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    compared(tmp_path, monkeypatch, samplings=[GREEDY, SCORED])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("tool", ["gptq", "gptq_v2", "awq", "awq by 32"])
def test_weights_that_gptq_and_awq_rounded(tmp_path, monkeypatch, tool, family):
    experts = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    tiny_models.write(
        tmp_path, family, **(AWQ_SIZES if tool.startswith("awq") else ROUNDED_SIZES), **experts
    )
    if tool.startswith("awq"):
        compress_awq(tmp_path, 32 if "32" in tool else 128)
    else:
        compress_gptq(tmp_path, **({"checkpoint_format": "gptq_v2"} if tool == "gptq_v2" else {}))
    if tool == "gptq_v2":  # writes its zero points as they are
        tensors = {n: np.asarray(t) for n, t in load_file(tmp_path / "model.safetensors").items()}
        eights = {
            n: np.full_like(t, 0x88888888 - 2**32)
            for n, t in tensors.items()
            if n.endswith("qzeros")
        }
        save_file(tensors | eights, tmp_path / "model.safetensors")
    compared(tmp_path, monkeypatch, samplings=[GREEDY, SCORED])


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("qzeros", lambda t: t + 1, "zero points"),
        ("g_idx", lambda t: t[::-1].copy(), "reordered inputs"),
        ("qweight", lambda t: t[:2], "is [2, "),
        ("scales", lambda t: t[:, :8].copy(), "is [2, 8]"),
        ("scales", None, "lacks"),
        ("qweight", None, "lacks"),
    ],
)
def test_gptqs_tensors_that_do_not_fit_are_named(tmp_path, part, change, named):
    tiny_models.write(tmp_path, **ROUNDED_SIZES)
    compress_gptq(tmp_path)
    tensors = {n: np.asarray(t) for n, t in load_file(tmp_path / "model.safetensors").items()}
    name = f"model.layers.1.self_attn.k_proj.{part}"
    value = tensors.pop(name)
    save_file(
        tensors if change is None else {**tensors, name: change(value)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=re.escape(named)) as error:
        LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES)
    assert error.value.field == name


@pytest.mark.parametrize(
    ("change", "named"), [("lost", "weight_scale"), ("shape", "is [8, "), ("zeros", "zero points")]
)
def test_rounded_tensors_that_do_not_fit_are_named(tmp_path, change, named):
    tiny_models.write(tmp_path, **ROUNDED_SIZES)
    compress(tmp_path, "int4-g32")
    tensors = {n: np.asarray(t) for n, t in load_file(tmp_path / "model.safetensors").items()}
    stem = "model.layers.1.mlp.down_proj"
    if change == "lost":
        del tensors[f"{stem}.weight_scale"]
    elif change == "shape":
        tensors[f"{stem}.weight_packed"] = tensors[f"{stem}.weight_packed"][:8]
    else:
        tensors[f"{stem}.weight_zero_point"] = np.zeros((8, 6), np.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(named)) as error:
        LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES)
    assert stem in str(error.value)


def test_a_number_of_threads_that_was_asked_for_is_kept(tmp_path):
    tiny_models.write(tmp_path)
    for number in (None, 2):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, **{**SIZES, "num_threads": number}
        ) as llm:
            runner = llm.core.executor.runner
            assert (runner.forwards.base.governor is None) == (
                number is not None or runner.config.device.num_threads == 1
            )


@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}], ids=str
)
def test_answers_do_not_depend_on_how_many_threads_work(tmp_path, monkeypatch, settings):
    """Bit by bit, with a number that changes after every decode."""
    tiny_models.write(tmp_path, hidden_size=64)
    changes, prompts = [], []

    def note(self, num_tokens, num_keys, seconds):
        assert num_keys >= num_tokens > 0 < seconds
        changes.append(1 + len(changes) % 2)
        self._threads.use(changes[-1])

    monkeypatch.setattr("slipstream.worker.thread_governor.ThreadGovernor.note", note)
    monkeypatch.setattr(
        "slipstream.worker.thread_governor.ThreadGovernor.begin_prompts",
        lambda self: prompts.append(self),
    )
    found = []
    for follows in (False, True):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, **{**SIZES, "num_threads": 2, **settings}
        ) as llm:
            runner = llm.core.executor.runner
            governor = ThreadGovernor(runner.ops.pool) if follows else None
            runner.forwards.base.governor = governor
            outputs = list(chain(*answers(llm)))
            scores = [[(e.token_id, e.logprob) for p in positions(o) for e in p] for o in outputs]
            found.append(([o.outputs[0].token_ids for o in outputs], scores))
    assert found[0] == found[1]
    assert len(changes) > 20
    assert prompts


# --- Encoders -------------------------------------------------------------------------------------------------------------

TEXTS = [{"prompt_token_ids": [5 + 7 * i % 190 for i in range(n)]} for n in (5, 1, 60, 16, 17)]


def vectors(path, kind, read, **settings):
    with LLM(str(path), skip_tokenizer_init=True, device="cpu", num_threads=1, **settings) as llm:
        assert type(llm.core.executor.runner.loaded) is kind
        return np.array(read(llm))


@pytest.mark.parametrize("family", [f for f in tiny_models.ENCODERS if f[:7] != "deberta"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_encoders_give_torchs_vectors(tmp_path, monkeypatch, family, pooling):
    tiny_models.build_encoder(tmp_path, family)
    tiny_models.write_sentence_transformers(tmp_path, mode=pooling)

    def embedded(llm):
        return [o.embedding for o in llm.embed(TEXTS)]

    settings = {
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    }  # several steps
    ours = vectors(tmp_path, HostLoaded, embedded, **settings)
    rounded = vectors(tmp_path, HostLoaded, embedded, dtype="bfloat16")
    monkeypatch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
    theirs = vectors(tmp_path, TorchLoaded, embedded, **settings)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    # torch's own error in bfloat16 differs between families ninefold, and a little between processors
    own = abs(vectors(tmp_path, TorchLoaded, embedded, dtype="bfloat16") - theirs).max()
    np.testing.assert_allclose(rounded, theirs, rtol=0, atol=1.25 * own + 0.002)


@pytest.mark.parametrize("family", [f for f in tiny_models.SCORING if f[:7] != "deberta"])
def test_cross_encoders_give_torchs_scores(tmp_path, monkeypatch, family):
    """The heads' dense layer, norm and activation are computed, and for BERT the types of a pair's two texts."""
    tiny_models.build_encoder(tmp_path, family, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)

    def scores(kind):
        with LLM(str(tmp_path), device="cpu", dtype="float32", num_threads=1) as llm:
            assert type(llm.core.executor.runner.loaded) is kind
            return [
                o.score for o in llm.score("hello world", ["a b c", "hello", "what is this world"])
            ]

    ours = scores(HostLoaded)
    monkeypatch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
    np.testing.assert_allclose(ours, scores(TorchLoaded), rtol=0, atol=1e-5)
    assert len(set(ours)) == 3


# --- Encoder-decoders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny_models.T5S)
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"kv_cache_bytes": 45 * 2**10, "block_size": 4}],
    ids=str,
)
def test_encoder_decoders_give_torchs_answers(tmp_path, monkeypatch, family, settings):
    """This holds even where too few blocks make some begin again, which encodes their prompts a second time."""
    tiny_models.build_t5(tmp_path, family)
    scored = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    settings = {"max_model_len": 32, **settings}
    stats = compared(
        tmp_path, monkeypatch, samplings=[GREEDY, DRAWN, PENALISED, scored], **settings
    )
    assert (stats.num_preemptions > 0) == ("block_size" in settings)


def test_an_encoder_decoder_needs_no_torch(tmp_path):
    tiny_models.build_t5(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    answer = told_without_torch(
        "run", str(tmp_path), "hello", "--max-tokens", "4", "--json", "--device", "cpu"
    )
    assert answer["text"] is not None


# --- Caches, grammars -----------------------------------------------------------------------------------------------------


def test_an_8_bit_cache(tmp_path):
    """The scales come from random text, which NumPy and torch draw differently: the answers are near, not equal."""
    tiny_models.write(tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_dtype="int8", **SIZES) as llm:
        assert type(llm.core.executor.runner.loaded) is HostLoaded
        assert all(layer.k.dtype == np.int8 for layer in llm.core.executor.runner.kv)
        (ours,) = llm.generate(PROMPTS[:1], SCORED, progress=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES) as llm:
        (theirs,) = llm.generate(PROMPTS[:1], SCORED, progress=False)
    pairs = [
        (a.chosen, b.chosen)
        for a, b in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
    ]
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.3


def test_prefixes_grammars_and_choices(tmp_path, monkeypatch):
    tiny_models.write_with_tokenizer(tmp_path)
    grammar = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5)
    found = []
    for by_torch in (False, True):
        with monkeypatch.context() as patch:
            if by_torch:
                patch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
            with LLM(str(tmp_path), block_size=4, **SIZES) as llm:
                text = "hello hello hello hello hello"
                outputs = [
                    llm.generate(text, s, progress=False)[0]
                    for s in (GREEDY, grammar, several, GREEDY)
                ]
                assert outputs[-1].num_cached_tokens > 0
                assert set(outputs[1].outputs[0].text) <= set("ab")
                found.append([[c.token_ids for c in o.outputs] for o in outputs])
    assert found[0] == found[1]


def python(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told_without_torch(*words):
    done = without_torch.run(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--speculative-model", "ngram"],
        ["--load-format", "dummy"],
        ["--quantization", "int4"],
        ["--repetition-penalty", "1.1"],
    ],
)
def test_run_needs_no_torch(tmp_path, more):
    tiny_models.write_with_tokenizer(tmp_path, hidden_size=128, intermediate_size=128)
    answer = told_without_torch(
        "run", str(tmp_path), "hello", "--max-tokens", "4", "--json", "--device", "cpu", *more
    )
    assert answer["text"] is not None


def test_a_gpu_that_is_not_there_comes_before_torch_that_is_not(tmp_path):
    program = (
        "import sys\nimport slipstream.worker.device as d\nd.driver_sees_gpu = lambda: False\n"
    )
    program += "sys.modules['torch'] = None\nfrom pathlib import Path\nfrom slipstream.errors import ConfigError\n"
    program += "try: d.detect('cuda', Path(sys.argv[1]))\nexcept ConfigError as error: print(error.field, error)"
    told = python(program, str(tmp_path))
    assert told.startswith("device device='cuda': there is no NVIDIA GPU")
    assert "device='cpu'" in told
    assert "the extra gpu" in told


def test_gptqs_weights_need_no_torch(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path, **ROUNDED_SIZES)
    compress_gptq(tmp_path)
    answer = told_without_torch(
        "run", str(tmp_path), "hello", "--max-tokens", "4", "--json", "--device", "cpu"
    )
    assert answer["text"] is not None


def test_an_encoder_needs_no_torch(tiny_encoder):
    answer = told_without_torch(
        "embed", str(tiny_encoder), "hello", "a b c", "--json", "--device", "cpu"
    )
    assert len(answer["embeddings"]) == 2


def test_a_draft_model_needs_no_torch(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    more = ["--speculative-model", str(tmp_path), "--num-speculative-tokens", "2"]
    answer = told_without_torch(
        "run", str(tmp_path), "hello", "--max-tokens", "4", "--json", "--device", "cpu", *more
    )
    assert answer["text"] is not None


@pytest.mark.parametrize("kind", ["eagle3", "eagle31"])
def test_a_draft_head_needs_no_torch(tmp_path, kind):
    tiny_models.write_with_tokenizer(tmp_path / "model", num_hidden_layers=6)
    method, write = draft_heads.BY_KIND[kind]
    write(tmp_path / "head")
    given = json.dumps(
        {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    )
    more = ["--speculative-config", given, "--max-tokens", "4", "--json", "--device", "cpu"]
    answer = told_without_torch("run", str(tmp_path / "model"), "hello", *more)
    assert answer["text"] is not None


@pytest.mark.parametrize("what", ["draft", "rounded", "family", "pictures", "ranks"])
def test_what_needs_torch_says_how_to_get_it(tmp_path, what):
    more, named = [], {"rounded": "mxfp4", "pictures": "max_images=0"}.get(what, "")
    if what == "pictures":
        vision_models.build_vision(tmp_path, "gemma3")
        vision_models.write_tokenizer(
            tmp_path, vision_models.SPECIAL["gemma3"], vision_models.TEMPLATES["gemma3"]
        )
    else:
        tiny_models.write_with_tokenizer(tmp_path, **(NOT_COVERED if what == "family" else {}))
    if what == "draft":  # whose own model torch runs
        tiny_models.write(tmp_path / "drafts", **NOT_COVERED)
        more = ["--speculative-model", str(tmp_path / "drafts")]
    if what == "ranks":  # before a process of theirs is started
        more = ["--tensor-parallel-size", "2"]
    if what == "rounded":
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    done = without_torch.run("run", str(tmp_path), "hello", "--device", "cpu", *more)
    assert done.returncode != 0
    assert "[torch]" in done.stderr
    assert named in done.stderr
    assert done.stderr.startswith(f"slipstream: {tmp_path}: ")  # as it was asked for
    assert "Traceback" not in done.stderr


SERVED = """
import os, sys, json, threading, urllib.request, time
from slipstream.cli.main import main
port = int(sys.argv[2])
def ask():
    url = f"http://127.0.0.1:{port}/v1/completions"
    def answer(**more):
        body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4, "temperature": 0, **more}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as got:
            return json.load(got)
    for _ in range(1200):
        try:
            usage = answer()["usage"]["completion_tokens"]
            break
        except OSError:
            time.sleep(0.1)
    text = answer(structured_outputs={"regex": "[ab]{3}"})["choices"][0]["text"]
    maps = ["/proc/self/maps"] + [f"/proc/{c}/maps" for c in os.listdir("/proc") if c.isdigit() and mine(c)]
    print(usage, len(text), set(text) <= set("ab"), len(maps), any("libtorch" in open(m).read() for m in maps), flush=True)
    os._exit(0)
def mine(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False
threading.Thread(target=ask, daemon=True).start()
main(["serve", sys.argv[1], "--port", str(port), "--device", "cpu", "--served-model-name", "m"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_servers_processes_load_no_torch(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    *_, last = python(SERVED, str(tmp_path), str(free_port())).splitlines()
    assert last == "4 3 True 2 False"
