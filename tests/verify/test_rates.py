"""Error rates of whole verifications, by simulation: a server of a toy model, sound or with a fault, verified many times."""

import math
import random
from collections import Counter
from functools import cache, cached_property

import pytest
import torch

from slipstream.verify.checks import Verification
from slipstream.verify.report import document, summary
from slipstream.verify.seen import VerifyPlan
from slipstream.verify.served import NotOfferedError, Served, ServedAnswer, ServedToken

VOCABULARY, LIMIT = 64, 0.01


class Table:
    """A model whose next token depends on the last one alone, and a server of it that names five tokens."""

    def __init__(self, logits):
        self.rows = logits.log_softmax(-1)
        top = self.rows.topk(5, -1)
        self._likeliest = [
            tuple((bytes([i]), v) for i, v in zip(*row, strict=True))
            for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        self._falling = self.rows.sort(-1, descending=True)

    def answer(self, last, num_tokens, chance, *, temperature=1.0, top_k=-1, top_p=1.0, **_):
        tokens = []
        for _ in range(num_tokens):
            ids, weights = self._drawn(last, temperature, top_k, top_p)
            (token,) = chance.choices(ids, weights)
            logprob = float(self.rows[last, token])
            likeliest = self._likeliest[last]
            tokens.append(ServedToken(data=bytes([token]), logprob=logprob, likeliest=likeliest))
            last = token
        return tuple(tokens)

    @cache  # noqa: B019 - of a few tables
    def _drawn(self, last, temperature, top_k, top_p):
        ids, values = self._falling.indices[last].tolist(), self._falling.values[last]
        kept = 1 if temperature == 0 else top_k if top_k > 0 else VOCABULARY
        kept = min(kept, int((values.exp().cumsum(-1) < top_p - 1e-9).sum()) + 1)
        weights = (values[:kept] / (temperature or 1)).softmax(-1).tolist()
        return ids[:kept], weights


class Model(Table):
    """The model as a verification asks the reference for it."""

    has_tools = True
    never = torch.zeros(VOCABULARY, dtype=torch.bool)

    def __init__(self, logits):
        super().__init__(logits)
        self.texts = []

    def prompt(self, messages):
        """The number of a text, and a token that it begins with."""
        self.texts.append(messages[-1]["content"])
        return [len(self.texts) - 1, sum(map(ord, self.texts[-1])) % VOCABULARY]

    def greedy(self, prompt, num_tokens):
        return self.texts[prompt[0]]  # which has a needle's word

    def answer_ids(self, tokens):
        return [token.data[0] for token in tokens]

    def token_id(self, data):
        return data[0]

    def logprobs(self, prompt, answer):
        return self.rows[[prompt[-1], *answer[:-1]]]

    @cached_property
    def noise(self):
        return torch.randn(self.rows.shape, generator=torch.Generator().manual_seed(1))

    def off_by(self, spread):
        """Another model whose logits are off by normal noise: a KL of some spread² / 2."""
        return Table(self.rows + spread * self.noise)


class Server(Served):
    """Answers by `usual`, and one of `one_in` answers by `faulty`. `change` gives a request's settings."""

    def __init__(self, model, usual, seed, *, faulty=None, one_in=1, change=lambda more: more):
        super().__init__("", "toy", None)
        self.own, self.usual, self.faulty, self.one_in = model, usual, faulty, one_in
        self.chance, self.change = random.Random(seed), change

    def ask(self, messages, *, max_tokens, seed, **more):
        if "tools" in more or "response_format" in more:
            raise NotOfferedError("toy")
        is_hit = self.faulty is not None and self.chance.random() < 1 / self.one_in
        table = self.faulty if is_hit else self.usual
        prompt = self.own.prompt(messages)
        tokens = table.answer(prompt[-1], max_tokens, self.chance, **self.change(more))
        text = messages[-1]["content"]
        return ServedAnswer(text=text, tokens=tokens, num_prompt_tokens=2, finish_reason="length")


@pytest.fixture(scope="module")
def model():
    chance = torch.Generator().manual_seed(0)
    return Model(2 * torch.randn(VOCABULARY, VOCABULARY, generator=chance))


def verified(server, seed):
    plan = VerifyPlan(max_kl=LIMIT, concurrency=1, seed=seed)
    made = Verification(server, server.own, plan)
    return document(made.counts(), made.run()) | made.counts()


def verdicts(model, runs, usual=0.03, faulty=None, **more):
    usual = model.off_by(usual)
    faulty = None if faulty is None else model.off_by(faulty)
    servers = (Server(model, usual, seed, faulty=faulty, **more) for seed in range(runs))
    return Counter(verified(server, seed)["verdict"] for seed, server in enumerate(servers))


def rate(count, runs, stated):
    """True if a count of errors is one that the stated rate allows, by two standard errors."""
    return count <= runs * stated + 2 * math.sqrt(runs * stated)


def test_a_sound_server_is_called_so_by_few_answers_and_what_is_excluded_is_told(model):
    found = verified(Server(model, model.off_by(0.03), 0), 0)
    assert found["verdict"] == "sound"
    assert found["num_answers"] <= 80
    excluded = found["excluded"]
    assert excluded["one_in_answers"] >= 8
    assert excluded["one_in_long_answers"] >= 3
    assert excluded["one_in_tokens"] > 100
    told = " ".join(summary({**found, "model": "toy"}))
    assert "toy is sound" in told
    assert f" in 1 of {int(excluded['one_in_answers'])} answers" in told


def hotter(more):
    return {**more, "temperature": 1.1 * more["temperature"]}


def without_top_k(more):
    return {**more, "top_k": -1}


def constant(more):
    return {**more, "temperature": 1.0}


@pytest.mark.parametrize("change", [hotter, without_top_k, constant])
def test_a_fault_of_sampling_is_found(model, change):
    assert verdicts(model, 3, change=change) == {"faulty": 3}


RUNS = 100


@pytest.mark.slow
@pytest.mark.parametrize("usual", [0.0, 0.03, 0.06])  # up to a fifth of the limit
def test_sound_servers_are_seldom_called_faulty(model, usual):
    found = verdicts(model, RUNS, usual)
    assert rate(found["faulty"], RUNS, 0.005)  # 7 checks, each 0.001 at most
    assert found["sound"] > 0.9 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize(("one_in", "spread"), [(8, 0.6), (4, 0.6), (1, 0.25)])
def test_a_fault_of_the_stated_size_is_seldom_called_sound(model, one_in, spread):
    found = verdicts(model, RUNS, faulty=spread, one_in=one_in)
    print(found)
    assert rate(found["sound"], RUNS, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("change", [hotter, without_top_k, constant])
def test_a_fault_of_sampling_is_found_nearly_always(model, change):
    found = verdicts(model, RUNS // 2, change=change)
    print(found)
    assert rate(found["sound"], RUNS // 2, 0.01)
    assert found["faulty"] > 0.8 * RUNS // 2  # a few take more than 96 answers
