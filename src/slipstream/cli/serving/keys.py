"""`slipstream keys add|list|revoke|rotate FILE`: manages the keys of a server
(`serve --keys-file FILE`): who may use it, and how much.

A key is shown once, when it is created. The file stores a digest of it. A running server reads a
changed file within a second."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.cli.console import print_json
from slipstream.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to do", metavar="KIND", required=True)

    def kind(
        name: str, text: str, handler: Callable[[argparse.Namespace], int], *, takes_id: bool = True
    ) -> Any:
        made = kinds.add_parser(name, help=text)
        made.add_argument("file", metavar="FILE", help="the file of the keys")
        if takes_id:
            made.add_argument("id", metavar="ID", help="which key (`slipstream keys list`)")
        made.add_argument("--json", action="store_true", help="print one JSON object")
        made.set_defaults(handler=handler)
        return made

    add = kind("add", "make a key, and show it", run_add, takes_id=False)
    add.add_argument(
        "--name", default="", metavar="NAME", help="whose it is, for the list and the log"
    )
    text = "user: answers; metrics: /metrics only; admin: everything (default: user)"
    add.add_argument("--role", default="user", choices=("user", "admin", "metrics"), help=text)
    limits = {
        "--requests-per-minute": "requests in any 60 s",
        "--tokens-per-minute": "tokens of prompts and answers in any 60 s",
        "--tokens-per-day": "the same in a day (UTC)",
        "--max-concurrent": "requests at once",
    }
    for flag, text in limits.items():
        add.add_argument(
            flag, type=_positive, default=None, metavar="N", help=f"{text} (default: no limit)"
        )
    text = "one that it may use; may be repeated (default: all)"
    add.add_argument("--model", action="append", default=[], metavar="NAME", help=text)
    text = "what its requests have at best; lower goes first (default: 0)"
    add.add_argument("--priority", type=int, default=0, metavar="N", help=text)
    text = "share of the served tokens, beside other keys of the same priority (default: 1)"
    add.add_argument("--weight", type=float, default=1.0, metavar="X", help=text)
    text = "share cached prefixes with the other keys of this group (default: with no other key)"
    add.add_argument("--share-prefixes", default=None, metavar="GROUP", help=text)
    add.add_argument(
        "--expires",
        type=_span,
        default=None,
        metavar="SPAN",
        help="such as 12h or 90d (default: never)",
    )

    kind("list", "the keys, without their secrets", run_list, takes_id=False)
    kind("revoke", "let a key open nothing any more", run_revoke)
    rotate = kind("rotate", "a new secret for the same key, limits and counts", run_rotate)
    rotate.add_argument(
        "--grace",
        type=_span,
        default=0,
        metavar="SPAN",
        help="so long the old one holds, too (default: 0s)",
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _span(text: str) -> int:
    number, unit = text[:-1], _SECONDS.get(text[-1:])
    if unit is None or not number.isascii() or not number.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time span such as 30s, 15m, 12h or 90d"
        )
    return int(number) * unit


def run_add(args: argparse.Namespace) -> int:
    import msgspec

    from slipstream.server.http import keys

    if not 0 < args.weight <= 1000:
        raise ConfigError(
            f"--weight must be above 0 and at most 1000, got {args.weight:g}", field="weight"
        )
    if abs(args.priority) > 2**30:
        raise ConfigError("--priority must be from −2³⁰ to 2³⁰", field="priority")
    if len(args.name) > 200:
        raise ConfigError("--name is longer than 200 characters", field="name")
    group = args.share_prefixes
    if group is not None and not (0 < len(group) <= 200 and group.isprintable()):
        raise ConfigError(
            "--share-prefixes must be a name of 1 to 200 printable characters",
            field="share_prefixes",
        )
    now = int(time.time())
    with keys.changing(Path(args.file), may_create=True) as known:
        if len(known) >= keys.MAX_KEYS:
            raise ConfigError(
                f"{args.file} has {len(known)} keys, as many as a server takes", field="keys_file"
            )
        id_ = next(found for found in iter(lambda: secrets.token_hex(6), "") if found not in known)
        text, salt, digest = keys.new_secret(id_)
        given = {
            name: getattr(args, name)
            for name in (*keys.LIMITS, "name", "role", "priority", "weight", "share_prefixes")
        }
        expires = None if args.expires is None else now + args.expires
        made = keys.Key(
            id=id_,
            salt=salt,
            digest=digest,
            created=now,
            expires=expires,
            models=tuple(args.model),
            **given,
        )
        # validated in the form in which it will be read
        known[id_] = msgspec.convert(msgspec.to_builtins(made), keys.Key)
    return _show(args, id_, text)


def run_list(args: argparse.Namespace) -> int:
    from slipstream.cli.console import say
    from slipstream.server.http import keys

    now = time.time()
    rows = [_public(key, now) for key in keys.read(Path(args.file)).values()]
    if args.json:
        print_json({"keys": rows})
        return 0
    for row in rows:
        limits = "  ".join(
            f"{name}={row[name]}"
            for name in (*keys.LIMITS, "priority", "weight", "share_prefixes")
            if row[name] is not None
        )
        models = ",".join(row["models"]) or "all"
        print(
            f"{row['id']}  {row['state']:8}  {row['role']:7}  {row['name'] or '-'}  models={models}  {limits}"
        )
    if not rows:
        say("no keys")
    return 0


def _public(key: Any, now: float) -> dict[str, Any]:
    shown = ("id", "name", "role", "created", "expires", "revoked", "models", "priority", "weight")
    from slipstream.server.http import keys

    return {
        **{name: getattr(key, name) for name in (*shown, "share_prefixes", *keys.LIMITS)},
        "state": key.state(now),
    }


def run_revoke(args: argparse.Namespace) -> int:
    import msgspec

    from slipstream.server.http import keys

    with keys.changing(Path(args.file)) as known:
        key = _require(known, args)
        known[args.id] = msgspec.structs.replace(
            key, revoked=key.revoked or int(time.time()), old_digest=None, old_until=0
        )
    print_json({"id": args.id, "state": "revoked"}) if args.json else print(f"{args.id} is revoked")
    return 0


def run_rotate(args: argparse.Namespace) -> int:
    import msgspec

    from slipstream.server.http import keys

    now = int(time.time())
    with keys.changing(Path(args.file)) as known:
        key = _require(known, args)
        if key.state(now) != "active":
            raise ConfigError(
                f"the key {args.id} is {key.state(now)}; make a new one (`slipstream keys add`)",
                field="id",
            )
        # the salt belongs to the key, and the old secret needs it too
        text, _, digest = keys.new_secret(key.id, key.salt)
        old = (
            {"old_digest": key.digest, "old_until": now + args.grace}
            if args.grace
            else {"old_digest": None, "old_until": 0}
        )
        known[args.id] = msgspec.structs.replace(key, digest=digest, **old)
    return _show(args, args.id, text)


def _require(known: dict[str, Any], args: argparse.Namespace) -> Any:
    if args.id not in known:
        raise ConfigError(
            f"{args.file} has no key {args.id[:64]!r}; `slipstream keys list` shows them",
            field="id",
        )
    return known[args.id]


def _show(args: argparse.Namespace, id_: str, text: str) -> int:
    if args.json:
        print_json({"id": id_, "key": text})
    else:
        print(text)
        print(f"This key is not shown again. Its id is {id_}.", file=sys.stderr)
    return 0
