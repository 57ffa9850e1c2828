"""Draft heads that run: from their files to what guesses the tokens of a loaded model (`spec.draft_heads` says what they are).

A head that goes on by itself (EAGLE-3, MTP) computes a *pair* at each place: the state that the model had at a token, and the
token that follows. It gives the state from which the token behind is drawn, and the state that its next pair takes in the place
of the model's. Its lines are written once and take tensors or the symbolic values of a record: on a CPU a pass is one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, OutOfMemoryError
from slipstream.kernels.cpu import LinearArgmax, LinearProgram, NativeOps
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import NativeLinear
from slipstream.kernels.ops import OpSet
from slipstream.kernels.recording import TOKENS, RecordingOps, TracedKV, TracedMeta, Value
from slipstream.kernels.weights import Linear
from slipstream.model.decoder import Decoder
from slipstream.model.layers import Attention, Layer, Tap, build_layer, build_linear, build_norm
from slipstream.model.program import CompiledOps, compiled
from slipstream.model.weights import fill, stored_tensors_of
from slipstream.spec.draft_heads import EagleSpec, HeadDescription, MedusaSpec, MTPSpec
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import Scheme

Body = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""(ops, embeddings [T, E], states [T, E], cache, metadata) → (what the output head reads, what the next pair takes), [T, E]."""


@dataclass(frozen=True, slots=True)
class EagleBody:
    """Li et al. 2025, figure 5: the layer's attention reads [norm(embedding); norm(state)], here as the sum of two products."""

    spec: EagleSpec
    layer: Layer
    of_embedding: Linear
    embed_norm: NormParams
    final_norm: NormParams

    def __call__(self, ops: OpSet, embedded: Tensor, state: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Any:
        n, attention = self.layer.norms, self.layer.attention
        assert isinstance(attention, Attention)
        rows, residual = ops.norm(state, n["pre_attention"])
        if self.spec.norm_before_residual:
            residual = cast("Tensor", rows)
        own = ops.norm(embedded, self.embed_norm)[0]
        qkv = ops.linear(rows, attention.qkv) + ops.linear(own, self.of_embedding)
        rows, residual = ops.norm(attention.attend(ops, qkv, kv, meta), n["pre_mlp"], residual=residual)
        return ops.norm(self.layer.mlp(ops, rows), self.final_norm, residual=residual)


@dataclass(frozen=True, slots=True)
class MTPBody:
    """DeepSeek-V3 (arXiv:2412.19437), equations 21 to 23."""

    layer: Layer
    of_embedding: Linear
    of_state: Linear
    embed_norm: NormParams
    hidden_norm: NormParams
    final_norm: NormParams

    def __call__(self, ops: OpSet, embedded: Tensor, state: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Any:
        own, rows = ops.norm(embedded, self.embed_norm)[0], ops.norm(state, self.hidden_norm)[0]
        joined = ops.linear(own, self.of_embedding) + ops.linear(rows, self.of_state)
        h, residual = self.layer(ops, joined, None, kv, meta)
        return ops.norm(h, self.final_norm, residual=residual)


class ChainHead:
    """A head that goes on by itself. `tap`: what it wants of the model between layers; None: the final hidden states."""

    def __init__(
        self, spec: EagleSpec | MTPSpec, body: Body, ops: OpSet, embed: Any, scale: float, head: Linear, tap: Tap | None
    ) -> None:
        self.spec, self.ops, self.tap, self.head = spec, ops, tap, head
        self._body, self._embed, self._scale = body, embed, scale
        self.program: CompiledOps | Reason = Reason("the draft head's C++ program needs kernels='cpu'", notable=False)
        self._logits: LinearProgram | None = None
        self._argmax: LinearArgmax | None = None
        if isinstance(ops, NativeOps):
            self.program = compiled(ops, 1, *self._trace())
            if isinstance(head, NativeLinear):
                self._logits = LinearProgram(ops.pool, head)
                self._argmax = LinearArgmax(ops.pool, head) if len(head.parts) == 1 else None

    def _trace(self) -> tuple[Any, Value, Value, tuple[Value, ...]]:
        """(ops, the states, what the output head reads, what the next pair takes)"""
        recorder = RecordingOps()
        state, recorder.layer = recorder.value((self.spec.hidden_size,)), 0
        embedded = recorder.embed(TOKENS, self._embed, self._scale)
        kv = TracedKV(0, self.spec.layer.attention.num_kv_heads)
        hidden, following = self._body(recorder, embedded, state, kv, TracedMeta())
        return tuple(recorder.ops), state, hidden, (following,)

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """tokens [T], the states before them [T, E] → (what `logits` reads, the states for the next pairs) [T, E]"""
        if isinstance(self.program, Reason):
            embedded = self.ops.embed(token_ids, self._embed, self._scale)
            return self._body(self.ops, embedded, states.to(embedded.dtype), kv[0], meta)
        hidden, following = (torch.empty(len(token_ids), self.spec.hidden_size) for _ in range(2))
        self.program.run(kv, meta, token_ids, states, hidden, (following,))
        return hidden, following

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] → [N, its own vocabulary]"""
        return self.ops.linear(hidden, self.head) if self._logits is None else self._logits(hidden.float())

    def greedy(self, hidden: Tensor) -> Tensor:
        """[N, E] → int64 [N], the head's own tokens whose logits are largest."""
        return self.logits(hidden).argmax(-1) if self._argmax is None else self._argmax(hidden.float())

    @property
    def token_bytes(self) -> int:
        return 0 if isinstance(self.program, Reason) else self.program.program.token_bytes + 12 * self.spec.hidden_size


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Cai et al. 2024, section 2.1.1."""

    spec: MedusaSpec
    ops: OpSet
    blocks: tuple[tuple[Linear, ...], ...]
    heads: tuple[Linear, ...]

    tap = None

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        """[N, E] → [N, V] of the token `place` + 2 behind the state's own."""
        x = hidden
        for block in self.blocks[place]:
            x = x + torch.nn.functional.silu(self.ops.linear(x, block))
        return self.ops.linear(x, self.heads[place])


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """`target_ids`: the model's token for each of the head's; None: they are the same."""

    head: ChainHead | MedusaHead
    target_ids: Tensor | None  # int64
    weights_bytes: int


def load_head(
    description: HeadDescription,
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    scheme: Scheme | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> LoadedHead:
    """The head for the model of `decoder`, whose embeddings it shares unless it has its own; products are rounded by `scheme`.
    With load_format="dummy" the weights are random."""
    spec, device = description.spec, decoder.device
    with torch.inference_mode():
        try:
            values, ids = (
                _dummy(spec, dtype, device, seed)
                if load_format == "dummy"
                else _load(description, dtype=dtype, device=device)
            )
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"the draft head does not fit on {device}: {error}", field="model") from error
        num_bytes = sum(v.numel() * v.element_size() for v in values.values())
        return LoadedHead(build_head(spec, values, decoder, max_model_len=max_model_len, scheme=scheme), ids, num_bytes)


def build_head(
    spec: EagleSpec | MTPSpec | MedusaSpec,
    values: dict[str, Tensor],
    decoder: Decoder,
    *,
    max_model_len: int,
    scheme: Scheme | None = None,
) -> ChainHead | MedusaHead:
    """Of parameters by the names of `spec.shapes`, which are taken out."""
    ops, products = decoder.ops, dict[str, Linear]()

    def linear(name: str) -> Linear:
        return build_linear(name, values, ops, scheme, products)

    def half(name: str, part: int) -> Linear:
        """Of a product of [embedding; state]."""
        return ops.quantize_weight(pairs[name][part], None, scheme)

    assert decoder.head is not None
    if isinstance(spec, MedusaSpec):
        blocks = tuple(tuple(linear(f"{i}.blocks.{j}") for j in range(spec.num_layers)) for i in range(spec.num_heads))
        heads = tuple(linear(f"{i}.head") if spec.own_heads else decoder.head for i in range(spec.num_heads))
        return MedusaHead(spec, ops, blocks, heads)
    joined = "attention.qkv.weight" if isinstance(spec, EagleSpec) else "join.weight"
    pairs = {joined: [w.contiguous() for w in values.pop(joined).chunk(2, dim=1)]}
    embed = ops.embedding(values.pop("embed.weight"), None) if "embed.weight" in values else decoder.embed
    norms = {
        n: build_norm(spec.norm, n, values)
        for n in ("embed_norm", "hidden_norm", "final_norm")
        if f"{n}.weight" in values
    }
    head = linear("head") if "head.weight" in values else decoder.head
    tap, body, scale = None, cast("Body", None), 1.0
    if isinstance(spec, EagleSpec):
        parts = values.pop("fc.weight").chunk(len(spec.aux_layers), dim=1)
        tap = Tap(
            {i: ops.quantize_weight(w.contiguous(), None, scheme) for i, w in zip(spec.aux_layers, parts, strict=True)}
        )
        values["attention.qkv.weight"] = pairs[joined][1]
    else:
        scale = decoder.spec.embed_scale
    tables = ops.position_tables(max_model_len, decoder.device)
    layer = build_layer(spec.layer, values, ops, tables, scheme=scheme, products=products)
    if isinstance(spec, EagleSpec):
        body = EagleBody(spec, layer, half(joined, 0), norms["embed_norm"], norms["final_norm"])
    else:
        body = MTPBody(
            layer, half(joined, 0), half(joined, 1), norms["embed_norm"], norms["hidden_norm"], norms["final_norm"]
        )
    assert not values, f"unused: {list(values)}"
    return ChainHead(spec, body, ops, embed, scale, head, tap)


def _load(
    description: HeadDescription, *, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Tensor], Tensor | None]:
    """(parameters, the model's token for each of the head's)"""
    spec, maps = description.spec, dict[str, Tensor]()

    def others() -> Any:
        for name, shape, read in stored_tensors_of(description.path):
            name = name.removeprefix("medusa_heads.")
            if name in ("d2t", "t2d") and isinstance(spec, EagleSpec):
                maps[name] = read()
            elif name not in description.ignored:
                yield name, shape, read

    values = fill(spec.shapes, description.names, others(), dtype=dtype, device=device)
    return values, _target_ids(spec, maps) if isinstance(spec, EagleSpec) else None


def _target_ids(spec: EagleSpec, maps: dict[str, Tensor]) -> Tensor | None:
    """`d2t` says how far behind each of the head's tokens the model's is; `t2d`, which of the model's tokens are the head's."""
    steps, chosen = maps.get("d2t"), maps.get("t2d")
    if steps is None:
        return None
    if tuple(steps.shape) != (spec.draft_vocab_size,) or steps.is_floating_point():
        raise CheckpointError(
            f"the tensor 'd2t' must be {spec.draft_vocab_size} whole numbers, draft_vocab_size", field="d2t"
        )
    ids = torch.arange(spec.draft_vocab_size) + steps.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"the tensor 'd2t' names tokens beyond the model's {spec.vocab_size}, or some twice", field="d2t"
        )
    if chosen is not None and (
        tuple(chosen.shape) != (spec.vocab_size,) or not chosen[ids].all() or chosen.sum() != len(ids)
    ):
        raise CheckpointError("the tensor 't2d' says otherwise than 'd2t' which tokens are the head's", field="t2d")
    return ids


def _dummy(
    spec: EagleSpec | MTPSpec | MedusaSpec, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[dict[str, Tensor], Tensor | None]:
    generator = torch.Generator(device).manual_seed(seed)
    values = {}
    for name, shape in spec.shapes.items():
        value = values[name] = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            value.normal_(0.0, 0.02, generator=generator)
    ids = None if spec.draft_vocab_size == spec.vocab_size else torch.arange(spec.draft_vocab_size)
    return values, ids
