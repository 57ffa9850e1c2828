"""The curve of `examples/grpo.py`: the reward of each step, with the engine's log-probabilities and the trainer's own.

python examples/grpo.py --record engine.json
python examples/grpo.py --logprobs trainer --record trainer.json
python benchmarks/grpo_curve.py engine.json trainer.json     # grpo.json, docs/pictures/grpo.svg

Of several seeds each has a thin line, and their mean a thick one.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from common import HERE, parser, save

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 260, 46, 16, 34
COLOURS = {"engine": "#2f81f7", "trainer": "#d4762c"}


def at(step: int, reward: float, num_steps: int) -> str:
    x = LEFT + (WIDTH - LEFT - 12) * step / max(1, num_steps - 1)
    y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - reward)
    return f"{x:.1f},{y:.1f}"


def drawn(runs: dict[str, list[list[float]]]) -> str:
    """A picture of the rewards by name and seed, whose background is the page's own."""
    n = max(len(rewards) for seeds in runs.values() for rewards in seeds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Reward by step">',
        "<style>text{font:12px system-ui,sans-serif;fill:#6e7781}.grid{stroke:#8c959f;stroke-opacity:.4}</style>",
    ]
    for reward in (0, 0.25, 0.5, 0.75, 1):
        begin, end = at(0, reward, n).split(","), at(n - 1, reward, n).split(",")
        parts.append(
            f'<line class="grid" x1="{begin[0]}" y1="{begin[1]}" x2="{end[0]}" y2="{end[1]}"/>'
        )
        parts.append(f'<text x="8" y="{float(begin[1]) + 4}">{reward:.2f}</text>')
    for i, (name, seeds) in enumerate(runs.items()):
        mean = [statistics.mean(at_step) for at_step in zip(*seeds, strict=False)]
        lines = [(seed, 'stroke-width="0.6" stroke-opacity=".5"') for seed in seeds]
        for rewards, width in [*(lines if len(seeds) > 1 else []), (mean, 'stroke-width="1.6"')]:
            points = " ".join(at(step, reward, n) for step, reward in enumerate(rewards))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" {width}/>'
            )
        label = f"log-probabilities of the {name}"
        parts.append(
            f'<text x="{LEFT + 8}" y="{TOP + 16 + 17 * i}" style="fill:{COLOURS[name]}">{label}</text>'
        )
    parts.append(f'<text x="{WIDTH // 2 - 20}" y="{HEIGHT - 8}">step (of {n})</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    made = parser(__doc__, "grpo")
    made.add_argument("records", nargs="+", type=Path)
    made.add_argument(
        "--picture", type=Path, default=HERE.parent / "docs" / "pictures" / "grpo.svg"
    )
    args = made.parse_args()
    runs: dict[str, Any] = {}
    for path in args.records:
        found = json.loads(path.read_text())
        rewards = [round(step["reward"], 4) for step in found["steps"]]
        run = runs.setdefault(
            found["logprobs"],
            {key: found[key] for key in ("model", "device", "dtype")}
            | {"farthest_logprob": 0.0, "last_20": {}, "rewards": {}},
        )
        farthest = max(step["farthest"] for step in found["steps"])
        run["farthest_logprob"] = max(run["farthest_logprob"], farthest)
        run["rewards"][f"seed {found['seed']}"] = rewards
    for run in runs.values():
        tails = [rewards[-20:] for rewards in run["rewards"].values()]
        means = [statistics.mean(tail) for tail in tails]
        run["last_20"] = {
            "mean": statistics.mean(means),
            "deviation_of_steps": statistics.mean(map(statistics.stdev, tails)),
            "deviation_of_seeds": statistics.stdev(means) if len(means) > 1 else None,
        }
    args.picture.write_text(drawn({name: [*run["rewards"].values()] for name, run in runs.items()}))
    save(args.output, "grpo", runs=runs)


if __name__ == "__main__":
    main()
