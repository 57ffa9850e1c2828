"""Trains a draft head and records its receipt; writes questions to a file for machines without a network.

    python benchmarks/draft_head.py MODEL --out FOLDER [--recipe draft:eagle3] [--device cuda]
    python benchmarks/draft_head.py --export questions.jsonl
    python benchmarks/draft_head.py --receipt FOLDER/slipstream-draft.json    # records a run that was made before

A file of questions stands in a recipe as `text`: `- draft_head: {kind: eagle3, text: questions.jsonl}`. Which questions are
held out depends on their texts alone, so it is the same everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

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


def main() -> int:
    parser = common.parser(__doc__, "draft_head")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipe", default="draft:eagle3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--export", type=Path, metavar="FILE")
    parser.add_argument("--receipt", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.export is not None:
        export(args.export)
        return 0
    receipt = args.receipt
    if receipt is None:
        if args.out is None:
            parser.error("--out, --export or --receipt is needed")
        code = slipstream(
            ["compress", args.model, "--recipe", args.recipe, "--out", str(args.out), "--device", args.device]
        )
        if code:
            return code
        receipt = args.out / RECEIPT_NAME
    common.save(args.output, "draft_head", receipt=json.loads(receipt.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
