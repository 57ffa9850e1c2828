"""Random steps for the ops of recurrent layers, each op's calls, and Hugging Face's modules in terms of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.ops import OpSet
from slipstream.kernels.states import (
    CHUNK,
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
    StateMetadata,
)
from slipstream.spec.recurrent import (
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from tests.kernels.recurrent_steps import Maker

GARBAGE = 1e4
"""Fills the slots that no sequence reads, and the null slot."""


@dataclass(frozen=True, slots=True)
class StatefulSequence:
    """A sequence of `num_tokens` that reads a slot. `kept` has (token of the sequence, slot) pairs."""

    num_tokens: int
    read: int
    kept: tuple[tuple[int, int], ...] = ()


def step_of(sequences: Sequence[StatefulSequence]) -> AttentionMetadata:
    """Makes the metadata of a step, decodes first."""
    decodes = [s for s in sequences if s.num_tokens == 1]
    ordered = decodes + [s for s in sequences if s.num_tokens != 1]
    starts, write = [0], []
    chunks: list[tuple[int, int, int]] = []
    for i, s in enumerate(ordered):
        begin, kept = starts[-1], dict(s.kept)
        write += [kept.get(t, 0) for t in range(s.num_tokens)]
        cuts = sorted({*(t + 1 for t in kept), *range(CHUNK, s.num_tokens, CHUNK), s.num_tokens})
        if i >= len(decodes):
            chunks += [(i, begin + a, begin + b) for a, b in zip([0, *cuts], cuts, strict=False)]
        starts.append(begin + s.num_tokens)
    num_tokens, lens = starts[-1], torch.tensor([s.num_tokens for s in ordered], dtype=torch.int32)
    states = StateMetadata(
        read=torch.tensor([s.read for s in ordered], dtype=torch.int32),
        write=torch.tensor(write, dtype=torch.int32),
        chunks=torch.tensor(chunks, dtype=torch.int32).view(-1, 3),
    )
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=lens,
        block_table=torch.zeros(len(ordered), 1, dtype=torch.int32),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        num_decodes=len(decodes),
        max_query_len=int(lens.max()) if len(lens) else 0,
        max_seq_len=int(lens.max()) if len(lens) else 0,
        states=states,
    )


def new_state(
    spec: RecurrentSpec,
    num_slots: int,
    used: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> LayerState:
    """Makes a layer's slots: random numbers in those `used`, and else garbage."""
    conv = torch.full((num_slots, spec.conv_width - 1, spec.conv_channels), GARBAGE, dtype=dtype)
    shape = spec.state_shape
    states = None if shape is None else torch.full((num_slots, *shape), GARBAGE)
    for slot in used:
        conv[slot] = torch.randn(conv.shape[1:]).to(dtype)
        if states is not None:
            states[slot] = torch.randn(states.shape[1:])
    return LayerState(conv, states)


def copy_of(state: LayerState) -> LayerState:
    return LayerState(
        state.conv.clone(), None if state.recurrent is None else state.recurrent.clone()
    )


Call = Callable[[OpSet, Any, LayerState, AttentionMetadata], Tensor]
"""Runs a layer's ops on its inputs [T, …]."""


def layer_call(params: Any, conv: ConvParams | None = None) -> Call:
    """Returns the call of a layer's op. `conv`: the convolution before the scan of a Mamba layer."""

    def call(ops: OpSet, x: Any, state: LayerState, meta: AttentionMetadata) -> Tensor:
        how: dict[str, Any] = dict(state=state, meta=meta, params=params)
        match params:
            case GatedDeltaParams():
                how |= zip(("decay", "z"), x[2:], strict=False)
                return ops.gated_delta(x[0], gates=x[1], **how)
            case Mamba2Params():
                return ops.mamba2(x[0], **how)
            case MambaParams():
                _, dt, b, c, xz = x
                inner = ops.causal_conv(xz, state=state, meta=meta, params=conv)
                return ops.selective_scan(inner, dt=dt, b=b, c=c, xz=xz, **how)
        return ops.short_conv(x[0], **how)

    return call


def random_layer(
    spec: RecurrentSpec, dtype: torch.dtype = torch.float32
) -> tuple[Call, Callable[[int], tuple[Tensor, ...]]]:
    """Makes random parameters. Returns the op's call, and a function that makes inputs of T tokens."""
    make = Maker(int(torch.randint(2**31, ())), "cpu", dtype, conv_scale=1.0)
    conv = make.conv(spec, spec.conv_bias) if isinstance(spec, MambaSpec) else None
    return layer_call(make.params(spec), conv), lambda n: make.rows(spec, n)


# --- Hugging Face's modules -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Theirs:
    """A module of transformers: its layer as a spec, its products and our op."""

    module: nn.Module
    spec: RecurrentSpec
    inputs: Callable[[Tensor], Any]  # hidden states [T, E] → what the op takes
    call: Call
    out: nn.Linear


def _randomized(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():
        scale = 1.0 if parameter.dim() < 2 or "conv" in name or "A_log" in name else 0.3
        nn.init.normal_(parameter, std=scale)
        if "norm" in name:
            parameter.data += 1
    return module.eval().requires_grad_(False)


def _conv(module: nn.Conv1d, *, silu: bool = True) -> ConvParams:
    bias = None if module.bias is None else module.bias
    return ConvParams(weight=module.weight.squeeze(1), bias=bias, silu=silu)


def qwen3_next() -> Theirs:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        linear_num_value_heads=6,
        linear_num_key_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        layer_types=["linear_attention"],
    )
    m: Any = _randomized(Qwen3NextGatedDeltaNet(config, 0))
    spec = GatedDeltaSpec(
        num_key_heads=3,
        num_heads=6,
        key_dim=16,
        value_dim=24,
        conv_width=4,
        eps=config.rms_norm_eps,
    )
    params = GatedDeltaParams(
        spec=spec, conv=_conv(m.conv1d), decay=m.A_log, time=m.dt_bias, norm=m.norm.weight
    )

    def inputs(h: Tensor) -> Any:
        q, k, v, z, b, a = m.fix_query_key_value_ordering(
            m.in_proj_qkvz(h)[None], m.in_proj_ba(h)[None]
        )
        x = torch.cat([y[0].flatten(1) for y in (q, k, v, z)], dim=1)
        return x, torch.cat((b[0], a[0]), dim=1)

    return Theirs(m, spec, inputs, layer_call(params), m.out_proj)


def olmo_hybrid() -> Theirs:
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    config = OlmoHybridConfig(
        hidden_size=32,
        num_hidden_layers=2,
        linear_num_value_heads=4,
        linear_num_key_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        linear_allow_neg_eigval=True,
        layer_types=["linear_attention", "full_attention"],
    )
    m: Any = _randomized(OlmoHybridGatedDeltaNet(config, 0))
    spec = GatedDeltaSpec(
        num_key_heads=4,
        num_heads=4,
        key_dim=12,
        value_dim=24,
        conv_width=4,
        eps=m.o_norm.variance_epsilon,
        negative_eigenvalues=True,
    )
    params = GatedDeltaParams(
        spec=spec, conv=_conv(m.conv1d), decay=m.A_log, time=m.dt_bias, norm=m.o_norm.weight
    )

    def inputs(h: Tensor) -> Any:
        rows = [project(h) for project in (m.q_proj, m.k_proj, m.v_proj, m.g_proj)]
        return torch.cat(rows, dim=1), torch.cat((m.b_proj(h), m.a_proj(h)), dim=1)

    return Theirs(m, spec, inputs, layer_call(params), m.o_proj)


def kimi_linear() -> Theirs:
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_num_heads=3,
        linear_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    m: Any = _randomized(KimiLinearDeltaAttention(config, 0))
    spec = GatedDeltaSpec(
        num_key_heads=3,
        num_heads=3,
        key_dim=16,
        value_dim=16,
        conv_width=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        decay="channel",
        gate="sigmoid",
        latent=16,
    )
    gate = m.forget_gate
    params = GatedDeltaParams(
        spec=spec,
        conv=_conv(m.conv1d),
        decay=gate.A_log.flatten(),
        time=gate.dt_bias,
        norm=m.o_norm.weight,
    )

    def inputs(h: Tensor) -> Any:
        x = torch.cat([project(h) for project in (m.q_proj, m.k_proj, m.v_proj)], dim=1)
        return x, m.b_proj(h), gate.f_b_proj(gate.f_a_proj(h)), m.g_b_proj(m.g_a_proj(h))

    return Theirs(m, spec, inputs, layer_call(params), m.o_proj)


def _mamba2(m: Any, spec: Mamba2Spec, inputs: Callable[[Tensor], Tensor]) -> Theirs:
    params = Mamba2Params(
        spec=spec,
        conv=_conv(m.conv1d),
        decay=m.A_log,
        time=m.dt_bias,
        skip=m.D,
        norm=None if spec.norm is None else m.norm.weight,
    )
    return Theirs(m, spec, lambda h: (inputs(h),), layer_call(params), m.out_proj)


def nemotron_h() -> Theirs:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=32,
        num_hidden_layers=1,
        mamba_num_heads=6,
        mamba_head_dim=12,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        layers_block_type=["mamba"],
    )
    m: Any = _randomized(NemotronHMamba2Mixer(config, 0))
    low, high = m.time_step_limit
    spec = Mamba2Spec(
        num_heads=6,
        value_dim=12,
        key_dim=16,
        num_groups=2,
        conv_width=4,
        eps=config.layer_norm_epsilon,
        norm_groups=2,
        time_limit=(low, high),
    )
    return _mamba2(m, spec, m.in_proj)


def bamba() -> Theirs:
    from transformers import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    config = BambaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    )
    m: Any = _randomized(BambaMixer(config, 0))
    spec = Mamba2Spec(
        num_heads=4,
        value_dim=16,
        key_dim=24,
        num_groups=1,
        conv_width=4,
        eps=config.rms_norm_eps,
        time_limit=tuple(config.time_step_limit),
    )
    return _mamba2(m, spec, m.in_proj)


def falcon_h1(*, norm: bool, first: bool = False) -> Theirs:
    from transformers import FalconH1Config
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

    config = FalconH1Config(
        hidden_size=32,
        num_hidden_layers=1,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_ssm=64,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_chunk_size=8,
        mamba_rms_norm=norm,
        mamba_norm_before_gate=first,
    )
    m: Any = _randomized(FalconH1Mixer(config, 0))
    if not hasattr(m, "mup_vector"):
        m.register_buffer("mup_vector", torch.ones(1, 1, m.in_proj.out_features))
    spec = Mamba2Spec(
        num_heads=4,
        value_dim=16,
        key_dim=24,
        num_groups=2,
        conv_width=4,
        eps=config.rms_norm_eps,
        norm=None if not norm else "norm_first" if first else "gate_first",
        norm_groups=2,
    )
    return _mamba2(m, spec, lambda h: m.in_proj(h * m.ssm_in_multiplier) * m.mup_vector[0])


def jamba() -> Theirs:
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    config = JambaConfig(
        hidden_size=20, num_hidden_layers=1, mamba_d_state=8, mamba_dt_rank=5, mamba_expand=2
    )
    return _mamba1(_randomized(JambaMambaMixer(config, 0)), 40, 8, 5)


def falcon_mamba() -> Theirs:
    from transformers import FalconMambaConfig
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

    config = FalconMambaConfig(
        hidden_size=24, num_hidden_layers=1, state_size=16, time_step_rank=6, expand=2
    )
    return _mamba1(
        _randomized(FalconMambaMixer(config, 0, initialize_mixer_weights=False)), 48, 16, 6
    )


def _mamba1(m: Any, width: int, key_dim: int, rank: int) -> Theirs:
    spec = MambaSpec(width=width, key_dim=key_dim, rank=rank, conv_width=4, eps=1e-6)
    conv = _conv(m.conv1d)
    params = MambaParams(spec=spec, decay=m.A_log, time=m.dt_proj.bias, skip=m.D)

    def call(ops: OpSet, x: Any, state: LayerState, meta: AttentionMetadata) -> Tensor:
        inner = ops.causal_conv(x[0], state=state, meta=meta, params=conv)
        dt, b, c = m.x_proj(inner).split([rank, key_dim, key_dim], dim=1)
        dt, b, c = m.dt_layernorm(dt), m.b_layernorm(b), m.c_layernorm(c)
        dt = F.linear(dt, m.dt_proj.weight)
        more: dict[str, Any] = dict(state=state, meta=meta, params=params)
        return ops.selective_scan(inner, dt=dt, b=b, c=c, xz=x[0], **more)

    return Theirs(m, spec, lambda h: (m.in_proj(h),), call, m.out_proj)


def lfm2() -> Theirs:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = Lfm2Config(
        hidden_size=40, num_hidden_layers=1, conv_L_cache=3, conv_bias=True, layer_types=["conv"]
    )
    m: Any = _randomized(Lfm2ShortConv(config, 0))
    spec = ShortConvSpec(width=40, conv_width=3, bias=True)
    params = _conv(m.conv, silu=False)
    return Theirs(m, spec, lambda h: (m.in_proj(h),), layer_call(params), m.out_proj)


THEIRS: dict[str, Callable[[], Theirs]] = {
    "qwen3_next": qwen3_next,
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "falcon_h1 without a norm": lambda: falcon_h1(norm=False),
    "falcon_h1, gate first": lambda: falcon_h1(norm=True),
    "falcon_h1, norm first": lambda: falcon_h1(norm=True, first=True),
    "jamba": jamba,
    "falcon_mamba": falcon_mamba,
    "lfm2": lfm2,
}


# --- Our layers -------------------------------------------------------------------------------------------------------

_DELTA = GatedDeltaSpec(
    num_key_heads=2, num_heads=4, key_dim=16, value_dim=32, conv_width=4, eps=1e-6
)
_MAMBA2 = Mamba2Spec(num_heads=4, value_dim=16, key_dim=8, num_groups=2, conv_width=4, eps=1e-5)
SPECS: dict[str, RecurrentSpec] = {
    "delta": _DELTA,
    "delta of odd sizes": replace(
        _DELTA, num_heads=6, key_dim=11, value_dim=21, negative_eigenvalues=True, conv_width=2
    ),
    "delta of wide heads": replace(_DELTA, num_key_heads=1, num_heads=1, key_dim=40, value_dim=144),
    "delta by channel": replace(_DELTA, num_key_heads=4, decay="channel", gate="sigmoid", latent=8),
    "delta by channel, together": replace(_DELTA, decay="channel", value_dim=16),
    "delta by channel, bounded": replace(_DELTA, decay="channel", gate="sigmoid", bound=-5.0),
    "delta, bounded": replace(_DELTA, bound=-1.5),
    "mamba2": _MAMBA2,
    "mamba2 of odd sizes": replace(
        _MAMBA2, num_heads=3, num_groups=3, value_dim=20, key_dim=13, norm_groups=3, conv_bias=False
    ),
    "mamba2, norm first": replace(
        _MAMBA2, norm="norm_first", norm_groups=2, time_limit=(0.1, 0.6), value_dim=64
    ),
    "mamba2 without a norm": replace(_MAMBA2, norm=None, num_groups=1, time_limit=(0.01, math.inf)),
    "mamba": MambaSpec(width=48, key_dim=16, rank=4, conv_width=4, eps=1e-6),
    "mamba of odd sizes": MambaSpec(
        width=37, key_dim=5, rank=4, conv_width=3, eps=1e-6, conv_bias=False
    ),
    "short": ShortConvSpec(width=64, conv_width=3),
    "short of odd sizes": ShortConvSpec(width=45, conv_width=4, bias=True),
}
