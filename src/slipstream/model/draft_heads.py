"""Draft heads, which propose tokens for a loaded model.

`spec.drafts.heads` describes them; `draft_loader` and `host_head` load them. An autoregressive head
reads a *pair* at each position: the model's state at a token, and the token after it. It returns
the state from which the next token is predicted, and the state that the next pair uses instead of
the model's.

Values are tensors or NumPy arrays; arrays need no torch. The layers' code also runs on the symbolic
values of a recording, so that a pass becomes one program on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.programs import LinearArgmax, LinearProgram
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.tracing.recording import TOKENS, RecordingOps, TracedKV, TracedMeta
from slipstream.kernels.weights.forms import Linear
from slipstream.model.building import build_layer, build_linear, build_norm
from slipstream.model.compile_step import compiled
from slipstream.model.decoder import Decoder
from slipstream.model.layers.attention import Attention
from slipstream.model.layers.layer import Layer
from slipstream.model.layers.residual import whole
from slipstream.model.layers.taps import AnyTap, JoinedTap, Tap
from slipstream.model.load.loaded import tensor_bytes
from slipstream.model.step_program import CompiledOps, Floats
from slipstream.model.vocabulary import Vocabulary
from slipstream.spec.drafts.heads import WRAPPED, HeadDescription, HeadSpec, LayeredSpec, MedusaSpec
from slipstream.spec.model import ModelSpec
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet

MAPS = ("d2t", "t2d")
"""Tensors of a head's file that map its tokens to the model's."""


@dataclass(frozen=True, slots=True)
class HeadLayers:
    """A head's layers, norms and input projection.

    A projection of [embedding; state] is computed as a sum of two: `halves` has the weights for the
    embedding and for the state. The second one has the bias.
    """

    spec: LayeredSpec
    layers: tuple[Layer, ...]
    norms: Mapping[str, NormParams]
    halves: tuple[Linear, ...] = ()

    def __call__(
        self,
        ops: OpSet,
        embedded: Tensor,
        state: Any,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
    ) -> Any:
        """embeddings [T, E], states [T, E] → (input of the output head, state for the next pair),
        both [T, E].

        Heads that attend to states as a context get no `state` here.
        """
        layers, residual, h = self.layers, None, embedded
        if self.spec.join == "product":
            h = self._joined(ops, embedded, self._rows(ops, state, "hidden_norm"))
        elif self.spec.join == "attention":
            h, residual = self._first(ops, embedded, state, kv[0], meta)
            layers, kv = layers[1:], kv[1:]
        for layer, cache in zip(layers, kv, strict=True):
            pending, residual = layer(ops, h, residual, cache, meta)
            h = whole(ops, pending)
        if "final_norm" in self.norms:
            hidden, total = ops.norm(h, self.norms["final_norm"], residual=residual)
            return hidden, hidden if self.spec.norm_output else total
        total = h if residual is None else h + residual
        return total, total

    def remember(
        self, ops: OpSet, state: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> None:
        """Writes the keys and values computed from a context's states [T, E] to the layers'
        caches."""
        inputs = self.layers[0].inputs[0]
        rows = ops.norm(state, self.norms["hidden_norm"], inputs=inputs)[0]
        for layer, cache in zip(self.layers, kv, strict=True):
            assert isinstance(layer.attention, Attention)
            layer.attention.remember(ops, rows, cache, meta)

    def _first(
        self, ops: OpSet, embedded: Tensor, state: Tensor, kv: LayerKV, meta: AttentionMetadata
    ) -> Any:
        """Runs the first layer of an EAGLE-3 head (Li et al. 2025, figure 5). Its attention reads
        [norm(embedding); norm(state)]."""
        layer, norm = self.layers[0], self.norms["hidden_norm"]
        assert isinstance(layer.attention, Attention)
        assert layer.mlp is not None
        if self.spec.norm_before_residual:
            rows = residual = cast("Tensor", ops.norm(state, norm)[0])
        else:
            rows, residual = cast("Any", ops.norm(state, norm, inputs=self.halves[1].inputs))
        h = layer.attention.attend(ops, self._joined(ops, embedded, rows), kv, meta)
        rows, residual = cast(
            "Any", ops.norm(h, layer.norms["pre_mlp"], residual=residual, inputs=layer.mlp.inputs)
        )
        return layer.mlp(ops, rows), residual

    def _joined(self, ops: OpSet, embedded: Tensor, rows: Any) -> Tensor:
        """The projection of embeddings and normed states `rows` to the layers' input."""
        first = ops.linear(self._rows(ops, embedded, "embed_norm"), self.halves[0])
        return ops.linear_added(rows, self.halves[1], first)

    def _rows(self, ops: OpSet, x: Tensor, norm: str) -> Any:
        """Input of one linear layer of `halves`, normed if there is a norm."""
        return (
            ops.norm(x, self.norms[norm], inputs=self.halves[0].inputs)[0]
            if norm in self.norms
            else x
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """Metadata of all passes of a chain of drafts, [P, S]. In pass i the first counts[i] sequences
    take part."""

    block_table: npt.NDArray[np.int32]  # [S, max_blocks]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int32]
    counts: Sequence[int]

    @property
    def meta(self) -> AttentionMetadata:
        """Metadata of the first pass."""
        size = len(self.block_table)
        arrays: dict[str, Any] = {
            "positions": self.positions[0],
            "slot_mapping": self.slots[0],
            "seq_lens": self.seq_lens[0],
        }
        arrays |= {
            "query_start_loc": np.arange(size + 1, dtype=np.int32),
            "block_table": self.block_table,
        }
        return AttentionMetadata(
            **arrays, num_decodes=size, max_query_len=1, max_seq_len=int(self.seq_lens[0].max())
        )


def as_model(logits: Any, model: ModelSpec | None) -> Any:
    """Applies the logit scale and soft cap of `model` to its output head's logits [N, V], float32.

    With None (a head of its own) logits are returned unchanged.
    """
    if model is None:
        return logits
    if model.logit_scale != 1.0:
        logits = logits * model.logit_scale
    if (cap := model.logit_softcap) is None:
        return logits
    return (
        np.tanh(logits / cap) * cap
        if isinstance(logits, np.ndarray)
        else (logits / cap).tanh() * cap
    )


class LayeredHead:
    """A draft head made of decoder layers.

    `tap` collects the model's states that it reads; None: it reads the final hidden states.
    `mask_state` [E] replaces an unknown token's state. `model`: the model whose output head is
    used; None: the head has its own. `ends`: (vocabulary of the embedding table, that of the output
    head). A pass and its most likely tokens are C++ programs where the kernels have them
    (`program`).
    """

    def __init__(
        self,
        body: HeadLayers,
        ops: OpSet,
        embed: Any,
        scale: float,
        head: Linear,
        tap: AnyTap | None,
        mask_state: Any = None,
        model: ModelSpec | None = None,
        *,
        ends: tuple[Vocabulary, Vocabulary],
    ) -> None:
        self._tokens_in, self._tokens_out = ends
        self.spec = body.spec
        self.ops = ops
        self.tap = tap
        self.head = head
        self.mask_state = mask_state
        self._model = model
        self._body, self._embed, self._scale = body, embed, scale
        self.program: CompiledOps | Reason = Reason(
            "the draft head's C++ program needs kernels='cpu'", notable=False
        )
        self._context: CompiledOps | Reason | None = None
        self._logits: LinearProgram | None = None
        self._argmax: LinearArgmax | None = None
        if ops.name == "cpu":
            pool: ThreadPool = ops.pool  # type: ignore[attr-defined]
            if self._tokens_in.is_shared:
                self.program = Reason("the model's embeddings are split over ranks", notable=False)
            else:
                self._compile(pool)
            if isinstance(head, NativeLinear) and not self._tokens_out.is_shared:
                self._logits = LinearProgram(pool, head)
                self._argmax = LinearArgmax(pool, head) if len(head.parts) == 1 else None

    def _compile(self, pool: ThreadPool) -> None:
        spec = self.spec
        kv: Any = [
            TracedKV(i, layer.self_attention.num_kv_heads) for i, layer in enumerate(spec.layers)
        ]
        meta: Any = TracedMeta()

        def recorder() -> tuple[Any, Any]:
            made = RecordingOps()
            state, made.layer = made.value((spec.hidden_size,)), 0
            return made, state

        ops, state = recorder()
        hidden, following = self._body(
            ops, ops.embed(TOKENS, self._embed, self._scale), state, kv, meta
        )
        given = None if spec.join == "context" else state
        # the output head and the next pair read the same state, which must be copied
        if following is hidden:
            self.program = compiled(pool, 1, tuple(ops.ops), given, None, (following,))
        else:
            self.program = compiled(
                pool,
                1,
                tuple(ops.ops),
                given,
                hidden,
                () if spec.join == "context" else (following,),
            )
        if spec.join == "context":
            ops, state = recorder()
            self._body.remember(ops, state, kv, meta)
            self._context = compiled(pool, 1, tuple(ops.ops), state, None)
            if isinstance(self._context, Reason):
                self.program = self._context

    def forward(
        self, token_ids: Any, states: Any, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Any, Any]:
        """tokens [T], the previous states [T, E] → (input of `logits`, states for the next pairs),
        both [T, E].

        For heads with a context, `states` is None, and no states for a next pair are returned.
        """
        if isinstance(self.program, Reason):
            embedded = self._tokens_in.embed(self.ops, token_ids, self._embed, self._scale)
            hidden, following = self._body(
                self.ops, embedded, None if states is None else states.to(embedded.dtype), kv, meta
            )
            return hidden, following
        hidden = np.empty((len(token_ids), self.spec.hidden_size), np.float32)
        following = (
            np.empty_like(hidden)
            if self.program.lowered.more and self.program.lowered.out is not None
            else hidden
        )
        more = (following,) if self.program.lowered.more else ()
        self.program.run(
            kv, meta, token_ids, None if states is None else _floats(states), hidden, more
        )
        return _like(token_ids, hidden), _like(token_ids, following)

    def remember(self, states: Any, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Writes the keys and values of a context's states [T, E] to the cache."""
        if isinstance(self._context, CompiledOps):
            self._context.run(kv, meta, None, _floats(states), None)
        else:
            self._body.remember(self.ops, states, kv, meta)

    @property
    def is_compiled(self) -> bool:
        """True if the head's pass and its argmax both run as compiled C++ programs."""
        return isinstance(self.program, CompiledOps) and self._argmax is not None

    def go_on(
        self,
        token_ids: npt.NDArray[np.int32],
        states: Floats,
        kv: Sequence[LayerKV],
        passes: Passes,
        own: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    ) -> Iterator[npt.NDArray[np.int32]]:
        """Runs the greedy passes after the first one, and yields the tokens that each pass
        proposes. Each sequence has one pair per pass.

        `token_ids` int32 [S] and `states` [S, E] are the inputs of the first of these passes; each
        pass overwrites them with the next inputs. `own` maps the head's tokens to the model's.
        """
        assert isinstance(self.program, CompiledOps)
        assert self._argmax is not None
        hidden = np.empty_like(states) if self.program.lowered.out is not None else states
        self.program.bind(states, hidden, (states,))
        best = self._argmax.of(hidden)
        inputs, kept = self.program.inputs(kv, passes.meta, token_ids)
        group = inputs.groups[0]
        first = (inputs.positions, inputs.groups[0].slots, inputs.groups[0].seq_lens)
        row_bytes = [x.strides[0] for x in (passes.positions, passes.slots, passes.seq_lens)]
        for i, count in enumerate(passes.counts):
            inputs.num_tokens = inputs.num_seqs = inputs.num_decodes = count
            inputs.positions, group.slots, group.seq_lens = (
                at + i * n for at, n in zip(first, row_bytes, strict=True)
            )
            self.program.program.run(inputs, self._argmax.program)
            token_ids[:count] = own(best[:count])
            yield token_ids[:count]
        del kept

    def logits(self, hidden: Any, place: int = 0) -> Any:
        """[N, E] → float32 [N, the head's own vocabulary]."""
        return as_model(self._products(hidden), self._model)

    def _products(self, hidden: Any) -> Any:
        if self._logits is None:
            return self._tokens_out.gathered(self.ops, self.ops.linear(hidden, self.head)).float()
        return _like(hidden, self._logits(_floats(hidden)))

    def greedy(self, hidden: Any, place: int = 0, token_ids: Any = None) -> Any:
        """Finds the head's own tokens with the largest logits: [N, E] → int64 [N].

        With `token_ids` [own vocabulary] they are mapped to the model's tokens.
        """
        if self._argmax is None and not isinstance(hidden, np.ndarray):
            return self._tokens_out.best(self.ops, self.ops.linear(hidden, self.head), token_ids)
        own = (
            self._products(hidden).argmax(-1)
            if self._argmax is None
            else _like(hidden, self._argmax(_floats(hidden)))
        )
        return own if token_ids is None else token_ids[own]

    @property
    def token_bytes(self) -> int:
        """Bytes of activations per token of a pass; 0 if unknown."""
        made = [
            p.program.token_bytes
            for p in (self.program, self._context)
            if isinstance(p, CompiledOps)
        ]
        return sum(made) + 12 * self.spec.hidden_size if made else 0


class MedusaHead:
    """Medusa heads (Cai et al. 2024, section 2.1.1).

    `model`: the model whose output head all positions share; None if each position has its own.
    `tokens`: vocabulary of an output head.
    """

    tap = None

    def __init__(
        self,
        spec: MedusaSpec,
        ops: OpSet,
        blocks: tuple[tuple[Linear, ...], ...],
        heads: tuple[Linear, ...],
        model: ModelSpec | None,
        tokens: Vocabulary,
    ) -> None:
        self.spec, self.ops, self.blocks, self.heads, self._model = spec, ops, blocks, heads, model
        self._tokens = tokens
        # keyed by weight, since all positions may share the model's head
        self._programs = dict[int, LinearProgram]()

    def logits(self, hidden: Any, place: int) -> Any:
        """[N, E] → float32 [N, V], the logits of the token `place` + 2 positions after the state's
        own."""
        return as_model(self._products(hidden, place), self._model)

    def _products(self, hidden: Any, place: int) -> Any:
        x = _floats(hidden) if isinstance(hidden, np.ndarray) else hidden
        for block in self.blocks[place]:
            y = self._product(x, block)
            if isinstance(y, np.ndarray):
                x = np.asarray(x + y / (np.float32(1.0) + np.exp(-y)), np.float32)  # SiLU
            else:
                x = x + y * y.sigmoid()
        y = self._product(x, self.heads[place])
        return y if isinstance(y, np.ndarray) else self._tokens.gathered(self.ops, y).float()

    def greedy(self, hidden: Any, place: int, token_ids: None = None) -> Any:
        """Finds the tokens with the largest logits: [N, E] → int64 [N]. These heads use the model's
        token ids."""
        found = self._products(hidden, place)
        return found.argmax(-1) if isinstance(found, np.ndarray) else self.ops.argmax(found)

    def _product(self, x: Any, w: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return self.ops.linear(x, w)
        if id(w) not in self._programs:
            self._programs[id(w)] = LinearProgram(self.ops.pool, w)  # type: ignore[attr-defined]
        return self._programs[id(w)](x)


def _floats(x: Any) -> Floats:
    """Converts an array or a CPU tensor to a float32 array."""
    return x.astype(np.float32, copy=False) if isinstance(x, np.ndarray) else x.float().numpy()


def _like(given: Any, found: npt.NDArray[Any]) -> Any:
    """Converts `found` to a tensor if `given` is one."""
    if isinstance(given, np.ndarray):
        return found
    import torch  # imported late, since arrays need no torch

    return torch.from_numpy(found)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A loaded head.

    `target_ids` (int64) maps the head's tokens to the model's; None if they are the same.
    `weights_bytes` is counted as in `LoadedModel`, without weights shared with the model.
    """

    head: LayeredHead | MedusaHead
    target_ids: Any
    weights_bytes: int

    @classmethod
    def of(cls, head: LayeredHead | MedusaHead, target_ids: Any, decoder: Decoder) -> LoadedHead:
        of_model = vars(decoder).values()
        own = tensor_bytes(*vars(head).values(), *of_model) - tensor_bytes(*of_model)
        return cls(head, target_ids, own)


def build_head(
    spec: HeadSpec,
    values: MutableMapping[str, Tensor],
    decoder: Decoder,
    *,
    max_model_len: int,
    scheme: Scheme | None = None,
    products: MutableMapping[str, Linear] | None = None,
) -> LayeredHead | MedusaHead:
    """Builds a head from parameters named as in `spec.shapes`, and removes them from `values`.
    `products`: weights that are already quantized."""
    ops, products = decoder.ops, {} if products is None else products
    # `fc` and `join` are never among a checkpoint's `products`
    of_first = None if products else scheme
    own, of_model = Vocabulary(spec.draft_vocab_size), decoder.vocabulary

    def linear(name: str) -> Linear:
        return build_linear(name, values, ops, scheme, products)

    assert decoder.head is not None
    if isinstance(spec, MedusaSpec):
        blocks = tuple(
            tuple(linear(f"{i}.blocks.{j}") for j in range(spec.num_layers))
            for i in range(spec.num_heads)
        )
        heads = tuple(
            linear(f"{i}.head") if spec.own_heads else decoder.head for i in range(spec.num_heads)
        )
        tokens = own if spec.own_heads else of_model
        return MedusaHead(
            spec, ops, blocks, heads, None if spec.own_heads else decoder.spec, tokens
        )
    embed = ops.embedding(values.pop("embed.weight"), None) if spec.own_embedding else decoder.embed
    head = linear("head") if spec.own_head else _head_for_drafts(decoder.head, ops, scheme)
    norms = {name: build_norm(spec.norm, name, values) for name in spec.norms}
    tap: AnyTap | None = None
    mask_state = None
    if spec.aux_layers is not None:
        fc, taps = values.pop("fc.weight"), spec.aux_layers
        aux_norms = [build_norm(norm, name, values) for name, norm in spec.aux_norms.items()]
        if spec.fc_norm == "joint":
            tap = JoinedTap(taps, aux_norms[0], ops.quantize_weight(fc, None, of_first))
        else:
            parts = [ops.quantize_weight(w, None, of_first) for w in _columns(fc, len(taps))]
            tap = Tap(dict(zip(taps, parts, strict=True)), dict(zip(taps, aux_norms, strict=False)))
        if spec.has_mask_state:
            mask_state = _state_of(values.pop("mask.weight")[0], fc, aux_norms)
    halves: list[Linear] = []
    if spec.join == "product":
        both, bias = _columns(values.pop("join.weight"), 2), values.pop("join.bias", None)
        both = both[::-1] if spec.state_first else both
        halves = [
            ops.quantize_weight(w, b, of_first) for w, b in zip(both, (None, bias), strict=True)
        ]
    elif spec.join == "attention":
        qkv = "layers.0.attention.qkv.weight"
        of_embedding, values[qkv] = _columns(values.pop(qkv), 2)
        halves = [ops.quantize_weight(of_embedding, None, scheme)]
    tables = ops.position_tables(max_model_len, decoder.device)
    layers = tuple(
        build_layer(
            layer, values, ops, tables, name=f"layers.{i}.", scheme=scheme, products=products
        )
        for i, layer in enumerate(spec.layers)
    )
    if spec.join == "attention":
        assert isinstance(layers[0].attention, Attention)
        halves.append(layers[0].attention.qkv)
    assert not values, f"unused: {list(values)}"
    body = HeadLayers(spec, layers, norms, tuple(halves))
    scale = decoder.spec.embed_scale if spec.scales_embedding else 1.0
    model = None if spec.own_head else decoder.spec
    ends = own if spec.own_embedding else of_model, own if spec.own_head else of_model
    return LayeredHead(body, ops, embed, scale, head, tap, mask_state, model, ends=ends)


def _head_for_drafts(head: Linear, ops: OpSet, scheme: Scheme | None) -> Linear:
    """The output head for drafts: an 8-bit copy of the model's, if that is the drafts' scheme and
    the model's own is dense; otherwise the model's.

    With a large vocabulary, reading the head takes most of the time of a one-layer pass. Rounding
    it is safe, because verification uses the model's own head.
    """
    fits = scheme is not None and scheme.weight_bits == 8 and type(head) is Linear
    if not fits or head.bias is not None or head.out_features % ops.output_multiple:
        return head
    return ops.quantize_weight(head.weight, None, scheme)


def head_tensors(
    description: HeadDescription,
    stored: Iterable[tuple[str, Any, Callable[[], Any]]],
    maps: dict[str, Any],
) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yields the tensors (name, shape, read) of a head's file that are parameters, and stores those
    of `MAPS` in `maps`."""
    for name, shape, read in stored:
        name = name.removeprefix("medusa_heads.").removeprefix(WRAPPED)
        if name in MAPS and description.has_map:
            maps[name] = read()
        elif name == "mask_hidden":  # [1, 1, E] or [1, E]
            yield (
                name,
                (1, shape[-1]) if len(shape) == 3 and shape[:2] == (1, 1) else shape,
                _two_dims(read),
            )
        elif name not in description.ignored:
            yield name, shape, read


def _two_dims(read: Callable[[], Any]) -> Callable[[], Any]:
    def flat() -> Any:
        value = read()
        return value.reshape(-1, value.shape[-1])

    return flat


def _state_of(row: Any, fc: Any, norms: Sequence[NormParams]) -> Any:
    """`fc` [E, n · E] applied to a row [n · E] → float32 [E]. The row's n parts are normed first if
    there are `norms`.

    Takes tensors or arrays.
    """
    total = 0.0
    parts = _columns(row[None], len(norms) or 1)
    for i, weight in enumerate(_columns(fc, len(parts))):
        x = _wide(parts[i][0])
        if norms:
            x = x * (x @ x / len(x) + norms[i].eps) ** -0.5 * _wide(norms[i].weight)
        total = total + _wide(weight) @ x
    return total


def _wide(x: Any) -> Any:
    """Converts a tensor or an array to float32."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()


def _columns(weight: Any, count: int) -> list[Any]:
    """Splits a weight [out, in], a tensor or an array, into `count` parts of equal width."""
    width = weight.shape[1] // count
    parts = [weight[:, i * width : (i + 1) * width] for i in range(count)]
    return [np.ascontiguousarray(p) if isinstance(p, np.ndarray) else p.contiguous() for p in parts]


def target_ids(
    spec: LayeredSpec, maps: dict[str, npt.NDArray[Any]]
) -> npt.NDArray[np.int64] | None:
    """The model's token id for each of the head's tokens; None if they are the same.

    `d2t`: the difference between the model's id and the head's. `t2d`: a mask of the model's tokens
    that the head has; without `d2t` the head's tokens are these, in order. CheckpointError if the
    tensors are inconsistent.
    """
    steps, chosen = maps.get("d2t"), maps.get("t2d")
    if chosen is not None and (
        chosen.shape != (spec.vocab_size,) or np.count_nonzero(chosen) != spec.draft_vocab_size
    ):
        message = f"the tensor 't2d' must name {spec.draft_vocab_size} of {spec.vocab_size} tokens, draft_vocab_size"
        raise CheckpointError(message, field="t2d")
    if steps is None:
        return None if chosen is None else np.flatnonzero(chosen)
    if steps.shape != (spec.draft_vocab_size,) or steps.dtype.kind not in "iu":
        raise CheckpointError(
            f"the tensor 'd2t' must be {spec.draft_vocab_size} whole numbers, draft_vocab_size",
            field="d2t",
        )
    ids = np.arange(spec.draft_vocab_size) + steps.astype(np.int64)
    if ids.min() < 0 or ids.max() >= spec.vocab_size or len({*ids.tolist()}) < len(ids):
        raise CheckpointError(
            f"the tensor 'd2t' names tokens beyond the model's {spec.vocab_size}, or some twice",
            field="d2t",
        )
    if chosen is not None and not chosen[ids].all():
        raise CheckpointError(
            "the tensors 't2d' and 'd2t' disagree about the head's tokens", field="t2d"
        )
    return ids
