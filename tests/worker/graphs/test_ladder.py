"""The choice of a step graph's size, without a GPU."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.forms import NO_DRAFTS
from slipstream.costs.graph_sizes import MIXED_TOKENS
from slipstream.messages.steps import StepShape
from slipstream.worker.graphs import ladder as module
from slipstream.worker.graphs.ladder import LARGER, LONGER, PATIENCE, GraphLadder

SPEC = SimpleNamespace(hidden_size=4096, encoder=None, layers=(), is_recurrent=False)


def made(captured=(), num_ranks=0, speculation=NO_DRAFTS):
    config = SimpleNamespace(
        speculation=speculation,
        scheduling=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=4096),
        model=SimpleNamespace(max_model_len=4096),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mixed_prompts", lambda config, spec: [32, 64, 128, 256, 512, 4096])
        patch.setattr(module, "mixed_sequences", lambda config, spec: 64)
        return GraphLadder(config, SPEC, set(captured), num_ranks)


SIZES = made()
DECODES = st.sets(st.sampled_from([(n, 0) for n in SIZES.sizes]))
MIXED = st.sets(st.tuples(st.sampled_from(SIZES.decode_sizes), st.sampled_from(SIZES.prompt_sizes)))


@given(captured=DECODES, num_seqs=st.integers(1, 256), is_full=st.booleans())
def test_a_decode_size_holds_the_step_and_wastes_little(captured, num_seqs, is_full):
    ladder = made(captured)
    ladder.is_full = is_full
    size = ladder.size_for(num_seqs)
    own = ladder.decode_size(num_seqs)
    assert own >= num_seqs
    assert own == min(n for n in ladder.sizes if n >= num_seqs)
    assert size == own or ((size, 0) in captured and own < size <= LARGER * num_seqs)
    if (own, 0) in captured and own <= LARGER * num_seqs:
        assert size == own


@given(captured=MIXED, decodes=st.integers(0, 256), prompt=st.integers(1, 4096))
def test_a_mixed_size_holds_the_step_and_wastes_little(captured, decodes, prompt):
    ladder = made(captured)
    size = ladder.mixed_size_for(decodes, prompt)
    own = ladder.mixed_size(decodes, prompt)
    assert size[0] >= decodes
    assert size[1] >= prompt
    if own in captured:
        assert size == own
    elif size != own:
        assert size in captured
        assert sum(size) <= decodes + prompt + ladder.spare_tokens


def test_a_size_that_is_often_wanted_runs_in_its_own_graph():
    ladder = made({(32, 0)})
    for _ in range(LONGER):
        assert ladder.size_for(17) == 32
        ladder.note_wanted((24, 0))
    assert ladder.size_for(17) == 24
    ladder.stop()
    assert ladder.size_for(17) == 32
    assert not ladder.ahead
    ladder.note_wanted((24, 0))
    assert not ladder.ahead


def test_a_mixed_size_is_refused_until_it_is_due():
    ladder = made()
    step = StepShape(41, 1, 1, 40, only_drafts=False, num_keys_again=0)
    size = ladder.mixed_size(1, 40)
    for _ in range(PATIENCE - 1):
        assert ladder.refusal(step) is module.NOT_CAPTURED
        ladder.note_wanted(size)
    assert ladder.refusal(step) is None
    ladder.stop()
    assert ladder.refusal(step) is module.NO_MEMORY
    ladder.forget()
    assert ladder.refusal(step) is module.NOT_CAPTURED
    assert not ladder.is_due((0, MIXED_TOKENS + 1))


def test_every_size_is_queued_once_and_the_commonest_come_first():
    ladder = made()
    first, ladder.soon = ladder.commonest()
    ladder.captured.update(first)
    ladder.queue()
    every = {(n, 0) for n in ladder.sizes} | {
        (d, p) for d in ladder.decode_sizes for p in ladder.prompt_sizes
    }
    assert len(ladder.ahead) == len(set(ladder.ahead))
    assert set(ladder.ahead) == every - set(first)
    soonest = ladder.ahead[::-1][: len(ladder.soon)]
    assert set(soonest) == ladder.soon
    assert made(num_ranks=2).commonest() == ([*first, *sorted(ladder.soon)], set())


def test_a_model_that_woke_for_a_request_captures_few_sizes_first_and_the_others_soon():
    ladder = made()
    all_first, all_soon = ladder.commonest()
    first, soon = ladder.commonest(few=True)
    assert first == [all_first[0], (1, 0), all_first[-1]]
    assert not all_first[-1][0]
    assert {*first, *soon} == {*all_first, *all_soon}
    assert made(num_ranks=2).commonest(few=True) == made(num_ranks=2).commonest()


@pytest.mark.parametrize("is_recurrent", [True, False])
def test_a_verification_with_recurrent_layers_finds_a_small_graph_at_the_start(is_recurrent):
    config = SimpleNamespace(
        speculation=SimpleNamespace(limit=3),
        scheduling=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=4096),
        model=SimpleNamespace(max_model_len=4096),
        parallel=SimpleNamespace(stage=SimpleNamespace(size=1)),
        max_num_sampled=64,
    )
    spec = SimpleNamespace(**vars(SPEC) | {"is_recurrent": is_recurrent})
    ladder = GraphLadder(config, spec, set())
    first, _ = ladder.commonest()
    smallest = min(p for d, p in first if not d and p)
    assert smallest == ladder.prompt_sizes[0] if is_recurrent else smallest == 128
    assert ladder.prompt_sizes[0] == (8 if is_recurrent else 32)
