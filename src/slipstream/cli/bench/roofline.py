"""`slipstream bench roofline`: measures the limits of this CPU, and the fraction of them that each
operator reaches. Part of `bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import phases
from slipstream.cli.options import MODEL_HELP
from slipstream.errors import ConfigError
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.worker.start.roofline import OperatorShare, Roofline

EXPLAINED = (
    "A ceiling is measured with nothing else to do. An operator's floor is the time that the ceiling which binds it would\n"
    "take; its share is floor / time. A share above 100% says that other programs were busy while the ceiling was measured."
)
UNUSED = ("tokenizer", "skip_tokenizer_init")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--batch-sizes",
        default="1,16",
        metavar="N,…",
        help="sequences of the decode steps (default: 1,16)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=256,
        metavar="X",
        help="tokens that each of them has (default: 256)",
    )
    parser.add_argument(
        "--prompt", type=int, default=512, metavar="X", help="tokens of the prefill (default: 512)"
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.report import document
    from slipstream.cli.bench.measurements import bench_args, deliver, parse_sizes, positive
    from slipstream.worker.local_executor import LocalExecutor
    from slipstream.worker.start.roofline import measure_roofline

    sizes = parse_sizes(args.batch_sizes)
    positive(args, "context", "prompt")
    settings = bench_args(args, needs_text=False, sharing=False)
    if settings.device.startswith("cuda"):
        raise ConfigError("the roofline is a CPU's; take device='cpu'", field="device")
    with phases(f"starting {args.model}") as on_phase:
        executor = LocalExecutor.build(settings, progress=on_phase, by_torch=True)
        on_phase("measuring")
        found = measure_roofline(
            executor.runner, batch_sizes=sizes, prompt=args.prompt, context=args.context
        )
    if not args.json:
        _show(args.model, found)
    deliver(
        args,
        document("roofline", model=args.model, context=args.context, results=plain_results(found)),
    )
    return 0


def _show(model: str, found: Roofline) -> None:
    from slipstream.bench.report import print_table
    from slipstream.cli.console import print_info

    c = found.ceilings
    threads = "1 thread" if found.num_threads == 1 else f"{found.num_threads} threads"
    print(f"{model}\n{EXPLAINED}\n")
    print_info(
        f"ceilings of {threads}, {found.kernels}",
        [
            ("read", f"{c.read / 1e9:.1f} GB/s"),
            *(
                (name, f"{getattr(c, name) / 1e9:,.0f} G operations/s")
                for name in ("int6", "int8", "bfloat16", "float32")
            ),
        ],
    )
    for step in found.steps:
        print()
        tokens = f", {step.length} tokens each" if step.num_new == 1 else " tokens"
        total = f"{step.seconds * 1e3:.2f} ms, {step.floor_s / step.seconds:.0%} of it floor"
        print_table(
            f"{step.name}{tokens}: {total}",
            ("operator", "count", "ms", "of the step", "GB/s", "G op/s", "bound by", "share"),
            [_cells(o, step.seconds) for o in sorted(step.operators, key=lambda o: -o.seconds)],
        )


def plain_results(found: Roofline) -> dict[str, Any]:
    import dataclasses

    result = dataclasses.asdict(found)
    for step, shares in zip(result["steps"], found.steps, strict=True):
        for operator, o in zip(step["operators"], shares.operators, strict=True):
            operator["share"] = o.share
    return result


def _cells(o: OperatorShare, step_seconds: float) -> tuple[str, ...]:
    rates = (f"{n / o.seconds / 1e9:,.1f}" if n else "–" for n in (o.num_bytes, o.operations))
    share = "–" if o.share is None else f"{o.share:.0%}"
    return (
        o.operator,
        str(o.count),
        f"{o.seconds * 1e3:.3f}",
        f"{o.seconds / step_seconds:.0%}",
        *rates,
        o.bound or "–",
        share,
    )
