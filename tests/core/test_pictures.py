"""Pictures in the scheduler: blocks with other pictures are never shared, and pictures whose tokens see one another are not
cut."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.core.cache.prefix_cache import extend_keys
from slipstream.core.make import make_scheduler
from slipstream.messages.media import MediaSpan
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepResult
from slipstream.params.sampling import SamplingParams
from tests.core.configs import BLOCK, config

HOLDER = 9


def span(offset, num_tokens, key):
    pixels = b"\0" * num_tokens * 3
    return MediaSpan(
        offset=offset,
        rows=1,
        columns=num_tokens,
        key=bytes([key]) * 16,
        height=1,
        width=num_tokens,
        data=pixels,
    )


PROMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=3
)


def prompt_of(parts, end):
    """Words, and pictures of so many tokens with keys."""
    tokens, images = [], []
    for words, size, key in parts:
        tokens += [1] * words
        images.append(span(len(tokens), size, key))
        tokens += [HOLDER] * size
    return tuple(tokens + [2] * end), tuple(images)


def seen(tokens, images, position):
    """All that the state at a position depends on: pictures before it, and all of one that it is in."""
    return tuple(tokens[: position + 1]), tuple(
        (i.offset, i.key) for i in images if i.offset <= position
    )


@given(one=PROMPTS, other=PROMPTS, end=st.integers(1, 6))
def test_keys_are_alike_only_where_all_pictures_are(one, other, end):
    given_, keys = [prompt_of(parts, end) for parts in (one, other)], []
    for tokens, images in given_:
        keys.append([])
        extend_keys(keys[-1], b"root", tokens, BLOCK, len(tokens) // BLOCK, images)
    for i, (a, b) in enumerate(zip(*keys, strict=False)):
        last = (i + 1) * BLOCK - 1
        assert (a == b) == (seen(*given_[0], last) == seen(*given_[1], last))


@settings(deadline=None, max_examples=80)
@example(  # a decode shares a block with the prompt that computes it in the same step
    prompts=[([(0, 3, 0)], 1), ([(1, 9, 0)], 6), ([(0, 3, 0)], 3)],
    budget=21,
    mixed=4,
    num_blocks=22,
    whole=False,
)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 6)), min_size=1, max_size=5),
    budget=st.integers(13, 24),
    mixed=st.integers(4, 24),
    num_blocks=st.integers(22, 60),
    whole=st.booleans(),
)
def test_blocks_hold_what_their_sequences_see(prompts, budget, mixed, num_blocks, whole):
    settings_ = config(
        max_num_batched_tokens=budget,
        max_num_mixed_tokens=min(mixed, budget),
        num_blocks=num_blocks,
        max_num_seqs=4,
    )
    scheduler = make_scheduler(**settings_, whole_media=whole)
    requests = {}
    for n, (parts, end) in enumerate(prompts):
        tokens, images = prompt_of(parts, end)
        requests[str(n)] = list(tokens), images
        given_ = dict(
            prompt_token_ids=tokens,
            sampling=SamplingParams(),
            max_tokens=3,
            media=images,
            arrival=float(n),
        )
        scheduler.add(EngineRequest(request_id=str(n), **given_))
    tables, content = {}, {}
    for _ in range(400):
        if not scheduler.has_requests:
            break
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.num_tokens <= budget
        tables |= {new.request_id: [] for new in plan.new}
        assert all(new.media == requests[new.request_id][1] for new in plan.new)
        for s in plan.scheduled:
            table = tables[s.request_id]
            for update in s.table_updates:
                table[update.index :] = update.block_ids
            tokens, images = requests[s.request_id]
            for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens):
                content[table[position // BLOCK], position % BLOCK] = seen(tokens, images, position)
        for s in plan.scheduled:  # a layer writes all keys and values before anything reads them
            table, (tokens, images) = tables[s.request_id], requests[s.request_id]
            stop = s.num_computed_tokens + s.num_tokens
            for position in range(stop):
                assert content[table[position // BLOCK], position % BLOCK] == seen(
                    tokens, images, position
                )
            if whole:
                assert not any(image.offset < stop < image.end for image in images)
        sampled = [s for s in plan.scheduled if s.num_sampled]
        scheduler.update(plan, StepResult(plan.step_id, [3] * len(sampled)))
        for s in sampled:
            requests[s.request_id][0].append(3)
    assert not scheduler.has_requests
