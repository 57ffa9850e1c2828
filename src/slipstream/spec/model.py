"""Model specs: what a model computes, as data. No torch.

1. One `Decoder` runs every `ModelSpec`, encoders included. The memory ledger, the roofline and the pruner read the same spec.
2. A choice between mechanisms is a tagged union (`RopeSpec | AlibiSpec | None`), not a set of booleans.
3. Sizes belong to a layer, so layers may differ.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.cache import CacheGroup as CacheGroup
from slipstream.spec.cache import MixedLayout, group_layers, mixed_layout
from slipstream.spec.cache import longest_sequence as longest_sequence
from slipstream.spec.functions import Activation as Activation
from slipstream.spec.functions import ClampedSilu as ClampedSilu
from slipstream.spec.functions import ClampedSwiglu as ClampedSwiglu
from slipstream.spec.functions import NamedActivation as NamedActivation
from slipstream.spec.functions import NormSpec as NormSpec
from slipstream.spec.functions import OwnActivation as OwnActivation
from slipstream.spec.functions import OwnNorm as OwnNorm
from slipstream.spec.functions import Shape as Shape
from slipstream.spec.functions import Xielu as Xielu
from slipstream.spec.layers import ROUNDED as ROUNDED
from slipstream.spec.layers import AttentionKind as AttentionKind
from slipstream.spec.layers import AttentionSpec as AttentionSpec
from slipstream.spec.layers import BlockIndexSpec as BlockIndexSpec
from slipstream.spec.layers import BlockSpec as BlockSpec
from slipstream.spec.layers import CompressedAttentionSpec as CompressedAttentionSpec
from slipstream.spec.layers import DenseSpec as DenseSpec
from slipstream.spec.layers import GroupLimit as GroupLimit
from slipstream.spec.layers import HyperSpec as HyperSpec
from slipstream.spec.layers import IndexSpec as IndexSpec
from slipstream.spec.layers import InputGateSpec as InputGateSpec
from slipstream.spec.layers import LatentAttentionSpec as LatentAttentionSpec
from slipstream.spec.layers import LayerSpec as LayerSpec
from slipstream.spec.layers import MLPSpec as MLPSpec
from slipstream.spec.layers import MoESpec as MoESpec
from slipstream.spec.layers import OwnInputSpec as OwnInputSpec
from slipstream.spec.layers import ParallelBlock as ParallelBlock
from slipstream.spec.layers import PostNormBlock as PostNormBlock
from slipstream.spec.layers import QKNormSpec as QKNormSpec
from slipstream.spec.layers import RecallSpec as RecallSpec
from slipstream.spec.layers import SequentialBlock as SequentialBlock
from slipstream.spec.layers import SharedExpertSpec as SharedExpertSpec
from slipstream.spec.layers import ShortcutSpec as ShortcutSpec
from slipstream.spec.layers import StreamsSpec as StreamsSpec
from slipstream.spec.layers import TwinBlock as TwinBlock
from slipstream.spec.layers import linear_shapes as linear_shapes
from slipstream.spec.media.audio import AudioSpec as AudioSpec
from slipstream.spec.media.medium import MediaSpec as MediaSpec
from slipstream.spec.media.vision import VisionSpec as VisionSpec
from slipstream.spec.positions import AlibiSpec as AlibiSpec
from slipstream.spec.positions import BucketSpec as BucketSpec
from slipstream.spec.positions import DisentangledSpec as DisentangledSpec
from slipstream.spec.positions import LearnedPositionSpec as LearnedPositionSpec
from slipstream.spec.positions import LinearScaling as LinearScaling
from slipstream.spec.positions import Llama3Scaling as Llama3Scaling
from slipstream.spec.positions import LongRopeScaling as LongRopeScaling
from slipstream.spec.positions import ProportionalScaling as ProportionalScaling
from slipstream.spec.positions import QueryScale as QueryScale
from slipstream.spec.positions import RopeScaling as RopeScaling
from slipstream.spec.positions import RopeSpec as RopeSpec
from slipstream.spec.positions import SinusoidSpec as SinusoidSpec
from slipstream.spec.positions import YarnScaling as YarnScaling
from slipstream.spec.recurrent import GatedDeltaSpec as GatedDeltaSpec
from slipstream.spec.recurrent import LightningSpec as LightningSpec
from slipstream.spec.recurrent import Mamba2Spec as Mamba2Spec
from slipstream.spec.recurrent import MambaSpec as MambaSpec
from slipstream.spec.recurrent import RecurrentSpec as RecurrentSpec
from slipstream.spec.recurrent import ShortConvSpec as ShortConvSpec
from slipstream.spec.recurrent import state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """The encoder of an encoder-decoder model. It shares the decoder's embeddings, or reads `audio`. The decoder starts with
    `start_token_id` and the tokens of `forced`. `positions`, `embed_norm`: the encoder's own, instead of the decoder's."""

    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    start_token_id: int
    forced: tuple[int, ...] = ()
    audio: AudioSpec | None = None
    positions: LearnedPositionSpec | None = None
    embed_norm: NormSpec | None = None

    def longest(self, max_model_len: int) -> int:
        """Maximum tokens (or audio states) of a request that the encoder reads. For audio a constant number."""
        return max_model_len if self.audio is None else self.audio.num_states


class SharedTensor(NamedTuple):
    """A weight shared by several layers: `base`, plus, where named, the product of the layer's own low-rank `up` and
    `down`."""

    base: str
    down: str | None = None
    up: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """Per-layer inputs, which layers read besides the residual (Gemma 3n and 4; `OwnInputSpec`): `size` elements for each of
    `num_layers`.

    They are (norm(project(h)) + scale · row) · factor, where h is the first layer's input and `row` the token's entry in a
    table of `vocab_size` tokens. The norm is taken over each layer's elements separately. The table is only indexed, so it
    keeps its stored format.
    """

    vocab_size: int
    size: int
    num_layers: int
    scale: float
    factor: float
    norm: NormSpec

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        width = self.num_layers * self.size
        return {
            "layer_inputs.table.weight": (self.vocab_size, width),
            "layer_inputs.project.weight": (width, hidden_size),
            **self.norm.shapes("layer_inputs.norm"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """A classification head in place of the output head: out(norm(act(dense(x)))), with x pooled
    from the tokens' final states, or with `pooling` "tokens" the state of each token.

    `bias` is that of `dense`. Without `activation` it is out(x) alone, without a bias on decoders.
    """

    num_labels: int
    activation: Literal["tanh", "relu", "gelu"] | None
    norm: NormSpec | None = None
    bias: bool = True
    pooling: Literal["cls", "mean", "last", "tokens"] = "cls"

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        if self.activation is not None:
            found |= linear_shapes("classifier.dense", hidden_size, hidden_size, self.bias)
            found |= {} if self.norm is None else self.norm.shapes("classifier.norm")
        return found | linear_shapes(
            "classifier.out",
            self.num_labels,
            hidden_size,
            self.activation is not None or self.pooling == "tokens",
        )


MAX_EXPERTS = 2**18
"""Maximum experts of all layers together, since each has an entry in the table of names."""

MAX_PARAMETERS = 2**45


ModelKind: TypeAlias = Literal[
    "a decoder", "a decoder without a head", "an encoder", "a classifier", "an encoder-decoder"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A language model.

    1. A decoder has causal `layers`, and an output head or a `classifier`.
    2. An encoder (BERT) has `layers` that are not causal, no output head, and sometimes a `classifier`. Embeddings of
       `num_token_types` token types are added to the tokens' embeddings.
    3. An encoder-decoder (T5) has an `encoder`, and causal `layers` with cross attention. Its encoder may read audio (Whisper).
    4. A decoder with an image or audio encoder (`media`) reads images or audio, too: their embeddings replace
       placeholder tokens.

    `max_position`: maximum trained context; for an encoder-decoder, of the prompt and of the answer each.
    `embed_size`: the width of the embeddings, if not the layers'; then there are projections in and out (OPT
    350M). `embed_norm`: a norm of the embeddings (BLOOM). If its size is `embed_size`, positions and token
    types have that width, too, and the input projection follows the norm and has a bias (ELECTRA).
    `headless`: a decoder saved without its head (by AutoModel); it only computes embeddings. `layer_inputs`:
    per-layer inputs (Gemma 3n and 4). `logit_scale` multiplies logits (Cohere, Granite). With `logit_softcap`
    they then become tanh(l / cap) · cap. `folded`: factors by which weights are multiplied at load, by name
    suffix in the checkpoint; each pair is (number of rows, their factor) (Falcon-H1). `shared`: tensors used
    by several layers: name in the family's table, and the checkpoint tensors that it is made from (Zamba 2).
    `stage`: the layers [first, last) of this pipeline stage, if other ranks have the others. The first stage
    also has the embeddings, the last one everything after the layers. With `embeds` a later stage has the
    embeddings, too, for a draft head. `groups`: on a rank of several (`spec.parallel`), the cache groups of
    the whole model, which all ranks share.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    learned_positions: LearnedPositionSpec | SinusoidSpec | None = None
    embed_size: int | None = None
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    tied_embeddings: bool = False
    head_bias: bool = False
    headless: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_token_types: int = 0
    classifier: ClassifierSpec | None = None
    encoder: EncoderSpec | None = None
    media: MediaSpec | None = None
    folded: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()
    shared: tuple[tuple[str, SharedTensor], ...] = ()
    layer_inputs: LayerInputsSpec | None = None
    stage: tuple[int, int] | None = None
    embeds: bool = False
    groups: tuple[CacheGroup, ...] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise UnsupportedModelError(
                "num_hidden_layers must be at least 1", field="num_hidden_layers"
            )
        num_experts = sum(
            layer.mlp.num_experts for layer in self.all_layers if isinstance(layer.mlp, MoESpec)
        )
        if num_experts > MAX_EXPERTS:
            raise UnsupportedModelError(
                f"the layers have {num_experts} experts, more than {MAX_EXPERTS}",
                field="num_experts",
            )
        if self.num_parameters > MAX_PARAMETERS:
            raise UnsupportedModelError(
                f"the config's sizes make {self.num_parameters:.3g} parameters: no model has so many",
                field="hidden_size",
            )
        if self.encoder is not None and not 0 <= self.encoder.start_token_id < self.vocab_size:
            raise UnsupportedModelError(
                f"decoder_start_token_id ({self.encoder.start_token_id}) is no token of {self.vocab_size}",
                field="decoder_start_token_id",
            )
        if self.media is not None:
            self.media.check(self.vocab_size)
            windows = [a.window for a in self.attentions if isinstance(a, AttentionSpec)]
            if self.media.whole_tokens > min((w for w in windows if w), default=2**31):
                raise UnsupportedModelError(
                    f"tokens of a picture see each other: {self.media.whole_tokens} must fit in the decoder's window",
                    field="max_soft_tokens",
                )
        for i, layer in enumerate(self.layers):
            source = None if layer.attention is None else layer.attention.kv_from
            if source is not None and not 0 <= source < i:
                raise UnsupportedModelError(
                    f"layer {i} reads the keys and values of layer {source}, which is no layer before it",
                    field="num_kv_shared_layers",
                )
        for i in (0, self.local_layers.start):
            first = self.layers[i].attention
            if isinstance(first, LatentAttentionSpec) and first.index == "previous":
                raise UnsupportedModelError(
                    f"layer {i} attends to the keys that the layer before it chose, which is not on this stage",
                    field="indexer_types",
                )
        for layer in self.all_layers:
            a, r = layer.attention, layer.recurrent
            if a is None and r is None:
                raise UnsupportedModelError(
                    "a layer needs attention or a recurrence", field="layer_types"
                )
            if isinstance(r, GatedDeltaSpec) and r.num_heads % r.num_key_heads:
                raise UnsupportedModelError(
                    f"linear_num_value_heads ({r.num_heads}) must be a multiple of linear_num_key_heads ({r.num_key_heads})",
                    field="linear_num_key_heads",
                )
            if isinstance(r, Mamba2Spec) and (
                r.num_heads % r.num_groups or r.v_size % r.norm_groups
            ):
                raise UnsupportedModelError(
                    f"the heads of Mamba-2 ({r.num_heads}) must be a multiple of its groups ({r.num_groups})",
                    field="n_groups",
                )
            if a is not None and a.num_heads % a.num_kv_heads:
                raise UnsupportedModelError(
                    f"num_attention_heads ({a.num_heads}) must be a multiple of num_key_value_heads ({a.num_kv_heads})",
                    field="num_key_value_heads",
                )
            m = layer.mlp
            if isinstance(m, MoESpec) and not 1 <= m.num_experts_per_token <= m.num_choices:
                raise UnsupportedModelError(
                    f"num_experts_per_tok ({m.num_experts_per_token}) must be 1 to the number of experts ({m.num_choices})",
                    field="num_experts_per_tok",
                )
            g = m.groups if isinstance(m, MoESpec) else None
            if isinstance(m, MoESpec) and g is not None:
                each = m.num_choices // g.num_groups
                fits = m.num_choices % g.num_groups == 0 and each >= (
                    2 if g.by == "best_two" else 1
                )
                if not fits or not m.num_experts_per_token <= g.num_chosen * each <= m.num_choices:
                    raise UnsupportedModelError(
                        f"{m.num_experts_per_token} of {m.num_choices} experts can't be chosen from {g.num_chosen} of "
                        f"{g.num_groups} groups",
                        field="n_group",
                    )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def local_layers(self) -> range:
        """Indices of the layers whose weights this rank has."""
        return range(self.num_layers) if self.stage is None else range(*self.stage)

    @property
    def has_first(self) -> bool:
        """Whether the first layer, and so the embeddings, are on this rank."""
        return self.local_layers.start == 0

    @property
    def has_last(self) -> bool:
        """Whether the last layer, and so what comes after it, is on this rank."""
        return self.local_layers.stop == self.num_layers

    @property
    def attentions(self) -> tuple[AttentionKind, ...]:
        """Attention specs of the layers that have attention, in order."""
        return tuple(x.attention for x in self.layers if x.attention is not None)

    @property
    def sees(self) -> bool:
        """Whether prompts may contain images."""
        return self.media is not None and self.media.medium == "image"

    @property
    def hears(self) -> bool:
        """Whether prompts may contain audio clips (instead of images)."""
        return self.media is not None and self.media.medium == "audio"

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have recurrent states, instead of or in addition to keys and values."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def reads_lengths(self) -> bool:
        """Whether some layers' attention is computed in plain torch, sequence by sequence, so that no graph and no program
        can have it."""
        return any(
            isinstance(a, CompressedAttentionSpec)
            or (isinstance(a, AttentionSpec) and a.index is not None)
            for a in self.attentions
        )

    @property
    def is_encoder(self) -> bool:
        """Whether the model reads whole texts and generates none."""
        first = self.layers[0].attention
        return isinstance(first, AttentionSpec) and not first.causal

    @property
    def generates(self) -> bool:
        """Whether the model has an output head and so generates text."""
        return not self.is_encoder and self.classifier is None and not self.headless

    @property
    def kind(self) -> ModelKind:
        """The kind of model, for messages. Only a decoder can be scored on text, be compressed, and
        have a canary."""
        if self.encoder is not None:
            return "an encoder-decoder"
        if self.classifier is not None:
            return "a classifier"
        if self.is_encoder:
            return "an encoder"
        return "a decoder without a head" if self.headless else "a decoder"

    @property
    def needs_full_prompt(self) -> bool:
        """Whether a prompt must be computed in one step, not in chunks."""
        return self.is_encoder or self.encoder is not None

    @property
    def joins_prompts(self) -> bool:
        """Whether all tokens of a prompt with images attend to each other."""
        return self.media is not None and self.media.bidirectional == "prompt"

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the encoder, if there is one, then those of the decoder."""
        return (() if self.encoder is None else self.encoder.layers) + self.layers

    @property
    def has_head(self) -> bool:
        """Whether the output head has its own weight, not the embedding table's."""
        return self.generates and not self.tied_embeddings

    @property
    def embed_width(self) -> int:
        """Width of the embedding table and of the output head."""
        return self.hidden_size if self.embed_size is None else self.embed_size

    @property
    def sums_narrow(self) -> bool:
        """Whether embeddings, positions and token types are added and normed before the projection to the hidden size."""
        return self.embed_norm is not None and self.embed_norm.size == self.embed_size

    @property
    def num_parameters(self) -> int:
        """Distinct parameters: a tied output head counts once."""
        return sum(map(math.prod, parameters(self).values()))

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The KV cache groups. An encoder's only group retains no blocks. An encoder-decoder's last group is `cross`."""
        if self.groups is not None:
            return self.groups
        groups = group_layers(
            {
                i: x.attention
                for i, x in enumerate(self.layers)
                if x.attention is not None and x.attention.kv_from is None
            },
            self.max_position,
            divide=not self.is_encoder,
        )
        if self.encoder is not None:
            read = None if self.encoder.audio is None else self.encoder.audio.num_states
            groups.append(
                CacheGroup(kind="cross", layers=tuple(range(self.num_layers)), num_read=read)
            )
        return tuple(groups)

    @property
    def owners(self) -> tuple[int, ...]:
        """Index, for each layer, of the layer that caches the keys and values it reads."""
        kept = (None if x.attention is None else x.attention.kv_from for x in self.layers)
        return tuple(i if source is None else source for i, source in enumerate(kept))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index, for each layer, of the cache group with its own keys and values; 0 for layers
        without attention."""
        found = {
            layer: i
            for i, group in enumerate(self.cache_groups)
            if group.kind != "cross"
            for layer in group.layers
        }
        return tuple(found.get(i, 0) for i in self.owners)

    @property
    def cross_group(self) -> int:
        """Index of an encoder-decoder's `cross` group."""
        return len(self.cache_groups) - 1

    @property
    def cache_places(self) -> tuple[int, ...]:
        """Index of each layer's cache tensor, which is its index in its group; −1 without
        attention. All layers of an encoder use tensor 0 in turn."""
        if self.is_encoder:
            return (0,) * self.num_layers
        found = {
            x: p for g in self.cache_groups if g.kind != "cross" for p, x in enumerate(g.layers)
        }
        return tuple(found.get(i, -1) for i in self.owners)

    @property
    def mixed_layout(self) -> MixedLayout | None:
        """Cache layout of the local layers if their groups differ in key size; otherwise None."""
        layout = mixed_layout(
            self.cache_groups, {i: x.attention for i, x in enumerate(self.layers) if x.attention}
        )
        if layout is None:
            return None
        places = {i: x for i, x in layout.places.items() if i in self.local_layers}
        return dataclasses.replace(layout, places=places)

    @property
    def block_scales(self) -> tuple[int, ...]:
        """The factor of each group's block ids in block tables (`MixedLayout.scales`)."""
        layout = self.mixed_layout
        return (1,) * len(self.cache_groups) if layout is None else layout.scales

    def block_bytes_per_token(self, element_bytes: float) -> int:
        """Bytes per token of a block, summed over all cache tensors."""
        if self.is_encoder:
            return self.kv_bytes_per_token(element_bytes)
        if (layout := self.mixed_layout) is not None:
            return round(len(layout.tensors) * layout.width * element_bytes)
        places = self.cache_places
        kept = ((places[i], self.layers[i].attention) for i in self.local_layers)
        sizes = {place: a.cached_bytes(element_bytes) for place, a in kept if a is not None}
        return sum(sizes.values())

    def kv_bytes_per_token(self, element_bytes: float) -> int:
        """2 · kv_heads · head_dim · bytes (latent attention: (kv_rank + rotary_dim) · bytes),
        summed over layers. An encoder counts its largest layer, since its layers use one cache in
        turn. A layer that reads another's keys and values counts 0."""
        sizes = [a.cached_bytes(element_bytes) for a in self.attentions if a.kv_from is None]
        return max(sizes) if self.is_encoder else sum(sizes)

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of a sequence's states in the local recurrent layers; 0 without such layers."""
        own = (self.layers[i].recurrent for i in self.local_layers)
        return sum(state_bytes(r, element_bytes) for r in own if r is not None)


def parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter and its shape, in the order of computation. A tied output head is not listed.

    1. The weights of q, k and v are one parameter, with rows in this order, for one matrix product.
    2. So are the weights of gate and up.
    3. The experts of a layer are stacked in one parameter.
    """
    whole = _parameters(spec)
    if spec.stage is None:
        return whole
    return {name: shape for name, shape in whole.items() if _is_held(name, spec)}


def _is_held(name: str, spec: ModelSpec) -> bool:
    """Whether the pipeline stage has the parameter. A tied output head is the embedding table, which is then on two
    stages."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) in spec.local_layers
    if name == "embed.weight":
        return spec.has_first or spec.embeds or (spec.tied_embeddings and spec.has_last)
    first = ("embed_in.", "positions.", "token_types.", "embed_norm.", "media.", "layer_inputs.")
    if name.startswith(first):
        return spec.has_first
    return name.startswith("distances") or spec.has_last


def _parameters(spec: ModelSpec) -> dict[str, Shape]:
    hidden, width = spec.hidden_size, spec.embed_width
    found: dict[str, Shape] = {"embed.weight": (spec.vocab_size, width)}
    if spec.embed_size is not None:
        found |= linear_shapes("embed_in", hidden, width, bias=spec.sums_narrow)
    summed = width if spec.sums_narrow else hidden
    if isinstance(spec.learned_positions, LearnedPositionSpec):
        found["positions.weight"] = (spec.learned_positions.num_positions, summed)
    if spec.num_token_types:
        found["token_types.weight"] = (spec.num_token_types, summed)
    if spec.embed_norm is not None:
        found |= spec.embed_norm.shapes("embed_norm")
    if spec.layer_inputs is not None:
        found |= spec.layer_inputs.shapes(hidden)
    if spec.encoder is not None:
        if spec.encoder.audio is not None:
            found |= spec.encoder.audio.shapes("encoder", hidden)
        if spec.encoder.positions is not None:
            rows = spec.encoder.positions.num_positions
            found["encoder.positions.weight"] = (rows, hidden)
        if spec.encoder.embed_norm is not None:
            found |= spec.encoder.embed_norm.shapes("encoder.embed_norm")
        found |= _stack_shapes("encoder.", spec.encoder.layers, spec.encoder.final_norm, hidden)
    found |= _stack_shapes("", spec.layers, spec.final_norm, hidden)
    if spec.classifier is not None:
        found |= spec.classifier.shapes(hidden)
    if spec.embed_size is not None and spec.generates:
        found["embed_out.weight"] = (width, hidden)
    if spec.has_head:
        found["head.weight"] = (spec.vocab_size, width)
    if spec.head_bias:
        found["head.bias"] = (spec.vocab_size,)
    return found if spec.media is None else found | spec.media.shapes(hidden)


def _stack_shapes(
    prefix: str, layers: tuple[LayerSpec, ...], final_norm: NormSpec | None, hidden: int
) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    first = layers[0].attention
    position = None if first is None else first.position
    if first is not None and isinstance(position, BucketSpec) and not position.own:
        found[f"{prefix}distances.weight"] = (position.num_buckets, first.num_heads)
    if isinstance(position, DisentangledSpec):
        found[f"{prefix}distances.weight"] = (2 * position.span, hidden)
        if position.norm is not None:
            found |= position.norm.shapes(f"{prefix}distances_norm")
    for i, layer in enumerate(layers):
        found |= {
            f"{prefix}layers.{i}.{name}": shape for name, shape in layer.shapes(hidden).items()
        }
    return found if final_norm is None else found | final_norm.shapes(f"{prefix}final_norm")
