"""The decoder: one loop that runs every `ModelSpec`, op by op.

  h = embed(tokens)
  for layer in layers: h = h + attention(norm(h)); h = h + mlp(norm(h))
  logits = head(norm(h))

It knows no architecture by name and no device, and imports no torch. With
`kernels.tracing.recording.RecordingOps` it records its ops instead of computing them. Faster
implementations of the same layers are built from that recording (`model.step_program`,
`model.one_token`). The decoder depends on none of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.model.building import build_layer, build_linear, build_norm
from slipstream.model.encoder import AudioInput, Classifier, Encoder, TextInput
from slipstream.model.layers.feed_forward import MoE
from slipstream.model.layers.layer import Layer, Partition, run_layers
from slipstream.model.layers.residual import finished, normed, state_of
from slipstream.model.layers.taps import AnyTap
from slipstream.model.vocabulary import Vocabulary
from slipstream.spec.model import (
    DisentangledSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    SinusoidSpec,
)
from slipstream.spec.parameters import keeps_float32
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.layouts import NormParams
    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Linear
    from slipstream.model.device_stream import DeviceStream
    from slipstream.model.layer_stream import LayerStream
    from slipstream.model.layers.residual import Pending
    from slipstream.platform.collectives import Pipe, RankGroup


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs, which layers read besides the residual (`LayerInputsSpec`)."""

    spec: LayerInputsSpec
    table: Any  # in the op set's layout
    project: Linear
    norm: NormParams
    is_short: bool = False  # token ids beyond the table use its row 0 (Gemma 3n)

    def into(self, meta: Any, ops: OpSet, token_ids: Tensor, h: Tensor) -> Any:
        """Returns the step's metadata with the per-layer inputs added."""
        s, rows = self.spec, ops.linear(h, self.project)
        made = ops.layer_inputs(
            token_ids,
            rows,
            self.table,
            self.norm,
            scale=s.scale,
            factor=s.factor,
            limit=s.vocab_size if self.is_short else None,
        )
        return dataclasses.replace(meta, layer_inputs=made)


def _held_or_dense(
    name: str, parameters: MutableMapping[str, Tensor], products: MutableMapping[str, Linear]
) -> Tensor | Linear:
    """Removes and returns the embedding table: from `products` if it is quantized there, otherwise from `parameters`."""
    dense, held = parameters.pop(f"{name}.weight", None), products.get(f"{name}.weight")
    found = dense if held is None else held
    assert found is not None, name
    return found


class Decoder:
    """The model that `spec` describes, with its weights.

    1. `parameters` have the names of `spec.parameters`. `ops` lays them out, and quantizes the
       linear layers by `scheme`. They may be dropped afterwards.
    2. `products` are already quantized weights by the same names, without biases. Construction adds
       all other linear layers, as laid out.
    3. `layers`, if given, replace those that `parameters` would make. Training and calibration,
       which run layers one at a time, pass an empty list.
    4. With a `partition`, the spec (except its `vocab_size`) and the parameters are a rank's part.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Tensor],
        ops: OpSet,
        *,
        max_model_len: int,
        scheme: Scheme | None = None,
        products: MutableMapping[str, Linear] | None = None,
        layers: Sequence[Layer] | None = None,
        partition: Partition | None = None,
    ) -> None:
        products = {} if products is None else products
        of_experts, scheme = scheme, None if scheme is not None and scheme.experts_only else scheme
        self.spec = spec
        self.ops = ops
        self.partition = partition
        self.vocabulary = Vocabulary(spec.vocab_size, partition)
        self.pipe = None if partition is None else partition.pipe
        self.routed_experts: Tensor | None = None  # see `keep_routed_experts`
        held = products.get("embed.weight")
        table: Tensor | Linear | None = (
            parameters.pop("embed.weight", None) if held is None else held
        )
        known: Any = (
            table
            if table is not None
            else next(v for n, v in parameters.items() if not keeps_float32(n))
        )
        self.device, self.dtype = ops.place_of(known)
        tables = ops.position_tables(max_model_len, self.device)
        self.positions = parameters.pop("positions.weight", None)
        if isinstance(spec.learned_positions, SinusoidSpec) and spec.has_first:
            self.positions = tables.sinusoids(spec.learned_positions, spec.hidden_size)
        self.token_types = parameters.pop("token_types.weight", None)
        self.embed_in, self.embed_out = (
            None
            if spec.embed_size is None or not is_here
            else build_linear(name, parameters, ops, None, products)
            for name, is_here in (
                ("embed_in", spec.has_first),
                ("embed_out", spec.has_last and spec.generates),
            )
        )
        first_norm, last_norm = (
            spec.embed_norm if spec.has_first else None,
            spec.final_norm if spec.has_last else None,
        )
        self.embed_norm = (
            None if first_norm is None else build_norm(first_norm, "embed_norm", parameters, tables)
        )
        self.final_norm = (
            None if last_norm is None else build_norm(last_norm, "final_norm", parameters, tables)
        )
        if not spec.has_last:
            pass
        elif spec.tied_embeddings and held is not None:
            products["head.weight"] = held
        elif spec.tied_embeddings:
            parameters["head.weight"] = table  # type: ignore[assignment]
        self.head = None
        if spec.generates and spec.has_last:
            by = scheme if scheme is not None and scheme.head else None
            self.head = build_linear("head", parameters, ops, by, products)
        self.embed: Any = None  # in this op set's layout
        if spec.has_first or spec.embeds:
            assert table is not None
            self.embed = ops.embedding(table, self.head if spec.tied_embeddings else None)
        self.layer_inputs: LayerInputs | None = None
        if (s := spec.layer_inputs) is not None and spec.has_first:
            self.layer_inputs = LayerInputs(
                s,
                ops.embedding(_held_or_dense("layer_inputs.table", parameters, products), None),
                build_linear("layer_inputs.project", parameters, ops, None, products),
                build_norm(s.norm, "layer_inputs.norm", parameters),
                s.vocab_size < spec.vocab_size,
            )
        self.reads_tokens = any(getattr(layer.mlp, "hashed", 0) for layer in spec.layers)
        self.encoder = self.classifier = None
        self.tap: AnyTap | None = None  # collects the states between layers that a draft head reads
        # on all pipeline stages: the layers whose input states such a tap reads
        self.relays: tuple[int, ...] = ()

        def stack(own: Sequence[LayerSpec], name: str, held: range) -> list[Layer]:
            tables.distances = parameters.pop(f"{name}distances.weight", None)
            where = own[0].attention and own[0].attention.position
            if isinstance(where, DisentangledSpec) and where.norm is not None:
                norm_name = f"{name}distances_norm"
                tables.distances_norm = build_norm(where.norm, norm_name, parameters)
            how: dict[str, Any] = dict(scheme=of_experts, products=products, partition=partition)
            made: dict[int, Layer] = {}
            for i in held:
                n, same = f"{name}layers.{i}.", own[i].same_as
                made[i] = (
                    build_layer(own[i], parameters, ops, tables, name=n, **how)
                    if same is None
                    else made[same]
                )
            return list(made.values())

        if (e := spec.encoder) is not None:
            own_stack = stack(e.layers, "encoder.", range(len(e.layers)))
            audio: AudioInput | None = None
            if e.audio is not None:
                first, second = (
                    build_linear(f"encoder.audio.{x}", parameters, ops, None, products)
                    for x in ("first", "second")
                )
                where = parameters.pop("encoder.positions.weight")
                audio = AudioInput(e.audio, first, second, where)
            norms = (
                None if n is None else build_norm(n, f"encoder.{name}", parameters)
                for name, n in (("final_norm", e.final_norm), ("embed_norm", e.embed_norm))
            )
            final, of_text = norms
            text: TextInput | None = None
            if e.positions is not None:
                where = parameters.pop("encoder.positions.weight")
                text = TextInput(where, e.positions.offset, of_text)
            self.encoder = Encoder(own_stack, final, audio, text)
        if (c := spec.classifier) is not None and spec.has_last:
            out = build_linear("classifier.out", parameters, ops, None, products)
            dense = (
                None
                if c.activation is None
                else build_linear("classifier.dense", parameters, ops, None, products)
            )
            norm = None if c.norm is None else build_norm(c.norm, "classifier.norm", parameters)
            self.classifier = Classifier(c, dense, norm, out)
        # streams the weights of layers that are not kept in memory
        self.stream: LayerStream | DeviceStream | None = None
        self.take_layers(
            layers if layers is not None else stack(spec.layers, "", spec.local_layers)
        )
        assert not parameters, f"unused: {list(parameters)}"

    def take_layers(self, layers: Sequence[Layer]) -> None:
        """Replaces the layers, from the first local one on."""
        groups = zip(
            layers,
            self.spec.group_of_layer[self.spec.local_layers.start : self.spec.local_layers.stop],
            strict=False,
        )
        self.layers = [
            dataclasses.replace(x, group=g, cross_group=self.spec.cross_group) for x, g in groups
        ]

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states [T, E] after the final norm. Writes keys and values to the
        cache.

        On a pipeline stage before the last, returns what was sent to the next stage.
        """
        h = self.embedded(token_ids, meta)
        meta = self.with_inputs(token_ids, h, meta)
        if self.stream is not None or self.relays or self.sharing(h) is not None:
            return self.run(h, kv, meta)[0]
        return self.finished(*run_layers(self.ops, self.layers, h, kv, meta))

    def tapped(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(result of `forward`, the states between layers that a draft head reads [T, E])."""
        h = self.embedded(token_ids, meta)
        return self.run(h, kv, self.with_inputs(token_ids, h, meta))

    def with_inputs(self, token_ids: Tensor, h: Tensor, meta: Any) -> Any:
        """Returns the step's metadata with the per-layer inputs (`OwnInputSpec`), computed from the
        first layer's input `h`."""
        if self.reads_tokens:
            meta = dataclasses.replace(meta, token_ids=token_ids)
        made = self.layer_inputs
        return meta if made is None else made.into(meta, self.ops, token_ids, h)

    def run(
        self,
        h: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        before: Callable[[int], None] = lambda layer: None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers on `h`. Returns (hidden states, the tap's states); without a tap the
        hidden states twice.

        `before(i)` is called before layer i, and after the last with i = the number of layers.
        """
        taken: Tensor | None = None
        first, ranks = self.spec.local_layers.start, self.sharing(h)
        num_tokens = 0 if ranks is None else len(h)
        passed = self._received_states(h)

        def look(layer: int, pending: Pending, residual: Tensor | None) -> None:
            nonlocal taken
            if self.stream is not None:
                self.stream.before(layer)
            before(layer)
            if self.tap is not None:
                taken = self.tap.add(self.ops, taken, first + layer, pending, residual)
            elif first + layer in self.relays and layer < len(self.layers):
                state = state_of(self.ops, pending, residual)
                passed.append(
                    state.clone()
                    if ranks is None
                    else self.ops.gather_tokens(state, ranks, num_tokens)
                )

        if self.tap is not None:  # the tap adds its states in layer order, as on one device
            # states of earlier stages come first; the others are this stage's own
            for layer, whole in zip(self.relays, passed, strict=False):
                state = whole if ranks is None else self.ops.own_tokens(whole, ranks)
                taken = self.tap.add(self.ops, taken, layer, state, None)
        if ranks is not None:  # each rank holds some of the tokens between linear layers
            if meta.layer_inputs is not None:
                inputs = self.ops.own_tokens(meta.layer_inputs, ranks)
                meta = dataclasses.replace(meta, layer_inputs=inputs)
            own: Any = run_layers(
                self.ops, self.layers, self.ops.own_tokens(h, ranks), kv, meta, look
            )
            if taken is not None:
                taken = self.ops.gather_tokens(taken, ranks, num_tokens)
            if self.partition is not None and not self.partition.shard.tensor:
                hidden = self.ops.gather_tokens(self.finished(*own), ranks, num_tokens)
            else:
                together: Any = (
                    None if x is None else self.ops.gather_tokens(x, ranks, num_tokens) for x in own
                )
                hidden = self.finished(*together)
        else:
            hidden = self.finished(*run_layers(self.ops, self.layers, h, kv, meta, look))
        if not self.spec.has_last:
            for state in passed:  # after what `finished` sent
                self.pipe.send(state)  # type: ignore[union-attr]
        return hidden, hidden if taken is None else taken

    def _received_states(self, h: Tensor) -> list[Tensor]:
        """Receives the states of `relays` from earlier stages, which are sent after `h`, in layer order."""
        earlier = [i for i in self.relays if i < self.spec.local_layers.start]
        receive: Any = None if self.pipe is None else self.pipe.receive
        return [receive(tuple(h.shape), self.dtype) for _ in earlier]

    def sharing(self, h: Tensor) -> RankGroup | None:
        """The ranks that split the step's residual by tokens; None if each rank holds the whole residual."""
        part = self.partition
        return None if part is None or not part.sequence else self.sharers(len(h))

    def sharers(self, num_tokens: int) -> RankGroup | None:
        """`sharing` for a step with this number of tokens."""
        part = self.partition
        return part.group if part is not None and part.shares_tokens(num_tokens) else None

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Encodes the whole prompts of an encoder-decoder: token ids [T], or frames of audio (`AudioInput`).

        The keys and values that the decoder's layers read go into `meta`'s slots of their caches.
        """
        assert self.encoder is not None
        self.remember(
            self.encoder(self.ops, self.encoder_input(given, meta), kv[0], meta), kv, meta
        )

    def encoder_input(self, given: Tensor, meta: AttentionMetadata) -> Tensor:
        """Computes the input [T, E] of the encoder's first layer."""
        assert self.encoder is not None
        if self.encoder.audio is not None:
            return self.encoder.audio(self.ops, given)
        if self.encoder.text is None:
            return self.embedded(given, meta)
        h = self.vocabulary.embed(self.ops, given, self.embed, self.spec.embed_scale)
        return self.encoder.text(self.ops, h, meta)

    def remember(self, states: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Writes to each layer's cache the keys and values computed from the encoder's states [T, E]."""
        for layer, cache in zip(self.layers, kv, strict=True):
            assert layer.cross is not None
            layer.cross.remember(self.ops, states, cache, meta)

    def embedded(self, token_ids: Tensor, meta: AttentionMetadata) -> Tensor:
        """Embeds token_ids [T] → the first layer's input [T, E]. A later pipeline stage receives
        this input from the previous stage."""
        if not self.spec.has_first:
            assert self.pipe is not None
            return self.pipe.receive((len(token_ids), self.spec.hidden_size), self.dtype)
        h = self.vocabulary.embed(self.ops, token_ids, self.embed, self.spec.embed_scale)
        narrow = self.spec.sums_narrow
        if self.embed_in is not None and not narrow:
            h = self.ops.linear(h, self.embed_in)
        if self.positions is not None and self.spec.learned_positions is not None:
            h = h + self.ops.embed_positions(
                meta, self.positions, self.spec.learned_positions.offset
            )
        if self.token_types is not None:
            h = h + self.ops.embed_token_types(meta, self.token_types)
        if self.embed_norm is not None:
            h = normed(self.ops, self.embed_norm, h)
        return self.ops.linear(h, self.embed_in) if narrow and self.embed_in is not None else h

    def finished(self, h: Pending, residual: Tensor | None) -> Tensor:
        """Ends a forward pass: the last layer's output → the input of `logits`. A pipeline stage
        before the last sends it on instead."""
        if not self.spec.has_last:
            assert self.pipe is not None
            return self.pipe.send(finished(self.ops, None, h, residual))
        return finished(self.ops, self.final_norm, h, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, E] → logits [N, V]."""
        return self.vocabulary.gathered(self.ops, self._own_logits(hidden))

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Finds the tokens with the largest logits: [N, E] → int64 [N]. None if the vocabulary is
        not split over ranks."""
        return (
            self.vocabulary.best(self.ops, self._own_logits(hidden))
            if self.vocabulary.is_shared
            else None
        )

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        assert self.head is not None
        if self.embed_out is not None:
            hidden = self.ops.linear(hidden, self.embed_out)
        logits = self.ops.linear(hidden, self.head)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap=cap)

    def count_experts(self) -> dict[int, Tensor]:
        """Counts tokens by expert in every step from now on.

        Returns an int64 [X] counter on the device for each layer that has experts.
        """
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoE):
                counts = self.ops.new_counts(layer.mlp.spec.num_choices, self.device)
                self.layers[i] = dataclasses.replace(layer, expert_counts=counts)
        counted = zip(self.spec.local_layers, self.layers, strict=True)
        return {i: x.expert_counts for i, x in counted if x.expert_counts is not None}

    def route_own_tokens(self) -> None:
        """Makes each rank route its own tokens itself from now on, where ranks compute different requests."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoE):
                mlp = dataclasses.replace(layer.mlp, routes_own=True)
                self.layers[i] = dataclasses.replace(layer, mlp=mlp)

    def keep_routed_experts(self, num_tokens: int) -> Tensor:
        """Records each token's experts in every step from now on. Returns the buffer: int16 [layers
        with experts, num_tokens, k]."""
        mixtures = [i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoE)]
        most = max(x.mlp.spec.num_experts_per_token for x in self.layers if isinstance(x.mlp, MoE))
        self.routed_experts = self.ops.new_routed_experts(
            (len(mixtures), num_tokens, most), self.device
        )
        for own, i in zip(self.routed_experts, mixtures, strict=True):
            layer, mlp = self.layers[i], self.layers[i].mlp
            assert isinstance(mlp, MoE)
            routed = own[:, : mlp.spec.num_experts_per_token]
            self.layers[i] = dataclasses.replace(
                layer, mlp=dataclasses.replace(mlp, routed_experts=routed)
            )
        return self.routed_experts

    def with_ops(self, ops: OpSet) -> Decoder:
        """Returns a decoder with the same weights and other ops."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def with_(self, *, layers: list[Layer] | None = None, pipe: Pipe | None = None) -> Decoder:
        """Returns a decoder with the same weights that runs these layers and uses this pipe.

        None keeps this decoder's own. Both share all tensors.
        """
        other = copy.copy(self)
        other.layers = self.layers if layers is None else layers
        other.pipe = self.pipe if pipe is None else pipe
        return other
