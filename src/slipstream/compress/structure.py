"""The parts of a model that pruning can remove, for every family, derived from the `ModelSpec`.

A *unit* is removed as a whole: a kv group of a layer (with its query heads), a channel of an MLP, a dimension of the
residual stream. Each axis of each parameter consists of one kind of unit, or of none. Removing units selects rows of these
axes, and the importance of a unit is a sum over them. One parameter holds all experts of a layer; `split_experts` separates
them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.model.sequences import attention_of
from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.model import (
    AlibiSpec,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LongRopeScaling,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    SharedExpertSpec,
)

Kind: TypeAlias = Literal["hidden", "heads", "channels", "shared"]


class Units(NamedTuple):
    """The units of one kind in a layer or one of its experts. `channels` are an MLP's or expert's,
    `shared` the shared expert's."""

    kind: Kind
    layer: int = -1
    expert: int = -1


Axis: TypeAlias = tuple[Units, Tensor] | None
"""Units along an axis, and the unit of each row; −1 for rows that are never removed."""

HIDDEN = Units("hidden")
RESIDUAL_READERS = (
    *("recurrent.in", "recurrent.gates", "recurrent.decay_latent", "recurrent.gate_latent"),
    "experts_in",
)
"""Linear layers that read the residual, in recurrent layers and before experts over a latent."""


def num_units(spec: ModelSpec) -> dict[Units, int]:
    """Number of units of each kind."""
    found = {HIDDEN: spec.hidden_size}
    for i, layer in enumerate(spec.layers):
        if (a := attention_of(layer)) is not None:
            found[Units("heads", i)] = num_groups(a)
        m = layer.mlp
        if m is None:
            continue
        if isinstance(m, DenseSpec):
            found[Units("channels", i)] = m.intermediate_size
        else:
            found.update(
                {Units("channels", i, e): m.expert.intermediate_size for e in range(m.num_experts)}
            )
            if m.shared is not None:
                found[Units("shared", i)] = m.shared.mlp.intermediate_size
    return found


def num_groups(a: AttentionSpec) -> int:
    """Number of kv heads, or of query heads if there is only one kv head."""
    return a.num_kv_heads if a.num_kv_heads > 1 else a.num_heads


def split_experts(spec: ModelSpec, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with a separate view for each expert, named "name#expert"."""
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        count = _num_experts(spec, name)
        found.update(
            {name: value}
            if count is None
            else {f"{name}#{e}": part for e, part in enumerate(value.chunk(count))}
        )
    return found


def join_experts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_experts`."""
    found: dict[str, list[Tensor]] = {}
    for name, value in parts.items():
        found.setdefault(name.partition("#")[0], []).append(value)
    return {
        name: values[0] if len(values) == 1 else torch.cat(values) for name, values in found.items()
    }


def _num_experts(spec: ModelSpec, name: str) -> int | None:
    _, _, rest = name.partition("layers.")
    index, _, stem = rest.partition(".")
    if not stem.startswith("experts."):
        return None
    mlp = spec.layers[int(index)].mlp
    assert isinstance(mlp, MoESpec)
    return mlp.num_experts


def axes(spec: ModelSpec, name: str) -> tuple[Axis, Axis]:
    """Units along the rows and columns of a parameter from `split_experts`; a vector has only rows."""
    name, _, expert = name.partition("#")
    stem, _, kind = name.rpartition(".")
    hidden: Axis = (HIDDEN, torch.arange(spec.hidden_size))
    if not stem.startswith("layers."):
        inner = hidden if spec.embed_size is None else None  # embeddings may have another width
        return {
            "embed": (None, inner),
            "head": (None, inner if kind == "weight" else None),
            "embed_in": (hidden, None),
            "embed_out": (None, hidden),
            "positions": (None, hidden),
            "embed_norm": (hidden, None),
            "final_norm": (hidden, None),
        }[stem]
    _, index, stem = stem.split(".", 2)
    i = int(index)
    layer = spec.layers[i]
    if stem.startswith("attention."):
        a = attention_of(layer)
        assert a is not None
        return _attention_axes(a, Units("heads", i), stem, kind, hidden)
    if stem in ("recurrent.out", "experts_out"):
        return hidden, None
    if stem.startswith("recurrent.") or stem == "experts_in":  # their own sizes are not changed
        reads = stem in RESIDUAL_READERS and kind == "weight"
        return None, hidden if reads else None
    if stem in layer.norms:
        return hidden, None
    if stem in ("router", "shared_weight", "correction"):
        return None, hidden if kind == "weight" and stem != "correction" else None
    if stem in ("mlp.positive", "mlp.negative"):  # scalars of the activation
        return None, None
    which = (
        Units("shared", i)
        if stem.startswith("shared.")
        else Units("channels", i, int(expert) if expert else -1)
    )
    mlp = _mlp(layer, which)
    rows = torch.arange(mlp.intermediate_size)
    m = layer.mlp
    if stem.startswith("experts.") and isinstance(m, MoESpec) and m.latent is not None:
        hidden = None  # they read and write a latent
    if stem.endswith(".up"):
        return (which, rows.repeat(2) if mlp.gated else rows), hidden if kind == "weight" else None
    return hidden, (which, rows) if kind == "weight" else None


def _attention_axes(
    a: AttentionSpec, units: Units, stem: str, kind: str, hidden: Axis
) -> tuple[Axis, Axis]:
    if a.differential is not None and stem in ("attention.qkv", "attention.out"):
        reads = stem == "attention.qkv"  # its heads are not removed
        return None if reads else hidden, hidden if reads and kind == "weight" else None
    single = a.num_kv_heads == 1
    groups = torch.arange(a.num_heads) // (1 if single else a.num_heads // a.num_kv_heads)
    q = groups.repeat_interleave(a.head_dim)
    kv = (
        torch.full((a.head_dim,), -1)
        if single
        else torch.arange(a.num_kv_heads).repeat_interleave(a.head_dim)
    )
    match stem:
        case "attention.qkv":
            gate = () if not a.gated else (groups,) if a.gated == "head" else (q,)
            rows = torch.cat((*gate, q, kv, kv))
            return (units, rows), hidden if kind == "weight" else None
        case "attention.out":
            return hidden, (units, q) if kind == "weight" else None
        case "attention.sinks":
            return (units, groups), None
    if a.qk_norm is None or a.qk_norm.over in ("head", "layer"):
        return None, None
    of_q = stem == "attention.q_norm"
    if a.qk_norm.over == "row":
        return (units, q if of_q else kv), None
    return (units, groups if of_q else kv[:: a.head_dim]), None  # one row for each head


def _mlp(layer: LayerSpec, units: Units) -> DenseSpec:
    if isinstance(layer.feed_forward, DenseSpec):
        return layer.feed_forward
    if units.kind == "shared":
        assert layer.feed_forward.shared is not None
        return layer.feed_forward.shared.mlp
    return layer.feed_forward.expert


# --- Removing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PruneSelection:
    """The layers to keep, and the units to keep of each kind that loses any; ascending indices in the original."""

    layers: tuple[int, ...]
    units: Mapping[Units, Tensor]

    def count(self, units: Units, whole: int) -> int:
        return len(self.units[units]) if units in self.units else whole


def cut_spec(spec: ModelSpec, kept: PruneSelection) -> ModelSpec:
    """Spec of the pruned model. UnsupportedModelError if the remaining layers would compute differently."""
    hidden = kept.count(HIDDEN, spec.hidden_size)

    def norm(n: NormSpec | None) -> NormSpec | None:
        return None if n is None else dataclasses.replace(n, size=hidden)

    def layer(i: int) -> LayerSpec:
        whole = spec.layers[i]
        block = dataclasses.replace(
            whole.block,
            **{name: norm(n) for name, n in whole.norms.items()},  # type: ignore[arg-type]
        )
        a, mlp = attention_of(whole), None if whole.mlp is None else _cut_mlp(whole, i, kept)
        attention = None if a is None else _cut_attention(a, i, kept)
        return dataclasses.replace(whole, attention=attention, mlp=mlp, block=block)

    return dataclasses.replace(
        spec,
        hidden_size=hidden,
        layers=tuple(layer(i) for i in kept.layers),
        final_norm=norm(spec.final_norm),
        embed_norm=norm(spec.embed_norm),
    )


def _normed(field: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{field}: the model norms what its output products read, so the others would change; prune layers",
        field=field,
    )


def _cut_attention(a: AttentionSpec, i: int, kept: PruneSelection) -> AttentionSpec:
    groups = num_groups(a)
    count = kept.count(Units("heads", i), groups)
    if count == groups:
        return a
    if a.out_norm is not None:
        raise _normed("heads")
    if a.differential is not None:
        raise UnsupportedModelError(
            "heads: the model subtracts heads from one another, so the others would change; prune channels or the hidden width",
            field="heads",
        )
    if isinstance(a.position, AlibiSpec):
        raise UnsupportedModelError(
            "heads: ALiBi's slopes follow from the number of heads, so the others would change; prune channels, layers or the "
            "hidden width",
            field="heads",
        )
    if a.num_kv_heads == 1:
        return dataclasses.replace(a, num_heads=count)
    return dataclasses.replace(
        a, num_kv_heads=count, num_heads=count * (a.num_heads // a.num_kv_heads)
    )


def _cut_mlp(layer: LayerSpec, i: int, kept: PruneSelection) -> DenseSpec | MoESpec:
    m = layer.feed_forward
    if isinstance(m, DenseSpec):
        count = kept.count(Units("channels", i), m.intermediate_size)
        if m.down_norm is not None and count != m.intermediate_size:
            raise _normed("channels")
        return dataclasses.replace(m, intermediate_size=count)
    sizes = {
        kept.count(Units("channels", i, e), m.expert.intermediate_size)
        for e in range(m.num_experts)
    }
    assert len(sizes) == 1, "experts of one layer have one size"
    shared = m.shared
    if shared is not None:
        size = kept.count(Units("shared", i), shared.mlp.intermediate_size)
        shared = SharedExpertSpec(
            mlp=dataclasses.replace(shared.mlp, intermediate_size=size), weighed=shared.weighed
        )
    return dataclasses.replace(
        m, expert=dataclasses.replace(m.expert, intermediate_size=sizes.pop()), shared=shared
    )


def cut_parameters(
    spec: ModelSpec, parameters: Mapping[str, Tensor], kept: PruneSelection
) -> dict[str, Tensor]:
    """Copy the parameters that `cut_spec(spec, kept)` has."""
    found: dict[str, Tensor] = {}
    number = {old: new for new, old in enumerate(kept.layers)}
    for name, value in split_experts(spec, parameters).items():
        target = name
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            if int(index) not in number:
                continue
            target = f"layers.{number[int(index)]}.{rest}"
        for dim, axis in enumerate(axes(spec, name)):
            if axis is not None and (units := kept.units.get(axis[0])) is not None:
                rows = ((axis[1] < 0) | torch.isin(axis[1], units)).nonzero()[:, 0]
                value = value.index_select(dim, rows.to(value.device))
        found[target] = value.clone()
    return join_experts(found)


# --- The config -------------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "word_embed_proj_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "channels": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "expert": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
}
"""Config keys of these sizes. A family's reader uses only its own."""

HEADS_SHARE_WIDTH = frozenset(
    (
        "openai-gpt",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neox",
        "opt",
        "bloom",
        "mpt",
        "falcon",
        "RefinedWeb",
        "RefinedWebModel",
        "codegen",
        "gpt_neo",
        "helium",
        "olmoe",
        "stablelm",
        "persimmon",
        "xglm",
    )
)
"""Model types whose head_dim is always hidden size / heads, so that heads can only be removed together with width."""


def cut_config(
    family: Family, config: Mapping[str, Any], wanted: ModelSpec, kept: PruneSelection
) -> dict[str, Any]:
    """Config from which `wanted` is read, except for `folded`, and `embed_scale`, which may follow
    from the width. UnsupportedModelError if the family's configs can't express it."""
    reader = _RecordingReader(config)
    whole = family.read(reader)
    found = dict(config)

    def put(meaning: str, value: int) -> None:
        keys = [key for key in KEYS[meaning] if key in reader.taken]
        if meaning == "expert":
            keys = keys[:1]
        known = [key for key in keys if found.get(key) is not None]
        for key in known or keys[:1]:
            if key == "word_embed_proj_dim" and wanted.embed_size is not None:
                continue
            found[key] = value

    attentions = [attention_of(layer) for layer in wanted.layers]
    a = next(filter(None, attentions), None)
    put("hidden", wanted.hidden_size)
    if wanted.num_layers != whole.num_layers:
        put("layers", wanted.num_layers)
    if a is not None:
        halves = 1 if a.differential is None else 2  # each head is counted twice
        put("heads", a.num_heads // halves)
        put("kv_heads", a.num_kv_heads // halves)
    for layer in wanted.layers:
        if layer.mlp is None:
            continue
        if isinstance(layer.feed_forward, DenseSpec):
            put("channels", layer.feed_forward.intermediate_size)
        else:
            put("expert", layer.feed_forward.expert.intermediate_size)
            if layer.feed_forward.shared is not None:
                put("shared", layer.feed_forward.shared.mlp.intermediate_size)
    if a is not None:
        shares = family.model_type in HEADS_SHARE_WIDTH or (
            family.model_type == "phi" and a.qk_norm is not None
        )
        if not shares and ("head_dim" in config or a.q_size // halves != wanted.hidden_size):
            found["head_dim"] = a.head_dim
    windows = [None if b is None else b.window for b in attentions]
    if wanted.is_recurrent:
        found |= _kinds_of_layers(config, whole, kept)
        if config.get("attn_layer_indices"):
            found["attn_layer_indices"] = [i for i, b in enumerate(attentions) if b is not None]
    elif "layer_types" in reader.taken and (len(set(windows)) > 1 or "layer_types" in config):
        found["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ]
    if "no_rope_layers" in reader.taken:
        found["no_rope_layers"] = [
            int(b is not None and b.position is not None) for b in attentions
        ]
    if "num_attention_heads_per_layer" in reader.taken:
        found["num_attention_heads_per_layer"] = [b.num_heads for b in attentions if b is not None]
    if config.get("mlp_layer_types"):
        found["mlp_layer_types"] = [
            "dense" if isinstance(layer.feed_forward, DenseSpec) else "sparse"
            for layer in wanted.layers
        ]
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        found["mlp_only_layers"] = [
            i for i, layer in enumerate(wanted.layers) if isinstance(layer.feed_forward, DenseSpec)
        ]
        found["decoder_sparse_step"] = 1
    if "block_auto_adjust_ff_dim" in reader.taken:
        found["block_auto_adjust_ff_dim"] = False  # the size is the MLP's own
    differs = _not_expressed(family, found, wanted)
    if differs is not None:
        raise UnsupportedModelError(
            f"a {family.model_type} config can't express the pruned model ({differs}): prune other parts, or these in other "
            "proportions",
            field="prune",
        )
    return found


def _kinds_of_layers(
    config: Mapping[str, Any], whole: ModelSpec, kept: PruneSelection
) -> dict[str, Any]:
    """Lists by layer in a hybrid's config, for the layers that are kept. Nemotron-H has one entry
    for a mixer and one for the MLP after it."""
    found: dict[str, Any] = {}
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        kinds: Any = config.get(key) or ()
        sizes = [1] * whole.num_layers
        if len(kinds) != len(sizes):
            sizes = [1 + (layer.mlp is not None) for layer in whole.layers]
        if len(kinds) == sum(sizes):
            ends = list(accumulate(sizes))
            parts = [kinds[ends[i] - sizes[i] : ends[i]] for i in kept.layers]
            found[key] = "".join(parts) if isinstance(kinds, str) else [k for p in parts for k in p]
            if sum(sizes) != whole.num_layers:
                found["num_hidden_layers"] = len(found[key])
    return found


def _not_expressed(family: Family, config: Mapping[str, Any], wanted: ModelSpec) -> str | None:
    """Describe how the spec read from the config differs from `wanted`; None if it does not."""
    a = wanted.layers[0].attention
    if (
        isinstance(a, AttentionSpec)
        and a.q_size != wanted.hidden_size
        and isinstance(a.position, RopeSpec)
        and isinstance(a.position.scaling, LongRopeScaling)
    ):
        return "LongRoPE's factors, of which transformers wants as many as hidden size / heads / 2"
    try:
        read = family.read(ConfigReader(config))
    except UnsupportedModelError as error:
        return error.message
    if dataclasses.replace(read, embed_scale=wanted.embed_scale, folded=wanted.folded) == wanted:
        return None
    return ", ".join(dict.fromkeys(_differences(wanted, read)))


class _RecordingReader(ConfigReader):
    """Records which keys a family's reader reads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.taken = self._read


def _differences(a: Any, b: Any, name: str = "") -> Iterable[str]:
    """Names of the fields in which two specs differ."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            yield from _differences(getattr(a, field.name), getattr(b, field.name), field.name)
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _differences(x, y, name)
    elif a != b:
        yield (
            f"{name} {a}, not {b}"
            if isinstance(a, (int, float)) and isinstance(b, (int, float))
            else name
        )
