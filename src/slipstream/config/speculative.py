"""Checks `speculative_config`: from the user's settings to a `SpeculationConfig`."""

from __future__ import annotations

import difflib
from typing import Any

from slipstream.config.settings import EngineArgs, SpeculationConfig
from slipstream.errors import ConfigError
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import SCHEMES

OF_MODEL = ("method", "num_speculative_tokens", "model", "quantization")

KEYS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("method", "num_speculative_tokens"),
    **dict.fromkeys(("draft", "eagle", "eagle3", "peagle", "dflash", "medusa"), OF_MODEL),
    "mtp": ("method", "num_speculative_tokens", "quantization"),
}
"""Settings of each method."""

MTP_NAMES = (
    *(
        "deepseek_mtp",
        "ernie_mtp",
        "glm4_moe_mtp",
        "glm4_moe_lite_mtp",
        "mimo_mtp",
        "nemotron_h_mtp",
    ),
    *("qwen3_next_mtp", "qwen3_5_mtp"),
)
"""Other names of `mtp`, by family, as vLLM has them."""


def speculation_section(args: EngineArgs, spec: ModelSpec) -> SpeculationConfig | None:
    """The speculation section of the config. ConfigError names a wrong setting and its fault."""
    if args.speculative_model is None:
        if args.num_speculative_tokens is not None:
            raise ConfigError(
                "num_speculative_tokens has an effect only with speculative_model; leave it out",
                field="num_speculative_tokens",
            )
        if args.speculative_config is None:
            return None
        given, field = args.speculative_config, "speculative_config"
    else:
        given, field = {"method": args.speculative_model}, "speculative_model"
        if args.speculative_model not in ("ngram", "suffix"):
            given = {"method": "draft", "model": args.speculative_model}
        if args.num_speculative_tokens is not None:
            given["num_speculative_tokens"] = args.num_speculative_tokens
        if args.speculative_config is not None:
            raise ConfigError(
                "speculative_model is short for speculative_config; give one of them", field=field
            )
    if not spec.generates or spec.is_encoder:
        raise ConfigError(f"{field}: the model generates no text; leave it out", field=field)
    try:
        return _checked(given)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}", field=field) from None


def _checked(given: dict[str, Any]) -> SpeculationConfig:
    method = given.get("method")
    if method in MTP_NAMES:
        given = {**given, "method": (method := "mtp")}
    if not isinstance(method, str) or method not in KEYS:
        raise ConfigError(f"method={method!r} is not one of {', '.join(KEYS)}")
    for key in given:
        if key not in KEYS[method]:
            near = difflib.get_close_matches(str(key), KEYS[method], n=1)
            hint = (
                f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(KEYS[method])}"
            )
            raise ConfigError(f"method {method!r} takes no {key!r}{hint}")
    values = {
        key: value
        for key, value in given.items()
        if not (key == "num_speculative_tokens" and value in ("auto", None))
    }
    for key, least in (
        ("num_speculative_tokens", 1),
        ("prompt_lookup_min", 2),
        ("prompt_lookup_max", 2),
    ):
        value = values.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            other = ', or "auto"' if key == "num_speculative_tokens" else ""
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{other}, got {value!r}"
            )
    for key, wanted in (
        ("model", "model" in KEYS[method]),
        ("quantization", "quantization" in values),
    ):
        if wanted and not isinstance(values.get(key), str):
            raise ConfigError(f"method {method!r} needs {key!r}, a text, got {values.get(key)!r}")
    if values.get("quantization") not in (None, "none", *SCHEMES):
        raise ConfigError(
            f"quantization={values['quantization']!r} is not one of none, {', '.join(SCHEMES)}"
        )
    # Only heads are rounded by default.
    if values.get("quantization") == "none" and method in (
        "draft",
        "mtp",
    ):
        del values["quantization"]
    config = SpeculationConfig(**values)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min={config.prompt_lookup_min} is above prompt_lookup_max={config.prompt_lookup_max}"
        )
    return config
