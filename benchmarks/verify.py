"""`slipstream verify` on servers with a planted fault, and on sound ones.

    python benchmarks/verify.py [--clean 20] [--tiny 80] [--seed 0]                  # verify.json

1. Faults: each of those of `tests/verify/planted.py` on SmolLM2, in an order that the seed draws, with sound
   servers among them. The verification knows an address and the right model. What it says is then
   compared with what was planted: the verdict, and whether a cause that it names has the fault's words.
2. Clean: one sound server, verified with other questions and seeds each time; false alarms are counted.
   `--tiny`: the same over HTTP of a model with two layers and random weights, whose runs are cheap.

Server and reference have other kernels: the engine's program on the CPU, and PyTorch. Tokens and
answers are what a verification asked for until it ended.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import parser, save
from tests.server.conftest import serving
from tests.support import tiny_models
from tests.verify.planted import FAULTS, served_with, write_checkpoints

from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.verify.checks import Verification
from slipstream.verify.reference import Reference
from slipstream.verify.report import document
from slipstream.verify.seen import VerifyPlan
from slipstream.verify.served import Served


def verified(served: Served, reference: Reference, plan: VerifyPlan) -> dict[str, Any]:
    begin = time.process_time()
    verification = Verification(served, reference, plan)
    found = document(verification.counts(), verification.run())
    found |= verification.counts()
    return {
        "verdict": found["verdict"],
        "causes": found["causes"],
        "open": [f["check"] for f in found["findings"] if f["outcome"] == "undecided"],
        "kl": next(
            (
                float(f"{f['estimate']['value']:.2g}")
                for f in found["findings"]
                if f["check"] == "distribution" and f["estimate"]
            ),
            None,
        ),
        "one_in": [  # answers, tokens, long conversations of which a fault in one is excluded
            None if (n := found["excluded"][f"one_in_{what}"]) is None else round(n, 1)
            for what in ("answers", "tokens", "long_answers")
        ],
        "answers": found["num_answers"],
        "tokens": found["num_tokens"],
        "prompt_tokens": found["num_prompt_tokens"],
        "cpu_s": round(time.process_time() - begin, 1),
    }


def planted(
    folder: Path, max_kl: float, seed: int, num_sound: int, names: list[str]
) -> list[dict[str, Any]]:
    """The faults and sound servers among them, each verified by what a client sees."""
    hidden: list[str | None] = [*names, *[None] * num_sound]
    random.Random(seed).shuffle(hidden)
    references: dict[str, Reference] = {}
    rows = []
    for number, name in enumerate(hidden):
        fault = None if name is None else FAULTS[name]
        against = "base" if fault is None else fault.against
        if against not in references:
            args = EngineArgs(model=str(folder / against), dtype="bfloat16", device="cpu")
            references[against] = Reference.load(args, context=1600)
        with served_with(folder, fault) as served:
            row = verified(
                served, references[against], VerifyPlan(max_kl=max_kl, seed=seed + number)
            )
        if fault is None:
            right = not row["causes"]
        else:
            right = any(fault.words in cause for cause in row["causes"])
        rows.append({"planted": name or "none", "right": right, **row})
        print(rows[-1], flush=True)
    return rows


def clean(
    served: Served,
    reference: Reference,
    count: int,
    seed: int,
    record: Callable[[dict[str, Any]], None],
    **plan: Any,
) -> None:
    """Verify a sound server so often. What was seen is recorded after each time."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        rows.append(verified(served, reference, VerifyPlan(seed=100 + seed + number, **plan)))
        print(number, rows[-1], flush=True)
        each = {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
        record({**summary(rows), "each": each})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "runs": len(rows),
        "false_alarms": sum(bool(row["causes"]) for row in rows),
        "undecided": sum(bool(row["open"]) for row in rows),
        **{
            f"median_{name}": statistics.median(row[name] for row in rows)
            for name in ("answers", "tokens", "prompt_tokens", "cpu_s")
        },
    }


def main() -> None:
    made = parser(__doc__, "verify")
    made.add_argument("--clean", type=int, default=20)
    made.add_argument("--tiny", type=int, default=80)
    made.add_argument("--sound", type=int, default=3, help="sound servers among the planted ones")
    made.add_argument("--max-kl", type=float, default=0.001)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    made.add_argument("--earlier", type=Path, help="rows of a run that was cut, for the record")
    made.add_argument("--skip-faults", action="store_true")
    args = made.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Any] = {"max_kl": args.max_kl}

    def record(part: str, found: dict[str, Any]) -> None:
        parts[part] = found
        save(args.output, "verify", **parts)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.tiny:
            tiny_models.write_sharp(folder / "tiny", max_position_embeddings=2048)
            settings = {"model": str(folder / "tiny"), "dtype": "float32", "device": "cpu"}
            engine = EngineArgs(**settings, num_threads=1, kv_cache_bytes=2**25)
            reference = Reference.load(EngineArgs(**settings, num_threads=1), context=2048)
            with serving(start=lambda: AsyncLLM.start(engine)) as server:
                clean(
                    Served.connect(server.url),
                    reference,
                    args.tiny,
                    args.seed,
                    partial(record, "tiny"),
                    max_kl=args.max_kl,
                    long_lines=4,
                )
        if args.clean or not args.skip_faults:
            write_checkpoints(folder)
        if not args.skip_faults:
            rows = planted(folder, args.max_kl, args.seed, args.sound, args.only)
            if args.earlier is not None:
                parts["earlier"] = json.loads(args.earlier.read_text())
            parts["planted"] = {
                "right": sum(row["right"] for row in rows),
                "of": len(rows),
                "each": rows,
            }
            save(args.output, "verify", **parts)
        if args.clean:
            settings = {"model": str(folder / "base"), "dtype": "bfloat16", "device": "cpu"}
            reference = Reference.load(EngineArgs(**settings), context=1600)
            with served_with(folder, None) as served:
                each = partial(record, "smollm2")
                clean(served, reference, args.clean, args.seed, each, max_kl=args.max_kl)


if __name__ == "__main__":
    main()
