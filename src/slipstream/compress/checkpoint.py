"""The format of a quantized checkpoint, and the work folder in which it is written.

The result is compressed-tensors in safetensors. A quantized module has the tensors weight_packed
(or weight), weight_scale, weight_shape, weight_zero_point and input_scale; config.json gives the
format of each module. Everything else is copied from the source. Each finished layer is written to
a file in a *work folder* next to the result, so that an interrupted run can continue. The result
appears at the end, complete."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.base.files import digest, write_whole
from slipstream.compress.dense import write_tokenizer
from slipstream.compress.quantize.rounding import QuantGrid, Rounded
from slipstream.compress.recipe import RECIPE_NAME
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kernels.weights.quantize import e2m1_codes
from slipstream.model.load.checkpoint import place
from slipstream.model.load.weights import transform
from slipstream.model.save import new_folder, stored, write_config, write_tensors
from slipstream.model.stored.packing import pack_words, tensor_numbers
from slipstream.model.stored.parts import expanded, unpack_words
from slipstream.spec.description import ModelDescription, huggingface_config
from slipstream.spec.families.base import ROTARY_BUFFERS
from slipstream.spec.families.names import canonical
from slipstream.spec.parameters import Placement, Scale, Transpose, parameters
from slipstream.spec.scheme import RowFormat, WeightFormat
from slipstream.spec.stored.native_formats import is_product
from slipstream.spec.stored.quantization_config import StoredFormats
from slipstream.spec.stored.safetensors import weight_files


class Names:
    """The checkpoint's names for a model's parameters, with the prefix that transformers writes.
    The language model inside a multimodal one keeps the names of its own checkpoint."""

    def __init__(self, description: ModelDescription) -> None:
        family = description.family
        prefix = family.prefixes[-1]  # the first prefixes are for files whose writers leave it out
        self.tied = description.spec.tied_embeddings
        self.places: dict[str, Placement] = {
            ("" if at.target.startswith("head.") else prefix) + name: at
            for name, at in family.names(description.spec).items()
        }
        if family.nested_config is not None and description.format == "safetensors":
            table = family.names(description.spec)
            own = {canonical(n, family.prefixes, table): n for n, _ in stored_names(description)}
            base = next(n for n, at in table.items() if at.target == "embed.weight")
            ours, theirs = apart(base, own.get(base, base))
            self.places = {
                own.get(n) or (theirs + n.removeprefix(ours) if n.startswith(ours) else n): at
                for n, at in table.items()
            }
        self.shapes = parameters(description.spec)

    def of(self, target: str) -> list[str]:
        """Names of the tensors that make up a parameter."""
        return [name for name, at in self.places.items() if at.target == target]

    def check(self, formats: Mapping[str, WeightFormat]) -> None:
        """Raise UnsupportedModelError if compressed-tensors has no format for one of these weights
        in its stored layout."""
        for name, at in self.places.items():
            if (fmt := formats.get(at.target)) is None:
                continue
            if isinstance(at.transform, Scale) and (fmt.in_pairs or fmt.whole):
                raise UnsupportedModelError(
                    f"{name} is multiplied by numbers of the config, which {fmt.kind}{fmt.bits} with these scales can't "
                    "hold; take another format",
                    field=name,
                )
            if isinstance(at.transform, Transpose) or at.copies is not None:
                raise UnsupportedModelError(
                    f"{name} is not the [out, in] matrix of one module, and compressed-tensors has no other format; this kind "
                    "of model can't be quantised",
                    field=name,
                )

    def tensors(
        self,
        values: Mapping[str, Tensor],
        rounded: Mapping[str, Rounded],
        input_scales: Mapping[str, float],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint tensors of these parameters: `rounded` ones in their quantized formats, others in `dtype`."""
        for name, at in self.places.items():
            if at.target in rounded:
                module = name.removesuffix(".weight")
                yield from _module_tensors(module, at, rounded[at.target])
                if at.target in input_scales:
                    yield (
                        f"{module}.input_scale",
                        torch.tensor([input_scales[at.target]], dtype=dtype),
                    )
            elif at.target in values:
                yield name, stored(values[at.target].to(dtype), at).contiguous()

    def read(
        self, file: Path, formats: StoredFormats, *, device: torch.device
    ) -> dict[str, Tensor]:
        """Read parameters, in float32, from a file of the tensors that `tensors` returned."""
        from safetensors import safe_open

        with safe_open(file, framework="pt", device="cpu") as opened:

            def reader(name: str) -> Callable[[], Tensor]:
                return lambda: opened.get_tensor(name)

            given = [(n, tuple(opened.get_slice(n).get_shape()), reader(n)) for n in opened.keys()]  # noqa: SIM118

            def wanted(module: str) -> bool:
                return f"{module}.weight" in self.places and is_product(
                    self.places[f"{module}.weight"].target
                )

            found: dict[str, Tensor] = {}
            for name, _, read in expanded(given, formats, wanted, tensor_numbers):
                at = self.places.get(name)
                if at is None:
                    continue  # scales of inputs and of the KV cache
                if at.target not in found:
                    found[at.target] = torch.empty(self.shapes[at.target], device=device)
                place(found[at.target], at).copy_(
                    transform(read().to(device).float(), at.transform)
                )
        return found

    def read_grids(
        self, file: Path, formats: Mapping[str, WeightFormat], *, device: torch.device
    ) -> dict[str, QuantGrid]:
        """Read the grids of the quantized weights from a file of the tensors that `tensors`
        returned; `formats` are by parameter name."""
        from safetensors import safe_open

        found: dict[str, QuantGrid] = {}
        with safe_open(file, framework="pt", device="cpu") as opened:
            present = set(opened.keys())
            for name, at in self.places.items():
                module, fmt = name.removesuffix(".weight"), formats.get(at.target)
                if fmt is None or f"{module}.weight_scale" not in present:
                    continue
                scales = opened.get_tensor(f"{module}.weight_scale")
                if at.target not in found:
                    shape = (self.shapes[at.target][0], fmt.groups(self.shapes[at.target][1]))
                    zeros = (
                        None
                        if fmt.symmetric
                        else torch.empty(shape, dtype=torch.int8, device=device)
                    )
                    found[at.target] = QuantGrid(
                        fmt, torch.empty(shape, dtype=scales.dtype, device=device), zeros
                    )
                grid = found[at.target]
                place(grid.scales, at).copy_(transform(scales, at.transform))
                if grid.zeros is not None:
                    words = opened.get_tensor(f"{module}.weight_zero_point").T.numpy()
                    zeros = torch.from_numpy(unpack_words(words, fmt.bits, len(scales))).T
                    turned = None if isinstance(at.transform, Scale) else at.transform
                    place(grid.zeros, at).copy_(transform(zeros, turned))
        return found


def _module_tensors(module: str, at: Placement, rounded: Rounded) -> Iterator[tuple[str, Tensor]]:
    fmt, grid, unscaled = rounded.fmt, rounded.grid, at
    if isinstance(at.transform, Scale):  # the scales take the factors, in full precision
        unscaled = dataclasses.replace(at, transform=None)
        scales = stored(grid.scales.float(), at)
    else:
        scales = grid.scales if fmt.whole else stored(grid.scales, at)
    codes = stored(rounded.codes.view(torch.int8), unscaled)
    if fmt.in_pairs:
        yield from _float4_tensors(module, fmt, codes.view(rounded.codes.dtype), scales, grid, at)
        return
    if fmt.packed:
        yield f"{module}.weight_packed", pack_words(codes, fmt.bits)
        yield f"{module}.weight_shape", torch.tensor(codes.shape)
    else:
        yield f"{module}.weight", codes.contiguous().view(rounded.codes.dtype)
    yield f"{module}.weight_scale", scales.reshape(-1).clone() if fmt.whole else scales.contiguous()
    if grid.zeros is not None:
        yield (
            f"{module}.weight_zero_point",
            pack_words(stored(grid.zeros, unscaled).T.contiguous(), fmt.bits).T.contiguous(),
        )


def _float4_tensors(
    module: str, fmt: WeightFormat, numbers: Tensor, scales: Tensor, grid: QuantGrid, at: Placement
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of an NVFP4 or MXFP4 weight in the layout of compressed-tensors."""
    codes = e2m1_codes(numbers.float()).to(torch.uint8)
    yield f"{module}.weight_packed", codes[:, ::2] | codes[:, 1::2] << 4
    if grid.factors is None:
        yield f"{module}.weight_scale", (scales.log2().round() + 127).to(torch.uint8)
        return
    factors = stored(grid.factors[:, None], at)
    yield f"{module}.weight_scale", (scales * factors).to(torch.float8_e4m3fn)
    yield f"{module}.{fmt.factor}", factors[0].clone()


# --- The config -------------------------------------------------------------------------------------------------------


def apart(a: str, b: str) -> tuple[str, str]:
    """Remove from two names the longest dotted suffix that they share."""
    x, y = a.split("."), b.split(".")
    while x and y and x[-1] == y[-1]:
        x.pop(), y.pop()
    return "".join(f"{part}." for part in x), "".join(f"{part}." for part in y)


def stored_names(source: ModelDescription) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields the name of each tensor in a checkpoint folder, and the function that reads it."""
    from safetensors import safe_open

    for file in weight_files(source.path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no dict)
                yield name, partial(opened.get_tensor, name)


def untouched(source: ModelDescription) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields the tensors of a checkpoint outside its decoder, such as draft layers or an image encoder."""
    if source.format != "safetensors":
        return
    names, prefixes = source.family.names(source.spec), source.family.prefixes
    skipped = (*ROTARY_BUFFERS, rf"(.*\.)?{re.escape(source.head_name)}")
    for name, read in stored_names(source):
        is_skipped = any(re.fullmatch(pattern, name) for pattern in skipped)
        if not is_skipped and canonical(name, prefixes, names) is None:
            yield name, read


def stored_formats(
    names: Names, formats: Mapping[str, WeightFormat], untouched: Iterable[str] = ()
) -> StoredFormats:
    """Formats by module name, as in the config; `formats` are by parameter name. The most frequent format is
    that of "Linear", modules with other formats are named. Tensors that are `untouched` have none."""
    modules: dict[WeightFormat, list[str]] = {}
    ignored = ["lm_head"] if names.tied else []
    ignored += [name.removesuffix(".weight") for name in untouched if name.endswith(".weight")]
    for name, at in names.places.items():
        if len(names.shapes[at.target]) != 2 or at.target in ("embed.weight", "positions.weight"):
            continue
        module = name.removesuffix(".weight")
        if at.target in formats:
            modules.setdefault(formats[at.target], []).append(module)
        else:
            ignored.append(module)
    most = max(modules, key=lambda fmt: len(modules[fmt]))
    groups = [
        (("Linear",), most),
        *((tuple(m), fmt) for fmt, m in modules.items() if fmt is not most),
    ]
    return StoredFormats(tuple(groups), tuple(ignored))


def quantization_config(
    formats: StoredFormats, kv_cache: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Build the quantization_config of config.json. Without formats, only the KV cache is quantized."""
    kinds = [_format_name(fmt) for _, fmt in formats.groups] or ["dense"]
    return {
        "quant_method": "compressed-tensors",
        "format": kinds[0] if len(set(kinds)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": list(targets),
                "format": _format_name(fmt),
                "weights": _weights(fmt),
                "input_activations": _inputs(fmt),
                "output_activations": None,
            }
            for i, (targets, fmt) in enumerate(formats.groups)
        },
        "ignore": list(formats.ignore),
        "kv_cache_scheme": kv_cache,
    }


def cache_config(form: RowFormat, per: str) -> dict[str, Any]:
    kind = "float" if form == "fp8" else "int"
    strategy = "tensor" if per == "tensor" else "attn_head"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}


def _format_name(fmt: WeightFormat) -> str:
    if fmt.in_pairs:
        return f"{fmt.product}-pack-quantized"
    return (
        "float-quantized"
        if fmt.kind == "float"
        else "pack-quantized"
        if fmt.packed
        else "int-quantized"
    )


def _weights(fmt: WeightFormat) -> dict[str, Any]:
    strategy = "tensor" if fmt.whole else "channel" if fmt.group_size is None else "group"
    strategy = "tensor_group" if fmt.factor else strategy
    found = {
        "num_bits": fmt.bits,
        "type": fmt.kind,
        "symmetric": fmt.symmetric,
        "strategy": strategy,
        "group_size": fmt.group_size,
        "dynamic": False,
    }
    kinds = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
    return found | ({"scale_dtype": kinds[fmt.scale_type]} if fmt.scale_type in kinds else {})


def _inputs(fmt: WeightFormat) -> dict[str, Any] | None:
    if fmt.inputs is None:
        return None
    strategy = "tensor" if fmt.static_inputs else "token"
    return {
        "num_bits": 8,
        "type": fmt.kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": not fmt.static_inputs,
    }


# --- The folder -------------------------------------------------------------------------------------------------------


def work_folder(out: Path, kind: str = "partial") -> Path:
    """The folder next to `out` that stores an interrupted run of this kind."""
    return out.parent / f".{out.name}.{kind}"


class Attempts:
    """KL of attempts to compress to `out` that exceeded the limit, stored in a file next to it. An
    interrupted command with --back-off does not repeat them. An attempt is identified by everything
    that its KL depends on."""

    def __init__(self, out: Path, *, restart: bool) -> None:
        self.out, self.path = out, out.parent / f".{out.name}.tried.json"
        if restart:
            self.clear()
        self.costs: dict[str, float] = (
            json.loads(self.path.read_text()) if self.path.is_file() else {}
        )

    def cost(self, attempt: Mapping[str, Any]) -> float | None:
        """KL of an attempt; None if it was not made yet."""
        return self.costs.get(digest(attempt))

    def add(self, attempt: Mapping[str, Any], cost: float) -> None:
        """Record an attempt. Its layers are deleted first, so that after an interruption the next
        attempt does not reuse them."""
        shutil.rmtree(work_folder(self.out), ignore_errors=True)
        self.costs[digest(attempt)] = cost
        write_whole(self.path, json.dumps(self.costs))

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


def claim(work: Path, out: Path, plan: Mapping[str, Any], *, restart: bool) -> None:
    """Create the folder `work`, or reuse the one of an interrupted run with the same `plan`.
    ConfigError if its plan differs, or if `out` exists."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={str(out)!r} exists; remove it or name another folder", field="out")
    text = json.dumps(plan, sort_keys=True)
    if restart:
        shutil.rmtree(work, ignore_errors=True)
    kept = work / "plan.json"
    if kept.is_file() and kept.read_text() != text:
        raise ConfigError(
            f"{work} holds the work of an interrupted run with another recipe, model or text; give --restart to delete it, or "
            "another --out",
            field="out",
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
        write_whole(kept, text)
    except OSError as error:
        raise ConfigError(
            f"out={str(out)!r}: {out.parent} can't be written to ({error.strerror})", field="out"
        ) from error


class WorkFolder:
    """Folder next to the result that stores finished layers. `plan` is everything that their values
    depend on; ConfigError if the folder has another plan."""

    def __init__(self, out: Path, plan: Mapping[str, Any], *, restart: bool) -> None:
        self.out, self.path = out, work_folder(out)
        claim(self.path, out, plan, restart=restart)

    def part(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def note(self, name: str) -> dict[str, Any] | None:
        """Read the note of a part. None if the part is unfinished, or one of its files is damaged:
        then it is computed again."""
        from safetensors import SafetensorError, safe_open

        file = self.path / f"{name}.json"
        if not file.is_file():
            return None
        try:
            # opening checks that the file's length is that of its tensors
            with safe_open(self.part(name), framework="np"):
                found: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError, SafetensorError):
            return None
        return found

    def finish(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], note: Mapping[str, Any]
    ) -> None:
        """Write a part's tensors, then its note. The part counts as finished once its note is written."""
        from safetensors.torch import save_file

        held = {
            key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for key, value in tensors
        }
        temporary = self.path / f"{name}.unfinished"
        save_file(held, temporary, metadata={"format": "pt"})
        os.replace(temporary, self.part(name))
        write_whole(self.path / f"{name}.json", json.dumps(note))

    def publish(
        self,
        source: ModelDescription,
        parts: Sequence[str],
        config: Mapping[str, Any],
        recipe: Any,
        finish: Callable[[Path], None],
        untouched: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """Write the result from the finished parts and `untouched`, with `config` merged over the
        source's. Calls `finish` with it, then removes this folder."""
        with new_folder(self.out) as folder:
            write_tensors(folder, chain(self.tensors(parts), untouched))
            write_config(folder, {**huggingface_config(source), **config})
            write_tokenizer(folder, source)
            (folder / RECIPE_NAME).write_text(json.dumps(recipe, indent=2) + "\n")
            finish(folder)
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def tensors(self, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        for part in parts:
            with safe_open(self.part(part), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    yield name, opened.get_tensor(name)


def fingerprint(source: ModelDescription) -> str:
    """Hash of the names, sizes and modification times of a checkpoint's files."""
    files = (
        [source.path]
        if source.path.is_file()
        else [*weight_files(source.path), source.path / "config.json"]
    )
    return digest([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
