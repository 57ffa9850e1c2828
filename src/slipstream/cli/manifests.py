"""`slipstream manifests DIR --serve "MODEL …"`: writes a Dockerfile, and files for Docker Compose
and Kubernetes, that run `slipstream serve MODEL …`. docs/containers.md is the manual."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path

from slipstream.cli.console import print_json, write_files
from slipstream.cli.options import engine_args, parse_bytes
from slipstream.errors import ConfigError
from slipstream.hub import DEFAULT_MODEL, MODELS

DOCKERFILE, COMPOSE, KUBERNETES = "Dockerfile", "compose.yaml", "kubernetes.yaml"

IMAGE = (
    r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?(:\d{1,5})?/)?"  # a registry
    r"[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(:\w[-.\w]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""Regular expression of a reference to an image, as Docker and Kubernetes read it."""

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
"""Options of `serve` that the manifests set, or that don't work in them, by destination, with the
remedy."""

NEEDS = {"otlp_endpoint": "otel", "detect": "detect"}
"""Options of `serve` that need an extra of the package."""

WRITTEN = ("state_dir", "files_dir", "audit_log", "kv_disk_path", "download_dir")
"""Options of `serve` whose paths are written to."""

LEAST = {"memory": 2**28, "volume": 2**28}
"""Least bytes by option. Less is a number without its unit."""


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
        default=1,
        metavar="N",
        help="servers behind one address of Kubernetes (default: 1)",
    )
    add("--cpus", type=int, default=4, metavar="N", help="cores of a replica (default: 4)")
    add(
        "--memory",
        type=parse_bytes,
        default=8 * 2**30,
        metavar="SIZE",
        help="of a replica; it keeps within (default: 8GiB)",
    )
    add("--gpus", type=int, default=0, metavar="N", help="NVIDIA GPUs of a replica (default: 0)")
    add(
        "--volume",
        type=parse_bytes,
        default=50 * 2**30,
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
    import yaml

    from slipstream.server.operations import manifests

    for name in ("replicas", "cpus"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}", field=name)
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            message = f"--{name} must be at least {least >> 20}MiB, got {getattr(args, name)} bytes; give a unit, such as 8GiB"
            raise ConfigError(message, field=name)
    if args.gpus < 0:
        raise ConfigError(f"--gpus must not be negative, got {args.gpus}", field="gpus")
    for name in ("name", "key_secret"):
        given = getattr(args, name)
        if given is not None and not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", given):
            message = "must be of small letters, digits and -, begin with a letter, and have 42 characters at most"
            raise ConfigError(f"--{name.replace('_', '-')} {message}, got {given!r}", field=name)
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
    image = {"image": args.image} if "image" in args else {}
    if image and not re.fullmatch(IMAGE, args.image):
        message = f"--image must be [REGISTRY/]NAME[:TAG] in small letters, as Docker takes it, got {args.image!r}"
        raise ConfigError(message, field="image")
    found, drain_s = _checked(words, args.gpus)
    extras = [
        *args.extras,
        *(extra for option, extra in NEEDS.items() if getattr(found, option, None)),
    ]
    made = manifests.Deployment(
        words=words, drain_s=drain_s, name=args.name, replicas=args.replicas, cpus=args.cpus, gpus=args.gpus,
        memory=args.memory, volume=args.volume, extras=extras, key_secret=args.key_secret, **image,
    )  # fmt: skip
    folder = Path(args.dir)
    clone, here = args.source.resolve(), folder.resolve()
    composed = manifests.compose(
        made,
        build_from=os.path.relpath(clone, here),
        dockerfile_name=os.path.relpath(here / DOCKERFILE, clone),
    )
    # Each object is copied through JSON: parts that appear in it twice, such as labels, would
    # become YAML aliases, and an edit of one would change both.
    objects = [json.loads(json.dumps(found)) for found in manifests.kubernetes(made)]
    texts = {
        DOCKERFILE: manifests.dockerfile(made),
        COMPOSE: yaml.safe_dump(composed, sort_keys=False, width=1000),
        KUBERNETES: yaml.safe_dump_all(objects, sort_keys=False, width=1000),
    }
    write_files(folder, texts)
    if args.json:
        print_json(
            {
                "files": [str(folder / name) for name in texts],
                "command": ["slipstream", *made.command],
            }
        )
        return 0
    print(
        f"{folder / DOCKERFILE}: docker build -f {folder / DOCKERFILE} -t {made.image} {args.source}"
    )
    print(f"{folder / COMPOSE}: docker compose -f {folder / COMPOSE} up")
    print(f"{folder / KUBERNETES}: kubectl apply -f {folder / KUBERNETES}")
    return 0


def extras_of(project: Path) -> set[str]:
    import tomllib

    return set(
        tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )


def _checked(words: list[str], gpus: int) -> tuple[argparse.Namespace, float]:
    """(the parsed words, the drain timeout in seconds). Options that `serve` would refuse are
    refused here in its own words, and so are those that can't work in a container."""
    from slipstream.cli.parser import ArgumentParser
    from slipstream.cli.serve import check_watch, server_settings
    from slipstream.config.settings import num_ranks
    from slipstream.server.operations import manifests

    found = ArgumentParser(prog="slipstream serve", module="serve").parse_args(words)
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
