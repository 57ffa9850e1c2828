"""The families, by `model_type`. A new one is a module with a tuple `FAMILIES`, and a line here."""

from __future__ import annotations

from slipstream.errors import UnsupportedModelError
from slipstream.model.families import gemma3, gpt, llama, qwen
from slipstream.model.families.base import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for module in (llama, qwen, gemma3, gpt) for family in module.FAMILIES
}


def find_family(model_type: object, architectures: object) -> Family:
    """The family of a Hugging Face config."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; the families are {', '.join(sorted(FAMILIES))}",
            field="model_type",
        )
    named = architectures if isinstance(architectures, list) and architectures else list(family.architectures)
    if not set(named) & set(family.architectures):
        raise UnsupportedModelError(
            f"architectures {named!r} is not supported for {model_type}; {', '.join(family.architectures)} is",
            field="architectures",
        )
    return family


def find_gguf_family(architecture: object) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    known = {family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None}
    if architecture not in known:
        raise UnsupportedModelError(
            f"general.architecture {architecture!r} is not supported in GGUF files; {', '.join(sorted(known))} are",
            field="general.architecture",
        )
    return known[str(architecture)]
