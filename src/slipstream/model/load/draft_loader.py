"""Loads draft heads (`model.draft_heads`) as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import OutOfMemoryError
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LoadedHead, build_head, head_tensors, target_ids
from slipstream.model.load.checkpoint import head_fills
from slipstream.model.load.loader import part_weights
from slipstream.model.load.pulled import Pulled
from slipstream.model.load.random_weights import TensorDraws, random_weights, seed_of
from slipstream.model.load.weights import filled_tensors, stored_tensors_of
from slipstream.spec.drafts.heads import HeadDescription, HeadSpec, LayeredSpec
from slipstream.spec.scheme import Scheme


def load_head(
    description: HeadDescription,
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    scheme: Scheme | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> LoadedHead:
    """Loads a draft head for the model of `decoder`, whose embeddings it shares unless it has its own.

    Linear layers are quantized by `scheme`, unless they are stored quantized. With load_format="dummy" the
    weights are random. OutOfMemoryError if the head does not fit on the device.
    """
    spec, device = description.spec, decoder.device
    products, ids = None, None
    with torch.inference_mode():
        try:
            if description.source is not None:
                found, scheme = part_weights(
                    description.source,
                    ops=decoder.ops,
                    device=device,
                    dtype=dtype,
                    load_format=load_format,
                    seed=seed,
                    scheme=scheme,
                )
                values, products = found.values, found.products
            elif load_format == "dummy":
                values, ids = _dummy(spec, dtype, device, seed)
            else:
                values, ids = _load(description, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the draft head does not fit on {device}: {error}", field="model"
            ) from error
        return LoadedHead.of(
            build_head(
                spec, values, decoder, max_model_len=max_model_len, scheme=scheme, products=products
            ),
            ids,
            decoder,
        )


def _load(
    description: HeadDescription, *, dtype: torch.dtype, device: torch.device
) -> tuple[Pulled[Tensor], Tensor | None]:
    """(parameters, model's token id of each of the head's tokens or None)."""
    spec, maps = description.spec, dict[str, Tensor]()
    stored = head_tensors(description, stored_tensors_of(description.path), maps)
    fills = head_fills(spec.shapes, description.names, stored)
    values = filled_tensors(spec.shapes, fills, lambda name: device, dtype)
    ids = (
        target_ids(spec, {name: x.numpy() for name, x in maps.items()})
        if isinstance(spec, LayeredSpec)
        else None
    )
    return values, None if ids is None else torch.from_numpy(ids).to(device)


def _dummy(
    spec: HeadSpec, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Pulled[Tensor], Tensor | None]:
    found = random_weights(
        spec.shapes, lambda name: TensorDraws(dtype, seed_of(name, seed), device), None
    )
    ids = (
        None
        if spec.draft_vocab_size == spec.vocab_size
        else torch.arange(spec.draft_vocab_size, device=device)
    )
    return found.values, ids
