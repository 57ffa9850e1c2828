"""`slipstream embed MODEL TEXT ...`: prints a vector for each text, or the similarity of the texts.

A vector is printed as a line of numbers separated by spaces. `-` reads texts from standard input,
one per line. --similarity prints the cosine of each pair of texts."""

from __future__ import annotations

import argparse

from slipstream.cli.console import print_json
from slipstream.cli.models import fetch_model
from slipstream.cli.options import (
    MODEL_HELP,
    TEXT_ONLY,
    add_engine_options,
    add_output_options,
    engine_args,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="a text; a single - reads them from standard input"
    )
    parser.add_argument(
        "--similarity", action="store_true", help="print the cosine of each text with each instead"
    )
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="shorter vectors, from a model that gives them"
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="cut texts that are too long instead of refusing them",
    )
    add_output_options(parser)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answers.answer import given_texts, open_llm

    texts = given_texts(args.texts, "text", "texts")
    fetch_model(args.model, getattr(args, "download_dir", None))
    with open_llm(engine_args(args)) as (llm, start_s):
        found = llm.embed(texts, dimensions=args.dimensions, truncate=args.truncate)
        vectors = [output.embedding for output in found]
        alike = [[cosine(a, b) for b in vectors] for a in vectors] if args.similarity else None
        if args.json:
            print_json(
                {
                    "model": args.model,
                    "texts": texts,
                    "num_tokens": [len(output.prompt_token_ids) for output in found],
                    **({"embeddings": vectors} if alike is None else {"similarity": alike}),
                    "start_s": start_s,
                }
            )
            return 0
    for row in vectors if alike is None else alike:
        print(" ".join(f"{value:.6g}" if alike is None else f"{value:6.3f}" for value in row))
    return 0


def cosine(a: list[float], b: list[float]) -> float:
    norms = sum(x * x for x in a) ** 0.5 * sum(y * y for y in b) ** 0.5
    return (
        max(-1.0, min(1.0, sum(x * y for x, y in zip(a, b, strict=True)) / norms)) if norms else 0.0
    )
