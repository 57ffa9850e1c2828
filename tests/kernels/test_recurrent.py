"""Ops of recurrent layers: the oracle against Hugging Face's modules, and the op sets against the oracle.

Tolerances. Float32: the same sums in another order, over a few hundred tokens: 2e-5 of the largest number, 1e-4 for
Hugging Face's chunked forms. Bfloat16: rows are rounded once on each side: 2⁻⁷ of the largest number.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.ops import OpSet
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.sequences import SequenceBatch
from tests.kernels.recurrent_cases import (
    SPECS,
    THEIRS,
    StatefulSequence,
    copy_of,
    new_state,
    random_layer,
    step_of,
)

torch.set_num_threads(1)
reference = ReferenceOps()
ISAS = native.instruction_sets(emulated=True)
OPS = {isa: NativeOps(3, isa) for isa in ISAS}
STATEFUL = [name for name in SPECS if name.split()[0] != "short"]


def assert_near(got: Tensor, expected: Tensor, relative: float = 2e-5) -> None:
    assert got.dtype == expected.dtype
    size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=relative, atol=relative * size)


# --- The oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces", [(19,), (1,) * 19, (7, 1, 1, 2, 8)], ids=["whole", "tokens", "pieces"]
)
@pytest.mark.parametrize("name", THEIRS)
def test_layer_equals_transformers_whole_and_continued(name: str, pieces: tuple[int, ...]) -> None:
    torch.manual_seed(sum(map(ord, name)))
    theirs = THEIRS[name]()
    hidden = torch.randn(
        sum(pieces),
        theirs.module.in_features
        if hasattr(theirs.module, "in_features")
        else theirs.out.out_features,
    )
    expected = theirs.module(hidden[None])[0]
    state, outs, at, slot = new_state(theirs.spec, 4), [], 0, 0
    for n in pieces:
        following = slot % 3 + 1
        meta = step_of([StatefulSequence(n, slot, ((n - 1, following),))])
        rows = theirs.inputs(hidden[at : at + n])
        outs.append(theirs.out(theirs.call(reference, rows, state, meta)))
        at, slot = at + n, following
    assert_near(torch.cat(outs), expected, 1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_training_op_and_its_gradients_equal_the_oracle(name: str) -> None:
    """Sequences of one token, of a chunk and around it; 1e-3 of the largest gradient, after hundreds of tokens."""
    torch.manual_seed(2)
    call, rows = random_layer(SPECS[name])
    lengths = (1, 64, 16, 130)
    x = [y.requires_grad_() for y in rows(sum(lengths))]
    flat = SequenceBatch.of([[0] * n for n in lengths], torch.device("cpu")).meta
    outs = []
    grads = []
    for ops, meta in (
        (reference, step_of([StatefulSequence(n, 0) for n in lengths])),
        (AutogradOps(), flat),
    ):
        out = call(ops, x, new_state(SPECS[name], 1), meta)
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out.square().mean(), x, materialize_grads=True))
    assert_near(outs[1], outs[0], 1e-4)
    for ours, expected in zip(grads[1], grads[0], strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * largest)


# --- Op sets against the oracle ---------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[StatefulSequence, ...], int]:
    """Sequences that read slots of their own or none, and keep states in place, elsewhere, or nowhere."""
    lens = draw(
        st.lists(
            st.one_of(
                st.just(1), st.integers(1, 6), st.sampled_from([31, 32, 33, 63, 64, 65, 130])
            ),
            min_size=1,
            max_size=5,
        )
    )
    slots = iter(range(1, 1000))
    sequences = []
    for n in lens:
        own = next(slots)
        read = draw(st.sampled_from([0, own]))
        ends = draw(st.sampled_from([0, own, next(slots)]))
        others = draw(st.sets(st.integers(0, n - 1), max_size=4)) - {n - 1}
        kept = [(t, next(slots)) for t in sorted(others)] + [(n - 1, ends)] * (ends > 0)
        sequences.append(StatefulSequence(n, read, tuple(kept)))
    return tuple(sequences), next(slots)


def compare(
    ops: OpSet, name: str, sequences, num_slots: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    call, rows = random_layer(SPECS[name], dtype)
    state = new_state(SPECS[name], num_slots, [s.read for s in sequences if s.read], dtype)
    own, meta = copy_of(state), step_of(sequences)
    x = rows(sum(s.num_tokens for s in sequences))
    given_before = [y.clone() for y in x]
    expected, got = call(reference, x, state, meta), call(ops, x, own, meta)
    assert all(torch.equal(a, b) for a, b in zip(x, given_before, strict=True))
    narrow = dtype == torch.bfloat16
    if narrow:
        assert_near(got.float(), expected.float(), 2**-7)
        assert got.dtype == expected.dtype
    else:
        assert_near(got, expected)
    assert torch.equal(own.conv, state.conv)
    if state.recurrent is not None:
        assert own.recurrent is not None
        for slot in range(num_slots):
            assert_near(own.recurrent[slot], state.recurrent[slot], 2e-2 if narrow else 2e-5)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(step=steps(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9))
def test_native_op_equals_the_oracle(isa, name, step, dtype, seed) -> None:
    compare(OPS[isa], name, *step, dtype, seed)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", ISAS)
def test_native_op_of_many_sequences_equals_the_oracle(isa, name) -> None:
    sequences = [StatefulSequence(1, i, ((0, i),)) for i in range(1, 40)]
    sequences += [
        StatefulSequence(70, 0, ((69, 40),)),
        StatefulSequence(3, 41, ((0, 42), (1, 43), (2, 41))),
    ]
    compare(OPS[isa], name, sequences, 44, torch.float32, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", ISAS)
def test_native_result_does_not_depend_on_pieces_and_batch(isa, name, dtype) -> None:
    """Bit by bit: in one piece, in several, token by token, and among other sequences."""
    torch.manual_seed(1)
    call, rows = random_layer(SPECS[name], dtype)
    x, others = rows(75), rows(9)
    # the op set rounds its results to the rows' type, and a program's rows are float32
    x, others = ([y.float() for y in rows_] for rows_ in (x, others))

    def run(pieces: tuple[int, ...], *, crowded: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        state, outs, at = new_state(SPECS[name], 8, [4, 5], dtype), [], 0
        for n in pieces:
            own = StatefulSequence(n, 2 if at else 0, ((n - 1, 2),))
            sequences = [own]
            if crowded:
                sequences = [
                    StatefulSequence(1, 4, ((0, 4),)),
                    own,
                    StatefulSequence(8, 5, ((7, 5),)),
                ]
            meta = step_of(sequences)
            parts = []
            for y, other in zip(x, others, strict=True):
                mine = y[at : at + n]
                if not crowded:
                    parts.append(mine)
                elif n == 1:
                    parts.append(torch.cat((other[:1], mine, other[1:])))
                else:
                    parts.append(torch.cat((other[:1], mine, other[1:])))
            out = call(OPS[isa], parts, state, meta)
            first = 1 if crowded else 0
            outs.append(out[first : first + n])
            at += n
        kept = None if state.recurrent is None else state.recurrent[2].clone()
        return torch.cat(outs), state.conv[2].clone(), kept

    expected = run((75,), crowded=False)
    for pieces in ((1,) * 75, (33, 1, 41), (64, 11), (5, 70)):
        for crowded in (False, True):
            for a, b in zip(run(pieces, crowded=crowded), expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


def test_native_ops_refuse_a_convolution_of_half_precision() -> None:
    from slipstream.errors import ConfigError

    call, rows = random_layer(SPECS["short"], torch.float16)
    state = new_state(SPECS["short"], 2, dtype=torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        call(OPS[ISAS[-1]], rows(1), state, step_of([StatefulSequence(1, 0)]))
