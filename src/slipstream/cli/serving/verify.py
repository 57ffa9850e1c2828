"""`slipstream verify URL --against MODEL`: checks whether a server answers as the given model would.

    slipstream verify http://127.0.0.1:8000 --against smollm2
    slipstream verify https://api.example.com --api-key-file FILE --model NAME --against ./checkpoint --page verify.html

Any server that speaks OpenAI's chat API can be checked. The model is loaded here, and computes the probability of
each token of the server's answers. The exit code is 0 if no fault is found, 1 for a fault, 4 if the answers
are not conclusive. docs/verify.md lists the checks."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from slipstream.base.files import writing
from slipstream.cli.console import phases, print_json
from slipstream.cli.evaluate import OPTIONS
from slipstream.cli.options import (
    MODEL_HELP,
    add_engine_options,
    add_key_options,
    add_output_options,
    engine_args,
    given_key,
)
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError

CONTEXT = 64
"""Tokens of context beyond a long conversation's text: its frame, its question and its answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", help="the server, with or without /v1; may be left out with --record"
    )
    parser.add_argument("--against", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--model", dest="served", help="a model that it serves (default: the first it lists)"
    )
    add_key_options(parser)
    parser.add_argument(
        "--max-kl",
        type=float,
        default=0.01,
        metavar="X",
        help="largest mean KL of its distribution from the model's, in nats (default: %(default)g)",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=96,
        metavar="N",
        help="answers at most for one check; it ends as soon as all is decided (default: %(default)s)",
    )
    parser.add_argument(
        "--rarest",
        type=float,
        default=8.0,
        metavar="N",
        help="a server with a fault in one of N answers, or more of them, isn't called sound (default: %(default)g)",
    )
    parser.add_argument(
        "--forms",
        type=int,
        default=8,
        metavar="N",
        help="answers to a schema, and tool calls: 8 exclude 44 %% of broken ones, 919 exclude 0.5 %% (default: %(default)s)",
    )
    parser.add_argument(
        "--long",
        type=int,
        default=40,
        metavar="LINES",
        help="lines of some 20 tokens in the longest conversation; 0 asks none (default: %(default)s)",
    )
    parser.add_argument(
        "--question-seed",
        type=int,
        default=0,
        metavar="N",
        help="another number asks other questions (default: %(default)s)",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="leave the model's fingerprint there, for serve --self-check; not of a faulty server's",
    )
    parser.add_argument("--page", metavar="FILE", help="leave the findings there as a page")
    add_output_options(parser)
    engine = parser.add_argument_group("the model here (as in LLM(...))")
    add_engine_options(
        engine,
        without=tuple(f.name for f in dataclasses.fields(EngineArgs) if f.name not in OPTIONS),
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec
    from slipstream.verify.checks import Verification
    from slipstream.verify.record import fingerprint, write
    from slipstream.verify.reference import Reference
    from slipstream.verify.report import EXIT_CODES, document, page, scores, summary
    from slipstream.verify.seen import VerifyPlan
    from slipstream.verify.served import Served

    for name, is_valid, wanted in (
        ("answers", args.answers >= 4, "at least 4"),
        ("long", args.long >= 0, "at least 0"),
        ("max_kl", 0 < args.max_kl < math.inf, "above 0"),
        ("forms", 1 <= args.forms <= 10000, "from 1 to 10000"),
        ("rarest", 2 <= args.rarest <= 1000, "from 2 to 1000"),
    ):
        if not is_valid:
            raise ConfigError(f"--{name.replace('_', '-')} must be {wanted}", field=name)
    plan = VerifyPlan(
        answers=args.answers,
        long_lines=args.long,
        max_kl=args.max_kl,
        rarest=args.rarest,
        forms=args.forms,
        seed=args.question_seed,
    )
    if args.url is None and args.record is None:
        raise ConfigError("name the URL of a server, or --record FILE", field="url")
    served = args.url and Served.connect(args.url, model=args.served, api_key=given_key(args))
    with phases("verifying") as phase:
        phase(f"loading {args.against}")
        lines = 0 if served is None else plan.long_lines
        given = engine_args(args, model=args.against)
        own = read_spec(resolve_model(given.model, download_dir=given.download_dir)).spec
        context = max(min(512, own.max_position), 32 * lines + CONTEXT + plan.max_tokens)
        if lines and context > own.max_position:
            raise ConfigError(
                f"--long {lines} needs {context:,} tokens, and {args.against} has room for {own.max_position:,}; "
                "lower it, or ask none (--long 0)",
                field="long",
            )
        reference = Reference.load(given, context=min(context, own.max_position))
        if served is None:
            write(fingerprint(reference, max_kl=plan.max_kl, seed=plan.seed), args.record)
            return 0
        verification = Verification(served, reference, plan, phase)
        findings = verification.run()
    about = {"url": served.url, "model": served.model, "against": args.against}
    found = document({**about, **verification.counts()}, findings)
    if args.record is not None and not found["causes"]:
        write(fingerprint(reference, max_kl=plan.max_kl, seed=plan.seed), args.record)
    if args.page is not None:
        with writing(args.page, "page"):
            Path(args.page).expanduser().write_text(page(found), "utf-8")
    if args.json:
        print_json(found)
    else:
        for f in findings:
            print(f"{f.outcome:<13}{f.check:<18}{f.why}".rstrip())
        print(*scores(found), *summary(found), sep="\n")
    return EXIT_CODES[found["verdict"]]
