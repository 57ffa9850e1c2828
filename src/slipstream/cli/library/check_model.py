"""`slipstream check-model MODEL`: compares a checkpoint here with the same one in Hugging Face
transformers, layer by layer.

Both compute the same random tokens in float32: decoders, encoders (with their classifier),
encoder-decoders. If they differ, the exit code is 1, and the first place with a difference is named. A
checkpoint with quantized weights is computed by the reference kernels unless --kernels is given,
because the CPU's kernels quantize the inputs of linear layers to 8 bits. Inputs that a checkpoint
quantizes to int8, or with one scale for all tokens, are not quantized on either side, because
transformers rounds them differently."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slipstream.cli.console import phases, print_info, print_json
from slipstream.cli.options import MODEL_HELP, add_output_options

if TYPE_CHECKING:
    from slipstream.evals.reference import ReferenceCheck


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "--num-tokens", type=int, metavar="N", help="length of the compared text (default: 64)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="largest |ours − theirs| / largest |theirs| (default: 1e-4)",
    )
    parser.add_argument(
        "--kernels",
        default="auto",
        metavar="X",
        help="auto, reference, cpu, torch or triton (default: auto)",
    )
    parser.add_argument("--device", default="cpu", metavar="X", help="cpu or cuda:N (default: cpu)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the tokens (default: 0)"
    )
    parser.add_argument(
        "--download-dir",
        default=None,
        metavar="X",
        help="where models are kept, instead of the user's cache",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.evals.reference import check_against_transformers
    from slipstream.hub import resolve_model

    path = resolve_model(args.model, download_dir=args.download_dir)
    with phases(f"checking {args.model}") as phase:
        found = check_against_transformers(
            path,
            num_tokens=args.num_tokens,
            device=args.device,
            kernels=args.kernels,
            tolerance=args.tolerance,
            seed=args.seed,
            phase=phase,
        )
    report = found.report
    if args.json:
        print_json(
            {
                "model": args.model,
                "path": path,
                "num_tokens": found.num_tokens,
                "kernels": found.kernels,
                "rounded_inputs": found.rounds_inputs,
                "same": report.same,
                "first_divergence": report.first_divergence,
                "top1_agreement": report.top1_agreement,
                "tolerance": report.tolerance,
                "differences": report.differences,
            }
        )
    else:
        _show(args, found)
    return int(not report.same)


def _show(args: argparse.Namespace, found: ReferenceCheck) -> None:
    report, parted = found.report, found.report.first_divergence
    rows = [
        (d.where, f"{d.error:.1e}" + ("  < they part here" if d.where == parted else ""))
        for d in report.differences
    ]
    title = f"{args.model} against transformers in float32, {found.num_tokens} random tokens"
    if found.kernels != args.kernels:
        title += f", by the {found.kernels}'s kernels (its weights are rounded)"
    if not found.rounds_inputs:
        title += ", with inputs that neither rounds (transformers rounds them to other steps)"
    print_info(f"{title}: the largest difference after", rows)
    print()
    if report.top1_agreement is not None:
        print(f"both find the same token likeliest after {report.top1_agreement:.0%} of the tokens")
    most = f"{report.tolerance:.0e} of the largest number there"
    if report.same:
        print(f"the same: no difference is more than {most}")
        return
    print(f"they part at: {parted}, the first with more than {most}")
    print('what to look at: docs/adding-a-model.md, "Checking it"')
