"""Parts of a model's files that requests use: the tokenizer, end tokens, default parameters."""

from __future__ import annotations

import logging
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


def load_gguf_tokenizer(args: EngineArgs) -> tuple[ModelDescription, Tokenizer | None] | None:
    """A GGUF file's description and the tokenizer that `args` asks for; None for other models.

    Call it before the weights are loaded and the modules for that are imported. Python's objects for a
    vocabulary take twice the tokenizer's memory, and what is made after they are freed takes their place.
    """
    path = resolve_model(args.model, download_dir=args.download_dir)
    if path.suffix != ".gguf":
        return None
    model = read_spec(path).taking_media(args.max_images)
    tokenizer = load_tokenizer(args, model)
    if (trim := malloc_trim()) is not None:
        trim(0)
    return model, tokenizer


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
