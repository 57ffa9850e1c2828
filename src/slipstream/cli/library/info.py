"""`slipstream info MODEL`: shows a model's architecture, its size, and what fits on this machine,
without loading weights.

The memory part is an estimate: only a starting engine can measure activations and graphs."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING

from slipstream.cli.console import print_info, print_json, size
from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options, engine_args
from slipstream.config import EngineConfig
from slipstream.config.forms import (
    ContextParallel,
    HostAndGpu,
    HostExperts,
    ParallelConfig,
    TensorParallel,
)
from slipstream.costs.estimate import host_expert_bytes
from slipstream.costs.hardware import host_memory
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.hub import DEFAULT_MODEL
from slipstream.spec.drafts.mtp import read_mtp
from slipstream.spec.host_experts import mixtures
from slipstream.spec.model import (
    CompressedAttentionSpec,
    DenseSpec,
    GatedDeltaSpec,
    IndexSpec,
    LatentAttentionSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MoESpec,
    RecurrentSpec,
    ShortConvSpec,
)
from slipstream.spec.parallel import uneven_parts
from slipstream.spec.stored.gguf_types import CPU_BLOCK_BYTES, GPU_BLOCK_BYTES

if TYPE_CHECKING:
    from slipstream.compress.recipe import Recipe
    from slipstream.spec.description import ModelDescription
    from slipstream.spec.model import LayerSpec, ModelSpec
    from slipstream.spec.reason import Reason
    from slipstream.spec.stored.quantization_config import StoredQuantization
    from slipstream.worker.inspection import Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    add_output_options(parser)
    add_engine_options(parser, note="as in LLM(...), for the memory part", adapters=True)


def run(args: argparse.Namespace) -> int:
    from slipstream.compress.recipe import recipe_of
    from slipstream.engine.folder import settled
    from slipstream.worker.inspection import inspect_model

    settings = settled(engine_args(args))
    found, recipe, made_by = inspect_model(settings), None, ""
    try:
        if (recipe := recipe_of(found.path)) is not None:
            made_by = ", ".join(name for step in recipe.as_data() for name in step)
    except ConfigError as error:  # written by another version; an engine does not need the recipe
        made_by = str(error)
    if args.json:
        print_json(_document(settings.model, found, recipe))
        return 0
    print_info(settings.model, _rows(found, recipe, made_by))
    parts = found.bytes_by_part
    print()
    print_info(
        f"weights in {found.config.model.quantization or found.config.model.dtype}",
        [*((name, size(n)) for name, n in parts.items()), ("all", size(sum(parts.values())))],
    )
    print(
        "\nmemory on this machine (estimated: activations and graphs are measured when an engine starts)"
    )
    print("\n".join(found.ledger.describe()))
    return 0


def _document(model: str, found: Inspection, recipe: Recipe | None) -> dict[str, object]:
    from slipstream.cli.library.pull import files_bytes

    description, config, ledger, spec = found.description, found.config, found.ledger, found.spec
    how, offload = config.model.offload, found.offload
    read = offload and {**dataclasses.asdict(offload), "read_rate": found.offload_rate()}
    sequences = ledger.num_full_sequences
    return {
        "model": model,
        "path": found.path,
        "format": description.format,
        "file_bytes": files_bytes(found.path),
        "checkpoint_dtype": description.dtype,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "recipe": None if recipe is None else recipe.as_data(),
        "stored_types": {t.name: t.num_bytes for t in description.stored},
        "kv_cache_dtype": config.cache.dtype,
        "num_parameters": spec.num_parameters,
        "bytes_by_part": found.bytes_by_part,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "fast_ways": found.fast_paths,
        "parallel": _parallel(config.parallel),
        "host_experts": {
            "layers": how.mixtures if isinstance(how, HostExperts) else 0,
            "num_bytes": ledger.host_expert_bytes,
        },
        "offload": read,
        "needs_torch": found.needs_torch,
        "spec": spec,
        "memory_estimate": {
            **dataclasses.asdict(ledger),
            "num_states": ledger.num_states,
            "num_full_sequences": sequences,
        },
    }


def _parallel(how: ParallelConfig) -> dict[str, object]:
    first, stage = how.shard(0), how.stage
    return {
        "tensor": first.size if first.tensor else 1,
        "experts": first.size if first.experts else 1,
        "context": stage.size
        if isinstance(stage, ContextParallel)
        else getattr(stage, "context", 1),
        "stages": how.stages,
        "sequence": isinstance(stage, TensorParallel) and stage.sequence,
        "on_host": isinstance(how, HostAndGpu),
        "units": first.units,
        "num_ranks": how.num_ranks,
    }


def _rows(found: Inspection, recipe: Recipe | None, made_by: str) -> list[tuple[str, str]]:
    from slipstream.cli.library.pull import files_bytes

    description, config, spec = found.description, found.config, found.spec
    tied = " (output head tied to the embeddings)" if spec.tied_embeddings else ""
    kept = " (for the time of a step)" if spec.is_encoder else ""
    if any(spec.group_of_layer):  # several groups share the blocks
        kept = f" of {len(spec.cache_groups[0].layers)} layers"
    shared = ""
    if config.cache.context_ranks > 1:
        ranks = config.parallel.num_ranks // config.parallel.num_stages
        shared = f" over {ranks} ranks ({found.kv_bytes_per_token // ranks:,} B on each)"
    cache = (
        f"{found.kv_bytes_per_token:,} B a token{shared}, {size(found.ledger.block_bytes)} a block"
    )
    state = found.ledger.state_bytes // max(1, found.ledger.num_states)  # bytes on one rank
    layers = Counter(spec.all_layers).items()
    rows = [
        ("path", f"{found.path} ({description.format}, {size(files_bytes(found.path))})"),
        ("family", spec.family),
        ("parameters", f"{spec.num_parameters:,}"),
        ("context", f"{spec.max_position:,} tokens"),
        ("vocabulary", f"{spec.vocab_size:,}{tied}"),
        ("hidden size", f"{spec.hidden_size:,}"),
        *(("layers", f"{count} × {describe(layer)}") for layer, count in layers),
    ]
    if description.stored:
        rows.append(("stored as", stored_as(description)))
    q = description.quantization
    if q is not None and q.rounds:
        rows.append(("stored as", f"{q.scheme or 'several formats'} ({q.method})"))
    if (zeros := describe_zeros(q, recipe)) is not None:
        rows.append(("zeros", zeros))
    if made_by:
        rows.append(("made by", made_by))
    if not spec.generates:
        rows.append(("vectors", describe_vectors(description)))
    needs = found.needs_torch
    return [
        *rows,
        *(("split", text) for text in describe_split(config, spec)),
        *(("read", text) for text in describe_offload(found)),
        *(("experts", text) for text in describe_host_experts(config, description)),
        *(("steps", describe_path(name, reason)) for name, reason in found.fast_paths.items()),
        ("torch", "not needed" if needs is None else f"needed: {needs}"),
        ("KV cache", cache + kept),
        *((("states", f"{size(state)} a sequence"),) if state else ()),
        *(("drafts", text) for text in describe_drafts(description)),
    ]


def describe_drafts(description: ModelDescription) -> list[str]:
    """A line about the checkpoint's draft layers; empty if it has none."""
    try:
        spec = read_mtp(description).spec
    except (UnsupportedModelError, CheckpointError):
        return []
    count = sum(math.prod(shape) for shape in spec.shapes.values())
    return [f"by a layer of its own, {count:,} parameters: speculative_config, method 'mtp'"]


def describe_path(name: str, reason: Reason | None) -> str:
    what = {"program": "one C++ program", "one-token": "one kernel for a step of one token"}[name]
    return what if reason is None else f"op by op, not {what}: {reason}"


def describe_split(config: EngineConfig, spec: ModelSpec) -> list[str]:
    """Lines about how ranks divide the model; empty if there is one rank. Sizes shown after it are
    for one rank."""
    how, first, lines = config.parallel, config.parallel.shard(0), list[str]()
    if how.num_ranks == 1:
        return []
    if isinstance(how, HostAndGpu):
        text = f"the first {how.on_host} of {how.on_host + how.on_gpu} layers on the host's CPU, the others on the GPU (two "
        return [text + "stages of a pipeline)", "what follows is the GPU's"]
    if first.tensor:
        lines.append(
            f"each layer's heads and inner dimensions, and the vocabulary, over {first.size} ranks"
        )
    if first.experts:
        also = ", and requests with their keys and values" if first.deals_requests else ""
        lines.append(f"whole experts over {first.size} ranks{also}")
    if (context := config.cache.context_ranks) > 1 and first.tensor:
        lines.append(f"each request's keys and values by tokens over {context} ranks")
    if isinstance(how, ContextParallel):
        lines.append(
            f"each request's keys and values by tokens, and long steps' tokens, over {how.size} ranks; all weights on each"
        )
    if how.stages:
        lines.append(f"layers over {how.num_stages} stages: {', '.join(map(str, how.stages))}")
    lines += uneven_parts(spec, first)
    return [*lines, "what follows is one rank's" + (", the largest" if how.stages else "")]


def describe_offload(found: Inspection) -> list[str]:
    """Lines about the bytes read in each step, and the resulting upper bound of steps per second."""
    plan, device = found.offload, found.config.device.info
    if plan is None:
        return []
    rate = found.offload_rate()
    if device.is_cuda:
        free = host_memory()[1]
        room = f"from the host's memory, of which they take {size(plan.read_bytes)}; {size(free)} are free"
        if rate is None:
            return [plan.describe(), room, f"how fast that is is not known of {device.name}"]
        steps = rate / plan.read_bytes
        text = f"at most {steps:,.2f} steps a second (estimated), at {rate / 1e9:.0f} GB/s from host to GPU"
        return [plan.describe(), room, f"{text}; a step computes a token of each sequence"]
    if rate is None:
        return [
            plan.describe(),
            "how fast that is was not measured: the checkpoint has no large file here",
        ]
    steps = rate / plan.read_bytes
    where = f"{rate / 1e9:.2f} GB/s from where the checkpoint lies (measured now)"
    text = f"at most {steps:,.2f} steps a second (estimated), at {where}"
    return [
        plan.describe(),
        text,
        "more where the system keeps the file in memory; a step computes a token of each sequence",
    ]


def describe_host_experts(config: EngineConfig, description: ModelDescription) -> list[str]:
    """Lines about experts that the host computes, and the bytes of their weights read per token."""
    how, num_layers = config.model.offload, len(mixtures(description.spec))
    if not isinstance(how, HostExperts):
        return []
    held = host_expert_bytes(config, description)
    own = description.spec.layers[mixtures(description.spec)[0]].mlp
    assert isinstance(own, MoESpec)
    read = held * own.num_experts_per_token // own.num_experts
    return [
        f"of {how.mixtures} of {num_layers} mixtures in the host's memory, {size(held)}, computed there "
        "(the weights below are all)",
        f"a token reads {size(read)} of them: at most the host's bytes a second over that, in tokens a second of one sequence",
    ]


def stored_as(description: ModelDescription) -> str:
    """Types in a GGUF file: which of them a CPU and a GPU use without expanding them, and which are
    quantized again."""
    stored = [t.name for t in description.stored]
    types = ", ".join(f"{t.name} {size(t.num_bytes)}" for t in description.stored)
    for where, held in (("CPU", CPU_BLOCK_BYTES), ("GPU", GPU_BLOCK_BYTES)):
        if kept := ", ".join(name for name in stored if name in held):
            types += f"; on a {where} {kept} used as is"
        lost = ", ".join(name for name in stored if name in GPU_BLOCK_BYTES and name not in held)
        types += f"; on a {where} {lost} rounded to the engine's type" if lost else ""
    return types


def describe_zeros(stored: StoredQuantization | None, recipe: Recipe | None) -> str | None:
    """Fraction of zeros in a checkpoint's linear layers, and how they are stored; None if the
    checkpoint does not state zeros."""
    from slipstream.compress.steps import Sparsify

    made: Sparsify | None = None if recipe is None else recipe.one(Sparsify)
    said = None if stored is None else stored.zeros
    share, left_out = said if made is None else made.ratio, stored is not None and stored.sparse
    if not share and not left_out:
        return None
    of = f"{share:.0%} of the numbers in the sparsified products" if share else "in some products"
    if made is not None:
        of += f" ({made.method}{'' if made.pattern is None else f', {made.pattern}'})"
    return f"{of}, {'left out' if left_out else 'stored among the others'}"


def describe_vectors(description: ModelDescription) -> str:
    """Description of an encoder's output for a text."""
    classifier, how = description.spec.classifier, description.pooling
    if classifier is not None:
        of = {
            "cls": "the first token",
            "mean": "the tokens' mean",
            "last": "the last token",
            "tokens": "each token",
        }[classifier.pooling]
        return f"{classifier.num_labels} scores of {of}"
    if (late := how.late) is not None:
        size = how.token_size(description.spec.hidden_size)
        trained = " (trained with query expansion, which is left out)" * late.expands
        return f"{size:,} numbers for each token, length 1, compared by MaxSim{trained}"
    size, steps = how.vector_size(description.spec.hidden_size), len(how.dense)
    dense = f", {steps} Dense" if steps else ""
    more = ", weights of tokens" if how.lexical is not None else ""
    return f"{size:,} numbers, {how.kind} of the tokens{dense}" + (
        f", length 1{more}" if how.normalize else more
    )


def describe_recurrent(r: RecurrentSpec) -> str:
    """Short description of a recurrent part."""
    match r:
        case GatedDeltaSpec():
            of = "channel" if r.decay == "channel" else "head"
            of += "" if r.bound is None else f", at least exp({r.bound:g})"
            return f"gated delta rule, {r.num_heads} heads of {r.key_dim} × {r.value_dim}, decay by {of}"
        case LightningSpec():
            return f"lightning attention, {r.num_heads} heads of {r.key_dim} × {r.value_dim}"
        case Mamba2Spec():
            return f"Mamba-2, {r.num_heads} heads of {r.key_dim} × {r.value_dim}"
        case MambaSpec():
            return f"Mamba-1, {r.width:,} × {r.key_dim}"
        case ShortConvSpec():
            return f"convolution over {r.conv_width} tokens"


def describe(layer: LayerSpec) -> str:
    """Short description of a layer."""
    a, m = layer.attention, layer.mlp
    parts = [] if layer.recurrent is None else [describe_recurrent(layer.recurrent)]
    if isinstance(a, CompressedAttentionSpec):
        parts += [f"{a.num_heads} heads over one key of {a.head_dim}, window {a.local:,}"]
        if a.rate:
            best = "" if a.index_spec is None else f", the {a.index_spec.top_k:,} best"
            parts += [f"a compressed key for {a.rate} tokens{best}, {a.cached_size} cached"]
    elif isinstance(a, LatentAttentionSpec):
        parts += [f"latent attention, {a.num_heads} heads, {a.cached_size} cached"]
        if isinstance(a.index, IndexSpec):
            parts += [f"the {a.index.top_k:,} best keys of an index with {a.index.num_heads} heads"]
        elif a.index is not None:
            parts += ["the keys of the layer before"]
    elif a is not None:
        kind = "MHA" if a.num_kv_heads == a.num_heads else "MQA" if a.num_kv_heads == 1 else "GQA"
        parts += [f"{kind} {a.num_heads} heads, {a.num_kv_heads} kv, {a.head_dim} wide"]
        if a.kv_from is not None:
            parts.append(f"keys and values of layer {a.kv_from}")
        if a.index is not None:
            parts.append(f"the {a.index.top_k:,} best blocks of {a.index.block:,} keys")
        if not a.causal:
            parts.append("both directions")
        if layer.cross is not None:
            parts.append("cross attention")
        if a.window is not None:
            parts.append(f"window {a.window:,}")
    if a is not None and a.position is not None:
        parts.append(type(a.position).__name__.removesuffix("Spec"))
    if m is None:
        return ", ".join(parts)
    dense = m if isinstance(m, DenseSpec) else m.expert
    if isinstance(m, MoESpec):
        parts.append(
            f"{m.num_experts_per_token} of {m.num_experts} experts"
            + (" and a shared one" if m.shared else "")
        )
    parts.append(f"{'gated ' if dense.gated else ''}{dense.activation} {dense.intermediate_size:,}")
    return ", ".join(parts)
