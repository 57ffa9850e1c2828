"""The decoder: one piece of code that runs every `ModelSpec`.

    h = embed(tokens)
    for layer in layers: h = h + attention(norm(h)); h = h + mlp(norm(h))
    logits = head(norm(h))

It knows no architecture by name and no device. The residual travels beside the activations, so that each addition is
fused with the norm that follows it: `pending` is what was computed but not yet added to the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.ops import Activations, AttentionMetadata, LayerKV, Linear, OpSet
from slipstream.model.compiled import compile_step
from slipstream.model.parameters import block_norms
from slipstream.model.positions import alibi_slopes, rope_table
from slipstream.model.scheme import InputFormat, Scheme
from slipstream.model.spec import (
    AlibiSpec,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SequentialBlock,
)


@dataclass(frozen=True, slots=True)
class Norm:
    spec: NormSpec
    weight: Tensor
    bias: Tensor | None

    def __call__(self, ops: OpSet, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        h, total = self.quantizing(ops, x, residual, None)
        assert isinstance(h, Tensor)
        return h, total

    def quantizing(
        self, ops: OpSet, x: Tensor, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """The same, in the form that the product after it wants."""
        s = self.spec
        if s.kind == "rms":
            return ops.rms_norm(x, self.weight, s.eps, residual=residual, weight_offset=s.weight_offset, inputs=inputs)
        return ops.layer_norm(x, self.weight, self.bias, s.eps, residual=residual, inputs=inputs)


@dataclass(frozen=True, slots=True)
class Attention:
    spec: AttentionSpec
    qkv: Linear
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos_sin: Tensor | None
    slopes: Tensor | None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]"""
        s = self.spec
        q = ops.rope_and_cache(
            ops.linear(x, self.qkv),
            kv,
            meta,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            cos_sin=self.cos_sin,
            interleaved=isinstance(s.position, RopeSpec) and s.position.style == "interleaved",
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=s.qk_norm.eps if s.qk_norm else 0.0,
            norm_offset=s.qk_norm.weight_offset if s.qk_norm else 0.0,
        )
        seen = ops.attention(q, kv, meta, scale=s.scale, window=s.window, softcap=s.softcap, alibi_slopes=self.slopes)
        return ops.linear(seen.flatten(1), self.out)


@dataclass(frozen=True, slots=True)
class MLP:
    spec: DenseSpec
    up: Linear
    down: Linear

    def __call__(self, ops: OpSet, x: Activations) -> Tensor:
        """[T, E] → [T, E]"""
        act = ops.gated_activation if self.spec.gated else ops.activation
        return ops.linear(act(ops.linear(x, self.up), self.spec.activation, inputs=self.down.inputs), self.down)


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attention: Attention
    mlp: MLP
    norms: Mapping[str, Norm]

    def __call__(
        self, ops: OpSet, pending: Tensor, residual: Tensor | None, kv: LayerKV, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(what to add next, the residual)."""
        n, attention, mlp = self.norms, self.attention, self.mlp
        if isinstance(self.spec.block, SequentialBlock):
            x, residual = n["pre_attention"].quantizing(ops, pending, residual, attention.qkv.inputs)
            h = attention(ops, x, kv, meta)
            if "post_attention" in n:
                h, _ = n["post_attention"](ops, h)
            x, residual = n["pre_mlp"].quantizing(ops, h, residual, mlp.up.inputs)
            h = mlp(ops, x)
            if "post_mlp" in n:
                h, _ = n["post_mlp"](ops, h)
            return h, residual
        # Both branches read one norm, or each its own; all of a layer's products have one scheme.
        x, residual = n["norm"].quantizing(ops, pending, residual, attention.qkv.inputs)
        for_mlp = n["mlp_norm"].quantizing(ops, residual, None, mlp.up.inputs)[0] if "mlp_norm" in n else x
        return attention(ops, x, kv, meta) + mlp(ops, for_mlp), residual


class Decoder:
    """`parameters` are by the names of `model.parameters`; they are laid out as `ops` wants them, the layers' products
    rounded by `scheme`, and then not needed. `rounded` are weights that a checkpoint holds rounded already, by the same
    names, without their biases."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: dict[str, Tensor],
        ops: OpSet,
        *,
        max_model_len: int,
        scheme: Scheme | None = None,
        rounded: Mapping[str, Linear] | None = None,
    ) -> None:
        rounded = rounded or {}
        self.spec = spec
        self.ops = ops
        held = rounded.get("embed.weight")
        table: Tensor | Linear = parameters.pop("embed.weight") if held is None else held
        self.positions = parameters.pop("positions.weight", None)
        self.final_norm = _norm(spec.final_norm, "final_norm", parameters)
        if spec.tied_embeddings and isinstance(table, Linear):
            rounded = {**rounded, "head.weight": table}
        elif spec.tied_embeddings:
            parameters["head.weight"] = table  # type: ignore[assignment]
        self.head = _linear("head", parameters, ops, scheme if scheme is not None and scheme.head else None, rounded)
        self.embed = ops.embedding(table, self.head if spec.tied_embeddings else None)
        device = self.final_norm.weight.device
        tables: dict[RopeSpec, Tensor] = {}

        def attention(s: AttentionSpec, name: str) -> Attention:
            cos_sin = slopes = None
            if isinstance(s.position, RopeSpec):
                if s.position not in tables:
                    tables[s.position] = rope_table(s.position, max_model_len).to(device)
                cos_sin = tables[s.position]
            elif isinstance(s.position, AlibiSpec):
                slopes = alibi_slopes(s.position, s.num_heads).to(device)
            return Attention(
                s,
                _linear(f"{name}.qkv", parameters, ops, scheme, rounded),
                _linear(f"{name}.out", parameters, ops, scheme, rounded),
                parameters.pop(f"{name}.q_norm.weight", None),
                parameters.pop(f"{name}.k_norm.weight", None),
                cos_sin,
                slopes,
            )

        def layer(s: LayerSpec, name: str) -> Layer:
            up, down = (_linear(f"{name}.mlp.{part}", parameters, ops, scheme, rounded) for part in ("up", "down"))
            mlp = MLP(s.mlp, up, down)
            norms = {key: _norm(n, f"{name}.{key}", parameters) for key, n in block_norms(s).items()}
            return Layer(s, attention(s.attention, f"{name}.attention"), mlp, norms)

        self.layers = [layer(s, f"layers.{i}") for i, s in enumerate(spec.layers)]
        assert not parameters, f"unused: {list(parameters)}"
        self._compiled = compile_step(self)

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states [T, E] after the final norm; keys and values are in the cache."""
        if self._compiled is not None:
            return self._compiled(token_ids, kv, meta)
        assert isinstance(self.embed, Tensor)
        h = self.ops.embed(token_ids, self.embed, self.spec.embed_scale)
        if self.positions is not None and self.spec.learned_positions is not None:
            h = h + self.ops.embed(meta.positions + self.spec.learned_positions.offset, self.positions)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, kv, strict=True):
            h, residual = layer(self.ops, h, residual, cache, meta)
        return self.final_norm(self.ops, h, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] → [N, V], in the model's type, or in float32 if the step is compiled."""
        logits = self.ops.linear(hidden, self.head) if self._compiled is None else self._compiled.head(hidden)
        cap = self.spec.logit_softcap
        return logits if cap is None else (logits.float() / cap).tanh().mul(cap).to(logits.dtype)


def _norm(spec: NormSpec, name: str, parameters: dict[str, Tensor]) -> Norm:
    return Norm(spec, parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None))


def _linear(
    name: str, parameters: dict[str, Tensor], ops: OpSet, scheme: Scheme | None, rounded: Mapping[str, Linear]
) -> Linear:
    bias = parameters.pop(f"{name}.bias", None)
    held = rounded.get(f"{name}.weight")
    if held is not None:
        return ops.adopt_linear(dataclasses.replace(held, bias=bias))
    return ops.prepare_linear(parameters.pop(f"{name}.weight"), bias, scheme)
