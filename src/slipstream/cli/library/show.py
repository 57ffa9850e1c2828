"""`slipstream show MODEL`: a short description of a model on this machine. `slipstream info` has
all details, and what fits here."""

from __future__ import annotations

import argparse
from typing import Any

from slipstream.cli.console import print_json
from slipstream.errors import ConfigError, DownloadError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name as `slipstream list` shows it, or a path")
    parser.add_argument("--template", action="store_true", help="print only the chat template")
    parser.add_argument("--license", action="store_true", help="print only the licence")
    parser.add_argument(
        "--parameters", action="store_true", help="print only the sampling defaults"
    )
    parser.add_argument(
        "--download-dir", metavar="DIR", help="look here instead of in the user's caches"
    )
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object on standard output"
    )


def run(args: argparse.Namespace) -> int:
    found = describe_model(args.model, args.download_dir)
    if args.json:
        print_json(found)
    elif args.template:
        if found["template"] is None:
            raise ConfigError(
                f"{args.model} has no chat template: it continues a text, as with slipstream run --raw",
                field="template",
            )
        print(found["template"])
    elif args.license:
        print(found["license"] or "not stated")
    elif args.parameters:
        for name, value in found["parameters"].items():
            print(f"{name:<20}{value:g}")
    else:
        from slipstream.cli.console import print_info
        from slipstream.hub.store import megabytes

        template = found["template"]
        rows = [
            ("architecture", found["architecture"]),
            ("parameters", _count(found["num_parameters"])),
            ("context length", f"{found['context_length']:,}"),
            ("embedding length", f"{found['embedding_length']:,}"),
            ("quantization", found["quantization"]),
            ("size", megabytes(found["bytes"])),
            ("capabilities", ", ".join(found["capabilities"])),
            ("sampling", ", ".join(f"{k} {v:g}" for k, v in found["parameters"].items())),
            (
                "template",
                "none" if template is None else f"{len(template):,} characters (--template)",
            ),
            ("licence", found["license"] or "not stated"),
            ("path", str(found["path"])),
        ]
        print_info(args.model, rows)
    return 0


def describe_model(name: str, download_dir: str | None) -> dict[str, Any]:
    """Facts about a model. DownloadError if it is not on this machine."""
    from slipstream.hub import find_cached
    from slipstream.hub.listing import license_of

    path = find_cached(name, download_dir=download_dir)
    if path is None:
        raise DownloadError(
            f"{name!r} is not on this machine; slipstream pull {name} fetches it", field="model"
        )
    from slipstream.cli.library.pull import files_bytes
    from slipstream.engine.text.tokenizer import Tokenizer
    from slipstream.spec.description import read_spec

    description = read_spec(path)
    spec = description.spec
    template = Tokenizer.for_model(description).chat_template
    said = None if description.gguf is None else description.gguf.metadata.get("general.license")
    embeds = "embedding" if spec.classifier is None else "rerank"
    capabilities = ["completion"] if spec.generates else [embeds]
    if template is not None and "tools" in template:
        capabilities.append("tools")
    if spec.sees:
        capabilities.append("vision")
    if spec.hears:
        capabilities.append("audio")
    return {
        "model": name,
        "path": path,
        "format": description.format,
        "architecture": spec.family,
        "num_parameters": spec.num_parameters,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "quantization": description.scheme or description.gguf_type or description.dtype,
        "bytes": files_bytes(path),
        "capabilities": capabilities,
        "parameters": dict(description.sampling),
        "template": template,
        "license": said if isinstance(said, str) else license_of(name, path),
    }


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.3g}{unit} ({number:,})"
    return f"{number:,}"
