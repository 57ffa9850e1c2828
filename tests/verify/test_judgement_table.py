"""Whole judgements of servers with one fault each. They are the blocks of judgements.txt."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch

from slipstream.verify import measures
from slipstream.verify.judging import Judge
from slipstream.verify.measures import ScoredAnswer
from slipstream.verify.seen import SAMPLING, TOP_K, TOP_P, WARM, Evidence, VerifyPlan
from slipstream.verify.served import ServedToken

TEXT = (Path(__file__).parent / "judgements.txt").read_text()
BLOCKS = dict(block.split("\n", 1) for block in TEXT.split("## ")[1:])
TOKENS = 24
ASKED = {"plain": (1.0, -1, 1.0), "warm": (WARM, -1, 1.0), "greedy": (0.0, -1, 1.0)}
ASKED |= {"top_k": (1.0, TOP_K, 1.0), "top_p": (1.0, -1, TOP_P), "long": (1.0, -1, 1.0)}


@functools.cache
def answer(number, served, asked):
    """An answer drawn by chosen numbers from what `served` makes of the model's log-probabilities."""
    places = torch.arange(number * TOKENS, (number + 1) * TOKENS, dtype=torch.float64)
    logprobs = (4 * torch.sin(places[:, None] * torch.arange(1, 13) + 1)).log_softmax(-1)
    given = served(logprobs)
    spread = measures._sampled(given, *asked).exp().cumsum(-1)
    at = torch.tensor([(7919 * int(n) + 104729) ** 2 % 100003 / 100003 for n in places])
    ids = (spread < at[:, None]).sum(-1).clamp(max=11).tolist()
    likeliest = given.topk(5, -1)
    tokens = [
        ServedToken(
            data=bytes([i]),
            logprob=float(given[n, i]),
            likeliest=tuple(
                (bytes([t]), v) for v, t in zip(*(x[n].tolist() for x in likeliest), strict=True)
            ),
        )
        for n, i in enumerate(ids)
    ]
    return ScoredAnswer(token_ids=ids, tokens=tokens, logprobs=logprobs)


@functools.cache
def compared(number, served, asked, kind, named):
    made, ours = answer(number, served, asked), ASKED[kind]
    if not named:
        return made
    kls = {"kl": measures.divergences(made, lambda data: data[0])}
    cuts = {"top_k": ours[1], "top_p": ours[2]}
    kls["kl_cut"] = measures.divergences(made, lambda data: data[0], ours[0], **cuts)
    hits = measures.agreement(made, lambda data: data[0], is_greedy=kind == "greedy")
    return dataclasses.replace(made, **kls, agreed=hits)


def own(logprobs):
    return logprobs


def seen_of(num=40, served=own, named=True, long=None, **asked):
    """Answers of a server to each kind of question, at settings that it may take instead of ours."""
    seen = Evidence(plan=VerifyPlan(answers=num, long_lines=4))
    seen.counts += [(9, 9)] * num
    seen.long_counts += [(90, 90)] * num
    seen.needles |= {80: [(True, True)] * 8}
    for kind, ours in ASKED.items():
        if kind != "long" and kind not in SAMPLING:
            continue
        made = [
            compared(n, (kind == "long" and long) or served, asked.get(kind, ours), kind, named)
            for n in range(num)
        ]
        seen.drawn[kind] = made
    return seen


def flatter(logprobs):
    return (logprobs / 1.3).log_softmax(-1)


def rounded(logprobs):
    return (2 * logprobs).round().div(2).log_softmax(-1)


def other(logprobs):
    return logprobs.roll(1, -1)


def changed(seen, **changes):
    for name, value in changes.items():
        getattr(seen, name).clear()
        getattr(seen, name).update(value) if isinstance(value, dict) else getattr(
            seen, name
        ).extend(value)
    return seen


def cut(seen):
    seen.long_counts.append((60, 90))
    return seen


SERVERS = {
    "sound": seen_of,
    "few answers": lambda: seen_of(num=6),
    "rounded": lambda: seen_of(served=rounded),
    "hotter": lambda: seen_of(served=flatter),
    "other weights": lambda: seen_of(served=other),
    "no temperature": lambda: seen_of(warm=(1.0, -1, 1.0)),
    "no cuts": lambda: seen_of(greedy=(1.0, -1, 1.0), top_k=(1.0, -1, 1.0), top_p=(1.0, -1, 1.0)),
    "no log-probabilities": lambda: seen_of(named=False),
    "no log-probabilities, other weights": lambda: seen_of(
        named=False, served=lambda x: x.roll(1, -1)
    ),
    "a BOS more": lambda: changed(seen_of(), counts=[(10, 9)] * 4),
    "another template": lambda: changed(seen_of(), counts=[(9, 9), (12, 9)]),
    "a cut context": lambda: cut(seen_of()),
    "lost needles": lambda: changed(seen_of(), needles={80: [(False, True)] * 8}),
    "refuses": lambda: changed(seen_of(), refused=dict.fromkeys(ASKED, "no such field"), counts=[]),
    "nothing was read": lambda: seen_of(num=0),
    "long context in fewer bits": lambda: seen_of(long=flatter),
    "empty answers": lambda: changed(seen_of(), empty={"plain": 12}),
}
REPORTED = (
    "sound",
    "few answers",
    "rounded",
    "no log-probabilities",
    "lost needles",
    "empty answers",
)


def judged(name):
    seen = SERVERS[name]()
    judge = Judge(seen=seen, token_id=lambda data: data[0])
    lines = [f"{f.outcome} {f.check}: {f.why}" for f in judge.judged()]
    if name in REPORTED:
        lines += reported(seen)
    return [re.sub(r"[\d.]+e-1\d", "0", line) for line in lines]


def reported(seen):
    report = json.loads(
        json.dumps(seen.report()), parse_float=lambda text: float(f"{float(text):.3g}")
    )
    return [f"{key}: {json.dumps(report[key])}" for key in ("excluded", "scores", "needles")]


@pytest.fixture(scope="module")
def sound():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors
    yield judged("sound")
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_judged_as_the_block_says(name, sound):
    """The blocks after the first have only lines that the first, of a sound server, lacks."""
    lines = judged(name)
    found = lines if name == "sound" else [line for line in lines if line not in sound]
    found += [f"-- {len(lines)} lines"]
    assert found == BLOCKS[name].strip().splitlines()
