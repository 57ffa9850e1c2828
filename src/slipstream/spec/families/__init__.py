"""The families, by `model_type` (docs/adding-a-model.md). A new one is either

1. a module with a tuple `FAMILIES`, and a line here, or
2. an entry point of another package in the group `slipstream.families`, which names a `Family` or several."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.spec.families import (
    apertus,
    cohere,
    deepseek,
    exaone,
    gemma,
    gemma3n,
    gemma4,
    glm,
    granite,
    llama,
    mistral3,
    nemotron,
    olmo,
    qwen,
)
from slipstream.spec.families.base import Family
from slipstream.spec.families.classic import (
    bloom,
    falcon,
    gpt,
    mpt,
    neox,
    opt,
    phi,
    stablelm,
    starcoder,
)
from slipstream.spec.families.encoders import (
    bart,
    bert,
    bert_kin,
    deberta,
    modernbert,
    nomic,
    t5,
    whisper,
)
from slipstream.spec.families.experts import (
    axk2,
    dbrx,
    deepseek_v4,
    ernie,
    gpt_oss,
    hunyuan,
    llama4,
    longcat,
    minimax,
    minimax_m3,
    mixtures,
    sparse,
    step,
)
from slipstream.spec.families.hybrids import (
    bamba,
    falcon_h1,
    jamba,
    kimi_linear,
    lfm,
    ling,
    mamba,
    nemotron_h,
    olmo_hybrid,
    qwen_next,
    zamba,
)
from slipstream.spec.families.pictures import (
    cohere_compass,
    cohere_vision,
    exaone4_5,
    glm4v,
    idefics3,
    internvl,
    kimi_vl,
    lfm2_vl,
    llava_onevision,
    paligemma,
    qwen3_vl,
    qwen_vl,
)
from slipstream.spec.families.refused import REFUSED
from slipstream.spec.families.sounds import qwen2_audio, voxtral

MODULES = (
    apertus, axk2, bamba, bart, bert, bert_kin, deberta, bloom, cohere, cohere_compass, cohere_vision, dbrx, deepseek,
    deepseek_v4, ernie, exaone, exaone4_5, falcon, falcon_h1, gemma, gemma3n, gemma4, glm, glm4v, gpt, gpt_oss, granite,
    hunyuan, idefics3, internvl, jamba, kimi_linear, kimi_vl, lfm, lfm2_vl, ling, llama, llama4, llava_onevision, longcat,
    mamba, minimax, minimax_m3, mistral3, mixtures, modernbert, mpt, nemotron, nemotron_h, neox, nomic, olmo, olmo_hybrid, opt,
    paligemma, phi, qwen, qwen2_audio, qwen3_vl, qwen_next, qwen_vl, sparse, stablelm, starcoder, step, t5, voxtral,
    whisper, zamba,
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    family.model_type: family for module in MODULES for family in module.FAMILIES
}
ENTRY_POINTS = "slipstream.families"


@cache
def families() -> dict[str, Family]:
    """Slipstream's families and those of installed packages, by `model_type`. Two families for one type raise an error."""
    found = dict(FAMILIES)
    for entry in _entries():
        for family in _several(entry.load()):
            if not isinstance(family, Family) or family.model_type in found:
                why = (
                    "names no Family"
                    if not isinstance(family, Family)
                    else f"has {family.model_type!r} a second time"
                )
                raise UnsupportedModelError(
                    f"the entry point {entry.name} = {entry.value} {why}", field=ENTRY_POINTS
                )
            found[family.model_type] = family
    return found


def _entries() -> list[Any]:
    """The entry points of the group `slipstream.families`. Calls importlib.metadata, which takes 40
    ms, only if some installed package has such an entry."""
    if not any(_names_families(Path(folder)) for folder in sys.path):
        return []
    from importlib.metadata import entry_points

    return [*entry_points(group=ENTRY_POINTS)]


def _names_families(folder: Path) -> bool:
    """Whether a package installed in `folder` has entry points of the group. True for a zip file, which is not opened."""
    if folder.is_file():
        return True
    found = (
        file
        for pattern in ("*.dist-info", "*.egg-info")
        for file in folder.glob(f"{pattern}/entry_points.txt")
    )
    return any(
        f"[{ENTRY_POINTS}]" in file.read_text(encoding="utf-8", errors="replace") for file in found
    )


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def find_family(model_type: object, architectures: object) -> Family:
    """The family of a Hugging Face config. UnsupportedModelError if there is none."""
    family = families().get(model_type) if isinstance(model_type, str) else None
    if family is None and isinstance(model_type, str) and model_type in REFUSED:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported: {REFUSED[model_type]}", field="model_type"
        )
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; the families are {', '.join(sorted(families()))} "
            "(docs/adding-a-model.md says how to add one)",
            field="model_type",
        )
    named = (
        architectures
        if isinstance(architectures, list) and architectures
        else list(family.architectures)
    )
    if not set(named) & set(family.architectures) and not is_base(family, named):
        raise UnsupportedModelError(
            f"architectures {named!r} is not supported for {model_type}; {', '.join(family.architectures)} is",
            field="architectures",
        )
    return family


def is_base(family: Family, architectures: object) -> bool:
    """Whether a config's architecture is the family's decoder without an output head, such as
    LlamaModel for LlamaForCausalLM. AutoModel and sentence-transformers write such names."""
    if not isinstance(architectures, list) or family.nested_config is not None:
        return False
    heads, known = ("ForCausalLM", "LMHeadModel"), set(family.architectures)
    stems = {name.removesuffix(head) for name in known for head in heads if name.endswith(head)}
    bases = {stem + end for stem in stems for end in ("Model", "TextModel")}
    return not known & set(architectures) and bool(bases & set(architectures))


def find_gguf_family(architecture: object) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    known = {
        name: family
        for family in families().values()
        if family.gguf is not None
        for name in (family.gguf.architecture, *family.gguf.also)
    }
    if architecture not in known:
        raise UnsupportedModelError(
            f"general.architecture {architecture!r} is not supported in GGUF files; {', '.join(sorted(known))} are",
            field="general.architecture",
        )
    return known[str(architecture)]
