"""Tests whether the one-token kernel can run a model's layers, from a recording of their ops.

`match_layers` compares each layer's ops with the pattern that the kernel implements:

  norm, attention, norm, MLP                      or, parallel: norm, [norm], attention, MLP, sum
  attention: qkv product, rope_and_cache, attention (with a window, sinks, an output gate), out product
             or latent attention, with queries of one product
             or the gated delta rule, with a decay for each head
  MLP:       up product, activation, down product
             or router, experts, [a shared expert, [weighted]]

A match has the layers' products and small tensors, by the kernel's names. Nothing here imports
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

from slipstream.kernels.layouts import Experts, MLAShape, TokenShape
from slipstream.kernels.tracing.recording import Op, Refused, Value
from slipstream.spec.model import ClampedSwiglu, GatedDeltaSpec, MoESpec, OwnNorm
from slipstream.spec.reason import Reason

LACKS = {
    "clip": "clip_qkv: the one-token kernel has no clamp",
    "norm_qk": "qk_norm: the one-token kernel norms q and k of each head by one weight only",
    "scale_queries": "query_scale: the one-token kernel has no factor of queries by position",
    "scale": "residual_scale: the one-token kernel has no factor for a branch",
    "bidirectional_attention": "the one-token kernel is for decoding, and an encoder reads whole texts",
    "disentangled_attention": "the one-token kernel is for decoding, and an encoder reads whole texts",
    "add": "the one-token kernel has a norm before every branch and no other sums",
    "all_reduce": "the one-token kernel sums over ranks after attention and after the MLP, each",
}

OTHER_RANK = Reason("another rank can't run the one-token kernel")

COLUMN = 64
"""Bytes of a row that a warp multiplies at once."""
MAX_EXPERTS = 512
"""Maximum experts: each lane of a warp holds 1/32 of the router's logits."""
MAX_CHOSEN = 16
"""Maximum chosen experts of a token: each consumer thread loads a tile's row for one of them."""
MAX_MIDS = 32768
"""Maximum inputs of a token's down products together, which the consumer threads hold in
registers."""
MAX_TABLES = 2
"""Maximum number of block tables: the kernel has this many parameters for them."""


def widths(s: TokenShape) -> tuple[int, int, int]:
    """Intermediate sizes of a dense MLP, an expert and the shared expert; 0 if there is none."""
    shared = None if s.experts is None else s.experts.shared
    return (
        s.intermediate_size,
        0 if s.experts is None else s.experts.expert.intermediate_size,
        0 if shared is None else shared.mlp.intermediate_size,
    )


def inner_sizes(s: TokenShape) -> list[int]:
    """Numbers of inputs of the token's linear layers."""
    values = 0 if s.delta is None else s.delta.v_size
    return [n for n in (s.hidden_size, s.num_heads * s.head_dim, values, *widths(s)) if n]


def size_refusal(s: TokenShape, bits: int, rotary: int | None) -> Reason | None:
    """Returns why the kernel can't run layers of these sizes with weights of `bits` bits; None if
    it can."""
    group = s.num_heads // s.num_kv_heads
    if s.experts is not None and not _takes_experts(s.experts, s):
        return Reason(
            "the one-token kernel has no such mixture of experts: in groups, in a parallel block, too many, too wide"
        )
    if not all(n % 16 == 0 and n * bits // 8 % COLUMN == 0 for n in inner_sizes(s)):
        found = ", ".join(map(str, inner_sizes(s)))
        return Reason(
            f"the one-token kernel reads {COLUMN} bytes of a row at once, and rows of {found} are not all multiples"
        )
    if s.delta is not None and not _takes_delta(s.delta):
        return Reason(
            "the one-token kernel has the gated delta rule with one decay a head, no latents, and heads of 32, 64, 128 or 256"
        )
    if s.head_dim not in (32, 64, 128, 256) or group > 8 or s.num_kv_heads * s.head_dim % 16:
        which = f"heads of {s.head_dim} with {group} queries to a key"
        return Reason(
            f"the one-token kernel has no {which}; it has heads of 32, 64, 128 or 256 with at most 8"
        )
    if rotary is not None and rotary % 2:
        return Reason(
            f"the one-token kernel rotates pairs, and {rotary} elements of a head are rotated"
        )
    return None


def ranks_refusal(s: TokenShape) -> Reason | None:
    """Returns why several ranks can't run such layers together; None if they can."""
    if s.parallel or s.experts is not None or s.latent is not None or s.delta is not None:
        return Reason(
            "the one-token kernel of several ranks has no experts, latents, recurrent layers and parallel blocks"
        )
    return None


def _takes_delta(d: GatedDeltaSpec) -> bool:
    sizes = (32, 64, 128, 256)
    rows = d.conv_channels + d.v_size
    whole = rows % 16 == 0 and d.conv_channels % 8 == 0 and d.v_size % 256 == 0
    plain = d.latent is None and d.decay == "head" and d.bound is None
    return plain and whole and d.key_dim in sizes and d.value_dim in sizes and d.conv_width <= 8


def _takes_experts(m: MoESpec, s: TokenShape) -> bool:
    top = m.num_experts_per_token
    return (
        not s.parallel
        and m.groups is None
        and not m.identity
        and top <= min(MAX_CHOSEN, m.num_experts)
        and top * m.expert.intermediate_size <= MAX_MIDS
        and m.num_experts <= MAX_EXPERTS
    )


@dataclass(slots=True)
class LayerMatch:
    """A layer that the kernel runs: its shape (as if all layers were like it), products and other
    tensors, by the kernel's names."""

    shape: TokenShape
    products: dict[str, Any]
    tensors: dict[str, Any]
    plain: list[Any]  # never quantized: the router and the weight of a shared expert
    cos_sin: Any
    window: int | None = None
    cache_group: int = 0
    group: Any = None  # ranks whose parts are summed, after attention and after the MLP


def match_layers(body: Sequence[Op]) -> tuple[TokenShape, list[LayerMatch]] | Reason:
    """Returns the shape that all layers share, and each layer; or the reason why the kernel can't
    run them.

    `body` has the ops of a trace's layers and those after them.
    """
    try:
        of_layers = (
            (i, list(ops))
            for i, ops in groupby(_sums_apart(body), key=lambda op: op.layer)
            if i is not None
        )
        layers = [Matcher(ops).layer() for _, ops in of_layers]
        return _together(layers), layers
    except Refused as refused:
        return refused.reason


def _sums_apart(body: Sequence[Op]) -> Iterator[Op]:
    """Yields the ops, but splits an op that sums over ranks and norms into two. The sum belongs to
    the layer whose results it adds."""
    made: dict[int, int | None] = {}  # by value
    for op in body:
        made |= {x.index: op.layer for x in op.outputs}
        if op.name != "all_reduce_norm":
            yield op
            continue
        part, *residual = op.inputs
        total = Value(-op.out.index, part.shape) if residual else op.outputs[1]
        yield Op(
            "all_reduce", (part,), (total,), {"group": op.arguments["group"]}, made.get(part.index)
        )
        normed = op.outputs if residual else op.outputs[:1]
        yield Op("norm", (total, *residual), normed, {"norm": op.arguments["norm"]}, op.layer)


OF_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "latent", "interleaved", "qk_eps", "qk_offset"),
    *("scale", "output_gate"),
)
"""Fields of `TokenShape` that describe attention. A recurrent layer has none, so its shape takes
them from the model's layers with attention."""


def _with_attention(layers: Sequence[LayerMatch]) -> None:
    """Fills in the attention fields of recurrent layers, and checks that all recurrent layers have
    the same recurrence."""
    attended = [x for x in layers if x.shape.delta is None]
    deltas = {x.shape.delta for x in layers} - {None}
    if not attended or len(deltas) > 1:
        raise Refused(
            "the one-token kernel has one kind of recurrent layers, together with others that have attention"
        )
    first = attended[0]
    own = {name: getattr(first.shape, name) for name in OF_ATTENTION} | {
        "delta": next(iter(deltas), None)
    }
    for x in layers:
        if x.shape.delta is not None:
            x.shape, x.cos_sin = dataclasses.replace(x.shape, **own), first.cos_sin
        elif deltas:
            x.shape = dataclasses.replace(x.shape, delta=own["delta"])


def _together(layers: Sequence[LayerMatch]) -> TokenShape:
    recurrent = [x.shape.delta is not None for x in layers]
    _with_attention(layers)
    shapes = [layer.shape for layer in layers]
    dense = {s.intermediate_size for s in shapes if s.experts is None}
    mixtures = {s.experts for s in shapes if s.experts is not None}
    common = {dataclasses.replace(s, intermediate_size=0, experts=None) for s in shapes}
    if len(common) > 1 or len(dense) > 1 or len(mixtures) > 1:
        raise Refused("the layers differ, and the one-token kernel is made for one kind")
    if any(x.cos_sin is not layers[0].cos_sin for x in layers):
        raise Refused(
            "the layers rotate by different angles, and the one-token kernel has one table of them"
        )
    if (most := max(x.cache_group for x in layers)) >= MAX_TABLES:
        raise Refused(
            f"the one-token kernel has {MAX_TABLES} block tables, and the model's layers have {most + 1}"
        )
    experts = next(iter(mixtures), None)
    if experts is not None:
        _check_biases(layers, experts)
    for kind in product((False, True), repeat=2):
        there = {
            (*_there(x.products), *_there(x.tensors))
            for x, delta in zip(layers, recurrent, strict=True)
            if (x.shape.experts is not None, delta) == kind
        }
        if len(there) > 1:
            raise Refused(
                "some layers have biases or norms that others lack, and the one-token kernel is made for one kind"
            )
    return dataclasses.replace(
        common.pop(), intermediate_size=next(iter(dense), 0), experts=experts
    )


def _check_biases(layers: Sequence[LayerMatch], experts: MoESpec) -> None:
    names = ("up", "down", "shared_up", "shared_down")
    beside = experts.shared is not None or any(x.shape.experts is None for x in layers)
    if beside and any(
        x.products[n].bias is not None for x in layers for n in names if n in x.products
    ):
        raise Refused("the one-token kernel has no biases of experts together with another MLP")
    one, shared = experts.expert, experts.shared
    if experts.nearness or experts.scales_input or not experts.has_usual_choice:
        raise Refused("the one-token kernel has no such weights of experts")
    if shared is not None and (shared.mlp.activation, shared.mlp.gated) != (
        one.activation,
        one.gated,
    ):
        raise Refused(
            "the shared expert has another activation than the experts, and the one-token kernel has one"
        )


def _there(found: dict[str, Any]) -> Iterator[tuple[str, bool, bool]]:
    for name, x in found.items():
        yield name, x is not None, getattr(x, "bias", None) is not None


@dataclass(slots=True)
class Matcher:
    """Reads a layer's ops in order. An op that does not fit the pattern raises `Refused`."""

    ops: list[Op]
    at: int = 0
    products: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    plain: list[Any] = field(default_factory=list)
    cos_sin: Any = None
    window: int | None = None
    cache_group: int = 0
    groups: list[Any] = field(default_factory=list)
    """Rank groups of the sums that were read so far."""

    def layer(self) -> LayerMatch:
        if self._next != "norm":
            raise Refused(LACKS["add"])
        first, second = self._norm("norm"), None
        if self._next == "norm":  # the MLP's own norm, in a parallel block
            second = self._norm("mlp_norm")
            if second.inputs != first.outputs[1:] and second.inputs != (first.x,):
                raise self._refused()
        attended, of_attention = self._attention(first.out)
        attended = self._summed(attended)
        parallel = second is not None or self._next != "norm"
        if not parallel:
            second = self._norm("mlp_norm")
            if len(second.inputs) != 2 or second.x != attended:
                raise Refused(
                    "the one-token kernel adds a branch's result to the residual without a norm of its own"
                )
        self._same(first, second)
        out, of_mlp = self._mlp(first.out if second is None else second.out)
        out = self._summed(out)
        if parallel and set(self._take("add").inputs) != {attended, out}:
            raise Refused(LACKS["add"])
        if self.at < len(self.ops):
            raise self._refused()
        for name in ("mlp_norm", "mlp_norm_bias"):
            self.tensors.setdefault(name, None)
        norm = first.arguments["norm"]
        shape = TokenShape(
            hidden_size=first.out.width,
            parallel=parallel,
            norm=norm.kind,
            norm_eps=norm.eps,
            norm_offset=norm.offset,
            mlp_norm=second is not None,
            mlp_norm_eps=(second or first).arguments["norm"].eps,
            **of_attention,
            **of_mlp,
        )
        own = (
            shape,
            self.products,
            self.tensors,
            self.plain,
            self.cos_sin,
            self.window,
            self.cache_group,
        )
        if not self.groups:
            return LayerMatch(*own)
        if len(self.groups) < 2:
            raise Refused(LACKS["all_reduce"])
        if (reason := ranks_refusal(shape)) is not None:
            raise Refused(reason)
        return LayerMatch(*own, self.groups[0])

    # --- Parts ---

    def _summed(self, x: Value) -> Value:
        """Reads a sum over ranks, if one follows."""
        if self._next != "all_reduce":
            return x
        op = self._take("all_reduce")
        self.groups.append(op.arguments["group"])
        return op.out

    def _norm(self, name: str) -> Op:
        op = self._take("norm")
        norm = op.arguments["norm"]
        if isinstance(norm.kind, OwnNorm):
            raise Refused("the one-token kernel can't call a norm from outside (OwnNorm)")
        self.tensors |= {name: norm.weight, f"{name}_bias": norm.bias}
        return op

    def _same(self, first: Op, second: Op | None) -> None:
        """Checks that both norms are of the same kind, because the kernel has only one."""

        def kind(op: Op) -> tuple[object, ...]:
            norm = op.arguments["norm"]
            return norm.kind, op.out.width, norm.bias is None, norm.offset

        if second is not None and kind(second) != kind(first):
            raise Refused("a layer's norms are of two kinds, and the one-token kernel has one")

    def _attention(self, x: Value) -> tuple[Value, dict[str, Any]]:
        """Reads attention and returns (its result, its fields of `TokenShape`)."""
        qkv = self._linear("qkv", x)
        if self._next == "linear" and self._after(1) == "gated_delta":
            return self._delta(x, qkv)
        gate = None
        if self._next == "columns":
            gate, qkv = self._take("columns"), self._take("columns").out
        if self._next == "norm":
            raise Refused("q_lora_rank: the one-token kernel has no latents of queries")
        if self._next == "linear":
            return self._latent_attention(x, qkv)
        turned = self._take("rope_and_cache")
        heads, op = turned.arguments["heads"], self._take("attention")
        params = op.arguments["params"]
        if heads.norm_after:
            raise Refused("qk_norm: the one-token kernel norms q and k before it rotates them")
        for name in ("softcap", "alibi_slopes", "distance_bias"):
            if getattr(params, name) is not None:
                raise Refused(f"{name}: the one-token kernel has no such attention")
        self.cos_sin = heads.cos_sin
        self.window = params.window
        self.cache_group = op.arguments["meta"].group
        self.tensors |= {"q_norm": heads.q_norm, "k_norm": heads.k_norm, "sinks": params.sinks}
        attended = op.out
        if gate is not None:
            if gate.out.width != op.out.width:
                raise Refused(
                    "the one-token kernel has output gates of as many numbers as heads give"
                )
            opened = self._take("sigmoid")
            attended = self._take("mul").out
            if opened.inputs != (gate.out,):
                raise self._refused()
        return self._linear("out", attended), dict(
            output_gate=gate is not None,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            latent=None,
            interleaved=heads.interleaved,
            qk_eps=heads.norm_eps,
            qk_offset=heads.norm_offset,
            scale=params.scale,
        )

    def _delta(self, x: Value, rows: Value) -> tuple[Value, dict[str, Any]]:
        """Reads a gated delta rule with its product of gates, which is not quantized."""
        gates = self._take("linear")
        op = self._take("gated_delta")
        if gates.x != x or op.inputs != (rows, gates.out):
            raise self._refused()
        params, w = op.arguments["params"], gates.arguments["w"]
        self.plain.append(w)
        self.tensors |= {
            "gates": w.weight,
            "conv": params.conv.weight,
            "conv_bias": params.conv.bias,
            "decay": params.decay,
            "time": params.time,
            "delta_norm": params.norm,
        }
        out = self._linear("out", op.out)
        if w.bias is not None or any(self.products[n].bias is not None for n in ("qkv", "out")):
            raise Refused("the one-token kernel has no biases of recurrent layers")
        none = dict.fromkeys(OF_ATTENTION, 0)
        return out, {**none, "latent": None, "interleaved": False, "delta": params.spec}

    def _latent_attention(self, x: Value, q: Value) -> tuple[Value, dict[str, Any]]:
        if self._next == "scale_queries":
            raise self._refused()
        row = self._linear("latent", x)
        op = self._take("mla_attention")
        params, out = op.arguments["params"], self._linear("out", op.out)
        if any(self.products[name].bias is not None for name in ("latent", "out")):
            raise Refused("the one-token kernel has no biases of latents")
        self.cos_sin, rotary = params.cos_sin, params.rotary_dim
        self.tensors |= {"k_norm": params.norm.weight, "keys": params.keys, "values": params.values}
        num_heads = op.x.shape[0]
        latent = MLAShape(
            nope_dim=op.x.shape[1] - rotary,
            rotary_dim=rotary,
            rank=row.width - rotary,
            eps=params.norm.eps,
        )
        return out, dict(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=op.out.width // num_heads,
            latent=latent,
            interleaved=params.interleaved,
            qk_eps=0.0,
            qk_offset=0.0,
            scale=params.scale,
        )

    def _mlp(self, x: Value) -> tuple[Value, dict[str, Any]]:
        found = self._take("linear")
        if self._next not in ("moe", "moe_and_shared"):
            self.products["up"] = found.arguments["w"]
            down, act = self._activated(found, x, "down")
            return down, dict(intermediate_size=act.out.width, **act.arguments, experts=None)
        if found.x != x:
            raise self._refused()
        routed = self._take("moe", "moe_and_shared")
        router, experts = found.arguments["w"], routed.arguments["experts"]
        assert isinstance(experts, Experts)
        spec = experts.spec
        self._plain_activation(spec.expert.activation)
        self.products |= {"up": experts.up, "down": experts.down}
        self.tensors |= {
            "router": router.weight,
            "router_bias": router.bias,
            "correction": experts.correction,
        }
        self.tensors["expert_counts"] = routed.arguments["load"]
        self.plain.append(router)
        out = routed.out
        if routed.name == "moe_and_shared":
            self.products |= dict(
                zip(("shared_up", "shared_down"), routed.arguments["shared"], strict=True)
            )
        elif spec.shared is not None:
            out = self._shared(x, out)
        expert = spec.expert
        return out, dict(
            intermediate_size=0, gated=expert.gated, activation=expert.activation, experts=spec
        )

    def _shared(self, x: Value, routed: Value) -> Value:
        """Reads a shared expert, its weight if any, and its sum with the other experts."""
        up = self._take("linear")
        self.products["shared_up"] = up.arguments["w"]
        added, _ = self._activated(up, x, "shared_down")
        if self._next == "linear":
            weight = self._take("linear")
            self.plain.append(weight.arguments["w"])
            self.tensors["shared_weight"] = weight.arguments["w"].weight
            self._take("sigmoid")
            added = self._take("mul").out
        total = self._take("add")
        if set(total.inputs) != {routed, added}:
            raise Refused(LACKS["add"])
        return total.out

    def _activated(self, up: Op, x: Value, name: str) -> tuple[Value, Op]:
        if up.x != x:
            raise Refused("the one-token kernel's branches read a norm's result")
        act = self._take("activation")
        self._plain_activation(act.arguments["activation"])
        return self._linear(name, act.out), act

    @staticmethod
    def _plain_activation(activation: object) -> None:
        if not isinstance(activation, str | ClampedSwiglu):
            raise Refused(f"the one-token kernel has no activation {activation}")

    # --- Reading ---

    @property
    def _next(self) -> str | None:
        return self.ops[self.at].name if self.at < len(self.ops) else None

    def _after(self, n: int) -> str | None:
        return self.ops[self.at + n].name if self.at + n < len(self.ops) else None

    def _take(self, *names: str) -> Op:
        if self._next not in names:
            raise self._refused()
        self.at += 1
        return self.ops[self.at - 1]

    def _linear(self, name: str, x: Value) -> Value:
        op = self._take("linear")
        if op.x.index != x.index:
            raise self._refused()
        self.products[name] = op.arguments["w"]
        return op.out

    def _refused(self) -> Refused:
        name = self._next
        if name is None:
            return Refused("the one-token kernel's layers have more parts than this one")
        return Refused(
            LACKS.get(name, f"the one-token kernel has no {name} at that point of a layer")
        )
