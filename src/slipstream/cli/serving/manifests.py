"""`slipstream manifests DIR --serve "MODEL …"`: writes a Dockerfile, and files for Docker Compose
and Kubernetes, that run `slipstream serve MODEL …`. docs/containers.md is the manual."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path

from slipstream.cli.console import print_json, write_files
from slipstream.cli.options import engine_args, parse_bytes
from slipstream.errors import ConfigError
from slipstream.hub import DEFAULT_MODEL, MODELS
from slipstream.server.operations.manifests import COMPOSE, DOCKERFILE, KUBERNETES

GIVEN = {
    "host": "the container listens on all of its addresses",
    "port": "the container's port is 8000; publish it as another one",
    "grpc_port": "its port is not published; write the manifests by hand",
    "api_key": "a key would stand in the files; use --key-secret",
    "api_key_file": "use --key-secret",
    **dict.fromkeys(
        ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
        "the container lacks its files, and probes speak HTTP; end TLS before the service (an Ingress, a proxy)",
    ),
    **dict.fromkeys(
        ("rank_address", "local_ranks"),
        "ranks of other hosts can't reach it; write the manifests by hand",
    ),
}
"""Options of `serve` that the manifests set, or that don't work in a container, by destination,
with what to do instead."""

NEEDS = {"otlp_endpoint": "otel", "detect": "detect"}
"""Options of `serve` that need an extra of the package, and the extra's name."""

WRITTEN = ("state_dir", "files_dir", "audit_log", "kv_disk_path", "download_dir")
"""Options of `serve` with paths to which it writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", metavar="DIR", help=f"where to write {DOCKERFILE}, {COMPOSE} and {KUBERNETES}"
    )
    add = parser.add_argument
    text = f"what follows `slipstream serve`, such as 'smollm2 --max-model-len 4096' (default: {DEFAULT_MODEL})"
    add("--serve", default=DEFAULT_MODEL, metavar="WORDS", help=text)
    add("--name", default="slipstream", metavar="NAME", help="of the objects (default: slipstream)")
    add(
        "--image",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="name and tag (default: slipstream:VERSION)",
    )
    add(
        "--replicas",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="servers behind one address of Kubernetes (default: 1)",
    )
    text = "cores of a replica (default: 4)"
    add("--cpus", type=int, default=argparse.SUPPRESS, metavar="N", help=text)
    add(
        "--memory",
        type=parse_bytes,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="of a replica; it keeps within (default: 8GiB)",
    )
    text = "NVIDIA GPUs of a replica (default: 0)"
    add("--gpus", type=int, default=argparse.SUPPRESS, metavar="N", help=text)
    add(
        "--volume",
        type=parse_bytes,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="of its models and kernels (default: 50GiB)",
    )
    text = "an extra of the package to install, such as vision; may be repeated (gpu comes with --gpus)"
    add("--extra", action="append", default=[], metavar="NAME", help=text, dest="extras")
    text = f"a secret whose entry `keys` has one API key a line (for {COMPOSE}: the file `keys` beside it)"
    add("--key-secret", metavar="NAME", help=text)
    add(
        "--source",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="the clone that the image is built from (default: here)",
    )
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from slipstream.server.operations import manifests

    fields = ("name", "replicas", "cpus", "gpus", "memory", "volume", "key_secret", "image")
    given = {name: getattr(args, name) for name in fields if name in args}
    made = manifests.Deployment(words=(), drain_s=0.0, **given)
    made.check()
    if not (args.source / "pyproject.toml").is_file():
        message = f"--source: {args.source} is not a clone of Slipstream: it has no pyproject.toml; give the clone's folder"
        raise ConfigError(message, field="source")
    if unknown := sorted(set(args.extras) - extras_of(args.source / "pyproject.toml")):
        raise ConfigError(
            f"--extra: there is no extra {', '.join(unknown)} (docs/installing.md lists them)",
            field="extras",
        )
    try:
        words = shlex.split(args.serve)
    except ValueError as error:
        raise ConfigError(f"--serve: {error}, in {args.serve!r}", field="serve") from None
    found, drain_s = _checked(words, made.gpus)
    needed = [extra for option, extra in NEEDS.items() if getattr(found, option, None)]
    made = dataclasses.replace(made, words=words, drain_s=drain_s, extras=[*args.extras, *needed])
    folder = Path(args.dir)
    texts = manifests.files(made, folder, args.source)
    write_files(folder, texts)
    if args.json:
        files = [str(folder / name) for name in texts]
        print_json({"files": files, "command": ["slipstream", *made.command]})
        return 0
    dockerfile = folder / DOCKERFILE
    print(f"{dockerfile}: docker build -f {dockerfile} -t {made.image} {args.source}")
    print(f"{folder / COMPOSE}: docker compose -f {folder / COMPOSE} up")
    print(f"{folder / KUBERNETES}: kubectl apply -f {folder / KUBERNETES}")
    return 0


def extras_of(project: Path) -> set[str]:
    import tomllib

    return set(
        tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )


def _checked(words: list[str], gpus: int) -> tuple[argparse.Namespace, float]:
    """(the parsed words, the drain timeout in seconds). Raises the errors that `serve` would raise,
    and errors for options that can't work in a container."""
    from slipstream.cli.parser import ArgumentParser
    from slipstream.cli.serving.serve import check_watch, server_settings
    from slipstream.config.settings import num_ranks
    from slipstream.server.operations import manifests

    found = ArgumentParser(prog="slipstream serve", module="serving.serve").parse_args(words)
    for name, instead in GIVEN.items():
        if getattr(found, name, None) not in (None, []):  # 0 is a valid port
            raise ConfigError(f"leave --{name.replace('_', '-')} out: {instead}", field="serve")
    model = found.model or DEFAULT_MODEL
    if model.startswith((".", "~")) or (
        not model.startswith("/") and model not in MODELS and Path(model).exists()
    ):
        message = f"{model!r} is a path of this machine, which the container lacks; name a model that it can fetch"
        raise ConfigError(
            f"--serve: {message}, or a path within it, such as {manifests.HOME}/model",
            field="serve",
        )
    for name in WRITTEN:
        path = str(getattr(found, name, None) or "")
        if path.startswith("/") and not any(
            Path(path).is_relative_to(folder) for folder in (manifests.HOME, "/tmp")
        ):
            message = f"the container can only write below {manifests.HOME} (its volume) and /tmp"
            raise ConfigError(
                f"--serve: --{name.replace('_', '-')} {path}: {message}", field="serve"
            )
    asked, device = num_ranks(engine_args(found, model=model)), getattr(found, "device", "auto")
    if (device == "cpu" and gpus) or (device.startswith("cuda") and not gpus):
        raise ConfigError(
            f"--serve has --device {device}, and --gpus is {gpus}; make them agree", field="gpus"
        )
    if asked > max(gpus, 1):
        raise ConfigError(
            f"--serve asks for {asked} devices, and --gpus is {gpus}; give --gpus {asked}",
            field="gpus",
        )
    check_watch(found)
    drain_s = server_settings(
        argparse.Namespace(**{**vars(found), "logits_processors": []})
    ).drain_timeout_s
    if not drain_s < 1e6:
        message = f"--serve: --drain-timeout {drain_s:g}: a container runtime needs a finite number of seconds"
        raise ConfigError(message, field="serve")
    return found, drain_s
