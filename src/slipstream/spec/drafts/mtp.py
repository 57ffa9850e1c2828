"""Reads a model's own multi-token-prediction (MTP) layers as a draft head.

They are a separate part of the model's checkpoint (`PartDescription`), so the model's loader reads
them in whatever format they are stored. No torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import ModelDescription, PartDescription, read_json
from slipstream.spec.drafts.heads import HeadDescription, LayeredSpec
from slipstream.spec.families.mtp import MTPFormat
from slipstream.spec.families.names import canonical
from slipstream.spec.model import AttentionSpec, LayerSpec, RopeSpec
from slipstream.spec.parameters import Placement
from slipstream.spec.stored.quantization_config import StoredQuantization
from slipstream.spec.stored.safetensors import tensor_names

ROUNDED = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
"""Names of tensors next to a module's weight that show that the weight is quantized."""


def mtp_format(target: ModelDescription) -> MTPFormat | None:
    """The MTP format of the model's family; None if the family has no MTP layers."""
    family = target.family
    if target.format == "gguf":
        return None if family.gguf is None else family.gguf.mtp
    return family.mtp


def read_mtp(target: ModelDescription) -> HeadDescription:
    """The MTP layers of `target`, as a draft head.

    UnsupportedModelError: the family or the config has none. CheckpointError: the files lack them.
    """
    fmt, config = mtp_format(target), _config(target)
    if fmt is None:
        raise UnsupportedModelError(
            f"method 'mtp' is for checkpoints with layers that draft (DeepSeek-V3 and V3.2, GLM-4.5 and 5, Qwen3-Next, "
            f"Qwen 3.5, Nemotron-H, MiMo, ERNIE 4.5), and Slipstream knows of none in {target.name} ({target.format})",
            field="method",
        )
    count = fmt.count(config)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UnsupportedModelError(
            f"{target.path.name}: {fmt.counts[0]} = {count!r}: method 'mtp' is for a model with at least one",
            field=fmt.counts[0],
        )
    stored = _stored_names(target)
    head, names = _head(target, fmt, config, stored)
    part = _part(target, fmt, head, names, stored)
    found = {canonical(name, part.family.prefixes, names) for name in stored}
    if stored and not found & {f"{name}.weight" for name in _around(fmt, target, head).values()}:
        raise CheckpointError(
            f"{target.path} has no {next(iter(names))}: its config names layers that draft, but they were left out when "
            "it was written (transformers drops them); take the published checkpoint, or another method",
            field=fmt.counts[0],
        )
    return HeadDescription(method="mtp", path=target.path, spec=head, names=names, source=part)


def _config(target: ModelDescription) -> Mapping[str, Any]:
    """The config that has the keys of `MTPFormat`. For a GGUF file: its metadata, keys without the architecture's prefix."""
    if target.gguf is not None:
        prefix = f"{target.gguf.metadata.get('general.architecture')}."
        return {
            key.removeprefix(prefix): value
            for key, value in target.gguf.metadata.items()
            if key.startswith(prefix)
        }
    config = read_json(target.path / "config.json")
    nested = config.get(target.family.nested_config or "")
    return nested if isinstance(nested, Mapping) else config


def _stored_names(target: ModelDescription) -> frozenset[str]:
    if target.gguf is not None:
        return frozenset(target.gguf.tensors)
    return tensor_names(target.path)


def _around(fmt: MTPFormat, target: ModelDescription, head: LayeredSpec) -> dict[str, str]:
    """Checkpoint names of the module's parameters outside its layers, by our names."""
    last = sum(1 + (layer.mlp is not None) for layer in head.layers) - 1
    every = {
        ours: theirs.format(n=target.spec.num_layers, last=last)
        for ours, theirs in fmt.around.items()
    }
    return {ours: theirs for ours, theirs in every.items() if f"{ours}.weight" in head.shapes}


def _head(
    target: ModelDescription, fmt: MTPFormat, config: Mapping[str, Any], stored: frozenset[str]
) -> tuple[LayeredSpec, dict[str, Placement]]:
    """(the head's spec, placements of its tensors in the checkpoint)."""
    spec, family = target.spec, target.family
    assert spec.final_norm is not None
    own_head = fmt.around.get("head", "").format(n=spec.num_layers, last=0)
    head = LayeredSpec(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size,
        layers=tuple(map(_with_one_position, fmt.layers(spec, config))),
        norm=spec.final_norm,
        join="product",
        own_head=f"{own_head}.weight" in stored,
        norm_output=fmt.norm_output,
        state_first=fmt.state_first,
        scales_embedding=True,
    )
    names = {
        f"{theirs}.weight": Placement(
            f"{ours}.weight", transform=fmt.norms if ours.endswith("norm") else None
        )
        for ours, theirs in _around(fmt, target, head).items()
    }
    alone = dataclasses.replace(spec, layers=head.layers, media=None, stage=None)
    of = family.gguf if target.format == "gguf" and family.gguf is not None else family
    usual, own = (text.format(n=spec.num_layers) for text in fmt.renamed)
    for name, place in of.names(alone).items():
        if place.target.startswith("layers."):
            names[own + name.removeprefix(usual)] = place
    return head, names


def _with_one_position(layer: LayerSpec) -> LayerSpec:
    """The layer with one position per token. Image rows and columns are dropped, because a draft
    head counts tokens."""
    a = layer.attention
    if not isinstance(a, AttentionSpec) or not isinstance(a.position, RopeSpec):
        return layer
    position = dataclasses.replace(a.position, sections=None)
    return dataclasses.replace(layer, attention=dataclasses.replace(a, position=position))


def _part(
    target: ModelDescription,
    fmt: MTPFormat,
    head: LayeredSpec,
    names: dict[str, Placement],
    stored: frozenset[str],
) -> PartDescription:
    """The part of the checkpoint that holds the head. Other tensors are not read. A tensor of the
    head's modules that `names` lacks raises an error."""
    family, prefixes = target.family, (*target.family.prefixes, "model.")
    own = re.escape(fmt.renamed[1].format(n=target.spec.num_layers))
    copies = [re.escape(name.format(n=target.spec.num_layers)) for name in fmt.copies]
    ignored = (rf"(?!{own}).*", *copies)

    def names_of_part(spec: Any) -> dict[str, Placement]:
        return dict(names)

    gguf = family.gguf and dataclasses.replace(family.gguf, names=names_of_part, ignored=ignored)
    family = dataclasses.replace(
        family, names=names_of_part, prefixes=prefixes, ignored=ignored, gguf=gguf, mtp=None
    )
    spec = dataclasses.replace(
        target.spec, layers=head.layers, media=None, stage=None, tied_embeddings=False
    )
    fields = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    fields |= {
        "family": family,
        "spec": spec,
        "quantization": _quantization(target.quantization, prefixes, names, stored),
        "part": head.shapes,
    }
    return PartDescription(**fields)


def _quantization(
    whole: StoredQuantization | None,
    prefixes: tuple[str, ...],
    names: Mapping[str, Placement],
    stored: frozenset[str],
) -> StoredQuantization | None:
    """Quantization format of the head's weights. Quantizers often leave MTP layers unquantized
    whatever the config says, so the stored tensors decide."""
    if whole is None or not stored:
        return whole
    modules = {name.removesuffix(".weight") for name in names}
    rounded = set()
    for name in stored:
        module, _, kind = name.rpartition(".")
        if kind in ROUNDED and (own := canonical(f"{module}.weight", prefixes, names)):
            rounded.add(own.removesuffix(".weight"))
    if not rounded:
        return dataclasses.replace(whole, scheme=None, formats=None)
    if whole.formats is None:
        return whole
    ignore = (*whole.formats.ignore, *sorted(modules - rounded))
    return dataclasses.replace(
        whole, formats=dataclasses.replace(whole.formats, ignore=ignore, columns={})
    )
