"""Runs draft heads, which propose tokens for a loaded model. `spec.draft_heads` describes them, `draft_loader` and
`host_head` load them.

A chain head (EAGLE-3, MTP) computes a *pair* at each position: the model's state at a token, and the token that follows. It
returns the state from which the next token is drawn, and the state that the next pair takes in place of the model's. The
same code takes tensors or the symbolic values of a record, so a pass is one program on a CPU. With arrays that needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import NativeLinear, ThreadPool
from slipstream.kernels.programs import LinearArgmax, LinearProgram
from slipstream.kernels.recording import TOKENS, RecordingOps, TracedKV, TracedMeta, Value
from slipstream.kernels.weights import Linear
from slipstream.model.decoder import Decoder
from slipstream.model.layers import Attention, Layer, Tap, build_layer, build_linear, build_norm
from slipstream.model.step_program import CompiledOps, Floats, compiled
from slipstream.spec.draft_heads import EagleSpec, MedusaSpec, MTPSpec
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.native import Array
    from slipstream.kernels.ops import OpSet

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
        if self.spec.norm_before_residual:
            rows = ops.norm(state, n["pre_attention"])[0]
            residual = cast("Tensor", rows)
        else:
            rows, residual = ops.norm(state, n["pre_attention"], inputs=attention.inputs)
        own = ops.norm(embedded, self.embed_norm, inputs=self.of_embedding.inputs)[0]
        qkv = ops.linear(rows, attention.qkv) + ops.linear(own, self.of_embedding)
        h = attention.attend(ops, qkv, kv, meta)
        rows, residual = ops.norm(h, n["pre_mlp"], residual=residual, inputs=self.layer.mlp.inputs)
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
        own = ops.norm(embedded, self.embed_norm, inputs=self.of_embedding.inputs)[0]
        rows = ops.norm(state, self.hidden_norm, inputs=self.of_state.inputs)[0]
        joined = ops.linear(own, self.of_embedding) + ops.linear(rows, self.of_state)
        h, residual = self.layer(ops, joined, None, kv, meta)
        return ops.norm(h, self.final_norm, residual=residual)


@dataclass(frozen=True, slots=True)
class Passes:
    """Where the pairs of a chain's passes [P, S] stand. In pass i the first counts[i] sequences have one."""

    block_table: npt.NDArray[np.int32]  # [S, max_blocks]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int32]
    counts: Sequence[int]

    @property
    def meta(self) -> AttentionMetadata:
        """The first pass."""
        size = len(self.block_table)
        arrays: dict[str, Any] = {"positions": self.positions[0], "slot_mapping": self.slots[0], "seq_lens": self.seq_lens[0]}
        arrays |= {"query_start_loc": np.arange(size + 1, dtype=np.int32), "block_table": self.block_table}
        return AttentionMetadata(**arrays, num_decodes=size, max_query_len=1, max_seq_len=int(self.seq_lens[0].max()))


class ChainHead:
    """A head that continues from its own states. `tap`: the model's states that it reads; None: the final hidden states."""

    def __init__(
        self, spec: EagleSpec | MTPSpec, body: Body, ops: OpSet, embed: Any, scale: float, head: Linear, tap: Tap | None
    ) -> None:
        self.spec, self.ops, self.tap, self.head = spec, ops, tap, head
        self._body, self._embed, self._scale = body, embed, scale
        self.program: CompiledOps | Reason = Reason("the draft head's C++ program needs kernels='cpu'", notable=False)
        self._logits: LinearProgram | None = None
        self._argmax: LinearArgmax | None = None
        if ops.name == "cpu":
            pool: ThreadPool = ops.pool  # type: ignore[attr-defined]
            self.program = compiled(pool, 1, *self._trace())
            if isinstance(head, NativeLinear):
                self._logits = LinearProgram(pool, head)
                self._argmax = LinearArgmax(pool, head) if len(head.parts) == 1 else None

    def _trace(self) -> tuple[Any, Value, Value, tuple[Value, ...]]:
        """(ops, the states, the output head's input, the next pair's states)"""
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
        import torch  # late: arrays go to `run`

        hidden, following = self.run(token_ids, states.float().numpy(), kv, meta)
        return torch.from_numpy(hidden), torch.from_numpy(following)

    @property
    def is_compiled(self) -> bool:
        """Whether `run`, `argmax` and `go_on` may be called."""
        return isinstance(self.program, CompiledOps) and self._argmax is not None

    def run(
        self, token_ids: Array, states: Array, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Floats, Floats]:
        """`forward` by the C++ program, of arrays."""
        assert isinstance(self.program, CompiledOps)
        hidden, following = (np.empty((len(token_ids), self.spec.hidden_size), np.float32) for _ in range(2))
        self.program.run(kv, meta, token_ids, states, hidden, (following,))
        return hidden, following

    def argmax(self, hidden: Floats) -> npt.NDArray[np.int64]:
        """`greedy`, of arrays"""
        assert self._argmax is not None
        return self._argmax(hidden)

    def go_on(
        self,
        token_ids: npt.NDArray[np.int32],
        states: Floats,
        kv: Sequence[LayerKV],
        passes: Passes,
        own: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    ) -> Iterator[npt.NDArray[np.int32]]:
        """Greedy passes behind a first one, in which each sequence has one pair: of each the tokens that it proposes. Token ids
        int32 [S] and states [S, E] are those of the first of these passes, and change from pass to pass. `own`: the model's
        tokens for the head's."""
        assert isinstance(self.program, CompiledOps)
        assert self._argmax is not None
        hidden = np.empty_like(states)
        self.program.bind(states, hidden, (states,))
        best = self._argmax.of(hidden)
        inputs, kept = self.program.inputs(kv, passes.meta, token_ids)
        group, first = inputs.groups[0], (inputs.positions, inputs.groups[0].slots, inputs.groups[0].seq_lens)
        row_bytes = [x.strides[0] for x in (passes.positions, passes.slots, passes.seq_lens)]
        for i, count in enumerate(passes.counts):
            inputs.num_tokens = inputs.num_seqs = inputs.num_decodes = count
            inputs.positions, group.slots, group.seq_lens = (at + i * n for at, n in zip(first, row_bytes, strict=True))
            self.program.program.run(inputs, self._argmax.program)
            token_ids[:count] = own(best[:count])
            yield token_ids[:count]
        del kept

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] → [N, its own vocabulary]"""
        if self._logits is None:
            return self.ops.linear(hidden, self.head)
        import torch

        return torch.from_numpy(self._logits(hidden.float().numpy()))

    def logits_of(self, hidden: Floats) -> Floats:
        """`logits`, of arrays"""
        assert self._logits is not None
        return self._logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor:
        """[N, E] → int64 [N], the head's own tokens whose logits are largest."""
        if self._argmax is None:
            return self.ops.argmax(self.logits(hidden))
        import torch

        return torch.from_numpy(self.argmax(hidden.float().numpy()))

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
        import torch

        x = hidden
        for block in self.blocks[place]:
            x = x + torch.nn.functional.silu(self.ops.linear(x, block))
        return self.ops.linear(x, self.heads[place])


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """`target_ids`: the model's token for each of the head's, int64; None: they are the same."""

    head: ChainHead | MedusaHead
    target_ids: Any
    weights_bytes: int


def build_head(
    spec: EagleSpec | MTPSpec | MedusaSpec,
    values: dict[str, Tensor],
    decoder: Decoder,
    *,
    max_model_len: int,
    scheme: Scheme | None = None,
) -> ChainHead | MedusaHead:
    """Makes the parts of a head from parameters by the names of `spec.shapes`, which it removes."""
    ops, products = decoder.ops, dict[str, Linear]()

    def linear(name: str) -> Linear:
        return build_linear(name, values, ops, scheme, products)

    def half(name: str, part: int) -> Linear:
        """A half of a product of [embedding; state]."""
        return ops.quantize_weight(pairs[name][part], None, scheme)

    assert decoder.head is not None
    if isinstance(spec, MedusaSpec):
        blocks = tuple(tuple(linear(f"{i}.blocks.{j}") for j in range(spec.num_layers)) for i in range(spec.num_heads))
        heads = tuple(linear(f"{i}.head") if spec.own_heads else decoder.head for i in range(spec.num_heads))
        return MedusaHead(spec, ops, blocks, heads)
    joined = "attention.qkv.weight" if isinstance(spec, EagleSpec) else "join.weight"
    pairs = {joined: _columns(values.pop(joined), 2)}
    embed = ops.embedding(values.pop("embed.weight"), None) if "embed.weight" in values else decoder.embed
    norms = {
        n: build_norm(spec.norm, n, values)
        for n in ("embed_norm", "hidden_norm", "final_norm")
        if f"{n}.weight" in values
    }
    head = linear("head") if "head.weight" in values else decoder.head
    tap, body, scale = None, cast("Body", None), 1.0
    if isinstance(spec, EagleSpec):
        parts = _columns(values.pop("fc.weight"), len(spec.aux_layers))
        tap = Tap({i: ops.quantize_weight(w, None, scheme) for i, w in zip(spec.aux_layers, parts, strict=True)})
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


def _columns(weight: Any, count: int) -> list[Any]:
    """A weight [out, in] (a tensor or an array) cut into `count` of equal widths."""
    width = weight.shape[1] // count
    parts = [weight[:, i * width : (i + 1) * width] for i in range(count)]
    return [np.ascontiguousarray(p) if isinstance(p, np.ndarray) else p.contiguous() for p in parts]


def target_ids(spec: EagleSpec, maps: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64] | None:
    """The model's token for each of the head's; None: the same. `d2t` says how far behind each of the head's tokens the model's
    is; `t2d`, which of the model's tokens are the head's."""
    steps, chosen = maps.get("d2t"), maps.get("t2d")
    if steps is None:
        return None
    if steps.shape != (spec.draft_vocab_size,) or steps.dtype.kind not in "iu":
        raise CheckpointError(
            f"the tensor 'd2t' must be {spec.draft_vocab_size} whole numbers, draft_vocab_size", field="d2t"
        )
    ids = np.arange(spec.draft_vocab_size) + steps.astype(np.int64)
    if ids.min() < 0 or ids.max() >= spec.vocab_size or len(np.unique(ids)) < len(ids):
        raise CheckpointError(
            f"the tensor 'd2t' names tokens beyond the model's {spec.vocab_size}, or some twice", field="d2t"
        )
    if chosen is not None and (
        chosen.shape != (spec.vocab_size,) or not chosen[ids].all() or chosen.astype(bool).sum() != len(ids)
    ):
        raise CheckpointError("the tensor 't2d' says otherwise than 'd2t' which tokens are the head's", field="t2d")
    return ids
