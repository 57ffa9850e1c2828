"""`slipstream check-model MODEL`: compares a checkpoint here with the same one in Hugging Face
transformers, layer by layer.

Both compute the same random tokens in float32: decoders, encoders (with their classifier),
encoder-decoders. If they differ, the exit code is 1, and the first place is named. The reference's
kernels compute a checkpoint with rounded weights unless --kernels says otherwise, because the CPU's
kernels round the inputs of products to 8 bits. Inputs that a checkpoint rounds to int8, or with one
scale for all tokens, are not rounded on either side, because transformers rounds them to other
steps."""

from __future__ import annotations

import argparse

from slipstream.cli.console import phases, print_info, print_json
from slipstream.cli.options import MODEL_HELP, add_output_options
from slipstream.errors import ConfigError


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
    import random

    from slipstream.bench.adapters.transformers import load_folder
    from slipstream.hub import resolve_model
    from slipstream.model.check import check, padding_tokens, unrounded_inputs
    from slipstream.spec.description import read_spec
    from slipstream.spec.scheme import CPU_BLOCK_BYTES

    path = resolve_model(args.model, download_dir=args.download_dir)
    with phases(f"checking {args.model}") as phase:
        phase("description")
        description = read_spec(path)
        spec, kernels = description.spec, args.kernels
        is_rounded = description.quantization is not None or any(
            t.name in CPU_BLOCK_BYTES for t in description.stored
        )
        if kernels == "auto" and args.device == "cpu" and is_rounded:
            kernels = "reference"
        num_tokens = min(64, spec.max_position) if args.num_tokens is None else args.num_tokens
        if not 1 <= num_tokens <= spec.max_position:
            message = (
                f"num_tokens must be from 1 to the model's {spec.max_position}, got {num_tokens}"
            )
            raise ConfigError(message, field="num_tokens")
        phase("transformers")
        theirs = load_folder(path, "float32", spec.kind)
        rng = random.Random(args.seed)
        drawn = [t for t in range(spec.vocab_size) if t not in padding_tokens(theirs)]
        tokens = rng.choices(drawn, k=num_tokens)
        phase("slipstream")
        report = check(
            path, theirs, tokens, device=args.device, kernels=kernels, tolerance=args.tolerance
        )
    if args.json:
        print_json(
            {
                "model": args.model,
                "path": path,
                "num_tokens": len(tokens),
                "kernels": kernels,
                "rounded_inputs": not unrounded_inputs(description),
                "same": report.same,
                "first_divergence": report.first_divergence,
                "top1_agreement": report.top1_agreement,
                "tolerance": report.tolerance,
                "differences": report.differences,
            }
        )
        return int(not report.same)
    parted = report.first_divergence
    rows = [
        (d.where, f"{d.error:.1e}" + ("  < they part here" if d.where == parted else ""))
        for d in report.differences
    ]
    title = f"{args.model} against transformers in float32, {len(tokens)} random tokens"
    if kernels != args.kernels:
        title += f", by the {kernels}'s kernels (its weights are rounded)"
    if unrounded_inputs(description):
        title += ", with inputs that neither rounds (transformers rounds them to other steps)"
    print_info(f"{title}: the largest difference after", rows)
    print()
    if report.top1_agreement is not None:
        print(f"both find the same token likeliest after {report.top1_agreement:.0%} of the tokens")
    if report.same:
        print(
            f"the same: no difference is more than {report.tolerance:.0e} of the largest number there"
        )
        return 0
    print(
        f"they part at: {parted}, the first with more than {report.tolerance:.0e} of the largest number there"
    )
    print('what to look at: docs/adding-a-model.md, "Checking it"')
    return 1
