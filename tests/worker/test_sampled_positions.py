"""A step that samples at several positions of a request: its tokens, where they go, and how each is sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.messages.logprobs import SampledLogprobs
from slipstream.messages.steps import NewRequest, ScheduledRequest, StepPlan, TableUpdate
from slipstream.worker.draft.verification import verified
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.inputs.input_batch import gather
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.sampling.biases import FORBIDDEN
from slipstream.worker.sampling.sampler import sampling_tensors
from tests.support import tiny_models

TOKENS = [(7 * i) % 250 + 5 for i in range(13)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def updates(llm, first):
    """A table of three blocks in every group, from block `first` on."""
    groups = range(len(llm.config.cache.groups))
    return tuple(TableUpdate(g, 0, tuple(range(first + 4 * g, first + 4 * g + 4))) for g in groups)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
def test_several_positions_are_sampled(tmp_path, family, kernels):
    """The last three of a prompt, and then three more in a step of their own; beside others that sample one, or none. The C++
    program, and the layers one by one."""
    theirs = tiny_models.build(tmp_path, family)
    sizes = dict(
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        max_model_len=32,
        max_num_seqs=4,
    )
    with torch.no_grad():
        best = theirs(torch.tensor([TOKENS])).logits[0].argmax(-1).tolist()
    with LLM(str(tmp_path), kernels=kernels, num_threads=1, **sizes) as llm:
        runner = llm.core.executor.runner
        assert isinstance(runner.loaded, HostLoaded) == (kernels == "auto")
        new = NewRequest("a", tuple(TOKENS), 10, GREEDY), NewRequest("b", tuple(TOKENS), 10, GREEDY)
        shares = (
            ScheduledRequest("a", 0, 10, 3, updates(llm, 1)),
            ScheduledRequest("b", 0, 5, 0, updates(llm, 1 + 4 * len(llm.config.cache.groups))),
        )
        result = runner.launch(StepPlan(1, shares, new)).result()
        assert (list(result.token_ids), list(result.num_tokens)) == (best[7:10], [3])
        rows = runner.rows.tokens[runner.rows.rows["a"].index]
        assert rows[8:11].tolist() == best[7:10]
        rows[8:13] = torch.tensor(TOKENS[8:13], dtype=torch.int32)
        shares = ScheduledRequest("a", 10, 3, 3), ScheduledRequest("b", 5, 3, 1)
        result = runner.launch(StepPlan(2, shares)).result()
        assert (list(result.token_ids), list(result.num_tokens)) == (
            [*best[10:13], best[7]],
            [3, 1],
        )
        shares = (
            ScheduledRequest("a", 9, 3, 3),
        )  # every token of the step is sampled: at once, where the kernels can
        rows[8:13] = torch.tensor(TOKENS[8:13], dtype=torch.int32)
        assert list(runner.launch(StepPlan(3, shares)).result().token_ids) == best[9:12]


def test_log_probabilities_of_several_positions(tmp_path):
    theirs = tiny_models.build(tmp_path, "llama")
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    sizes = dict(
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        max_model_len=32,
        max_num_seqs=4,
    )
    with LLM(str(tmp_path), num_threads=1, **sizes) as llm:
        wants = SamplingParams(temperature=0, max_tokens=9, logprobs=2)
        new = NewRequest("b", tuple(TOKENS), 10, GREEDY), NewRequest("a", tuple(TOKENS), 10, wants)
        shares = (
            ScheduledRequest("b", 0, 10, 2, updates(llm, 5)),
            ScheduledRequest("a", 0, 10, 3, updates(llm, 1)),
        )
        result = llm.core.executor.runner.launch(StepPlan(1, shares, new)).result()
    assert list(result.num_tokens) == [2, 3]
    (extra,) = result.extras
    assert isinstance(extra, SampledLogprobs)
    assert (extra.request_ids, extra.token_ids, extra.counts) == (
        ("a",) * 3,
        tuple(result.token_ids[2:]),
        (2,) * 3,
    )
    assert np.frombuffer(extra.logprobs, np.float32) == pytest.approx(
        expected[7:10].amax(1).numpy(), abs=1e-4
    )
    assert np.frombuffer(extra.ranks, np.int64).tolist() == [1] * 3
    values, ids = expected[7:10].topk(2)
    assert np.frombuffer(extra.top_ids, np.int64).tolist() == ids.flatten().tolist()
    assert np.frombuffer(extra.top_logprobs, np.float32) == pytest.approx(
        values.flatten().numpy(), abs=1e-4
    )


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {}, {4: 1.5, 2: -1.0}]),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    max_tokens=st.just(9),
    stop_token_ids=st.sampled_from([(), (6,)]),
    bad_words_token_ids=st.sampled_from([(), (), ((7,), (0, 3)), ((3, 6, 0), (6, 0), (1,))]),
    allowed_token_ids=st.sampled_from([None, None, (2, 8, 2), (5,)]),
)
REQUESTS = st.lists(
    st.tuples(PARAMS, st.integers(1, 6), st.integers(0, 7), st.integers(1, 5), st.integers(0, 3)),
    min_size=1,
    max_size=5,
)


def test_what_a_request_wanted_goes_with_its_row():
    """A later request may have the same name."""
    table = RowTable(2, 30, 4, ReferenceOps(), torch.device("cpu"), seed=0)
    wants = SamplingParams(
        temperature=0.5, top_k=3, logprobs=1, presence_penalty=0.5, logit_bias={4: 1.0}
    )
    for sampling in (wants, GREEDY):
        plan = StepPlan(
            1, (ScheduledRequest("a", 0, 3, 1),), (NewRequest("a", (1, 2, 3), 3, sampling),), ("a",)
        )
        table.apply(plan)
        assert table.is_greedy(["a"]) == (sampling is GREEDY)
    assert not any(table.wanting.values())


BEGUN = SamplingParams(temperature=0, max_tokens=9, bad_words_token_ids=((6, 0), (7, 1)))
"""The first token of an answer begins one of its words."""


@settings(max_examples=60)
@given(requests=REQUESTS)
@example(requests=[(GREEDY, 3, 0, 3, 1), (BEGUN, 3, 3, 1, 1)])
def test_each_sampled_position_is_told_what_its_request_wants(requests):
    """Against a plain recomputation. A request: what it wants, how many tokens its prompt has, how many are computed before,
    how many in this step, how many of these are sampled."""
    table = RowTable(8, 30, 4, ReferenceOps(), torch.device("cpu"), seed=0)
    new, shares = [], []
    for i, (params, num_prompt, computed, count, sampled) in enumerate(requests):
        tokens = tuple((3 * i + j) % 9 for j in range(computed + count))
        eos = (8,) if i % 2 else ()
        new.append(NewRequest(f"r{i}", tokens, num_prompt, params, eos))
        shares.append(ScheduledRequest(f"r{i}", computed, count, min(sampled, count)))
    shares.sort(key=lambda s: s.num_tokens != 1)
    plan = StepPlan(1, tuple(shares), tuple(new))
    table.apply(plan)
    batch = gather(table, plan)
    wanted = []  # request, params, its tokens up to the sampled position, how many are prompt, row, position in the step
    start = 0
    for s in shares:
        i = int(s.request_id[1:])
        for j in range(s.num_tokens - s.num_sampled, s.num_tokens):
            length = s.num_computed_tokens + j + 1
            row = table.rows[s.request_id]
            wanted.append(
                (i, requests[i][0], new[i].token_ids[:length], requests[i][1], row, start + j)
            )
        start += s.num_tokens
    sampled = batch.sampled
    assert sampled.rows.tolist() == [row.index for *_, row, _ in wanted]
    assert sampled.positions.tolist() == [len(tokens) for _, _, tokens, *_ in wanted]
    assert list(sampled.request_ids) == [f"r{i}" for i, *_ in wanted]
    places = [place for *_, place in wanted]
    assert (
        list(range(start)) if batch.sample_index is None else batch.sample_index.tolist()
    ) == places
    given = [new[int(s.request_id[1:])].token_ids[s.num_computed_tokens :] for s in shares]
    assert batch.token_ids.tolist() == [token for tokens in given for token in tokens]
    if not wanted:
        return
    found = sampling_tensors(table, sampled)
    all_params = [params for _, params, *_ in wanted]
    biases = {}
    for n, (i, params, tokens, num_prompt, *_) in enumerate(wanted):
        for token, value in params.logit_bias.items():
            biases[n, token] = biases.get((n, token), 0.0) + value
        if params.min_tokens and len(tokens) - num_prompt < params.min_tokens:
            for token in (*new[i].eos_token_ids, *params.stop_token_ids):
                biases[n, token] = biases.get((n, token), 0.0) + FORBIDDEN
        for word in params.bad_words_token_ids:
            if (
                (tokens[num_prompt:])[max(0, len(tokens) - num_prompt - len(word) + 1) :]
                == word[:-1]
            ):
                biases[n, word[-1]] = biases.get((n, word[-1]), 0.0) + FORBIDDEN
    limited = {
        n: set(params.allowed_token_ids)
        for n, params in enumerate(all_params)
        if params.allowed_token_ids
    }
    penalised = any(p.has_penalties for p in all_params)
    if all(p.temperature == 0 for p in all_params) and not biases and not penalised and not limited:
        assert found.all_greedy
        assert found.temperature.numel() == 0
        return
    assert found.all_greedy == all(p.temperature == 0 for p in all_params)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        expected = np.array([getattr(p, name) for p in all_params], np.float32)
        np.testing.assert_array_equal(getattr(found, name).numpy(), expected)
    assert found.seeds.tolist() == [row.seed for *_, row, _ in wanted]
    assert found.history_lens.tolist() == [len(tokens) for _, _, tokens, *_ in wanted]
    assert found.any_top_k == any(p.top_k for p in all_params)
    assert found.any_top_p == any(p.top_p < 1 for p in all_params)
    assert found.any_min_p == any(p.min_p > 0 for p in all_params)
    assert (found.history is not None) == penalised
    if penalised:
        assert found.prompt_lens.tolist() == [num_prompt for _, _, _, num_prompt, *_ in wanted]
        for line, length, (_, _, tokens, *_) in zip(
            found.history, found.history_lens, wanted, strict=True
        ):
            assert tuple(line[: int(length)].tolist()) == tokens
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            expected = np.array([getattr(p, name) for p in all_params], np.float32)
            np.testing.assert_array_equal(getattr(found, name).numpy(), expected)
    told = {}
    if found.bias_rows is not None:
        for n, token, value in zip(
            found.bias_rows, found.bias_tokens, found.bias_values, strict=True
        ):
            told[int(n), int(token)] = told.get((int(n), int(token)), 0.0) + float(value)
    assert {key: value for key, value in told.items() if value} == pytest.approx(biases)
    assert (found.limited_rows is not None) == bool(limited)
    if limited:
        assert found.limited_rows.tolist() == list(limited)
        pairs = list(zip(found.allowed_rows.tolist(), found.allowed_tokens.tolist(), strict=True))
        assert pairs == sorted((n, token) for n, tokens in limited.items() for token in tokens)


def test_forced_tokens_are_no_guesses():
    """Tokens that a grammar forces stand before the one sampled position. Guesses stand behind sampled positions."""
    forced = ScheduledRequest("a", 0, 4, 1, (), (5, 6, 7))
    guessed = ScheduledRequest("b", 9, 3, 3, (), (1, 2))
    assert verified([forced], [9]) == ([9], (1,))
    assert verified([guessed, forced], [1, 4, 8, 9]) == ([1, 4, 9], (2, 1))
