"""Reads the Dense steps of sentence-transformers, as arrays. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.model.load.checkpoint import safetensors_arrays
from slipstream.model.stored.gguf_quants import dequantize_tensor
from slipstream.spec.pooling import DenseStep
from slipstream.spec.stored.gguf import GGUFFile


def read_dense(step: DenseStep, load_format: str) -> tuple[Any, Any | None]:
    """Reads a linear layer of an embedding model: (weight, float32 [outputs, inputs], bias or
    None). With `load_format="dummy"` both are random.

    CheckpointError names a tensor that is missing or has the wrong shape.
    """
    stem = f"{step.name}." if step.name else ""
    wanted = {f"{stem}weight": (step.num_outputs, step.num_inputs)}
    if step.bias:
        wanted[f"{stem}bias"] = (step.num_outputs,)  # type: ignore[assignment]
    if load_format == "dummy":
        draws = np.random.default_rng(0)
        found = {name: draws.normal(0.0, 0.02, shape) for name, shape in wanted.items()}
    elif step.folder.suffix == ".gguf":
        file = GGUFFile(step.folder)
        found = {name: dequantize_tensor(file, name, "float32") for name in wanted}
    else:
        stored = {name: (shape, read) for name, shape, read in safetensors_arrays(step.folder)}
        for name, shape in wanted.items():
            if name not in stored or stored[name][0] != shape:
                has = f"has {name} {list(stored[name][0])}" if name in stored else f"lacks {name}"
                raise CheckpointError(
                    f"{step.folder.name} {has}, and its config asks for {list(shape)} in safetensors",
                    field=name,
                )
        found = {name: stored[name][1]() for name in wanted}
    weight, *bias = (np.ascontiguousarray(found[name], np.float32) for name in wanted)
    return weight, bias[0] if bias else None
