"""Loss of quality by GGUF's types: files that `compress` writes beside llama.cpp's own, by one script.

    python benchmarks/compression.py --study gguf --types Q4_K_M,IQ4_XS --by nearest,gptq [--model smollm2]
    python benchmarks/compression.py --study gguf --types Q4_K_M --by llama.cpp,llama.cpp+importance --llama FOLDER
    python benchmarks/compression.py --study gguf --by gptq --types "" --mixed 'NAME={"type": "IQ4_NL", "types": {…}}'
    python benchmarks/compression.py --study gguf --types "" --mixed '4.3 bits={"bits": 4.3}' --keep FOLDER --speed 5

FOLDER has llama.cpp's shared libraries, such as `package/bins/linux-x64` of npm's @node-llama-cpp/linux-x64. Its quantiser
gets the model in float32 and, with `+importance`, the squared inputs of the same calibration text. The reference kernels
measure everything in float32; the yardstick is the model's file in float32. Bits are those of all matrices, embeddings and
head included. Rows are kept as they come; a run that was broken off goes on with those that are missing. `--speed ROUNDS`
times the files that `--keep` kept, ROUNDS times in turn: tokens after the first a second of one core's time, 128 in and 64 out.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import torch
from cases.compression.recipes import Remembering, measure, size
from peers_cpu import rewritten

from slipstream import LLM, SamplingParams
from slipstream.bench.report import print_table
from slipstream.compress.calibrate import ObservingOps, Stream, load_layer
from slipstream.compress.gguf.source import places
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.compress.training.common import in_bfloat16
from slipstream.config import EngineArgs
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.text import TextSettings, calibration_text
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.stored.gguf import GGUFFile

OURS = {"plain": {"rounding": "nearest", "importance": False}, "nearest": {"rounding": "nearest"}}
CPU = torch.device("cpu")
CALIBRATED = torch.bfloat16 if in_bfloat16(CPU) else torch.float32


class Importance(ctypes.Structure):
    """llama.cpp's `llama_model_imatrix_data`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.POINTER(ctypes.c_float)),
        ("size", ctypes.c_size_t),
    )


class Parameters(ctypes.Structure):
    """llama.cpp's `llama_model_quantize_params`, of its libraries since spring 2026."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nthread", "ftype", "output", "embedding")),
        *(
            (name, ctypes.c_bool)
            for name in ("requantize", "head", "only_copy", "pure", "keep_split", "dry_run")
        ),
        ("imatrix", ctypes.POINTER(Importance)),
        *((name, ctypes.c_void_p) for name in ("kv", "tensors", "prune")),
    )


def llama_quantize(
    folder: Path, given: Path, out: Path, kind: str, squares: dict[str, torch.Tensor]
) -> None:
    """Round the file `given` by llama.cpp's quantiser, with these importances if there are any."""
    names = ("libggml-base.so", "libggml.*.so", "libllama.*.so")
    *_, library = (
        ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL) for name in names
    )
    library.llama_backend_init()
    library.llama_model_quantize_default_params.restype = Parameters
    library.llama_model_quantize.argtypes = (
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Parameters)),
    )
    library.llama_model_quantize.restype = ctypes.c_uint32
    chosen = library.llama_model_quantize_default_params()
    chosen.nthread, chosen.requantize = 2, True
    chosen.ftype = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    if squares:
        held = [values.float().numpy().copy() for values in squares.values()]
        entries = (Importance * (len(held) + 1))()
        for entry, name, values in zip(entries, squares, held, strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        chosen.imatrix = entries
    failed = library.llama_model_quantize(
        str(given).encode(), str(out).encode(), ctypes.byref(chosen)
    )
    if failed:
        raise SystemExit(f"llama.cpp's quantiser gave {failed}")


def squared_inputs(source: ModelDescription, windows: list[Any]) -> dict[str, torch.Tensor]:
    """The mean squares of each matrix's inputs in the original model, by the file's names."""
    stream, found = Stream(source, windows, device=CPU, dtype=CALIBRATED), {}
    names = places(source)
    for index in range(source.spec.num_layers):
        values = load_layer(source, index, CPU)
        own = {n: at for n, at in names.items() if at.target.startswith(f"layers.{index}.")}
        products = {at.target.split(".", 2)[2].removesuffix(".weight") for at in own.values()}
        stats = stream.observe(index, values, products, inputs={}, hessian=False)
        for name, at in own.items():
            product = at.target.split(".", 2)[2].removesuffix(".weight")
            if product in stats:
                found[name] = stats[product].mean_square
        stream.states = stream.run(index, values, ObservingOps())
    return found


def bits(path: Path) -> float:
    matrices = [t for t in GGUFFile(path).tensors.values() if len(t.shape) > 1]
    return 8 * sum(t.nbytes for t in matrices) / sum(t.numel for t in matrices)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--types", default="Q4_K_M")
    parser.add_argument("--by", default="nearest,gptq")
    parser.add_argument("--mixed", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--llama", type=Path, metavar="FOLDER")
    parser.add_argument("--calibrate", type=size, default=(16, 512), metavar="NxT")
    parser.add_argument("--evaluate", type=size, default=(16, 512), metavar="NxT")
    parser.add_argument("--speed", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the files stay")


def file_of(folder: Path, name: str) -> Path:
    """The file of a row: llama.cpp's, or in a folder of its own."""
    own = name.replace(" ", "-")
    return folder / f"{own}.gguf" if "llama.cpp" in name else folder / own / f"{own}.gguf"


def tokens_per_core_second(path: Path) -> float:
    """Tokens after the first by the engine's own kernels. The processor's time counts, so that other processes take none."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    prompt = {"prompt_token_ids": list(range(1000, 1128))}
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=256, max_num_seqs=1) as llm:
        spent = []
        for max_tokens in (1, 1, 65):
            begin = time.process_time()
            llm.generate(prompt, SamplingParams(max_tokens=max_tokens, **greedy))
            spent.append(time.process_time() - begin)
    return 64 / (spent[2] - spent[1])


def run(args: argparse.Namespace, write: Callable[..., None]) -> None:
    source = read_spec(resolve_model(args.model))
    count, context = args.evaluate
    text = TextSettings(context=context, stride=context, num_windows=count)
    windows = calibration_text(
        tokenizer=Tokenizer.for_model(source),
        num_windows=args.calibrate[0],
        context=args.calibrate[1],
    )
    plain = EngineArgs(model=args.model, device="cpu", dtype="float32", kernels="reference")
    original = Remembering.load(plain, context=context)
    settings = {
        "model": args.model,
        "text": dataclasses.asdict(text),
        "calibration": list(args.calibrate),
        "calibrated_in": str(CALIBRATED).removeprefix("torch."),
    }
    kept = json.loads(args.output.read_text()) if args.output.is_file() else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("settings") == settings else {}
    squares: dict[str, torch.Tensor] = {}
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        f"{kind} {by}": (by, {"type": kind, **OURS.get(by, {})})
        for kind in filter(None, args.types.split(","))
        for by in args.by.split(",")
    }
    for given in args.mixed:
        name, _, own = given.partition("=")
        rows[name] = ("gptq", json.loads(own))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for name, (by, own) in rows.items():
            if name in results:
                continue
            path, begin = file_of(folder, name), time.perf_counter()
            if by.startswith("llama.cpp"):
                whole = folder / f"{source.path.stem}.F32.gguf"
                made = whole if whole.is_file() else rewritten(source.path, "F32", folder)
                if by.endswith("importance") and not squares:
                    squares = squared_inputs(source, windows)
                    begin = time.perf_counter()
                llama_quantize(
                    args.llama,
                    made,
                    path,
                    own["type"],
                    squares if by.endswith("importance") else {},
                )
            else:
                recipe = parse([{"gguf": own}])
                compress(source, recipe, path.parent, windows=windows, device=CPU, dtype=CALIBRATED)
            row = {
                "bits_per_weight": bits(path),
                "file_bytes": path.stat().st_size,
                "seconds": time.perf_counter() - begin,
                "settings": own,
                **measure(original, dataclasses.replace(plain, model=str(path)), text),
            }
            results[name] = row
            write(settings=settings, results=results)
            print(name, {k: v for k, v in row.items() if k != "settings"}, flush=True)
        timed = [name for name in results if file_of(folder, name).is_file()]
        rounds = [
            {name: tokens_per_core_second(file_of(folder, name)) for name in timed}
            for _ in range(args.speed)
        ]
        for name in timed if rounds else ():
            results[name]["tokens_per_core_second"] = median(r[name] for r in rounds)
        write(settings=settings, results=results)
    print_table(
        f"{args.model}, {count} windows of {context} tokens",
        ("", "bits", "MB", "perplexity", "KL mean", "±", "KL p99", "top-1", "s", "tok/s"),
        [
            (
                name,
                f"{r['bits_per_weight']:.3f}",
                f"{r['file_bytes'] / 1e6:.1f}",
                f"{r['perplexity_ratio'] - 1:+.2%}",
                f"{r['kl_mean']:.4f}",
                f"{r['kl_stderr']:.4f}",
                f"{r['kl_p99']:.3f}",
                f"{r['top1_agreement']:.2%}",
                f"{r['seconds']:.0f}",
                f"{r['tokens_per_core_second']:.0f}" if "tokens_per_core_second" in r else "",
            )
            for name, r in results.items()
        ],
    )
