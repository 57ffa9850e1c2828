"""Every error that Slipstream raises on purpose.

    SlipstreamError
    ├── ConfigError            a setting or argument is wrong, or wrong for this model or machine
    ├── ModelError             a model cannot be run
    │   ├── UnsupportedModelError   its description holds something we do not implement
    │   └── CheckpointError         its files are missing, damaged or do not fit the description
    ├── DownloadError          a model could not be fetched
    ├── BudgetError            a compression costs more than was allowed
    ├── RequestError           one request is wrong (an HTTP 400); the engine is unharmed
    │   ├── ConflictError           it does not fit what is under way (an HTTP 409)
    │   ├── AdapterError            an adapter can't be loaded, or does not fit the model
    │   └── ContextLengthError      prompt and answer do not fit in the context
    └── EngineError            the engine cannot go on
        ├── OutOfMemoryError        weights or KV cache do not fit
        ├── EngineOverloadedError   the queue is full (an HTTP 429)
        ├── EngineAsleepError       it gave its memory back and waits to be woken (an HTTP 503)
        └── EngineDeadError         the engine process died; requests in flight are lost (an HTTP 503)
            ├── EngineKilledError       SIGKILL ended one of its processes
            └── EngineDownError         there is no engine to take the request now

Every message names the field at fault and says what to do. `field` carries the name for machines
(OpenAI's error `param`, for one).
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of all errors raised on purpose. `field` names the wrong setting or input, if there is
    one.

    A message quotes its input, which may be millions of characters of a user's file, so a long one
    is cut in the middle.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        if len(message) > 2000:
            message = f"{message[:1200]} … {message[-600:]}"
        super().__init__(message)
        self.message = message
        self.field = field if field is None else field[:200]


class ConfigError(SlipstreamError, ValueError):
    """A setting is wrong, or cannot work with this model or machine."""


class ModelError(SlipstreamError):
    """A model cannot be run."""


class UnsupportedModelError(ModelError):
    """The model's config has a value that Slipstream does not support."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, damaged, or do not fit the model's description."""


class DownloadError(SlipstreamError):
    """A model could not be fetched."""


class BudgetError(SlipstreamError):
    """A compression's measured loss of quality exceeds the limit."""


class RequestError(SlipstreamError, ValueError):
    """One request is wrong; others are not affected. `text`: index of the wrong text, in a request
    of several."""

    text: int | None = None


class ConflictError(RequestError):
    """A request conflicts with an operation in progress, such as an update or a pause. It may succeed later."""


class AdapterError(RequestError):
    """An adapter can't be loaded: because of its files, the model, the settings or the memory."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the requested answer together, is longer than the context.

    `lengths`, if known: tokens of the prompt, tokens asked for (None: the prompt alone is too
    long), tokens of the context.
    """

    lengths: tuple[int, int | None, int] | None = None


class EngineError(SlipstreamError, RuntimeError):
    """The engine can't continue."""


class OutOfMemoryError(EngineError):
    """Weights or KV cache do not fit in memory."""


class EngineOverloadedError(EngineError):
    """The waiting queue is full; try again later."""


class EngineAsleepError(EngineError):
    """The engine sleeps and has released its memory; no request runs before it is woken."""


class EngineDeadError(EngineError):
    """The engine process died. Requests that were in flight are lost."""


class EngineKilledError(EngineDeadError):
    """One of the engine's processes was killed by SIGKILL: by someone, or by the kernel for lack of
    memory."""


class EngineDownError(EngineDeadError):
    """The engine is down, so it did not take the request. The message says whether it starts
    again."""


def as_error(kind: str, message: str, field: str | None) -> SlipstreamError:
    """Convert another process's error to an exception in this process."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, SlipstreamError):
        return known(message, field=field)
    return EngineError(f"{kind}: {message}")


def first_line(error: Exception) -> str:
    """The first line of another library's error, for a log."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, by the tool that made it. It names the
    source that the installation came from, because the name alone is another's on the package
    index."""
    import json
    import sys
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    try:
        installed = distribution("slipstream")
        recorded = installed.read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        recorded = None
    if recorded is None:
        return f"pip install '.[{extra}]' in a clone of Slipstream, or with its wheel's name for the dot"
    prefix, command, more = Path(sys.prefix), "pip install", ""
    if (prefix / "pipx_metadata.json").exists():
        command = "pipx install --force"
    elif (prefix / "uv-receipt.toml").exists():
        command = "uv tool install --force"
    elif "archive-v0" in prefix.parts:  # an environment that uvx makes for a command
        command, more = "uvx --from", " slipstream"
    elif installed.read_text("INSTALLER") == "uv":  # which leaves pip out
        command = "uv pip install"
    found = json.loads(recorded)
    source = f"slipstream[{extra}] @ {found['url']}"
    if "dir_info" in found:
        command += " -e" if found["dir_info"].get("editable") else ""
        source = f"{unquote(urlsplit(found['url']).path)}[{extra}]"
    return f"{command} '{source}'{more}"


def missing_torch(error: Exception) -> ConfigError | None:
    """The advice to install torch, if `error` says that it is missing; otherwise None."""
    if not isinstance(error, ModuleNotFoundError) or error.name != "torch":
        return None
    more = "on a GPU the extra gpu; without one, torch's CPU build first, or pip may bring CUDA's gigabytes"
    return ConfigError(f"this needs torch: {install_command('torch')} ({more})")
