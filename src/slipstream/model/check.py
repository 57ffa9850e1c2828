"""A loaded model against another implementation of the same checkpoint, layer by layer: where they part first is where to look.

The other one is a torch module that takes `input_ids` [1, T] and gives `.logits` [1, T, V], with its layers in a ModuleList
(transformers' models are so). Both run the same tokens in one piece, from an empty cache. The measure is
max |ours − theirs| / max |theirs|, over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.kernels.ops import AttentionMetadata, LayerKV, cache_tensors, select_ops
from slipstream.model.decoder import Decoder
from slipstream.model.loader import LoadedModel, load_model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`where`: embeddings, layer 0, layer 1, …, logits."""

    where: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    differences: tuple[Difference, ...]
    tolerance: float
    top1_agreement: float  # the share of tokens after which both find the same token likeliest

    @property
    def first_divergence(self) -> str | None:
        """Where the error first exceeds the tolerance (or is no number); what comes before is the same."""
        return next((d.where for d in self.differences if not d.error <= self.tolerance), None)

    @property
    def same(self) -> bool:
        return self.first_divergence is None


def check(
    path: Path, theirs: nn.Module, tokens: Sequence[int], *, device: str, kernels: str, tolerance: float
) -> CheckReport:
    """`compare` with the checkpoint at `path`, loaded here in float32."""
    place = torch.device(device)
    ours = load_model(path, ops=select_ops(place, kernels), device=place, dtype=torch.float32)
    return compare(ours, theirs, tokens, tolerance=tolerance)


@torch.inference_mode()
def compare(ours: LoadedModel, theirs: nn.Module, tokens: Sequence[int], *, tolerance: float) -> CheckReport:
    """What follows the embeddings, each layer and the head, side by side."""
    pairs = zip(our_states(ours.decoder, tokens), _their_states(theirs, tokens, ours.spec.num_layers), strict=True)
    differences, agreement = [], 0.0
    for (where, a), b in pairs:
        a, b = a.float().cpu(), b.float().cpu()
        if a.shape != b.shape:
            raise CheckpointError(f"{where}: ours are {list(a.shape)}, theirs {list(b.shape)}", field=where)
        differences.append(Difference(where=where, error=float((a - b).abs().max() / b.abs().max())))
        agreement = float((a.argmax(-1) == b.argmax(-1)).float().mean())  # the last are the logits
    return CheckReport(differences=tuple(differences), tolerance=tolerance, top1_agreement=agreement)


def our_states(decoder: Decoder, tokens: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """(where, the residual there [T, E]), the logits [T, V] last."""
    device, count = decoder.device, len(tokens)
    num_blocks = -(-count // BLOCK_SIZE)
    meta = AttentionMetadata.alone(0, count, block_size=BLOCK_SIZE, device=device)
    h = decoder.embedded(torch.tensor(tokens, dtype=torch.int32, device=device), meta)
    yield "embeddings", h.clone()
    residual: Tensor | None = None
    for i, layer in enumerate(decoder.layers):
        new = partial(torch.zeros, dtype=decoder.dtype, device=device)
        kv = LayerKV(*cache_tensors(layer.attention.spec, num_blocks + 1, BLOCK_SIZE, new))
        h, residual = layer(decoder.ops, h, residual, kv, meta)
        yield f"layer {i}", h.clone() if residual is None else h + residual
    yield "logits", decoder.logits(decoder.finished(h, residual))


def _their_states(model: nn.Module, tokens: Sequence[int], num_layers: int) -> list[Tensor]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise CheckpointError(f"the other model has no list of {num_layers} layers", field="num_hidden_layers")
    layers, found = lists[0], []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1).clone())

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        found.append(model(input_ids=ids, use_cache=False).logits[0])
    finally:
        for hook in hooks:
            hook.remove()
    return found
