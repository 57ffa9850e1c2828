"""Several models on one command line: their names, without reading any of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.hub import local_path
from slipstream.spec.stored.gguf_parts import model_files


def folder_models(path: Path) -> dict[str, Path]:
    """The models in a folder by name: its .gguf files, and its folders that are a model."""
    found = {file.stem: file for file in model_files(path)}
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.name.startswith(".") and local_path(str(child)) is not None:
            found[child.name] = child
    return found


def named_models(given: Iterable[str]) -> dict[str, str]:
    """Names and models of the command line's words: NAME=MODEL, a model, or a folder of models.
    ConfigError if two have the same name, of one model, too."""
    found: dict[str, str] = {}

    def add(name: str, model: str) -> None:
        if name in found:
            raise ConfigError(
                f"two models are called {name!r}: {found[name]} and {model}; name one of them, as in other={model}, "
                "or leave it out",
                field="model",
            )
        found[name] = model

    for word in given:
        path = Path(word).expanduser()
        name, equals, model = word.partition("=")
        if equals and not path.exists():
            if not name or not model:
                raise ConfigError(f"{word!r} is not NAME=MODEL", field="model")
            add(name, model)
        elif path.is_dir() and local_path(word) is None and (several := folder_models(path)):
            for name, child in several.items():
                add(name, str(child))
        elif (own := local_path(word)) is not None:
            add(own.resolve().stem if own.suffix == ".gguf" else own.resolve().name, word)
        else:
            add(word, word)
    return found
