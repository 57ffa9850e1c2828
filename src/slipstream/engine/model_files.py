"""Parts of a model's files that requests use: the tokenizer, end tokens, default parameters."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.config import EngineArgs
from slipstream.engine.text.chat_template import read_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.threads.fair_threads import malloc_trim
from slipstream.errors import RequestError, UnsupportedModelError
from slipstream.hub import resolve_model
from slipstream.messages.stats import CanaryResult
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import ModelDescription, read_spec

_logger = logging.getLogger("slipstream.engine")


def load_tokenizer(args: EngineArgs, model: ModelDescription) -> Tokenizer | None:
    """The tokenizer that `args` asks for: the model's own, another one, or none. With a
    `chat_template` it uses that one. ConfigError if the file is no tokenizer."""
    if args.skip_tokenizer_init:
        return None
    path = None
    if args.tokenizer is not None:
        path = Path(args.tokenizer).expanduser()
        # otherwise it is complete without a model's files
        if not (path / "tokenizer.json").is_file():
            path = resolve_model(args.tokenizer, download_dir=args.download_dir)
    tokenizer = Tokenizer.for_model(model, path)
    if args.chat_template is not None:
        tokenizer.set_chat_template(read_template(args.chat_template))
    return tokenizer


class EarlyTokenizer:
    """A GGUF file's tokenizer, built in a thread while the weights are loaded. It needs twice its
    memory while being built, which is free again before all weights are loaded."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self.known: ModelDescription | None = None
        """Description of the model, if its file was already read."""
        path = resolve_model(args.model, download_dir=args.download_dir)
        if path.suffix == ".gguf" and not args.skip_tokenizer_init:
            self.known = read_spec(path).taking_media(args.max_images)
            thread = ThreadPoolExecutor(1, "tokenizer")
            self._read = thread.submit(self._load, self.known)
            thread.shutdown(wait=False)

    def _load(self, model: ModelDescription) -> Tokenizer | None:
        found = load_tokenizer(self._args, model)
        if (trim := malloc_trim()) is not None:
            trim(0)
        return found

    def of(self, model: ModelDescription) -> Tokenizer | None:
        """The tokenizer of `model`, which was loaded with the same settings."""
        return load_tokenizer(self._args, model) if self.known is None else self._read.result()


def end_tokens(model: ModelDescription, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends an answer: those that the model's files name, and the tokenizer's."""
    of_tokenizer = [
        i for i in (tokenizer.eos_token_ids if tokenizer else ()) if i < model.spec.vocab_size
    ]
    return tuple(dict.fromkeys((*model.eos_token_ids, *of_tokenizer)))


def default_sampling(model: ModelDescription) -> SamplingParams:
    """Default sampling parameters from the model's generation config. UnsupportedModelError if they
    are not valid."""
    try:
        return SamplingParams(**dict(model.sampling))  # type: ignore[arg-type]
    except RequestError as error:
        raise UnsupportedModelError(
            f"generation_config.json: {error}", field=error.field
        ) from error


def log_canary(result: CanaryResult | None) -> None:
    """Log the result of the checkpoint's canary, as a warning if it failed."""
    if result is not None:
        _logger.log(logging.INFO if result.ok else logging.WARNING, "%s", result.describe())
