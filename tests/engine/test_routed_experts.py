"""`enable_return_routed_experts`: an answer's experts are the model's, however they were computed, and a trainer takes them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.compress.replay import replayed_routing
from slipstream.errors import OutOfMemoryError, RequestError
from slipstream.worker.ranks.messages import SwapExperts
from slipstream.worker.start import sizing
from tests.support import tiny_models

PROMPTS = [
    {"prompt_token_ids": [(7 * i + 3 * n) % 50 + 4 for i in range(n)]} for n in (1, 5, 16, 45, 17)
]
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    return path, tiny_models.build(path, "qwen3_moe").requires_grad_(False)


def engine(path, **more) -> LLM:
    given = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=160, kv_cache_bytes=2**23)
    return LLM(str(path), enable_return_routed_experts=True, **{**given, **more})


def experts_of(theirs, token_ids: list[int]) -> np.ndarray:
    """The experts that the transformers model takes for all tokens but the last, in order of number."""
    logits = theirs(torch.tensor([token_ids])[:, :-1], output_router_logits=True).router_logits
    return torch.stack([x.topk(2).indices.sort().values for x in logits], 1).numpy()


def check(theirs, outputs) -> int:
    """Compares answers' experts. Returns how many prompt tokens came from the cache."""
    for output in outputs:
        found = output.outputs[0].routed_experts
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert found.shape == (len(ids) - 1, 2, 2)
        assert np.array_equal(np.sort(found, axis=2), experts_of(theirs, ids))
    return sum(output.num_cached_tokens for output in outputs)


def test_answers_have_their_tokens_experts_also_of_tokens_from_the_cache(made):
    path, theirs = made
    with engine(path) as llm:
        assert check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False)) == 0
        assert check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False)) > 0


def test_ledger_counts_the_experts_of_all_tokens_that_the_cache_holds(made, monkeypatch):
    path, _ = made
    with engine(path) as llm:
        ledger = llm.core.ledger
        held = ledger.num_blocks * ledger.block_size * 2 * 2 * 2  # layers, experts, bytes
        assert ledger.returned_expert_bytes == held
        assert any(line.startswith("tokens' experts: 0.0") for line in ledger.describe())
    free = held + ledger.kv_bytes - 1
    monkeypatch.setattr(sizing, "host_memory", lambda: (2**40, free))
    with pytest.raises(OutOfMemoryError, match=f"{held} bytes.*next to its {ledger.kv_bytes}") as e:
        engine(path)
    most = int(str(e.value).rpartition(" ")[2])  # the value that it names is one that starts
    assert most == ledger.kv_bytes - ledger.block_bytes
    with engine(path, kv_cache_bytes=most) as llm:
        assert llm.core.ledger.num_blocks == ledger.num_blocks - 1


def test_experts_of_a_gpus_cache_alone_are_compared_with_the_hosts_memory():
    ledger = SimpleNamespace(
        **dict(returned_expert_bytes=800, num_blocks=8, block_bytes=10**6, num_kv_tokens=64),
        **dict(kv_bytes=8 * 10**6, state_bytes=0),
    )
    sizing.check_experts(ledger, 800, cache_is_there=True)
    with pytest.raises(OutOfMemoryError, match=r"kv_cache_bytes to at most 7000000$"):
        sizing.check_experts(ledger, 799, cache_is_there=True)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("whole_experts", [False, True])
def test_two_ranks_return_the_models_experts(made, whole_experts):
    """Experts that move between the ranks keep their numbers."""
    path, theirs = made
    settings = {"tensor_parallel_size": 2, "max_num_batched_tokens": 19, "max_num_seqs": 3}
    settings |= {"expert_parallel_size": 2} if whole_experts else {}
    with engine(path, **settings) as llm:
        assert check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False)) == 0
        if whole_experts:
            llm.core.executor._broadcast(SwapExperts([(0, 0, 3), (1, 1, 2)]))
        assert check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False)) > 0
        llm.reset_prefix_cache()
        assert check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False)) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 19, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_bytes": 2**16, "max_model_len": 64},
    ],
    ids=["chunks", "drafts", "preempted"],
)
def test_chunks_drafts_and_preemptions_change_no_tokens_experts(made, settings):
    path, theirs = made
    with engine(path, **settings) as llm:
        check(theirs, llm.generate(PROMPTS, SAMPLING, progress=False))


def test_a_trainer_whose_router_differs_takes_the_engines_experts(made):
    path, theirs = made
    with engine(path) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING, progress=False)
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)

    def farthest(model) -> float:
        """The largest distance from the engine's log-probabilities."""
        logp = model(ids).logits[:, :-1].log_softmax(-1)
        found = 0.0
        for row, text, o in zip(logp, texts, outputs, strict=True):
            for i, p in enumerate(o.outputs[0].logprobs, len(o.prompt_token_ids)):
                found = max(found, abs(float(row[i - 1, text[i]]) - p.chosen.logprob))
        return found

    given = [o.outputs[0].routed_experts for o in outputs]
    assert farthest(theirs) < 1e-3
    routers = [m for m in theirs.modules() if type(m).__name__.endswith("TopKRouter")]
    before = [r.weight.clone() for r in routers]
    torch.manual_seed(0)
    for router in routers:
        router.weight += torch.randn_like(router.weight) * 0.02
    alone = farthest(theirs)
    with replayed_routing(theirs, given, ids.shape[1]):
        replayed = farthest(theirs)
    for router, weight in zip(routers, before, strict=True):
        router.weight.copy_(weight)
    assert replayed < alone / 2
    with (
        pytest.raises(RequestError, match="routed_experts are of"),
        replayed_routing(theirs, [x[:, :1] for x in given], 9),
    ):
        pass


@pytest.mark.parametrize("verb", ["serve", "plan", "run"])
def test_no_verb_takes_experts_that_it_would_not_return(capsys, verb):
    assert main([verb, "model", "--enable-return-routed-experts"]) != 0
    assert "an answer of LLM(...) has its experts" in capsys.readouterr().err
