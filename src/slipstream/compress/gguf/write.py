"""Writes a model as a GGUF file, layer by layer.

1. A layer is calibrated on the outputs of the quantized layers before it.
2. Finished layers are stored in the work folder as blocks. An interrupted run continues after the
   last one.
3. The last part is the embeddings and the output head, which is calibrated on the final hidden states.
4. With a `qat` step, all quantized tensors are then trained together (`train`).
5. The file is read back before it becomes the result: it must describe the same model.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_ends, load_layer
from slipstream.compress.checkpoint import WorkFolder
from slipstream.compress.gguf.blocks import WRITABLE
from slipstream.compress.gguf.budget import choose_types, measure_types
from slipstream.compress.gguf.metadata import add_metadata, frequencies, same_model
from slipstream.compress.gguf.mix import GGUF, SHORT, PlannedBlocks
from slipstream.compress.gguf.source import gguf_family_of, places, put, read_tensor, unpacked
from slipstream.compress.gguf.tensors import About, inside, outside, round_tensor
from slipstream.compress.gguf.train import train_blocks
from slipstream.compress.recipe import QAT, RECIPE_NAME
from slipstream.errors import ConfigError, SlipstreamError, UnsupportedModelError, install_command
from slipstream.model.load.weights import load_parameters
from slipstream.model.save import new_folder
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.parameters import Placement

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Array = npt.NDArray[Any]

PRODUCTS_NAME = "slipstream-products.json"
"""File next to the model with the type of each tensor, its rounding method, and its error (before training)."""

TRAINING_NAME = "slipstream-training.json"
"""File next to a trained model with the training's settings, its time, and the loss of each step."""


@dataclass(frozen=True, slots=True)
class GGUFRun:
    """Data shared by the stages of writing a GGUF file."""

    source: ModelDescription
    step: GGUF
    planned: Sequence[PlannedBlocks]
    work: WorkFolder
    device: torch.device
    dtype: torch.dtype
    qat: QAT | None = None
    training: Sequence[Sequence[int]] = ()  # windows

    @property
    def num_layers(self) -> int:
        return self.source.spec.num_layers

    @property
    def damping(self) -> float | None:
        return self.step.damping if self.step.rounding == "gptq" else None

    def tensors_of(self, above: str) -> list[tuple[PlannedBlocks, Placement]]:
        """Tensors of a layer ("layers.3."), or with "" those outside layers."""
        table = places(self.source)
        pairs = [(tensor, table[tensor.name]) for tensor in self.planned]
        return [
            (tensor, at)
            for tensor, at in pairs
            if (at.target.startswith(above) if above else not at.target.startswith("layers."))
        ]


def write_gguf(
    run: GGUFRun,
    recipe: Any,
    windows: Sequence[Sequence[int]],
    *,
    progress: Progress,
    finish: Callable[[Path], None],
) -> tuple[PlannedBlocks, ...]:
    """Write the folder with the file, and return its tensors. `finish` gets the folder before it becomes the result, as in
    `compress`."""
    require_gguf()
    if run.source.gguf is None:  # raise before the work if config or tokenizer can't be expressed
        with TemporaryDirectory(dir=run.work.path) as trial:
            _write_file(run, Path(trial) / "trial.gguf", None)
    total = run.num_layers + 1 + (0 if run.qat is None else run.qat.num_steps)
    if run.step.bits is not None:
        done = run.num_layers + 1
        total += done
        run = replace(run, planned=_allocated(run, windows, lambda n: progress(n, total)))
    else:
        done = 0
    text = None
    if windows and run.step.needs_text(run.planned):
        text = Stream(run.source, windows, device=run.device, dtype=run.dtype)
    for index in range(run.num_layers):
        part = f"layer-{index:05d}"
        if run.work.note(part) is None:
            _write_layer(run, index, part, text)
        if text is not None:
            written = load_layer(run.source, index, run.device)
            for tensor, at in run.tensors_of(f"layers.{index}."):
                put(written, inside(at, index), _read(run, part, tensor))
            text.states = text.run(index, written, ObservingOps())
        progress(done + index + 1, total)
    if run.work.note("ends") is None:
        _write_ends(run, text)
    parts = [*(f"layer-{index:05d}" for index in range(run.num_layers)), "ends"]
    done += run.num_layers + 1
    if run.qat is not None and run.work.note("trained") is None:
        held = _held(run, parts)
        made, receipt = train_blocks(
            run.source,
            run.planned,
            lambda tensor: _stored(run, held[tensor.name], tensor),
            run.training,
            run.qat,
            device=run.device,
            dtype=run.dtype,
            progress=lambda n: progress(done + n, total),
        )
        run.work.finish("trained", made.items(), receipt)
    with new_folder(run.work.out) as folder:
        trained = [] if run.qat is None else ["trained"]
        _write_file(run, folder / f"{run.work.out.name}.gguf", [*parts, *trained])
        (folder / RECIPE_NAME).write_text(json.dumps(recipe, indent=2) + "\n")
        found: About = {}
        for part in parts:
            found |= (run.work.note(part) or {})["about"]
        _warn_of_nearest(run, found)
        costs = (run.work.note("types") or {}).get("costs", {})
        for t in run.planned:
            if t.name in costs:
                found[t.name]["kl"] = costs[t.name][t.type]
        about = {t.name: {"format": t.type, **found.get(t.name, {})} for t in run.planned}
        (folder / PRODUCTS_NAME).write_text(json.dumps(about, indent=1) + "\n")
        if run.qat is not None:
            receipt = {"settings": asdict(run.qat), **(run.work.note("trained") or {})}
            (folder / TRAINING_NAME).write_text(json.dumps(receipt, indent=1) + "\n")
        progress(total, total)
        finish(folder)
    run.work.clear()
    return tuple(run.planned)


def _allocated(
    run: GGUFRun, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> tuple[PlannedBlocks, ...]:
    """Tensors with the types chosen within the budget of bits. Types are chosen once, and stored for a continued run."""
    if (note := run.work.note("types")) is None:
        costs = measure_types(
            run.source,
            run.step,
            run.planned,
            windows,
            device=run.device,
            dtype=run.dtype,
            progress=progress,
        )
        note = {"types": choose_types(run.step, run.planned, costs), "costs": costs}
        run.work.finish("types", [], note)
    return tuple(replace(t, type=note["types"].get(t.name, t.type)) for t in run.planned)


def _warn_of_nearest(run: GGUFRun, found: About) -> None:
    """Warn how many tensors were rounded to nearest although GPTQ was requested. Untied embeddings
    have no inputs for GPTQ."""
    expected = set() if run.source.spec.tied_embeddings else {"token_embd.weight"}
    names = [n for n in found if found[n]["rounding"] != "gptq" and n not in expected]
    if run.damping is not None and names:
        _logger.warning(
            "%s: %d of %d tensors, such as %s, have the nearest codes, or some of their experts do, and not GPTQ's: the text "
            "did not reach them, or the file orders their columns otherwise. %s says which",
            *(run.source.name, len(names), len(found), names[0], PRODUCTS_NAME),
        )


def require_gguf() -> None:
    """Raises ConfigError if the gguf package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"GGUF files are written with the gguf package: {install_command('gguf')}",
            field="recipe",
        ) from error


def _write_layer(run: GGUFRun, index: int, part: str, text: Stream | None) -> None:
    """Quantize a layer's matrices in the order in which they are computed. With GPTQ each is
    calibrated after the ones before it were quantized."""
    values = load_layer(run.source, index, run.device)
    own = [(tensor, inside(at, index)) for tensor, at in run.tensors_of(f"layers.{index}.")]
    rounded = [at.target.removesuffix(".weight") for tensor, at in own if tensor.type in WRITABLE]
    products = list(dict.fromkeys(rounded))
    exact, made, about = dict(values), dict[str, Tensor](), About()
    groups = [[name] for name in products] if run.damping is not None else [products]
    for group in groups if text is not None else [products]:
        stats: Mapping[str, InputStats] = {}
        if text is not None:
            stats = text.observe(index, values, group, inputs={}, hessian=run.damping is not None)
        for tensor, at in own:
            if at.target.removesuffix(".weight") in group and tensor.type in WRITABLE:
                values[at.target] = values[at.target].clone()
                value = read_tensor(run.source, tensor.name, outside(at, index), {
                    f"layers.{index}.{n}": v for n, v in exact.items()
                })  # fmt: skip
                made[tensor.name], after = round_tensor(
                    tensor, at, value, stats, about, run.damping
                )
                put(values, at, after)
    for tensor, at in own:
        if tensor.name not in made:
            named = {f"layers.{index}.{n}": v for n, v in exact.items()}
            value = read_tensor(run.source, tensor.name, outside(at, index), named)
            made[tensor.name] = _plain(value, tensor.type)
    run.work.finish(part, made.items(), {"about": about})


def _plain(value: Tensor, kind: str) -> Tensor:
    """Bytes of a tensor that is not stored in blocks."""
    typed = value.to({"F32": torch.float32, "F16": torch.float16}[kind]).cpu().contiguous()
    return typed.view(-1).view(torch.uint8)


def _stored(run: GGUFRun, part: str, tensor: PlannedBlocks) -> Tensor:
    """The bytes of a tensor in a finished part."""
    from safetensors import safe_open

    with safe_open(run.work.part(part), framework="pt") as opened:
        blocks: Tensor = opened.get_tensor(tensor.name)
    return blocks


def _read(run: GGUFRun, part: str, tensor: PlannedBlocks) -> Tensor:
    return unpacked(_stored(run, part, tensor), tensor.type, tensor.shape).to(run.device)


def _write_ends(run: GGUFRun, text: Stream | None) -> None:
    """Write embeddings, last norm and head. The head's inputs are the final hidden states after the
    norm."""
    spec, stats = run.source.spec, dict[str, InputStats]()
    if text is not None and spec.embed_size is None:
        ends = load_ends(run.source, device=run.device, dtype=run.dtype)
        found = InputStats.empty(spec.hidden_size, run.device, products=run.damping is not None)
        with torch.no_grad():
            for state in text.states:
                hidden = ends.finished(state.to(run.device), None)
                found.add(hidden, 1024 / max(1, text.num_tokens))
        stats["embed" if spec.tied_embeddings else "head"] = found
    values = load_parameters(
        run.source,
        dtype=torch.float32,
        device=run.device,
        wanted=lambda name: not name.startswith("layers."),
    )
    made, about = dict[str, Tensor](), About()
    for tensor, at in run.tensors_of(""):
        value = read_tensor(run.source, tensor.name, at, values)
        made[tensor.name] = (
            round_tensor(tensor, at, value, stats, about, run.damping)[0]
            if tensor.type in WRITABLE
            else _plain(value, tensor.type)
        )
    run.work.finish("ends", made.items(), {"about": about})


# --- The file ---------------------------------------------------------------------------------------------------------


def _write_file(run: GGUFRun, path: Path, parts: Sequence[str] | None) -> None:
    """Write the file from the finished parts, one tensor in memory at a time, and read its header
    back. Without parts, only the header is real and the tensors are holes in a sparse file."""
    import gguf

    source, planned = run.source.gguf, {tensor.name: tensor for tensor in run.planned}
    name = gguf_family_of(run.source).architecture
    if source is not None:
        name = str(source.metadata["general.architecture"])
    writer = gguf.GGUFWriter(path, name)
    add_metadata(writer, run.source)
    kind = run.step.name
    if run.step.bits is not None:  # the file type's name is its most frequent tensor type
        share = Counter[str]()
        for tensor in run.planned:
            share[tensor.type] += tensor.num_values
        kind = SHORT.get(frequent := share.most_common(1)[0][0], frequent)
    known = "MOSTLY_MXFP4_MOE" if kind == "MXFP4" else f"MOSTLY_{kind}"
    writer.add_file_type(gguf.LlamaFileType[known])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    others = [] if source is None else [n for n in source.tensors if n not in planned]
    for tensor in run.planned:
        of = gguf.GGMLQuantizationType[tensor.type]
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, of)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.num_bytes, of)
    for other in others:  # such as rotary frequencies
        assert source is not None
        held = source.tensors[other]
        of = gguf.GGMLQuantizationType[held.type]
        shape = gguf.quant_shape_to_byte_shape(held.shape, of)
        writer.add_tensor_info(other, shape, np.dtype(np.uint8), held.nbytes, of)
    divisors = frequencies(run.source)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if parts is None:
        assert writer.fout is not None
        file = writer.fout[0]
        sizes = [file.tell(), *(tensor.num_bytes for tensor in run.planned)]
        file.seek(sum(-(-size // writer.data_alignment) * writer.data_alignment for size in sizes))
        file.write(b"\0" if divisors is None else divisors.tobytes())
    for data in () if parts is None else _data(run, parts, others):
        writer.write_tensor_data(data)
    if divisors is not None and parts is not None:
        writer.write_tensor_data(divisors)
    writer.close()
    try:
        is_same = same_model(run.source, read_spec(path))
    except SlipstreamError as error:
        raise _unsaid(run.source) from error
    if not is_same:
        raise _unsaid(run.source)


def _unsaid(source: ModelDescription) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source.name}: Slipstream can't say all of this model's config ({source.family.model_type}) in GGUF's metadata yet. "
        "Start from a GGUF file of the model in F16 or BF16, or take another recipe",
        field="model_type",
    )


def _held(run: GGUFRun, parts: Sequence[str]) -> dict[str, str]:
    """The part of each tensor; later parts replace earlier ones."""
    from safetensors import safe_open

    held = dict[str, str]()
    for part in parts:
        with safe_open(run.work.part(part), framework="np") as opened:
            held.update(dict.fromkeys(opened.keys(), part))
    return held


def _data(run: GGUFRun, parts: Sequence[str], others: Sequence[str]) -> Iterator[Array]:
    from safetensors import safe_open

    held = _held(run, parts)
    for tensor in run.planned:
        with safe_open(run.work.part(held[tensor.name]), framework="np") as opened:
            yield np.ascontiguousarray(opened.get_tensor(tensor.name)).view(np.uint8).reshape(-1)
    for other in others:
        assert run.source.gguf is not None
        yield np.ascontiguousarray(run.source.gguf.raw(other)).reshape(-1)
