"""Adapters of random numbers, written by PEFT, and what transformers with PEFT answers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

UNBUILT = (
    "lm_head",
    "embed_out",
    "kv_b_proj",
    "project_in",
    "project_out",
    "per_layer_model_projection",
    "dt_proj",
)
"""Products that have no adapters here, or whose adapters transformers skips (`dt_proj`)."""
OF_SCANS = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}
"""Models whose `out_proj` PEFT refuses to adapt."""
OF_STREAMS = {"altup", "laurel", "altup_projections", "altup_unembed_projections"}
"""Modules of such products."""


def targets(model: Any) -> list[str]:
    """All products of a model that can have an adapter, by their full names."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    named = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and "Router" not in type(module).__name__
    ]
    by_peft = {"out_proj"} if model.config.model_type in OF_SCANS else set()
    return [
        n
        for n in named
        if n.rpartition(".")[2] not in (*UNBUILT, *by_peft)
        and ".experts." not in n
        and not n.endswith("router.classifier")  # LongCat Flash reads its weight alone
        and not OF_STREAMS & {*n.split(".")}
        and ".shared_transformer." not in n  # whose adapters are refused
    ]


def write(
    model: Any,
    path: Path,
    *,
    seed: int = 1,
    modules: list[str] | None = None,
    scale: float = 0.3,
    **config: Any,
) -> Any:
    """Give `model` an adapter and save it to `path`; the PEFT model is returned, and the adapter is inside `model`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    made = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": modules or targets(model), **config}
    )
    # Of mixtures PEFT would take a shared expert's down_proj for the name of the experts' stacked weights.
    with mock.patch(
        "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    ):
        adapted = get_peft_model(model, made).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * scale)
    adapted.save_pretrained(path)
    return adapted


@torch.inference_mode()
def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]
