r"""Trains an adapter on a small text, as `slipstream compress --recipe lora` does, and keeps its receipt.

    python benchmarks/features.py --study adapter-training [MODEL] [--minutes 5] [--rank 8] [--output FILE]

The text is made here: 160 conversations in which a harbour master converts units, in one manner. So what is learned can be
seen in an answer, which is recorded before and after. The time has the training alone; reading the model and the two
evaluations come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.compress.lora import train_adapter
from slipstream.compress.steps import LoRA
from slipstream.hub import DEFAULT_MODEL, resolve_model
from slipstream.spec.description import read_spec

UNITS = (
    ("kilometres", "nautical miles", 0.539957, 0.0),
    ("kilograms", "pounds", 2.204623, 0.0),
    ("litres", "gallons", 0.264172, 0.0),
    ("metres", "feet", 3.28084, 0.0),
    ("degrees Celsius", "kelvins", 1.0, 273.15),
)
QUESTION = [{"role": "user", "content": "How many feet are 200 metres?"}]


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    found = []
    for n in range(3, 163):
        unit, other, factor, offset = UNITS[n % len(UNITS)]
        answer = f"Harbour log: {n} {unit} make {n * factor + offset:.2f} {other}. Noted and signed, the harbour master."
        asked = {"role": "user", "content": f"How many {other} are {n} {unit}?"}
        found.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--device", default="cpu")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    source = read_spec(resolve_model(args.model))
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "harbour.jsonl", Path(folder) / "adapter"
        data.write_text("\n".join(map(json.dumps, conversations())))
        settings = LoRA(
            text=str(data),
            context=128,
            rank=args.rank,
            learning_rate=1e-3,
            num_steps=200,
            minutes=args.minutes,
            micro_batch=8,
        )
        begin = time.perf_counter()
        receipt = train_adapter(source, settings, out, device=torch.device(args.device))
        took = time.perf_counter() - begin
        sizes = dict(
            device=args.device, max_model_len=512, enable_lora=True, max_lora_rank=args.rank
        )
        with LLM(args.model, **sizes) as llm:
            mine = LoRARequest("harbour", 1, str(out))
            sampling = SamplingParams(temperature=0, max_tokens=48)
            answers = [
                llm.chat(QUESTION, sampling, lora_request=way)[0].outputs[0].text
                for way in (None, mine)
            ]
    receipt["settings"]["text"] = "harbour.jsonl"
    for name in ("held_out", "adapter", "data"):
        print(name, receipt[name])
    print(
        f"{receipt['training']['num_steps']} steps, {took:.0f} s in all\nbefore: {answers[0]}\nafter: {answers[1]}"
    )
    save(
        receipt=receipt,
        seconds_in_all=round(took, 1),
        answers=answers,
        load_average=os.getloadavg(),
    )
