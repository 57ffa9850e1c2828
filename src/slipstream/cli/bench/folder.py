"""`slipstream bench folder DIR`: checks on this machine the performance and quality of a folder of
`slipstream optimize`.

Its engine is measured with the traffic for which it was chosen. The exit code is 1 if an objective
is missed, or if the canary finds that the model's answers differ from those where its quality was
measured. On another machine the figures of both are shown side by side. With --against the quality
is measured again too, and must be within the limits of the search."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.console import phases, print_json
from slipstream.cli.options import add_output_options

if TYPE_CHECKING:
    from slipstream.optimize.check import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("folder", metavar="DIR", help="what `slipstream optimize … --out DIR` made")
    parser.add_argument(
        "--device", default="auto", metavar="X", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="measure its quality again, against the model that it was made of (default: no)",
    )
    add_output_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import resolve_model
    from slipstream.optimize.check import check_folder
    from slipstream.optimize.worker import quality, speed

    folder = Path(args.folder).expanduser().absolute()
    if args.against:
        resolve_model(args.against)  # an unknown name is reported before anything is measured
    with phases(f"measuring {folder.name}") as on_phase:
        on_phase("its engine under its traffic" + (", and its quality" if args.against else ""))
        found = check_folder(
            folder, device=args.device, speed=speed, quality=quality, original=args.against
        )
    if args.json:
        print_json({"folder": folder, "holds": found.holds, **dataclasses.asdict(found)})
    else:
        _show(folder, found)
    return 0 if found.holds else 1


def _show(folder: Path, found: Checked) -> None:
    from slipstream.bench.report import print_table

    rows = [
        (o.name, f"{o.wanted * 1e3:,.1f}", _ms(o.made), _ms(o.here), "met" if o.met else "missed")
        for o in found.objectives
    ]
    title = (
        "objectives, ms at the 99th percentile"
        if rows
        else "no objectives (--slo) were given when it was made"
    )
    if rows:
        print_table(title, ("", "at most", "as it was made", "here", ""), rows)
    else:
        print(title)
    here, made = (f["output_throughput"] for f in (found.figures, found.made))
    print(
        f"\nthroughput  {here:,.1f} output tok/s here, {made:,.1f} as it was made ({here / made:.0%})"
    )
    if (joules := found.figures.get("j_per_output_token")) is not None:
        print(f"energy      {joules:.4g} J an output token")
    q = found.quality
    if q["not_measured"]:
        print(f"quality     {q['not_measured']}")
    else:
        print(
            f"quality     as measured: KL {q['kl']:.4f} nats, perplexity {q['perplexity_ratio'] - 1:+.2%}"
        )
    if (h := found.quality_here) is not None:
        print(
            f"            here:        KL {h['kl']:.4f} nats, perplexity {h['perplexity_ratio'] - 1:+.2%}"
        )
    for fault in found.faults:
        print(f"            {fault}")
    if found.canary is None:
        print(
            "answers     no canary lies in the folder: the weights are the original's, and were not measured against it"
        )
    else:
        c = found.canary
        verdict = "as where it was measured" if c["ok"] else "NOT as where it was measured"
        print(f"answers     {verdict} (the canary's KL {c['kl']:.4g}, at most {c['most']:g})")
    for difference in found.differences:
        print(f"machine     another one: {difference}")
    print(
        f"{folder.name} keeps what it promised"
        if found.holds
        else f"{folder.name} does NOT keep what it promised here"
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f}"
