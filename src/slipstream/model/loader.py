"""From a path to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.errors import CheckpointError, OutOfMemoryError
from slipstream.kernels.ops import OpSet
from slipstream.model.decoder import Decoder
from slipstream.model.description import ModelDescription, read_spec
from slipstream.model.spec import ModelSpec
from slipstream.model.weights import dummy_parameters, load_parameters


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights_bytes` counts what the device holds: parameters as laid out for the ops, and position tables."""

    description: ModelDescription
    decoder: Decoder
    weights_bytes: int

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec


def load_model(
    path: Path,
    *,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> LoadedModel:
    """Load a checkpoint (or make random weights, `load_format="dummy"`) straight onto `device` in `dtype`."""
    description = read_spec(path)
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {path} is a {description.format} checkpoint", field="load_format"
        )
    with torch.inference_mode():
        try:
            if load_format == "dummy":
                values = dummy_parameters(description, dtype=dtype, device=device, seed=seed)
            else:
                values = load_parameters(description, dtype=dtype, device=device, progress=progress)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"the weights do not fit on {device}: {error}", field="model") from error
        context = max_model_len if max_model_len is not None else description.spec.max_position
        decoder = Decoder(description.spec, values, ops, max_model_len=context)
    return LoadedModel(description, decoder, _bytes(decoder))


def _bytes(decoder: Decoder) -> int:
    """Bytes of all distinct tensors that the decoder holds."""
    found: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta":  # a packed weight's stand-in
                key = id(value) if value.is_mkldnn else value.data_ptr()
                found[key] = value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    for value in vars(decoder).values():
        visit(value)
    return sum(found.values())
