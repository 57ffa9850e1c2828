"""Compares a loaded model with another implementation of the same checkpoint, layer by layer.

The first difference shows the faulty layer.

1. The other model is a torch module that takes `input_ids` [1, T] and has its layers in a ModuleList, like those of
   transformers. It returns `.logits` [1, T, V]; an encoder returns `.last_hidden_state`, a classifier the text's logits.
2. An encoder-decoder has `get_encoder` and `get_decoder`; both get the same tokens.
3. Both compute the whole text in one step, from an empty cache. The error is max |ours − theirs| / max |theirs|, over all
   tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.kernels.cache.tensors import cache_tensors, index_tensor
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.select import select_ops
from slipstream.kernels.states import layer_state
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.model.compile_step import compile_program
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Layer, run_layers
from slipstream.model.layers.residual import finished, whole
from slipstream.model.load.loaded import LoadedModel
from slipstream.model.load.loader import load_model
from slipstream.model.step_program import StepProgram
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.model import LayerSpec, ModelSpec, RecallSpec

if TYPE_CHECKING:
    from slipstream.model.layers.residual import Pending

BLOCK_SIZE = 16
ENDS = {
    "a decoder": "logits",
    "an encoder-decoder": "logits",
    "a decoder without a head": "states",
    "an encoder": "states",
    "a classifier": "scores",
}
"""Name of a model's last compared state, by `ModelSpec.kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The error at one point of the model.

    `where` is one of: embeddings, layer 0, layer 1, …, logits (an encoder's states, a classifier's
    scores), or "as one program". In an encoder-decoder "encoder: embeddings", "encoder: layer 0", …
    come first.
    """

    where: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    differences: tuple[Difference, ...]
    tolerance: float
    # fraction of tokens for which both models rank the same next token first; None without logits
    top1_agreement: float | None

    @property
    def first_divergence(self) -> str | None:
        """The first compared state (see `Difference`) whose error exceeds the tolerance or is
        NaN."""
        return next((d.where for d in self.differences if not d.error <= self.tolerance), None)

    @property
    def same(self) -> bool:
        return self.first_divergence is None


def check(
    path: Path,
    theirs: nn.Module,
    tokens: Sequence[int],
    *,
    device: str,
    kernels: str,
    tolerance: float,
) -> CheckReport:
    """Loads the checkpoint at `path` in float32 and compares it with `theirs`.

    Both get dense weights if their quantized activations can't be compared (`unrounded_inputs`).
    """
    place, description = torch.device(device), read_spec(path)
    ops = select_ops(place, kernels)
    if unrounded_inputs(description):
        ops.rounded = frozenset()  # so that every weight is expanded
        for module in theirs.modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                scheme.input_activations = None
    ours = load_model(description, ops=ops, device=place, dtype=torch.float32)
    return compare(ours, theirs, tokens, tolerance=tolerance)


def unrounded_inputs(description: ModelDescription) -> bool:
    """Whether a checkpoint quantizes activations in a way that differs between the two implementations.

    transformers divides int8's range into 255 steps, and uses static scales. The engine scales each
    token, to 254 steps.
    """
    stored = description.quantization
    groups = () if stored is None or stored.formats is None else stored.formats.groups
    return any(fmt.inputs == "int8" or fmt.static_inputs for _, fmt in groups)


def padding_tokens(theirs: nn.Module) -> set[int]:
    """Tokens that the other model treats as padding. Models like RoBERTa skip them when counting
    positions."""
    tables = [m for m in theirs.modules() if isinstance(m, nn.Embedding)]
    return {m.padding_idx for m in tables if m.padding_idx is not None}


@torch.inference_mode()
def compare(
    ours: LoadedModel, theirs: nn.Module, tokens: Sequence[int], *, tolerance: float
) -> CheckReport:
    """Compares the states after the embeddings and after each layer, and the head's output.

    If the engine computes a step as one program (`model.step_program`), the program's output is compared too.
    """
    found = _our_states(ours.decoder, tokens)
    expected = dict(_their_states(theirs, tokens, ours.spec))
    if isinstance(program := compile_program(ours.decoder), StepProgram):
        found["as one program"] = _whole_step(ours.decoder, program, tokens)
        expected["as one program"] = expected[ENDS[ours.spec.kind]]
    differences = []
    for where, state in found.items():
        a, b = state.float().cpu(), expected[where].float().cpu()
        if a.shape != b.shape:
            raise CheckpointError(
                f"{where}: ours are {list(a.shape)}, theirs {list(b.shape)}", field=where
            )
        differences.append(
            Difference(where=where, error=float((a - b).abs().max() / b.abs().max()))
        )
    agreement = None
    if "logits" in found:
        agreement = float(
            (found["logits"].cpu().argmax(-1) == expected["logits"].cpu().argmax(-1)).float().mean()
        )
    return CheckReport(
        differences=tuple(differences), tolerance=tolerance, top1_agreement=agreement
    )


def _metadata(decoder: Decoder, count: int) -> tuple[AttentionMetadata, AttentionMetadata]:
    """(metadata of one sequence, that of its encoder's text). The encoder's text has the same
    length; its blocks follow the sequence's."""
    meta = single_sequence(0, count, block_size=BLOCK_SIZE, platform=platform_of(decoder.device))
    num_blocks = meta.block_table.shape[1]
    read = dataclasses.replace(
        meta,
        block_table=meta.block_table + num_blocks,
        slot_mapping=meta.slot_mapping + num_blocks * BLOCK_SIZE,
        num_decodes=0,
    )
    meta = dataclasses.replace(meta, num_decodes=0 if decoder.spec.is_encoder else meta.num_decodes)
    return meta.with_groups(read) if decoder.encoder is not None else meta, read


def _caches(decoder: Decoder, meta: AttentionMetadata) -> list[LayerKV]:
    """A cache for each layer that needs its own. An encoder's layers share one, which they use in
    turn."""
    new = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
    num_blocks, layers = 2 * meta.block_table.shape[1] + 1, decoder.spec.layers
    if decoder.spec.is_encoder:
        return [LayerKV(*cache_tensors(layers[0].attention, num_blocks, BLOCK_SIZE, new))] * len(
            layers
        )
    zeros = partial(torch.zeros, device=decoder.device)
    made = [
        LayerKV(
            *cache_tensors(layer.attention, num_blocks, BLOCK_SIZE, new),
            state=layer_state(layer.recurrent, 2, decoder.dtype, torch.float32, zeros),
            index=index_tensor(layer.attention, num_blocks, BLOCK_SIZE, new),
        )
        for layer in layers
    ]
    return [made[i] for i in decoder.spec.owners]


def _our_states(decoder: Decoder, tokens: Sequence[int]) -> dict[str, Tensor]:
    """The residuals [T, E] by name, if layers have one. The last entry is the logits [T, V], an
    encoder's states [T, E] or a classifier's scores."""
    meta, read = _metadata(decoder, len(tokens))
    kv, ids = _caches(decoder, meta), torch.tensor(tokens, dtype=torch.int32, device=decoder.device)

    found: dict[str, Tensor] = {}
    streams = decoder.spec.layers[0].streams
    recalls = isinstance(streams, RecallSpec)
    width = decoder.spec.hidden_size if recalls else None  # the embeddings follow it

    def through(
        layers: Sequence[Layer], kv: Sequence[LayerKV], meta: AttentionMetadata, name: str
    ) -> Any:
        """Runs the layers, stores the state after each in `found`, and returns the residual before the final norm."""

        def before(i: int, pending: Pending, residual: Tensor | None) -> None:
            if streams is not None and not recalls:
                return  # several residuals, which transformers has in other forms
            where = f"{name}layer {i - 1}" if i else f"{name}embeddings"
            h = whole(decoder.ops, pending)
            found[where] = (h.clone() if residual is None else h + residual)[:, :width]

        h = (decoder.encoder_input if name else decoder.embedded)(ids, meta)
        return run_layers(decoder.ops, layers, h, kv, decoder.with_inputs(ids, h, meta), before)

    if (encoder := decoder.encoder) is not None:
        states = through(encoder.layers, kv[:1] * len(encoder.layers), read, "encoder: ")
        decoder.remember(finished(decoder.ops, encoder.final_norm, *states), kv, read)
    hidden = decoder.finished(*through(decoder.layers, kv, meta, ""))
    return {**found, ENDS[decoder.spec.kind]: _end(decoder, decoder, hidden, meta)}


def _end(
    decoder: Decoder, way: Decoder | StepProgram, hidden: Tensor, meta: AttentionMetadata
) -> Tensor:
    if decoder.classifier is not None:
        return decoder.classifier(decoder.ops, hidden, meta.query_start_loc)
    return way.logits(hidden) if decoder.spec.generates else hidden


def _whole_step(decoder: Decoder, program: StepProgram, tokens: Sequence[int]) -> Tensor:
    meta, read = _metadata(decoder, len(tokens))
    kv, ids = _caches(decoder, meta), torch.tensor(tokens, dtype=torch.int32, device=decoder.device)
    if decoder.encoder is not None:
        program.encode(ids, kv, read)
    return _end(decoder, program, program.forward(ids, kv, meta), meta)


def _their_states(
    model: Any, tokens: Sequence[int], spec: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yields the other model's states under the same names."""
    found: dict[str, Tensor] = {}
    hooks: list[Any] = []

    def watch(part: nn.Module, layers: Sequence[LayerSpec], name: str) -> None:
        # One of our layers may be two of theirs: a mixer and the MLP after it (Nemotron-H).
        ends = list(accumulate(1 + (layer.mlp is not None) for layer in layers))
        every = [m for m in part.modules() if isinstance(m, nn.ModuleList)]
        lists = [[*m] for m in every if len(m) == len(layers)]
        lists = lists or [[m[end - 1] for end in ends] for m in every if len(m) == ends[-1]]
        if not lists:
            raise CheckpointError(
                f"the other model has no list of {len(layers)} layers", field="num_hidden_layers"
            )
        first = next(m for m in every if lists[0][-1] is m[-1])[0]

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[f"{name}embeddings"] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        def after(where: str, _module: nn.Module, _args: Any, output: Any) -> None:
            found[where] = (
                (output[0] if isinstance(output, tuple) else output)
                .reshape(len(tokens), -1)
                .clone()
            )

        hooks.append(first.register_forward_pre_hook(before, with_kwargs=True))
        hooks.extend(
            x.register_forward_hook(partial(after, f"{name}layer {i}"))
            for i, x in enumerate(lists[0])
        )

    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    inputs = {"input_ids": ids}
    if spec.encoder is not None:
        inputs["decoder_input_ids"] = ids
        watch(model.get_encoder(), spec.encoder.layers, "encoder: ")
    has_more = spec.encoder is not None or spec.media is not None
    watch(model.get_decoder() if has_more else model, spec.layers, "")
    try:
        output = model(**inputs) if spec.is_encoder else model(**inputs, use_cache=False)
        found[ENDS[spec.kind]] = (
            output.last_hidden_state[0] if ENDS[spec.kind] == "states" else output.logits
        )
        if spec.kind in ("a decoder", "an encoder-decoder"):
            found["logits"] = found["logits"][0]
    finally:
        for hook in hooks:
            hook.remove()
    yield from found.items()
