"""`slipstream compress-prompt [MODEL] TEXT`: shortens a prompt by removing words that a small model
can predict.

One word is a text for the default model. Two words are a small model and a text. `-` reads the text
from standard input. The shortened text goes to standard output, the remaining fraction to standard
error."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slipstream.cli.console import print_json, say
from slipstream.cli.options import (
    MODEL_HELP,
    TEXT_ONLY,
    add_engine_options,
    add_output_options,
    engine_args,
)

if TYPE_CHECKING:
    from slipstream.engine.context import AnswerChange, PromptPart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] TEXT [options]"
    parser.add_argument("words", nargs="+", metavar="[MODEL] TEXT", help=f"MODEL: {MODEL_HELP}")
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="the same")
    parser.add_argument(
        "--before",
        metavar="TEXT",
        default="",
        help="protected text before it, such as instructions",
    )
    parser.add_argument("--question", metavar="TEXT", default="", help="protected text after it")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the tokens to keep (default: 0.5)",
    )
    parser.add_argument(
        "--method",
        default="iterative",
        metavar="X",
        help="iterative or selective (default: iterative)",
    )
    parser.add_argument(
        "--unit", default="word", metavar="X", help="token, word or sentence (default: word)"
    )
    parser.add_argument(
        "--protect",
        action="append",
        default=[],
        metavar="REGEX",
        help="what stays to the letter; may be repeated",
    )
    parser.add_argument(
        "--compare",
        metavar="MODEL",
        help="answer both prompts with this model and report how the answer changes",
    )
    add_output_options(parser)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answers.answer import open_llm
    from slipstream.cli.answers.run import choose
    from slipstream.engine.context import ContextSettings, PromptPart, compress, scorer

    model, text = choose(args.words, args.model_option, "compress-prompt")
    chosen = {
        "keep": args.keep,
        "method": args.method,
        "unit": args.unit,
        "protect": tuple(args.protect),
    }
    settings = ContextSettings(**chosen)
    parts = [PromptPart(args.before, True), PromptPart(text), PromptPart(args.question, True)]
    with open_llm(engine_args(args, model=model, max_num_seqs=1)) as (llm, _):
        context = min(settings.context, llm.config.model.max_model_len - 1)
        settings = ContextSettings(
            **chosen, segment=min(settings.segment, context // 2), context=context
        )
        found = compress(parts, llm.get_tokenizer(), scorer(llm), settings)
    change = None if args.compare is None else _compare(args, parts, "".join(found.parts))
    if args.json:
        info = {
            "num_tokens_before": found.num_tokens_before,
            "num_tokens_after": found.num_tokens_after,
        }
        print_json(
            {
                "model": model,
                "text": found.text,
                **info,
                "kept_share": found.kept_share,
                "answers": change,
            }
        )
        return 0
    print(found.text)
    say(
        f"slipstream: kept {found.num_tokens_after} of {found.num_tokens_before} tokens ({found.kept_share:.0%})"
    )
    if change is not None:
        more = f"{change.extra_nats:+.3f} nats a token"
        say(
            f"slipstream: the answers' words overlap by {change.overlap:.0%}; the first one costs {more} more"
        )
        say(f"before: {change.answer_before}\nafter:  {change.answer_after}")
    return 0


def _compare(args: argparse.Namespace, parts: list[PromptPart], after: str) -> AnswerChange:
    from slipstream.cli.answers.answer import open_llm
    from slipstream.engine.context import answer_change

    with open_llm(engine_args(args, model=args.compare, max_num_seqs=2)) as (llm, _):
        tokenizer = llm.get_tokenizer()
        texts = ["".join(part.text for part in parts), after]
        if tokenizer.chat_template is not None:
            texts = [
                tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
            ]
        return answer_change(llm, *texts)
