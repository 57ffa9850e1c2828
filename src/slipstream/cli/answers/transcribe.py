"""`slipstream transcribe MODEL FILE ...`: prints a transcript or subtitles of audio files.

The text of several files comes in their order, one after the other. With --output-dir each has a
file of its own there, with the same name and the format's extension."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from slipstream.engine.audio.transcription import Task

ENDINGS = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "verbose_json": ".json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a sound: WAV, and with the extra audio FLAC, MP3, Ogg",
    )
    parser.add_argument(
        "--format", choices=tuple(ENDINGS), default="text", help="text, subtitles, or OpenAI's JSON"
    )
    parser.add_argument(
        "--language", metavar="L", help="en or english, say; left out, the model tells it"
    )
    parser.add_argument("--translate", action="store_true", help="write English")
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="what precedes: names, spelling, style"
    )
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="write a file for each sound here instead"
    )
    add_output_options(parser)
    add_engine_options(parser, without=TEXT_ONLY)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.answers.answer import open_llm
    from slipstream.engine.audio.formats import subtitles, verbose

    paths = [Path(name) for name in args.files]
    if missing := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"{missing[0]} is no file", field="files")
    folder: Path | None = args.output_dir
    if folder is not None and len({path.stem for path in paths}) < len(paths):
        raise ConfigError(
            "two files have the same name, and their texts would be one file", field="output_dir"
        )
    fetch_model(args.model, getattr(args, "download_dir", None))
    task: Task = "translate" if args.translate else "transcribe"
    with open_llm(engine_args(args)) as (llm, start_s):
        found = llm.transcribe(
            [str(path) for path in paths],
            task=task,
            language=args.language,
            prompt=args.prompt,
            timestamps=args.format != "text" or args.json,
            details=args.format == "verbose_json" or args.json,
        )
    told = [verbose(task, x.language, x.duration_s, x.text, x.segments) for x in found]
    if args.json:
        files = [{"file": str(path), **own} for path, own in zip(paths, told, strict=True)]
        print_json({"model": args.model, "transcriptions": files, "start_s": start_s})
        return 0
    for path, output, own in zip(paths, found, told, strict=True):
        if args.format == "verbose_json":
            import json

            text = json.dumps(own, ensure_ascii=False, indent=1) + "\n"
        elif args.format == "text":
            text = output.text.strip() + "\n"
        else:
            text = subtitles(output.segments, args.format)
        if folder is None:
            print(text, end="")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{path.stem}{ENDINGS[args.format]}").write_text(text, encoding="utf-8")
    return 0
