"""Random steps of recurrent layers for the tests of their ops, and the specs they run with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
    StateMetadata,
    chunk_table,
)
from slipstream.spec.recurrent import (
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
)

GARBAGE = 1000.0


@dataclass(frozen=True, slots=True)
class Part:
    """`marks`: tokens after which the state is kept, beside the last. `follows`: it has a state; `in_place`: the last
    state overwrites it."""

    length: int
    marks: tuple[int, ...] = ()
    follows: bool = True
    in_place: bool = True


@st.composite
def sequences(draw: Any, longest: int = 150) -> list[Part]:
    """Decodes first, padded ones among them (length 0 here), then drafts to verify, then prompts with marks."""
    flag = st.booleans()
    found = [Part(1, (), draw(flag), draw(flag)) for _ in range(draw(st.integers(0, 3)))]
    found += [Part(0)] * draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.integers(2, 6))
        found.append(Part(n, tuple(range(n)), draw(flag), draw(flag)))
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.sampled_from([2, 3, 17, 63, 64, 65, 128, longest]))
        marks = draw(st.lists(st.integers(0, n - 1), max_size=2, unique=True))
        found.append(Part(n, tuple(sorted(marks)), draw(flag), draw(flag)))
    return found or [Part(1)]


def metadata(given: Sequence[Part], device: str = "cpu") -> tuple[AttentionMetadata, int]:
    """(the step's metadata, the number of slots)."""
    lengths = [max(1, s.length) for s in given]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    read, write, slots = [], torch.zeros(int(starts[-1]), dtype=torch.int32), 1
    for s, begin in zip(given, starts.tolist(), strict=False):
        own = slots if s.length and s.follows else 0
        slots += own > 0
        read.append(own)
        for mark in sorted({*s.marks, s.length - 1}) if s.length else ():
            last = mark == s.length - 1
            write[begin + mark] = own if last and own and s.in_place else slots
            slots += not (last and own and s.in_place)
    num_decodes = sum(n == 1 for n in lengths)
    chunks = torch.from_numpy(chunk_table(starts.tolist(), write.numpy(), num_decodes))
    if len(chunks):
        chunks = torch.cat((chunks, torch.zeros(2, 3, dtype=torch.int32)))  # padding
    states = StateMetadata(
        torch.tensor(read, dtype=torch.int32).to(device), write.to(device), chunks.to(device)
    )
    meta = AttentionMetadata.uniform(1, 1, 1, block_size=16, device=torch.device(device))
    meta = dataclasses.replace(
        meta,
        query_start_loc=starts.to(device),
        num_decodes=num_decodes,
        max_query_len=max(lengths),
        states=states,
    )
    return meta, slots


def owned(given: Sequence[Part]) -> Tensor:
    """The tokens that are no padding."""
    return torch.cat([torch.full((max(1, s.length),), s.length > 0) for s in given])


class Maker:
    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, wide: bool = False, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=self.rng) * scale
        return made.to(self.device, torch.float32 if wide else self.dtype)

    def state(self, spec: RecurrentSpec, slots: int) -> LayerState:
        """Random states; what is in the null slot would be seen in the result."""
        conv = self.normal(slots, spec.conv_width - 1, spec.conv_channels)
        conv[0] = GARBAGE
        if spec.state_shape is None:
            return LayerState(conv)
        states = self.normal(slots, *spec.state_shape, wide=True)
        states[0] = GARBAGE
        return LayerState(conv, states)

    def conv(self, spec: RecurrentSpec, bias: bool, silu: bool = True) -> ConvParams:
        c, w = spec.conv_channels, spec.conv_width
        return ConvParams(
            weight=self.normal(c, w, scale=0.5),
            bias=self.normal(c, scale=0.5) if bias else None,
            silu=silu,
        )

    def call(self, spec: RecurrentSpec, tokens: int) -> tuple[str, tuple[Tensor, ...], Any, dict]:
        """(op, its rows, its parameters, further arguments)."""
        match spec:
            case GatedDeltaSpec():
                params = GatedDeltaParams(
                    spec=spec,
                    conv=self.conv(spec, False),
                    decay=self.normal(spec.num_heads, wide=True),
                    time=self.normal(spec.decay_size, wide=True),
                    norm=self.normal(spec.value_dim),
                )
                if spec.latent is None:
                    x = self.normal(tokens, spec.conv_channels + spec.v_size)
                    gates = self.normal(tokens, spec.num_heads + spec.decay_size)
                    return "gated_delta", (x, gates), params, {}
                x, gates = (self.normal(tokens, n) for n in (spec.conv_channels, spec.num_heads))
                more = {
                    "decay": self.normal(tokens, spec.decay_size),
                    "z": self.normal(tokens, spec.v_size),
                }
                return "gated_delta", (x, gates), params, more
            case Mamba2Spec():
                heads = spec.num_heads
                norm = None if spec.norm is None else self.normal(spec.v_size)
                two = Mamba2Params(
                    spec=spec,
                    conv=self.conv(spec, spec.conv_bias),
                    decay=self.normal(heads, wide=True),
                    time=self.normal(heads, wide=True),
                    skip=self.normal(heads, wide=True),
                    norm=norm,
                )
                rows = spec.v_size + spec.conv_channels + heads
                return "mamba2", (self.normal(tokens, rows),), two, {}
            case MambaSpec():
                c, k = spec.width, spec.key_dim
                one = MambaParams(
                    spec=spec,
                    decay=self.normal(c, k, wide=True),
                    time=self.normal(c, wide=True),
                    skip=self.normal(c, wide=True),
                )
                rows = tuple(self.normal(tokens, n) for n in (c, c, k, k, 2 * c))
                return "selective_scan", rows, one, {}
            case ShortConvSpec():
                x = self.normal(tokens, 3 * spec.width)
                return "short_conv", (x,), self.conv(spec, spec.bias, silu=False), {}


def both(
    ours: Any, theirs: Any, spec: RecurrentSpec, given: Sequence[Part], maker: Maker
) -> list[tuple[Tensor, Tensor]]:
    """Runs an op of `ours`, and of `theirs` in float32 → pairs of what they give: rows, convolution states, states."""
    meta, slots = metadata(given, maker.device)
    assert meta.states is not None
    name, rows, params, more = maker.call(spec, len(meta.states.write))
    state, live = maker.state(spec, slots), owned(given).to(maker.device)
    results = []
    for ops, dtype in ((ours, maker.dtype), (theirs, torch.float32)):
        recurrent = None if state.recurrent is None else state.recurrent.clone()
        own = LayerState(state.conv.to(dtype, copy=True), recurrent)
        wide = {key: value.to(dtype) for key, value in more.items()}
        out = getattr(ops, name)(
            *(x.to(dtype) for x in rows), state=own, meta=meta, params=params, **wide
        )
        results.append((out[live], own.conv, own.recurrent))
    return [(a, b) for a, b in zip(*results, strict=True) if a is not None]


def error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖, without the null slot's numbers, which are large and must be the same."""
    null = theirs == GARBAGE
    assert ours.isfinite().all()
    assert torch.equal(null, ours == GARBAGE)
    ours, theirs = ours[~null].float(), theirs[~null].float()
    return ((ours - theirs).norm() / theirs.norm()).item()
