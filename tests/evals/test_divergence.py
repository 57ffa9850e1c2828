"""Perplexity and divergence, against transformers and torch on whole logits, and `slipstream eval`."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError, EngineError
from slipstream.evals import scorer as scorer_module
from slipstream.evals.divergence import KL_EDGES, compare, token_kl
from slipstream.evals.perplexity import perplexity
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import Document, Window, cut
from slipstream.worker.start.canary import run_canary
from tests.support import tiny_models

TEXT = "hello the world, in the other hour the hello is here and the wind is there. " * 3
CONTEXT = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny checkpoints, the second with other weights in one layer's MLP; and transformers' models of both."""
    a, b = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    first = tiny_models.build_with_tokenizer(a, num_hidden_layers=4)
    shutil.copytree(a, b, dirs_exist_ok=True)
    change(b, "model.layers.2.mlp.down_proj.weight", lambda w: w * 1.3)
    second = type(first).from_pretrained(b, dtype=torch.float32)
    return a, b, first, second


def change(folder, name, how):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: how(tensors[name]).contiguous()}, file, metadata={"format": "pt"})


def load(path, context=CONTEXT, **settings):
    given = {"dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    return Scorer.load(EngineArgs(model=str(path), **given), context=context)


@pytest.fixture(scope="module")
def scorers(models):
    """Scorers of both models, with default settings."""
    return load(models[0]), load(models[1])


def windows(scorer, stride=CONTEXT, context=CONTEXT):
    return list(
        cut(
            [Document(text=TEXT), Document(text="and so on")],
            scorer.tokenizer,
            context=context,
            stride=stride,
        )
    )


def theirs(model, window):
    """float32 [N, V] that predict the scored tokens, and those."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([window.token_ids])).logits[0]
    return logits[window.num_context - 1 : -1], torch.tensor(window.token_ids[window.num_context :])


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2", "falcon_h1", "zamba2"])
def test_models_with_states_score_and_go_on_as_transformers(family, tmp_path):
    model = tiny_models.build_with_tokenizer(tmp_path, family)
    scorer = load(tmp_path)
    written = int(scorer.step(0, 5).states.write.max())
    assert 0 < written < min(len(kv.state.conv) for kv in scorer.kv if kv.state is not None)
    ids = [9 + i % 40 for i in range(37)]
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0, len(ids) :]
    exact = [t for t in theirs.tolist() if t not in scorer.tokenizer.eos_token_ids]
    assert scorer.greedy(ids, 9) == exact
    canary = scorer.canary(ids)
    found = run_canary(scorer.forwards, scorer.kv, canary, context=CONTEXT)
    assert (found.num_tokens, found.ok) == (len(ids), True)
    assert found.kl_mean < 1e-6


@pytest.mark.parametrize("stride", [CONTEXT, 24])
def test_perplexity_is_transformers(models, scorers, stride):
    scorer = scorers[0]
    cutting = windows(scorer, stride)
    nll = [
        torch.nn.functional.cross_entropy(*theirs(models[2], w), reduction="none") for w in cutting
    ]
    found = perplexity(scorer, cutting)
    assert found.perplexity == pytest.approx(math.exp(torch.cat(nll).mean()), rel=1e-4)
    assert found.num_tokens == sum(len(n) for n in nll)
    assert found.num_windows == len(cutting)


def standard_error(means, counts):
    """Standard error of the mean over all tokens, for windows of `counts` tokens that differ by
    chance, with n − 1 as for n means."""
    n, total = len(means), sum(counts)
    mean = sum(m * c for m, c in zip(means, counts, strict=True)) / total
    parts = [(c / total * (m - mean)) ** 2 for m, c in zip(means, counts, strict=True)]
    return math.sqrt(sum(parts) * n / (n - 1))


def test_divergence_is_that_of_whole_logits(models, scorers):
    a, b = scorers
    cutting = windows(a)
    found = compare(a, b, cutting, num_worst=2)
    pairs = [(theirs(models[2], w)[0], theirs(models[3], w)[0]) for w in cutting]
    logs = [(p.log_softmax(-1), q.log_softmax(-1)) for p, q in pairs]
    kl = torch.cat(
        [
            torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
            for p, q in logs
        ]
    )
    assert found.kl.mean == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.kl.max == pytest.approx(kl.max().item(), rel=1e-3)
    assert found.kl.p99 == pytest.approx(
        kl.sort().values[math.ceil(0.99 * len(kl)) - 1].item(), rel=1e-3
    )
    p, q = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert found.top1_agreement == pytest.approx(
        (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    )
    shared = [
        len({*x} & {*y}) / 5
        for x, y in zip(p.topk(5).indices.tolist(), q.topk(5).indices.tolist(), strict=True)
    ]
    assert found.top5_agreement == pytest.approx(sum(shared) / len(shared))
    assert 0 < found.top5_agreement < 1
    assert sum(found.kl.histogram) == len(kl)
    for count, low, high in zip(found.kl.histogram[1:-1], KL_EDGES[1:], KL_EDGES[2:], strict=False):
        assert abs(count - ((kl > low) & (kl <= high)).sum()) <= 1
    assert found.perplexity_a == pytest.approx(perplexity(a, cutting).perplexity)
    assert found.perplexity_b == pytest.approx(perplexity(b, cutting).perplexity)
    assert found.perplexity_ratio == pytest.approx(found.perplexity_b / found.perplexity_a)
    assert found.kl.stderr == pytest.approx(
        standard_error(found.window_kl, [len(p) for p, _ in pairs])
    )
    worst = found.worst[0]
    assert worst.window == max(range(len(cutting)), key=lambda i: found.window_kl[i])
    assert worst.kl_mean == pytest.approx(max(found.window_kl))
    p, q = pairs[worst.window]
    at = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).argmax()
    for row, likely in ((p[at], worst.expected_a), (q[at], worst.expected_b)):
        best = row.softmax(-1).topk(len(likely)).values.tolist()
        assert [c.probability for c in likely] == pytest.approx(best, rel=1e-3)


def test_what_parts_most_is_shown_once(scorers):
    a, b = scorers
    first, second = windows(a)[:2]
    found = compare(a, b, [first, second, first], num_worst=3, layers=False)
    assert sorted(w.window for w in found.worst) == [0, 1]


def test_the_culprit_is_visible(scorers):
    found = compare(*scorers, windows(scorers[0])[:2])
    own = [layer.own for layer in found.layers]
    state = [layer.state for layer in found.layers]
    assert own[2] > 0.05
    assert max(own[0], own[1], own[3]) < 1e-5
    assert state[1] < 1e-5 < state[2]
    assert state[3] > 1e-3  # it is carried on


def test_the_same_model_is_the_same(models, scorers):
    a = scorers[0]
    found = compare(a, load(models[0]), windows(a))
    assert found.kl.mean < 1e-9
    assert found.top1_agreement == found.top5_agreement == 1.0
    assert found.perplexity_ratio == pytest.approx(1.0)
    assert max(layer.state for layer in found.layers) < 1e-6


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_what_would_run_is_measured(models, kv_cache_dtype):
    """The format of the cache counts."""
    a = load(models[0], kernels="reference")
    b = load(models[0], kernels="reference", kv_cache_dtype=kv_cache_dtype)
    found = compare(a, b, windows(a))
    assert (found.kl.mean > 1e-6) == (kv_cache_dtype != "auto")


def test_steps_and_rows_at_a_time_change_nothing(scorers, monkeypatch):
    a, b = scorers
    whole = compare(a, b, windows(a))
    monkeypatch.setattr(scorer_module, "STEP_TOKENS", 7)
    monkeypatch.setattr(scorer_module, "LOGITS_BYTES", 4 * tiny_models.VOCAB * 5)
    sizes = []
    monkeypatch.setattr(
        Scorer, "logits", lambda self, h, was=Scorer.logits: sizes.append(len(h)) or was(self, h)
    )
    found = compare(a, b, windows(a))
    assert max(sizes) == 5
    assert found.kl.mean == pytest.approx(whole.kl.mean, rel=1e-3)
    assert found.perplexity_b == pytest.approx(whole.perplexity_b, rel=1e-5)


def test_greedy_is_the_engines(models, scorers):
    scorer = scorers[0]
    ids = scorer.tokenizer.encode("hello the")
    with LLM(
        str(models[0]), dtype="float32", device="cpu", max_model_len=CONTEXT, max_num_seqs=1
    ) as llm:
        answer = llm.generate("hello the", SamplingParams(temperature=0, max_tokens=12))[0].outputs[
            0
        ]
    ended = [t for t in answer.token_ids if t not in scorer.tokenizer.eos_token_ids]
    assert scorer.greedy(ids, 12) == ended
    assert len(scorer.greedy(ids, 10_000)) <= CONTEXT - len(ids)  # the context ends


def test_impossible_tokens_add_nothing():
    p = torch.tensor([[0.0, 0.0, -math.inf]])
    q = torch.tensor([[1.0, 0.0, -math.inf]])
    wanted = 0.5 * (math.log(0.5) - math.log(math.e / (1 + math.e))) + 0.5 * (
        math.log(0.5) - math.log(1 / (1 + math.e))
    )
    assert token_kl(p, q).item() == pytest.approx(wanted, rel=1e-5)


def test_other_depths_have_no_layers(scorers, tmp_path):
    tiny_models.write_with_tokenizer(tmp_path, num_hidden_layers=2)
    a, b = scorers[0], load(tmp_path)
    found = compare(a, b, windows(a))
    assert found.layers == ()
    assert "4 layers" in found.why_no_layers
    assert found.kl.mean > 0


def test_layers_with_several_residuals_are_not_compared_one_by_one(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path, "zamba2")
    a, b = load(tmp_path), load(tmp_path, quantization="int8")
    found = compare(a, b, windows(a))
    assert found.layers == ()
    assert "several residuals" in found.why_no_layers
    assert 0 < found.kl.mean < 0.1


def test_errors_say_what_to_do(models, scorers, tmp_path):
    a = scorers[0]
    with pytest.raises(ConfigError, match="no text to score"):
        perplexity(a, [Window(token_ids=(1,), num_context=1)])
    with pytest.raises(ConfigError, match="the token 5000"):
        perplexity(a, [Window(token_ids=(1, 5000), num_context=1)])
    with pytest.raises(ConfigError, match="beyond the 256"):
        load(models[0], context=512)
    with pytest.raises(ConfigError, match="more than the context"):
        a.hidden([1] * (CONTEXT + 1))
    tiny_models.write_with_tokenizer(tmp_path / "wide", vocab_size=320)
    with pytest.raises(ConfigError, match=r"vocabulary of 288 tokens and .* of 320"):
        compare(a, load(tmp_path / "wide"), windows(a))
    shutil.copytree(models[0], tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(words))
    with pytest.raises(ConfigError, match="their vocabularies differ"):
        compare(a, load(tmp_path / "other"), windows(a))
    shutil.copytree(models[0], tmp_path / "broken")
    change(tmp_path / "broken", "model.norm.weight", lambda w: w * math.nan)
    with pytest.raises(EngineError, match="no number"):
        perplexity(load(tmp_path / "broken"), windows(a))


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*words):
        text = ["--text", str(tmp_path / "text.txt"), "--part=all", "--context=64", "--windows=2"]
        code = main(
            ["eval", *map(str, words), *text, "--device=cpu", "--num-threads=1", "--dtype=float32"]
        )
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in words else out

    return run


def test_the_command_measures_the_perplexity_of_one_model(models, scorers, command):
    code, found = command(models[0], "--json")
    a = scorers[0]
    assert code == 0
    assert found["perplexity"] == pytest.approx(perplexity(a, windows(a)[:2]).perplexity)
    assert found["text"]["num_windows"] == 2
    assert found["run_as"]["dtype"] == "float32"
    assert "perplexity" in command(models[0])[1]


@pytest.mark.parametrize("build", [tiny_models.build_encoder, tiny_models.build_t5])
def test_command_refuses_what_is_no_decoder(build, command, tmp_path):
    build(tmp_path / "model")
    tiny_models.write_tokenizer(tmp_path / "model")
    code, found = command(tmp_path / "model", "--json")
    assert code == 3
    assert found["error"]["field"] == "model_type"
    assert "only decoders" in found["error"]["message"]


def test_the_command_compares_two_models(models, command):
    code, found = command(models[0], models[1], "--json", "--worst=1")
    assert code == 0
    assert found["kl"]["mean"] > 0
    assert len(found["worst"]) == 1
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2, 3]
    assert command(models[0], models[1], "--json", "--no-layers")[1]["layers"] == []
    out = command(models[0], models[1])[1]
    assert "layer 2 (" in out
    assert "A expects" in out


def test_command_with_a_twin_of_an_option(models, command):
    found = command(models[0], "--json", "--kv-cache-dtype-b=int8")[1]
    sides = found["original"], found["compressed"]
    assert [side["run_as"]["kv_cache_dtype"] for side in sides] == ["float32", "int8"]
    assert sides[0]["model"] == sides[1]["model"]
    assert found["kl"]["mean"] > 0


def test_command_keeps_to_a_budget(models, command):
    code, found = command(models[0], models[1], "--json", "--max-kl=1e-9")
    assert code == 1
    assert not found["within_max_kl"]
    assert command(models[0], models[1], "--json", "--max-kl=1e9")[0] == 0
    for words, field in (
        ([models[0], "--max-kl=0"], "B"),
        ([*models[:2], "--max-kl=nan"], "max_kl"),
    ):
        code, found = command(*words, "--json")
        assert (code, found["error"]["field"]) == (2, field)
    for option in ("--max-kl=1", "--report=.", "--speed"):
        assert command(models[0], "--json", option)[1]["error"]["field"] == "B"


def test_command_leaves_a_report(models, command, tmp_path):
    folder = tmp_path / "a new" / "folder"
    found = command(models[0], models[1], "--json", f"--report={folder}")[1]
    assert json.loads((folder / "slipstream-report.json").read_text())["kl"] == found["kl"]
    assert "<html" in (folder / "slipstream-report.html").read_text()
    inside = folder / "slipstream-report.json" / "no folder"
    assert (
        command(models[0], models[1], "--json", f"--report={inside}")[1]["error"]["field"]
        == "report"
    )
