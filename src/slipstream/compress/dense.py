"""A dense model in memory, for pruning and distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.model.load.weights import load_parameters
from slipstream.model.save import (
    check_writable,
    copy_surroundings,
    new_folder,
    stored_tensors,
    write_config,
    write_tensors,
)
from slipstream.spec.description import ModelDescription, huggingface_config, read_spec
from slipstream.spec.families.base import Family
from slipstream.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """A dense model: `parameters` by the names of `spec.parameters`, and `config`, the config.json
    from which `spec` is read. Family and tokenizer are those of `source`."""

    source: ModelDescription
    config: Mapping[str, Any]
    spec: ModelSpec
    parameters: dict[str, Tensor]

    @property
    def family(self) -> Family:
        return self.source.family

    def write(self, out: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a checkpoint folder, in `dtype` or the parameters' own dtypes. After an error no
        folder is left."""
        with new_folder(out) as folder:
            self.write_into(folder, dtype=dtype)

    def write_into(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint's files into an existing folder."""
        kind = dtype or self.parameters["embed.weight"].dtype
        tensors = stored_tensors(self.family, self.spec, self.parameters)
        write_tensors(folder, ((name, tensor.to(kind)) for name, tensor in tensors))
        # the older name of the key "dtype"
        config = {key: value for key, value in self.config.items() if key != "torch_dtype"}
        write_config(folder, {**config, "dtype": str(kind).removeprefix("torch.")})
        write_tokenizer(folder, self.source)


def load_dense(path: Path, *, dtype: torch.dtype, device: torch.device) -> DenseModel:
    """Load the model at `path`. A GGUF file is dequantized. CheckpointError for other quantized checkpoints, and
    UnsupportedModelError for models that can't be written (`check_writable`)."""
    description = read_spec(path)
    check_writable(description)
    values = load_parameters(description, dtype=dtype, device=device)
    return DenseModel(
        source=description,
        config=huggingface_config(description),
        spec=description.spec,
        parameters=values,
    )


def write_tokenizer(folder: Path, source: ModelDescription) -> None:
    """Copy tokenizer, chat template and generation config, or write them from a GGUF file."""
    copy_surroundings(folder, source)
    if source.format == "gguf":
        from slipstream.engine.text.tokenizer import Tokenizer

        Tokenizer.from_pretrained(source.path).save(folder)
