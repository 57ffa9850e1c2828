"""How much of the front `slipstream optimize` finds with few measurements: every candidate is measured once, then the search is
played again on that table.

    python benchmarks/optimize_share.py MODEL [--share 0.15] [--seeds 5] [--state DIR] [options of `slipstream optimize`]

The table is kept in DIR (results.jsonl), and an interrupted run goes on. Printed: the share of the whole table's
hypervolume that the search has at 15 % of its measurements, over several seeds, and that of as many candidates at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path

import common

from slipstream.bench.load import ClosedLoop, parse_arrivals
from slipstream.config import EngineArgs
from slipstream.hub import machine_folder, resolve_model
from slipstream.optimize import run
from slipstream.optimize.pareto import hypervolume
from slipstream.optimize.prior import simulated_prior
from slipstream.optimize.search import Candidate, Result, Search
from slipstream.optimize.traffic import parse_traffic
from slipstream.plan.engines import this_hardware
from slipstream.spec.description import read_spec
from slipstream.worker.device import detect


def main() -> None:
    parser = common.parser(__doc__, "optimize_share")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--traffic", default="96/32")
    parser.add_argument("--arrivals", default="closed:8")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--max-quality-loss", default="kl=0.1")
    parser.add_argument("--compressions", default="none,int8,int4-g32")
    parser.add_argument("--eval-windows", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", default="sharegpt")
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--state", type=Path, default=Path("optimize_share.state"))
    args = parser.parse_args()
    description = read_spec(resolve_model(args.model))
    traffic = parse_traffic(args.traffic, args.arrivals, num_requests=args.num_requests, longest=args.max_model_len)
    info, arrivals = detect(args.device, machine_folder()), parse_arrivals(args.arrivals)
    users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else len(traffic.lengths)
    space = run.default_space(users=users, on_gpu=info.is_cuda)
    space = dataclasses.replace(space, compressions=run.check_compressions(args.compressions.split(",")))
    base = EngineArgs(model=args.model, device=args.device, max_model_len=args.max_model_len)
    prior = simulated_prior(base, description, traffic, this_hardware(args.device))
    limits = run.parse_quality_loss(args.max_quality_loss)
    args.state.mkdir(parents=True, exist_ok=True)
    table = measured(args, space.candidates(), traffic, limits)

    every = [r for r in table.values() if r.point is not None]
    points = [r.point for r in every]
    reference = (max(p[0] for p in points) + 0.1, max(p[1] for p in points) + 0.1, (limits.kl or 0.1) * 1.1)
    whole = hypervolume(points, reference)
    most = int(args.share * len(table))
    found, drawn = [], []
    for seed in range(args.seeds):
        search = Search(space, prior, table.__getitem__, seed=seed, kl_limit=limits.kl or 0.1)
        search.run(budget_s=most, clock=iter(range(1_000_000)).__next__)
        first = [r.point for r in search.results[:most] if r.point is not None]
        found.append(hypervolume(first, reference) / whole)
        sample = random.Random(seed).sample(list(table.values()), most)
        drawn.append(hypervolume([r.point for r in sample if r.point is not None], reference) / whole)
    print(
        f"{len(table)} candidates, {len(points)} on the table, {most} measured: hypervolume {found}; at random {drawn}"
    )
    rows = [run.as_row(r) for r in table.values()]
    common.save(args.output, "optimize_share", model=args.model, most=most, found=found, at_random=drawn, rows=rows)


def measured(
    args: argparse.Namespace, candidates: list[Candidate], traffic: object, limits: run.QualityLoss
) -> dict[Candidate, Result]:
    """The figures of every candidate, or the error of one that fails."""
    from slipstream.errors import SlipstreamError

    text = {"source": args.text, "context": 512, "stride": 512, "num_windows": args.eval_windows}
    base = EngineArgs(model=args.model, device=args.device, max_model_len=args.max_model_len)
    measurer = run.Measurer(base=base, traffic=traffic, objectives={}, limits=limits, folder=args.state, text=text)  # type: ignore[arg-type]
    space = run.Space(
        compressions=tuple({c.compression for c in candidates}), axes={n: () for n, _ in candidates[0].settings}
    )
    table = {r.candidate: r for r in run.read_results(measurer, space)}
    for number, candidate in enumerate(candidates):
        if candidate not in table:
            try:
                table[candidate] = measurer(candidate)
            except SlipstreamError as error:
                table[candidate] = Result(candidate=candidate, error=str(error))
            run.append_result(table[candidate], measurer)
            print(f"{number + 1} of {len(candidates)}: {candidate.name}: {table[candidate].throughput}", flush=True)
    return table


if __name__ == "__main__":
    main()
