"""How long a recipe takes for a model of some shape, and how much of a GPU's memory: random weights, random text.

    python benchmarks/compression.py --study time [--config benchmarks/configs/llama-3-8b] [--recipe int4-gptq] [--layers 32]

The checkpoint is made in a temporary folder first, 16 GB for 8B parameters. `--layers` makes a shorter one; the time of the
whole is then reckoned from its layers'. Everything is measured: reading, calibration, rounding, packing, writing. Quality is
not: random weights have no outliers and random text no structure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import common
import torch

from slipstream.compress.recipe import read_recipe
from slipstream.compress.run import compress
from slipstream.model.save import stored_tensors, write_config, write_tensors
from slipstream.model.weights import dummy_parameters
from slipstream.spec.description import huggingface_config, read_spec


def make_checkpoint(
    config: Path, folder: Path, num_layers: int | None, device: torch.device
) -> None:
    folder.mkdir()
    written = json.loads((config / "config.json").read_text())
    if num_layers is not None:
        written["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(written))
    source = read_spec(folder)
    values = dummy_parameters(source, dtype=torch.bfloat16, device=device, seed=0)
    write_tensors(folder, stored_tensors(source.family, source.spec, values))
    write_config(folder, huggingface_config(source))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=common.CONFIGS / "llama-3-8b")
    parser.add_argument("--recipe", default="int4-gptq")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--device", default="cuda")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    device = torch.device(args.device)
    whole = read_spec(args.config).spec.num_layers
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_checkpoint(args.config, folder / "model", args.layers, device)
        source = read_spec(folder / "model")
        rng = torch.Generator().manual_seed(0)
        shape = (args.windows, args.context)
        windows = torch.randint(0, source.spec.vocab_size, shape, generator=rng).tolist()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = [time.perf_counter()]
        compress(
            source,
            read_recipe(args.recipe),
            folder / "out",
            windows=windows,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            progress=lambda done, total: times.append(time.perf_counter()),
        )
        seconds = time.perf_counter() - times[0]
        layers = [
            b - a for a, b in pairwise(times[1:])
        ]  # the first step writes embeddings and head
        results = {
            "seconds": seconds,
            "seconds_a_layer": common.median(layers),
            "num_layers": source.spec.num_layers,
            "seconds_of_the_whole": seconds
            + (whole - source.spec.num_layers) * common.median(layers),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        }
    settings = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    save(settings=settings, results=results)
    print(json.dumps(results, indent=1))
