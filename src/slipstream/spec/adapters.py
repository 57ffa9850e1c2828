"""An adapter's `adapter_config.json`, as PEFT writes it. No torch.

Reading is strict like that of a model's config: a key is read, known to have no effect at
inference, or refused by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.families.base import ConfigReader

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_PATTERN = 256

_NO_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "ensure_weight_tying",
))  # fmt: skip
"""Config keys about training or about which modules were trained. The tensors' names tell the latter."""

_REFUSED = {
    "use_dora": "DoRA scales the base weight's columns anew, which is not built",
    "lora_bias": "biases of adapters are not built",
    "use_qalora": "QALoRA is not built",
    "modules_to_save": "the checkpoint holds whole modules next to the adapter; train without modules_to_save",
    "trainable_token_indices": "trained embeddings are not built",
    "target_parameters": "adapters of experts' stacked parameters are not built",
    "layer_replication": "replicated layers are not built",
    "alora_invocation_tokens": "activated LoRA is not built",
    "use_bdlora": "block-diagonal LoRA is not built",
    "arrow_config": "Arrow is not built",
    "kasa_config": "KaSA is not built",
    "velora_config": "VeLoRA is not built",
    "monteclora_config": "MonteCLoRA is not built",
}
"""Keys that change the computation, unless their value is null, false or empty."""

_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights unchanged. Others (PiSSA, OLoRA, CorDA, LoftQ) change
them."""

_HEAVY = re.compile(r"\)[*+?{]|\(\?|([*+?{].*){4}")
"""Patterns to refuse: with repeated or special groups, or more than three repeats. Each of these
multiplies the time of a match by a name's length."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The ranks and scales of an adapter's modules. Patterns are regular expressions for the end of
    a module's name."""

    rank: int
    alpha: float
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    use_rslora: bool

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor by which the product B · A is multiplied (lora_alpha / r, or / √r with rslora)."""
        rank, alpha = self.rank_of(module), float(_matching(self.alpha_pattern, module, self.alpha))
        return float(alpha / (rank**0.5 if self.use_rslora else rank))

    @property
    def most_ranks(self) -> int:
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])


def _matching(patterns: tuple[tuple[str, Any], ...], module: str, default: Any) -> Any:
    return next(
        (value for key, value in patterns if re.match(rf"(.*\.)?({key})$", module)), default
    )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a folder's adapter config. CheckpointError if it can't be read; UnsupportedModelError
    names a wrong key."""
    path = folder / CONFIG_NAME
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(
                f"{path} has more than {MAX_CONFIG_BYTES} bytes", field=CONFIG_NAME
            )
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {CONFIG_NAME}: it is not an adapter saved by PEFT; name the folder of one",
            field="path",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=CONFIG_NAME) from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{path} holds no JSON object", field=CONFIG_NAME)
    c = ConfigReader(given, CONFIG_NAME, no_effect=_NO_EFFECT)
    c.require("peft_type", "LORA")
    if "peft_type" not in c:
        raise UnsupportedModelError(
            f"{CONFIG_NAME} lacks 'peft_type', which must be 'LORA'", field="peft_type"
        )
    c.require("bias", "none")
    for key, why in _REFUSED.items():
        c.ignore(key)
        if given.get(key):
            raise c.unsupported(key, why)
    start = given.get("init_lora_weights", True)
    c.ignore("init_lora_weights", "eva_config", "corda_config", "lora_ga_config")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        why = "such a start changes the base weights; save the adapter with PEFT's path_initial_model_for_weight_conversion"
        raise c.unsupported("init_lora_weights", why)
    config = AdapterConfig(
        rank=c.size("r", 8),
        alpha=c.take("lora_alpha", float, 8.0),
        rank_pattern=_pattern(c, "rank_pattern", int),
        alpha_pattern=_pattern(c, "alpha_pattern", float),
        use_rslora=c.take("use_rslora", bool, False),
    )
    c.finish()
    return config


def _pattern(c: ConfigReader, key: str, kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    found = []
    values = c.take(key, dict, {})
    inner = ConfigReader(values, CONFIG_NAME, prefix=f"{key}.")
    for pattern in values:
        if len(pattern) > MAX_PATTERN or _HEAVY.search(pattern):
            what = "is a regular expression with a repeated or special group, more than three repeats, or very long"
            raise inner.unsupported(pattern, what)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise inner.unsupported(pattern, f"is not a regular expression ({error})") from error
        found.append((pattern, inner.size(pattern) if kind is int else inner.take(pattern, kind)))
    return tuple(found)
