"""Writes checkpoints, as `load/weights.py` reads them, into a folder that appears complete or not
at all.

A checkpoint has safetensors with the family's own names, and the config and tokenizer of the model
from which it was made. So programs that load the original also load it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.model.load.checkpoint import place
from slipstream.spec.description import ModelDescription
from slipstream.spec.families.base import Family
from slipstream.spec.model import AttentionSpec, ModelSpec, MoESpec
from slipstream.spec.parameters import (
    AxisHalves,
    Deinterleave,
    Flatten,
    Integers,
    MinusOne,
    OneRow,
    Placement,
    Regroup,
    Reshape,
    Scale,
    Stacked,
    Transpose,
    Turnable,
    Ungroup,
    Unpermute,
    Vector,
)

SHARD_BYTES = 5_000_000_000
KEPT_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    ),
    *(
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "source.spm",
        "target.spm",
        "sentencepiece.bpe.model",
        "vocab.txt",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
    ),
    *(
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "LICENSE",
    ),
    *(  # image preprocessing
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ),
)
"""Files that are copied from the source folder: tokenizer, recommended sampling, and pooling
settings."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a new folder next to `out` to write into. On exit it is renamed
    to `out`, or removed after an error.

    ConfigError if `out` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"out={str(out)!r} already exists; remove it or name another folder", field="out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        for file in (f for f in folder.rglob("*") if f.is_file()):
            file.chmod(0o644)  # safetensors creates files that only the owner can read
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stored_tensors(
    family: Family, spec: ModelSpec, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the checkpoint, tensor) for the given `parameters`, with transformers' names
    and the family's layout."""
    prefix = family.prefixes[-1]  # bare names come first, for writers that omit the prefix
    for name, placement in family.names(spec).items():
        if placement.target in parameters:
            above = "" if placement.target.startswith("head.") else prefix
            yield above + name, stored(parameters[placement.target], placement).contiguous()
            for end, beside in family.constants.items():
                if name.endswith(end):
                    for other, value in beside.items():
                        dtype = parameters[placement.target].dtype
                        yield (
                            above + name.removesuffix(end) + other,
                            torch.tensor(value, dtype=dtype),
                        )


def stored(parameter: Tensor, placement: Placement) -> Tensor:
    """The checkpoint tensor that fills `placement`, cut from a parameter: the inverse of loading."""
    part = place(parameter, placement)
    match placement.transform:
        case None | Turnable():
            return part
        case Integers():
            return part.long()
        case Transpose():
            return part.mT
        case OneRow():
            return part[None]
        case Vector():
            return part[0]
        case Ungroup(num_kv_heads=k, group=group):
            heads = part.unflatten(0, (k * (group + 2), -1))
            q, keys, values = heads.split((k * group, k, k))
            return torch.cat(
                (q.unflatten(0, (k, group)), keys[:, None], values[:, None]), dim=1
            ).flatten(0, 2)
        case AxisHalves(num_heads=n):
            halves: Tensor = part.unflatten(0, (n, 2, 2, -1)).transpose(1, 2)
            return halves.flatten(0, 3)
        case Regroup(num_groups=n, sizes=sizes, order=order):
            parts = part.split([n * sizes[i] for i in order])
            by_group = [rows.unflatten(0, (n, -1)) for rows in parts]
            whole = torch.cat([by_group[order.index(i)] for i in range(len(sizes))], 1)
            return whole.flatten(0, 1)
        case Reshape(shape=shape):
            return part.reshape(shape)
        case Stacked(transposed=turn):
            return (part.mT if turn else part).flatten(0, 1)
        case Scale(factors=factors):
            rows = torch.cat([torch.full((count,), x) for count, x in factors]).to(part.device)
            return (part.float() / rows.view(-1, *(1,) * (part.ndim - 1))).to(part.dtype)
        case Flatten(kernel=kernel):
            return part.reshape(part.shape[0], *kernel)
        case MinusOne():
            return part + 1
        case Unpermute(num_heads=n):
            turned: Tensor = part.unflatten(0, (n, 2, -1)).transpose(1, 2)
            return turned.flatten(0, 2)
        case Deinterleave(transposed=True):
            return torch.stack([half.mT for half in part.chunk(2, dim=-2)], dim=-1).flatten(-2)
        case Deinterleave():
            return torch.stack(part.chunk(2, dim=1), dim=2).flatten(1, 2)
        case other:
            raise UnsupportedModelError(
                f"{type(other).__name__} is a layout of GGUF files, which can't be written"
            )


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors, or shards and their index if there is more than `shard_bytes`. One
    shard is in memory at a time."""
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    size = total = 0

    def write() -> None:
        path = folder / f"part-{len(files)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        files.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > shard_bytes:
            write()
            size = 0
        # A view would keep its whole storage alive, and safetensors refuses two views of one storage.
        held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size, total = size + num_bytes, total + num_bytes
    write()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for i, (path, names) in enumerate(files):
        target = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / target)
        where.update(dict.fromkeys(names, target))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_surroundings(folder: Path, source: ModelDescription) -> None:
    """Copies the tokenizer and generation config of a Hugging Face folder.

    For a GGUF file the engine writes them (`Tokenizer.save`).
    """
    if source.format == "safetensors":
        for name in KEPT_FILES:
            if (source.path / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(source.path / name, folder / name)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_writable(source: ModelDescription, *, inside: bool = False) -> None:
    """Raises UnsupportedModelError or CheckpointError if a checkpoint of this kind of model can't be written.
    With `inside`, a language model nested in another model may be written back into its place."""
    if source.family.nested_config is not None and not inside:
        raise UnsupportedModelError(
            f"{source.name} holds a language model inside another one ({source.family.nested_config}); write the language "
            "model alone to a folder first",
            field="model_type",
        )
    if source.spec.shared:
        raise UnsupportedModelError(
            f"layers of {source.name} share weights, to which each adds its own; such models can't be compressed yet, but "
            "load with quantization=…",
            field="model_type",
        )
    if source.spec.kind != "a decoder":
        raise UnsupportedModelError(
            f"{source.name} is {source.spec.kind}; only decoders can be compressed yet",
            field="model_type",
        )
    for layer in source.spec.layers:
        a = layer.attention
        if (
            not (a is None or isinstance(a, AttentionSpec))
            or (isinstance(layer.mlp, MoESpec) and layer.mlp.expert.bias)
            or layer.scaled
            or (a is not None and (a.keys_as_values or a.kv_from is not None))
            or (a is not None and (a.value_dim is not None or a.index is not None))
            or layer.own_input is not None
        ):
            raise UnsupportedModelError(
                f"{source.name} has latent attention, an index of keys, experts with biases, or layers as Gemma 4's; such "
                "models can't be compressed yet",
                field="model_type",
            )
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.name} is quantised already; start from dense weights", field="model"
        )
