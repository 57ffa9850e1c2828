"""The decoder: one loop that runs every `ModelSpec`, op by op.

    h = embed(tokens)
    for layer in layers: h = h + attention(norm(h)); h = h + mlp(norm(h))
    logits = head(norm(h))

It knows no architecture by name and no device, and imports no torch: built with `kernels.recording.RecordingOps` it shows what
it does without computing it. Faster ways to run the same layers are made from that record (`model.program`,
`model.one_token`); the decoder knows none of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.model.encoder import Classifier, Encoder
from slipstream.model.layers import Layer, MoE, Tap, build_layer, build_linear, build_norm, finished, normed, run_layers
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights import Linear


class Decoder:
    """`parameters` are by the names of `spec.parameters`. They are laid out as `ops` wants them, the layers' products rounded
    by `scheme`, and then not needed. `products` are weights that are held rounded already, by the same names, without their
    biases; afterwards it has all of the decoder's products, as they were laid out. `layers`, if given, stand for those that
    `parameters` would make (training and calibration run layers one at a time, and give none)."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: dict[str, Tensor],
        ops: OpSet,
        *,
        max_model_len: int,
        scheme: Scheme | None = None,
        products: dict[str, Linear] | None = None,
        layers: Sequence[Layer] | None = None,
    ) -> None:
        products = {} if products is None else products
        of_experts, scheme = scheme, None if scheme is not None and scheme.experts_only else scheme
        self.spec = spec
        self.ops = ops
        held = products.get("embed.weight")
        table: Tensor | Linear = parameters.pop("embed.weight") if held is None else held
        self.positions = parameters.pop("positions.weight", None)
        self.token_types = parameters.pop("token_types.weight", None)
        self.embed_in, self.embed_out = (
            None if spec.embed_size is None else build_linear(name, parameters, ops, None, products)
            for name in ("embed_in", "embed_out")
        )
        self.embed_norm = None if spec.embed_norm is None else build_norm(spec.embed_norm, "embed_norm", parameters)
        self.final_norm = None if spec.final_norm is None else build_norm(spec.final_norm, "final_norm", parameters)
        if spec.tied_embeddings and held is not None:
            products["head.weight"] = held
        elif spec.tied_embeddings:
            parameters["head.weight"] = table  # type: ignore[assignment]
        self.head = None
        if spec.generates:
            by = scheme if scheme is not None and scheme.head else None
            self.head = build_linear("head", parameters, ops, by, products)
        self.embed: Any = ops.embedding(table, self.head if spec.tied_embeddings else None)  # what this op set's `embed` reads
        self.device, self.dtype = ops.place_of(table)
        tables = ops.position_tables(max_model_len, self.device)
        self.encoder = self.classifier = None
        self.tap: Tap | None = None  # what a draft head reads between layers

        def stack(own: Sequence[LayerSpec], name: str) -> list[Layer]:
            tables.distances = parameters.pop(f"{name}distances.weight", None)
            named = ((s, f"{name}layers.{i}.") for i, s in enumerate(own))
            return [build_layer(s, parameters, ops, tables, name=n, scheme=of_experts, products=products) for s, n in named]

        if (e := spec.encoder) is not None:
            self.encoder = Encoder(stack(e.layers, "encoder."), build_norm(e.final_norm, "encoder.final_norm", parameters))
        if (c := spec.classifier) is not None:
            out = build_linear("classifier.out", parameters, ops, None, products)
            dense = None if c.activation is None else build_linear("classifier.dense", parameters, ops, None, products)
            norm = None if c.norm is None else build_norm(c.norm, "classifier.norm", parameters)
            self.classifier = Classifier(c, dense, norm, out)
        groups = zip(layers if layers is not None else stack(spec.layers, ""), spec.group_of_layer, strict=False)
        self.layers = [dataclasses.replace(x, group=g, cross_group=spec.cross_group) for x, g in groups]
        assert not parameters, f"unused: {list(parameters)}"

    def forward(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → hidden states [T, E] after the final norm; keys and values are in the cache."""
        h = self.embedded(token_ids, meta)
        return self.finished(*run_layers(self.ops, self.layers, h, kv, meta))

    def tapped(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """(what `forward` gives, what a draft head reads of the step [T, E])"""
        return self.run(self.embedded(token_ids, meta), kv, meta)

    def run(
        self,
        h: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        before: Callable[[int], None] = lambda layer: None,
    ) -> tuple[Tensor, Tensor]:
        """What the layers give of `h`, and what the tap does; without one, the hidden states twice. `before(i)` is called
        before layer i, and in the end."""
        taken: Tensor | None = None

        def look(layer: int, pending: Tensor, residual: Tensor | None) -> None:
            nonlocal taken
            before(layer)
            if self.tap is not None:
                taken = self.tap.add(self.ops, taken, layer, pending, residual)

        hidden = self.finished(*run_layers(self.ops, self.layers, h, kv, meta, look))
        return hidden, hidden if taken is None else taken

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """An encoder-decoder's prompts, whole, token_ids [T]: what the decoder's layers read of them goes into `meta`'s slots
        of their caches."""
        assert self.encoder is not None
        self.remember(self.encoder(self.ops, self.embedded(token_ids, meta), kv[0], meta), kv, meta)

    def remember(self, states: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Keys and values of the encoder's states [T, E] go into each layer's cache."""
        for layer, cache in zip(self.layers, kv, strict=True):
            assert layer.cross is not None
            layer.cross.remember(self.ops, states, cache, meta)

    def embedded(self, token_ids: Tensor, meta: AttentionMetadata) -> Tensor:
        """token_ids [T] → what the first layer reads, [T, E]"""
        h = self.ops.embed(token_ids, self.embed, self.spec.embed_scale)
        if self.embed_in is not None:
            h = self.ops.linear(h, self.embed_in)
        if self.positions is not None and self.spec.learned_positions is not None:
            h = h + self.ops.embed_positions(meta, self.positions, self.spec.learned_positions.offset)
        if self.token_types is not None:
            h = h + self.ops.embed_token_types(meta, self.token_types)
        return h if self.embed_norm is None else normed(self.ops, self.embed_norm, h)

    def finished(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """What the last layer gives → what `logits` reads."""
        return finished(self.ops, self.final_norm, h, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] → [N, V]"""
        assert self.head is not None
        if self.embed_out is not None:
            hidden = self.ops.linear(hidden, self.embed_out)
        logits = self.ops.linear(hidden, self.head)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap=cap)

    def count_experts(self) -> dict[int, Tensor]:
        """From now on each step counts its tokens by expert: int64 [X] on the device for each layer that has experts."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoE):
                counts = self.ops.new_counts(layer.mlp.spec.num_experts, self.device)
                self.layers[i] = dataclasses.replace(layer, expert_counts=counts)
        return {i: x.expert_counts for i, x in enumerate(self.layers) if x.expert_counts is not None}

    def with_ops(self, ops: OpSet) -> Decoder:
        """The same weights, run by other ops."""
        other = copy.copy(self)
        other.ops = ops
        return other
