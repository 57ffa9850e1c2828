"""Trains a draft head and records its receipt; writes questions to a file for machines without a network.

    python benchmarks/speculation.py --study head MODEL --out FOLDER [--recipe draft:eagle3] [--device cuda]
    python benchmarks/speculation.py --study head --export questions.jsonl
    python benchmarks/speculation.py --study head --receipt FOLDER/slipstream-draft.json    # records a run made before
    python benchmarks/speculation.py --study head MODEL --cost FOLDER --output FILE    # a pass beside a step of the model

A file of questions stands in a recipe as `text`: `- draft_head: {kind: eagle3, text: questions.jsonl}`. Which questions are
held out depends on their texts alone, so it is the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from slipstream.cli.main import main as slipstream
from slipstream.compress.draft import RECEIPT_NAME
from slipstream.compress.teacher import read_questions

COUNT, LONGEST = 20_000, 1024


def export(path: Path) -> None:
    """Each question with an answer that nobody reads, since a text without answers is none."""
    lines = []
    for part in ("calibration", "evaluation"):
        for question in read_questions("sharegpt", part, COUNT, LONGEST):  # type: ignore[arg-type]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "-"}]
            lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines):,} questions in {path}")


def cost(model: str, head: Path, rounds: int = 60) -> dict[str, dict[str, float]]:
    """Milliseconds at position 128, in turns: a step of one token without and with the head loaded, verifications, a pass of
    the head."""
    import torch

    from slipstream import LLM
    from slipstream.kernels.metadata import AttentionMetadata
    from slipstream.worker.host_loading import HostLoaded

    sizes = {"max_model_len": 512, "max_num_seqs": 2}
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with LLM(model, **sizes) as plain, LLM(model, speculative_config=config, **sizes) as llm:
        first, second = (x.core.executor.runner for x in (plain, llm))  # type: ignore[attr-defined]
        draft, device = second.draft, second.device

        def tokens(count: int) -> tuple[torch.Tensor, AttentionMetadata]:
            size = second.config.cache.block_size
            meta = AttentionMetadata.single_sequence(
                128 - count, count, block_size=size, device=device
            )
            return torch.full((count,), 50, dtype=torch.int32, device=device), meta

        def step(runner: Any, count: int) -> None:
            ids, meta = tokens(count)
            hidden = runner.forwards.hidden(ids, runner.kv, meta)
            way = (
                runner.forwards.base.program
                if isinstance(runner.loaded, HostLoaded)
                else runner.forwards.base
            )
            if way.greedy(hidden) is None:
                runner.forwards.logits(hidden).argmax(-1)

        def one_pass() -> None:
            ids, meta = tokens(1)
            hidden, _ = draft.head.forward(ids, draft.ends[:1].clone(), draft.kv, meta)
            draft.head.greedy(hidden)

        kinds = {
            "plain": lambda: step(first, 1),
            "head loaded": lambda: step(second, 1),
            "head's pass": one_pass,
        }
        kinds |= {f"verify {n} drafts": lambda n=n: step(second, 1 + n) for n in (1, 2, 3, 5)}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        with torch.inference_mode():
            for _ in range(rounds):
                for name, run in kinds.items():
                    begin = time.perf_counter()
                    run()
                    second.platform.synchronize()
                    times[name].append(1e3 * (time.perf_counter() - begin))
    return {
        name: {"best_ms": min(own), "median_ms": common.median(own)} for name, own in times.items()
    }


RECORD = "draft_head"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipe", default="draft:eagle3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--export", type=Path, metavar="FILE")
    parser.add_argument("--receipt", type=Path, metavar="FILE")
    parser.add_argument("--cost", type=Path, metavar="FOLDER")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.cost is not None:
        found = cost(args.model, args.cost)
        for name, own in found.items():
            print(f"{name:20} best {own['best_ms']:7.2f} ms, median {own['median_ms']:7.2f} ms")
        save(load_average=os.getloadavg()[0], times=found)
        return
    if args.export is not None:
        export(args.export)
        return
    receipt = args.receipt
    if receipt is None:
        if args.out is None:
            raise SystemExit("--out, --export or --receipt is needed")
        code = slipstream(
            [
                "compress",
                args.model,
                "--recipe",
                args.recipe,
                "--out",
                str(args.out),
                "--device",
                args.device,
            ]
        )
        if code:
            raise SystemExit(code)
        receipt = args.out / RECEIPT_NAME
    save(receipt=json.loads(receipt.read_text(encoding="utf-8")))
