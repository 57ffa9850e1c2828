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
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of
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
    meta = uniform(1, 1, 1, block_size=16, platform=platform_of(torch.device(device)))
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
    def __init__(self, seed: int, device: str, dtype: torch.dtype, conv_scale: float = 0.5) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.conv_scale = device, dtype, conv_scale

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
            weight=self.normal(c, w, scale=self.conv_scale),
            bias=self.normal(c, scale=self.conv_scale) if bias else None,
            silu=silu,
        )

    def params(self, spec: RecurrentSpec) -> Any:
        """Parameters of the layer's op."""
        match spec:
            case GatedDeltaSpec():
                return GatedDeltaParams(
                    spec=spec,
                    conv=self.conv(spec, False),
                    decay=self.normal(spec.num_heads, wide=True),
                    time=self.normal(spec.decay_size, wide=True),
                    norm=self.normal(spec.value_dim),
                )
            case Mamba2Spec():
                norm = None if spec.norm is None else self.normal(spec.v_size)
                return Mamba2Params(
                    spec=spec,
                    conv=self.conv(spec, spec.conv_bias),
                    **{
                        n: self.normal(spec.num_heads, wide=True) for n in ("decay", "time", "skip")
                    },
                    norm=norm,
                )
            case MambaSpec():
                return MambaParams(
                    spec=spec,
                    decay=self.normal(spec.width, spec.key_dim, wide=True),
                    time=self.normal(spec.width, wide=True),
                    skip=self.normal(spec.width, wide=True),
                )
            case ShortConvSpec():
                return self.conv(spec, spec.bias, silu=False)

    def rows(self, spec: RecurrentSpec, tokens: int) -> tuple[Tensor, ...]:
        """Inputs of the layer's op, each [T, …]. Those of a Mamba layer are x, dt, b, c and xz."""
        match spec:
            case GatedDeltaSpec(latent=None):
                widths = (spec.conv_channels + spec.v_size, spec.num_heads + spec.decay_size)
            case GatedDeltaSpec():
                widths = (spec.conv_channels, spec.num_heads, spec.decay_size, spec.v_size)
            case Mamba2Spec():
                widths = (spec.v_size + spec.conv_channels + spec.num_heads,)
            case MambaSpec(width=c, key_dim=k):
                widths = (c, c, k, k, 2 * c)
            case ShortConvSpec():
                widths = (3 * spec.width,)
        return tuple(self.normal(tokens, n) for n in widths)

    def call(self, spec: RecurrentSpec, tokens: int) -> tuple[str, tuple[Tensor, ...], Any, dict]:
        """(op, its rows, its parameters, further arguments)."""
        params, rows = self.params(spec), self.rows(spec, tokens)
        match spec:
            case GatedDeltaSpec():
                return (
                    "gated_delta",
                    rows[:2],
                    params,
                    dict(zip(("decay", "z"), rows[2:], strict=False)),
                )
            case Mamba2Spec():
                return "mamba2", rows, params, {}
            case MambaSpec():
                return "selective_scan", rows, params, {}
            case ShortConvSpec():
                return "short_conv", rows, params, {}


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
