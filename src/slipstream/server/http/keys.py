"""API keys in a file, with their permissions and limits (`slipstream keys`, `serve --keys-file`).

A key is `sk-ID-SECRET`. The file holds the ID and a digest, never the secret. The secret has 256
random bits, so nobody can try them all, and one pass of a keyed hash (BLAKE2b, with a salt for each
key) is enough. scrypt or Argon2 slow down guesses at passwords that people chose; here they would
cost tens of milliseconds of CPU for each request and protect nothing.

The file is JSON, readable by its owner only (mode 0600). A change writes a new file next to it and
renames that, so a reader sees the old file or the new one. Commands that change it at the same time
wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from slipstream.base.files import open_new, open_private
from slipstream.errors import ConfigError

_logger = logging.getLogger("slipstream.server")

Role: TypeAlias = Literal["admin", "user", "metrics"]
"""`admin`: every route. `user`: all but /metrics and routes that change the server. `metrics`: only
/metrics and /version."""

MAX_KEYS = 4096
LOOK_S = 1.0
"""Seconds between checks of the file for changes."""

_Count = Annotated[int, Meta(ge=1, lt=2**53)]
_FORM = re.compile(r"sk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key with its permissions. Times are seconds since 1970; a limit of None does not apply."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    name: Annotated[str, Meta(max_length=200)] = ""
    role: Role = "user"
    salt: str = ""
    digest: str = ""
    created: int = 0
    expires: int | None = None
    revoked: int | None = None
    # Digest of the secret before the last rotation, valid until `old_until`.
    old_digest: str | None = None
    old_until: int = 0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    tokens_per_day: _Count | None = None
    max_concurrent: _Count | None = None
    models: tuple[str, ...] = ()  # empty: all
    # the lowest priority number that its requests may use (None: any)
    priority: Annotated[int, Meta(ge=-(2**30), le=2**30)] | None = 0
    # its weight: share of the served tokens relative to other keys of its priority
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    # Keys of a group share cached prefixes. None: the key shares them with no other.
    share_prefixes: Annotated[str, Meta(min_length=1, max_length=200)] | None = None

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) is not None for name in LIMITS)

    def state(self, now: float) -> Literal["active", "revoked", "expired"]:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"

    def accepts(self, secret: str, now: float) -> bool:
        """Whether the secret is this key's and the key is active. Compares in constant time."""
        given = _digest(secret, self.salt)
        fits = hmac.compare_digest(given, self.digest)
        if self.old_digest is not None and now < self.old_until:
            fits |= hmac.compare_digest(given, self.old_digest)
        return fits and self.state(now) == "active"


EVERYBODY = ""
"""`share_prefixes` of a server's only key. Not possible in a file."""


def prefix_salt(key: Key | None, given: str | None) -> str:
    """The salt of a request's cached prefixes, derived from its key and its body's `cache_salt`.

    Requests share cached prefixes only within one salt. So no key learns from `cached_tokens`, or
    from the time to the first token, what another has sent. The parts are hashed with their kinds
    and lengths, so that no `cache_salt` yields another key's salt.
    """
    parts = list[str]()
    if key is not None and key.share_prefixes != EVERYBODY:
        group = key.share_prefixes
        parts = ["key", key.id] if group is None else ["group", group]
    if given is not None:
        parts += ["given", given]
    if not parts:
        return ""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return hashlib.blake2b(
        b"".join(len(part).to_bytes(8, "little") + part for part in encoded), digest_size=32
    ).hexdigest()


LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")


class _Document(Struct, forbid_unknown_fields=True):
    keys: list[Key]
    version: Literal[1] = 1


def _digest(secret: str, salt: str) -> str:
    return hashlib.blake2b(
        secret.encode("utf-8", "surrogateescape"), key=bytes.fromhex(salt), digest_size=32
    ).hexdigest()


def new_secret(id_: str, salt: str | None = None) -> tuple[str, str, str]:
    """Makes a secret. Returns the key as its user sends it, the salt and the digest."""
    secret, salt = secrets.token_urlsafe(32), salt or secrets.token_hex(16)
    return f"sk-{id_}-{secret}", salt, _digest(secret, salt)


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret in a key; None if the text is no key of ours."""
    match = _FORM.fullmatch(text)
    return None if match is None else (match[1], match[2])


def read(path: Path) -> dict[str, Key]:
    """The keys of a file by id. ConfigError if the file is missing or damaged."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Document).keys
    except OSError as error:
        raise ConfigError(
            f"cannot read the keys in {path}: {error.strerror}", field="keys_file"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no file of `slipstream keys`: {error}", field="keys_file"
        ) from None
    if len(found) > MAX_KEYS:
        raise ConfigError(
            f"{path} has {len(found)} keys; a server takes {MAX_KEYS}", field="keys_file"
        )
    by_id = {key.id: key for key in found}
    if len(by_id) < len(found):
        raise ConfigError(f"{path} has an id twice", field="keys_file")
    for key in found:
        if not all(re.fullmatch("[0-9a-f]{32,}", part) for part in (key.salt, key.digest)):
            raise ConfigError(
                f"{path}: the key {key.id} has no salt and digest in hexadecimal", field="keys_file"
            )
    return by_id


@contextlib.contextmanager
def changing(path: Path, *, may_create: bool = False) -> Iterator[dict[str, Key]]:
    """Context manager that yields the keys of a file, and writes them back unless an error is
    raised. Other commands that change them wait."""
    if not may_create and not path.exists():
        raise ConfigError(
            f"{path} does not exist; create it with `slipstream keys add`", field="keys_file"
        )
    try:
        lock = open_private(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise ConfigError(f"cannot write next to {path}: {error}", field="keys_file") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = read(path) if path.exists() else {}
        yield keys
        data = (
            msgspec.json.format(msgspec.json.encode(_Document(list(keys.values()))), indent=1)
            + b"\n"
        )
        part = path.with_name(path.name + ".new")
        with open(open_new(part, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field="keys_file") from None
    finally:
        os.close(lock)


@dataclasses.dataclass(slots=True)
class KeyFile:
    """The keys file as a server sees it: read again after each change. If it can't be read, that is
    logged and the previous keys stay valid."""

    path: Path
    clock: Callable[[], float] = time.time
    _keys: dict[str, Key] = dataclasses.field(default_factory=dict)
    _seen: tuple[int, int, int] = (0, 0, 0)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._seen = self._stamp()
        self._keys = read(self.path)
        self._looked = time.monotonic()

    def find(self, text: str) -> Key | None:
        """The active key that `text` is; None if there is none."""
        parts = split(text)
        if parts is None:
            return None
        key = self.keys.get(parts[0])
        if key is None:
            UNKNOWN_KEY.accepts(parts[1], 0.0)
            return None
        return key if key.accepts(parts[1], self.clock()) else None

    @property
    def keys(self) -> dict[str, Key]:
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            self._look()
        return self._keys

    def _look(self) -> None:
        seen = self._stamp()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = read(self.path)
        except ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)
        else:
            _logger.info("keys read again: %d", len(self._keys))

    def _stamp(self) -> tuple[int, int, int]:
        try:
            about = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return about.st_ino, about.st_mtime_ns, about.st_size


UNKNOWN_KEY = Key(id="unknown", salt="00" * 16, digest="00" * 32)
"""A dummy, compared with secrets whose id is unknown, so that response times don't reveal which ids
exist."""
