"""Loads draft heads (`model.draft_heads`) without torch, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LoadedHead, build_head, head_tensors, target_ids
from slipstream.model.load.checkpoint import (
    filled_arrays,
    head_fills,
    random_arrays,
    safetensors_arrays,
)
from slipstream.model.load.host_model import part_arrays
from slipstream.model.load.pulled import Pulled
from slipstream.spec.drafts.heads import HeadDescription, HeadSpec, LayeredSpec
from slipstream.spec.scheme import Scheme

Array = npt.NDArray[Any]


def load_host_head(
    description: HeadDescription,
    decoder: Decoder,
    *,
    dtype: str,
    max_model_len: int,
    scheme: Scheme | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> LoadedHead:
    """Loads a head like `draft_loader.load_head`. Random weights are drawn by NumPy, so they differ
    from torch's with the same seed."""
    values: Any
    products, ids = None, None
    ops: Any = decoder.ops
    if description.source is not None:
        found, scheme = part_arrays(
            description.source,
            ops=ops,
            dtype=dtype,
            load_format=load_format,
            seed=seed,
            scheme=scheme,
        )
        values, products = found.values, found.products
    elif load_format == "dummy":
        values, ids = _dummy(description.spec, dtype, seed)
    else:
        values, ids = _load(description, dtype)
    head = build_head(
        description.spec,
        values,
        decoder,
        max_model_len=max_model_len,
        scheme=scheme,
        products=products,
    )
    return LoadedHead.of(head, ids, decoder)


def _load(
    description: HeadDescription, dtype: str
) -> tuple[Pulled[Array], npt.NDArray[np.int64] | None]:
    spec, maps = description.spec, dict[str, Array]()
    stored = head_tensors(description, safetensors_arrays(description.path), maps)
    values = filled_arrays(spec.shapes, head_fills(spec.shapes, description.names, stored), dtype)
    return values, target_ids(spec, maps) if isinstance(spec, LayeredSpec) else None


def _dummy(
    spec: HeadSpec, dtype: str, seed: int
) -> tuple[Pulled[Array], npt.NDArray[np.int64] | None]:
    ids = None if spec.draft_vocab_size == spec.vocab_size else np.arange(spec.draft_vocab_size)
    return random_arrays(spec.shapes, dtype, seed).values, ids
