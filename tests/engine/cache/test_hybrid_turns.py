"""Conversations with a hybrid: each turn computes what is new, and at most 256 tokens more; its answer is that without a cache.

Tokens computed are a prompt's less those that were cached. A first turn of 600 tokens of two families is in the default suite.
Those of 20,000 and 80,000, and the other families, are slow.
"""

from __future__ import annotations

import contextlib

import pytest

from slipstream import LLM, SamplingParams
from tests.support import mtp_layers, tiny_models

CHECKPOINT = 256
"""Most tokens back to a checkpoint."""

MTP = {"method": "mtp", "num_speculative_tokens": 2}
GUESSES = {"method": "ngram", "num_speculative_tokens": 2}
FAMILIES = {
    "qwen3_next": "plain drafts disk ranks disk-ranks disk-drafts",
    "nemotron_h": "plain drafts disk",
}
UNBOUNDED = ("mamba", "falcon_mamba", "mamba2")
OTHERS = {
    "nemotron_h": "ranks disk-drafts",
    **{
        family: f"plain {'drafts' if family in mtp_layers.FAMILIES else 'guesses'} disk ranks"
        for family in tiny_models.RECURRENT
        if family not in FAMILIES
    },
}
CASES = [
    *((family, how) for family, hows in FAMILIES.items() for how in hows.split()),
    *(
        pytest.param(family, how, marks=pytest.mark.slow)
        for family, hows in OTHERS.items()
        for how in hows.split()
    ),
]
NUM_TURNS = 10
LENGTHS = [600, *(pytest.param(n, marks=pytest.mark.slow) for n in (20_000, 80_000))]


def settings(length):
    return dict(
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=length + 2000,
        max_num_seqs=4,
        kv_cache_bytes=2**28,
    )


def message(i, count):
    """The tokens of a user's message."""
    return [(13 * i + 7 * j * j + j) % 250 + 5 for j in range(count)]


def greedy(llm, prompt, **more):
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **more)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, progress=False)
    return output


class Without:
    """Answers of an engine without a prefix cache."""

    def __init__(self, path, length):
        self.llm = LLM(str(path), enable_prefix_caching=False, **settings(length))
        self.known = {}

    def answer(self, prompt):
        if (key := tuple(prompt)) not in self.known:
            self.known[key] = greedy(self.llm, prompt).outputs[0].token_ids
        return self.known[key]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A checkpoint of the last family and an engine without a cache, by length of the first turn."""
    found = {}
    with contextlib.ExitStack() as stack:

        def of(family, length):
            if any(other != family for other, _ in found):  # whose engines hold memory
                stack.close()
                found.clear()
            if (family, length) not in found:
                path = tmp_path_factory.mktemp(family)
                build = (mtp_layers if family in mtp_layers.FAMILIES else tiny_models).build
                is_bounded = family not in UNBOUNDED
                build(
                    path, family, **{"max_position_embeddings": length + 4096} if is_bounded else {}
                )
                without = Without(path, length)
                stack.enter_context(without.llm)
                found[family, length] = path, without
            return found[family, length]

        yield of


def check(llm, without, prompt, num_new, *, compared=True, **more):
    """Answer a prompt whose last `num_new` tokens are new."""
    output = greedy(llm, prompt, **more)
    expected = without.answer(prompt) if compared else output.outputs[0].token_ids
    assert [own.token_ids for own in output.outputs] == [expected] * len(output.outputs)
    assert len(prompt) - output.num_cached_tokens <= num_new + CHECKPOINT
    return expected


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("family", "how"), CASES)
def test_turns_compute_what_is_new(engines, tmp_path, family, how, length):
    path, without = engines(family, length)
    more = {
        "plain": {},
        "drafts": dict(speculative_config=MTP),
        "guesses": dict(speculative_config=GUESSES),
        "disk": dict(kv_disk_bytes=2**30, kv_disk_path=str(tmp_path / "kv")),
        "ranks": dict(tensor_parallel_size=2),
        "disk-drafts": dict(
            speculative_config=MTP, kv_disk_bytes=2**30, kv_disk_path=str(tmp_path / "kv")
        ),
        "disk-ranks": dict(
            tensor_parallel_size=2, kv_disk_bytes=2**30, kv_disk_path=str(tmp_path / "kv")
        ),
    }[how]
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(str(path), **settings(length), **more))
        history = message(0, length)
        history += check(llm, without, history, length)
        for i in range(1, NUM_TURNS):
            if "disk" in how and i in (1, 6):  # a restart
                stack.close()
                llm = stack.enter_context(LLM(str(path), **settings(length), **more))
            asked, before = message(i, 30), history
            told = i in (1, NUM_TURNS - 1) or length < 10_000  # an engine without a cache is slow
            prompt = [*history, *asked]
            history = [*prompt, *check(llm, without, prompt, len(asked), compared=told)]
        check(llm, without, [*before, *message(77, 30)], 30)  # another last message
        check(llm, without, [*history, *message(78, 30)], 30, n=3)
        for i in range(2):  # two ways on from one answer
            check(llm, without, [*history, *message(80 + i, 25)], 25)
        if "drafts" in how:
            assert llm.stats().spec_accepted_tokens > 0
        if "disk" in how:
            assert llm.stats().tiers.disk_hit_tokens >= length
            return  # blocks are still being stored
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
