"""Encoders and encoder-decoders against transformers, in one process, taking turns.

    python benchmarks/engine.py --study encoders             # a CPU: minilm, flan-t5-small with random weights
    python benchmarks/engine.py --study encoders --device cuda --encoder benchmarks/configs/minilm \
        --t5 benchmarks/configs/t5-large --num-texts 4096 --num-prompts 256

Embeddings: texts of random tokens, 8 to 256 of them (lengths log-uniform, seeded), all given at once. transformers does as
sentence-transformers does: sorted by length, padded batches, the mean, length 1; of its batch sizes the best counts. Input
tokens per second of wall time, padding not counted. A folder without weights gets random ones, the same for both.

T5: prompts of 32 to 256 random tokens, answers of exactly --output-len, greedy, all there at the start; transformers.generate
on batches sorted by length, of the same batch sizes. Output tokens per second, encoding in the time.

The same type and threads for both, medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.report import print_table
from slipstream.costs.hardware import available_cores
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

CONFIG = common.CONFIGS / "flan-t5-small"
CLS, SEP = 101, 102


def texts(count: int, shortest: int, longest: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [round(shortest * (longest / shortest) ** rng.random()) for _ in range(count)]
    return [[rng.randrange(1000, vocab_size) for _ in range(n)] for n in lengths]


def padded(batch: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, batch))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def batches(given: list[list[int]], size: int) -> list[list[list[int]]]:
    ordered = sorted(given, key=len, reverse=True)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


@torch.inference_mode()
def embed(model: Any, given: list[list[int]], size: int, device: str) -> None:
    for batch in batches(given, size):
        inputs = padded(batch, device)
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        torch.nn.functional.normalize(
            ((hidden * mask).sum(1) / mask.sum(1)).float(), dim=-1
        ).tolist()


@torch.inference_mode()
def write(model: Any, given: list[list[int]], size: int, output_len: int, device: str) -> None:
    for batch in batches(given, size):
        # Greedy, and as many tokens as asked for: no end-of-sequence token stops it.
        found = model.generate(
            **padded(batch, device),
            max_new_tokens=output_len,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found.shape[1] == output_len + 1
        found.tolist()


def with_weights(path: Path, folder: Path, dtype: torch.dtype) -> Path:
    """`path`, or, if it holds no weights, a copy of it in `folder` that has random ones."""
    import transformers

    if list(path.glob("*.safetensors")):
        return path
    shutil.copytree(path, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    transformers.AutoModel.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def compare(runs: dict[str, Callable[[], Any]], num_tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each, medians over rounds in which they take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm
    for number in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            speeds[name].append(num_tokens / (time.perf_counter() - begin))
            print(f"round {number + 1}, {name}: {speeds[name][-1]:,.0f} tok/s", flush=True)
    return {name: common.median(values) for name, values in speeds.items()}


RECORD = "encoders"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument(
        "--t5", default=str(CONFIG), help="a folder; without weights they are random"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-texts", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    import transformers

    on_cpu, dtype = args.device == "cpu", getattr(torch, args.dtype)
    threads = available_cores()
    settings: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        **({"num_threads": threads} if on_cpu else {}),
    }
    torch.set_num_threads(threads)
    results: dict[str, dict[str, float]] = {}

    more: dict[str, Any]
    folder = tempfile.TemporaryDirectory()
    path = with_weights(resolve_model(args.encoder), Path(folder.name), dtype)
    given = [
        [CLS, *text, SEP] for text in texts(args.num_texts, 6, 254, read_spec(path).spec.vocab_size)
    ]
    prompts = [{"prompt_token_ids": text} for text in given]
    with LLM(str(path), skip_tokenizer_init=True, **settings) as llm:
        theirs = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval().to(args.device)
        with torch.inference_mode():  # the two give the same vectors
            expected = (
                theirs(torch.tensor([given[0]], device=args.device))
                .last_hidden_state[0]
                .float()
                .mean(0)
                .cpu()
            )
        ours = torch.tensor(llm.embed(prompts[0])[0].embedding)
        assert torch.nn.functional.cosine_similarity(ours, expected, dim=0) > 0.999
        runs: dict[str, Callable[[], Any]] = {
            "slipstream": lambda: llm.embed(prompts, progress=False)
        }
        for size in args.batch_sizes:
            runs[f"transformers, batches of {size}"] = lambda size=size: embed(
                theirs, given, size, args.device
            )
        results["embed"] = compare(runs, sum(map(len, given)), args.rounds)
        one = [prompts[i : i + 1] for i in range(32)]
        runs = {
            "slipstream, one at a time": lambda: [llm.embed(p, progress=False) for p in one],
            "transformers, one at a time": lambda: embed(theirs, given[:32], 1, args.device),
        }
        results["embed_one"] = compare(runs, sum(map(len, given[:32])), args.rounds)
        note(args, save, settings, results)
    del theirs
    folder.cleanup()

    path = Path(args.t5)
    dummy = not list(path.glob("*.safetensors"))
    spec = read_spec(path).spec
    given = texts(args.num_prompts, 32, 256, spec.vocab_size)
    prompts = [{"prompt_token_ids": text} for text in given]
    greedy = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    more = {"load_format": "dummy"} if dummy else {}
    with LLM(
        args.t5, skip_tokenizer_init=True, max_num_seqs=max(args.batch_sizes), **settings, **more
    ) as llm:
        if dummy:
            config = transformers.AutoConfig.from_pretrained(path)
            with torch.device(args.device):
                theirs = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)
        else:
            theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=dtype)
        theirs = theirs.eval().to(args.device)
        runs = {"slipstream": lambda: llm.generate(prompts, greedy, progress=False)}
        for size in [size for size in args.batch_sizes if size <= args.num_prompts]:
            runs[f"transformers, batches of {size}"] = lambda size=size: write(
                theirs, given, size, args.output_len, args.device
            )
        results["t5"] = compare(runs, args.num_prompts * args.output_len, args.rounds)
        runs = {
            "slipstream, one": lambda: llm.generate(prompts[:1], greedy, progress=False),
            "transformers, one": lambda: write(theirs, given[:1], 1, args.output_len, args.device),
        }
        results["t5_one"] = compare(runs, args.output_len, args.rounds)
    note(args, save, settings, results)


def note(
    args: argparse.Namespace,
    save: Callable[..., None],
    settings: dict[str, Any],
    results: dict[str, dict[str, float]],
) -> None:
    """Print and write what there is so far."""
    ratios = {}
    for part, speeds in results.items():
        ours, *peers = speeds.values()
        ratios[part] = ours / max(peers)
        rows = [(name, f"{speed:,.0f}", f"{ours / speed:.2f} ×") for name, speed in speeds.items()]
        print_table(part, ("", "tok/s", "slipstream is"), rows)
    save(
        settings={**settings, "output_len": args.output_len},
        workload={
            "encoder": args.encoder,
            "num_texts": args.num_texts,
            "t5": args.t5,
            "num_prompts": args.num_prompts,
        },
        results=results,
        over_the_best_of_transformers=ratios,
    )
