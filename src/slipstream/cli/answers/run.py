"""`slipstream run [MODEL] PROMPT`: streams the answer to one prompt, and prints its speed.

One word is a prompt for the default model, unless it names a model: then standard input is the
prompt, and in a terminal a chat begins. Two words are a model and a prompt. `-` reads the prompt from
standard input."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.cli.console import print_json, say
from slipstream.cli.models import fetch_model
from slipstream.cli.options import (
    MODEL_HELP,
    SAMPLING_TITLE,
    TEXT_ONLY,
    add_engine_options,
    add_output_options,
    add_sampling_options,
    engine_args,
    sampling_params,
)
from slipstream.errors import ConfigError, ContextLengthError, DownloadError, RequestError
from slipstream.hub import DEFAULT_MODEL, check_name

DEFAULTS: dict[str, Any] = {"max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [PROMPT] [options]"
    parser.add_argument("words", nargs="+", metavar="[MODEL] PROMPT", help=f"MODEL: {MODEL_HELP}")
    parser.add_argument(
        "--model", dest="model_option", metavar="MODEL", help=f"the same (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the prompt")
    text = "a picture for the prompt, of a model that sees; may be repeated"
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=text)
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is: no chat template"
    )
    add_output_options(parser)
    add_sampling_options(parser.add_argument_group(SAMPLING_TITLE), **DEFAULTS)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answers.answer import open_llm, stream_answer

    if args.model_option is None and len(args.words) == 1 and _is_model(args.words[0]):
        if sys.stdin.isatty():
            from slipstream.cli.answers import chat

            return chat.run(argparse.Namespace(**vars(args), model=args.words[0], prompt=[]))
        args.words += _piped()
    model, prompt = choose(args.words, args.model_option)
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template; leave out --raw", field="system")
    pictures = [read_picture(name) for name in args.image]
    if pictures and args.raw:
        raise ConfigError("--image needs the chat template; leave out --raw", field="image")
    sampling_params(args, **DEFAULTS)  # raises an error for a wrong value before the start
    fetch_model(model, getattr(args, "download_dir", None))
    with open_llm(engine_args(args, model=model, max_num_seqs=1)) as (llm, start_s):
        templated = not args.raw and llm.get_tokenizer().chat_template is not None
        if args.system is not None and not templated:
            raise ConfigError(
                "the model has no chat template, so it can't take --system; leave it out",
                field="system",
            )
        if not templated and not args.raw:
            say(
                f"slipstream: {model} has no chat template, so the prompt is continued as it is, as with --raw"
            )
        sampling = sampling_params(args, llm.get_default_sampling_params(), **DEFAULTS)
        if pictures and not templated:
            raise ConfigError(
                "the model has no chat template, so it can't take --image; leave it out",
                field="image",
            )
        content: Any = [
            *({"type": "image_pil", "image_pil": x} for x in pictures),
            {"type": "text", "text": prompt},
        ]
        messages = [{"role": "user", "content": content if pictures else prompt}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})

        def write(text: str) -> None:
            if not args.json:
                print(text, end="", flush=True)

        asked = messages if templated else prompt
        try:
            output, speed = stream_answer(llm, asked, sampling, write, start_s=start_s)
        except ContextLengthError as error:  # nothing was written yet
            num_prompt, _, most = error.lengths or (0, 0, 0)
            if hasattr(args, "max_tokens") or num_prompt >= most:
                raise
            # the default is this verb's own, so it is reduced to what fits the context
            sampling = dataclasses.replace(sampling, max_tokens=most - num_prompt)
            output, speed = stream_answer(llm, asked, sampling, write, start_s=start_s)
        (choice,) = output.outputs
        if args.json:
            print_json(
                {
                    "model": model,
                    "prompt": prompt,
                    "text": choice.text,
                    "finish_reason": choice.finish_reason,
                    "device": llm.config.device.info.name,
                    "dtype": llm.config.model.dtype,
                    "speed": speed,
                    "start_phases_s": llm.phases,
                }
            )
        else:
            print(flush=True)
            say(speed.line())
    return 0


def read_picture(name: str) -> bytes:
    """Read an image file. ConfigError, before the model is loaded, names a file that is not an
    image."""
    from slipstream.engine.media.pictures import opened

    if "://" in name:
        raise ConfigError(f"--image {name}: URLs are not downloaded; give a file", field="image")
    try:
        data = Path(name).expanduser().read_bytes()
        if find_spec("PIL") is not None:  # otherwise the engine's error says what to install
            opened(data)
    except OSError as error:
        raise ConfigError(f"--image {name}: {error.strerror or error}", field="image") from None
    except RequestError as error:
        raise ConfigError(
            f"--image {name}: {error.message.removeprefix('a picture: ')}", field="image"
        ) from None
    return data


def _is_model(word: str) -> bool:
    """Whether a single word names a model: a path, a short name, or ORG/NAME. Most words are
    prompts, which may be too long for a path."""
    if not word or any(c.isspace() for c in word):
        return False
    try:
        check_name(word)
    except (OSError, ValueError, DownloadError):
        return False
    return True


def _piped() -> list[str]:
    """Text on standard input as a list of one item; an empty list if there is none."""
    try:
        text = sys.stdin.read()
    except (OSError, ValueError):  # standard input is closed
        return []
    return [text] if text.strip() else []


def choose(words: list[str], model: str | None, verb: str = "run") -> tuple[str, str]:
    """(model, prompt) from the words of `verb`'s command line."""
    if len(words) > 2:
        raise ConfigError(
            f"{len(words)} words; quote the prompt: slipstream {verb} 'Tell me a joke'",
            field="prompt",
        )
    if len(words) == 2 and model is not None:
        raise ConfigError(
            "the model is given twice, as a word and as --model; leave one out", field="model"
        )
    prompt = words[-1]
    if len(words) == 2:
        model = words[0]
    elif model is None and _is_model(prompt):
        chat = f", or slipstream chat {prompt}" if verb == "run" else ""
        raise ConfigError(
            f"{prompt!r} is a model, and there is no prompt; write slipstream {verb} {prompt} 'PROMPT'{chat}",
            field="prompt",
        )
    if prompt == "-":
        prompt = sys.stdin.read()
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not valid UTF-8", field="prompt") from None
    if not prompt:
        raise ConfigError("the prompt is empty", field="prompt")
    return model or DEFAULT_MODEL, prompt


def is_gguf(word: str) -> bool:
    return word.endswith(".gguf") and Path(word).is_file()
