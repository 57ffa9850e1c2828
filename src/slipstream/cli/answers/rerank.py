"""`slipstream rerank MODEL QUERY DOC ...`: prints documents by relevance to a query, the most
relevant first.

A line has the score, the document's index (from 0), and the document. `-` reads documents from
standard input, one per line. A cross-encoder scores query and document together; an embedding model
compares their vectors (−1 to 1)."""

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
from slipstream.errors import ConfigError

MAX_SHOWN = 100
"""Maximum characters of a document shown in a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("query", metavar="QUERY", help="what the documents are to answer")
    parser.add_argument(
        "documents",
        nargs="+",
        metavar="DOC",
        help="a document; a single - reads them from standard input",
    )
    parser.add_argument("--top-n", type=int, metavar="N", help="print only so many, the best")
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="cut texts that are too long instead of refusing them",
    )
    add_output_options(parser)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answers.answer import given_texts, open_llm

    documents = given_texts(args.documents, "document", "documents")
    if args.top_n is not None and args.top_n < 1:
        raise ConfigError(f"top_n must be at least 1, got {args.top_n}", field="top_n")
    fetch_model(args.model, getattr(args, "download_dir", None))
    with open_llm(engine_args(args)) as (llm, start_s):
        results = llm.rerank(args.query, documents, top_n=args.top_n, truncate=args.truncate)
    if args.json:
        print_json(
            {"model": args.model, "query": args.query, "results": results, "start_s": start_s}
        )
        return 0
    places = len(str(len(documents) - 1))
    for result in results:
        text = " ".join(result.document.split())
        shown = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
        print(f"{result.relevance_score:9.4f}  {result.index:{places}}  {shown}")
    return 0
