"""Converts `speculative_config` from the user's settings to a checked `SpeculationConfig`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from slipstream.config.forms import (
    HeadDrafts,
    HostAndGpu,
    HostExperts,
    LearnedDrafts,
    ModelDrafts,
    MTPDrafts,
    NgramDrafts,
    NoDrafts,
    Pipeline,
    SpeculationConfig,
    StreamedLayers,
    SuffixDrafts,
)
from slipstream.config.sections import EngineConfig
from slipstream.config.settings import EngineArgs, split_setting
from slipstream.errors import ConfigError
from slipstream.spec.drafts.heads import FILE_METHODS
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import SCHEMES

FORMS: dict[str, type[Any]] = {
    **{form.method: form for form in (NgramDrafts, SuffixDrafts, ModelDrafts)},
    **dict.fromkeys(FILE_METHODS, HeadDrafts),
    MTPDrafts.method: MTPDrafts,
}
"""Settings class of each method."""

LEAST = {"num_speculative_tokens": 1, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
KEYS = ("method", *LEAST, "model", "quantization")

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
"""Other names of `mtp`, by family, from vLLM."""


def speculation_section(args: EngineArgs, spec: ModelSpec) -> SpeculationConfig:
    """Speculation section of the config. ConfigError names a wrong setting and its fault."""
    if args.speculative_model is None:
        if args.num_speculative_tokens is not None:
            raise ConfigError(
                "num_speculative_tokens has an effect only with speculative_model; leave it out",
                field="num_speculative_tokens",
            )
        if args.speculative_config is None:
            return NoDrafts()
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
    if not isinstance(method, str) or method not in FORMS:
        raise ConfigError(f"method={method!r} is not one of {', '.join(FORMS)}")
    form = FORMS[method]
    own = {f.name for f in dataclasses.fields(form)} - {"most_drafts"}
    keys = [key for key in KEYS if key in own or key == "method"]
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(keys)}"
            raise ConfigError(f"method {method!r} takes no {key!r}{hint}")
    values = {key: value for key, value in given.items() if key in own}
    if values.get("num_speculative_tokens") == "auto":
        values["num_speculative_tokens"] = None
    for key, least in LEAST.items():
        value = values.get(key, least)
        if key == "num_speculative_tokens" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            other = ', or "auto"' if key == "num_speculative_tokens" else ""
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{other}, got {value!r}"
            )
    for key, wanted in (("model", "model" in own), ("quantization", "quantization" in values)):
        if wanted and not isinstance(values.get(key), str):
            raise ConfigError(f"method {method!r} needs {key!r}, a text, got {values.get(key)!r}")
    if values.get("quantization") not in (None, "none", *SCHEMES):
        raise ConfigError(
            f"quantization={values['quantization']!r} is not one of none, {', '.join(SCHEMES)}"
        )
    # Only heads are quantized by default.
    if values.get("quantization") == "none" and form is not HeadDrafts:
        del values["quantization"]
    made: SpeculationConfig = form(**values)
    match made:
        case NgramDrafts(prompt_lookup_min=least, prompt_lookup_max=most) if least > most:
            raise ConfigError(f"prompt_lookup_min={least} is above prompt_lookup_max={most}")
    return made


def check_drafts(config: EngineConfig, args: EngineArgs) -> None:
    """Raise ConfigError if drafts computed by the worker conflict with another setting."""
    drafts, field = config.speculation, split_setting(args)
    if not isinstance(drafts, LearnedDrafts):
        return
    method, others = f"method {drafts.method!r} of speculation", "use 'ngram' or 'suffix'"
    untried = "drafts of a model were not tried with it; use speculative_model='ngram' or 'suffix'"
    for name, refused, why in (
        (
            "weights_bytes",
            isinstance(config.model.offload, StreamedLayers),
            "drafts of a model need all weights in memory; use speculative_model='ngram' or 'suffix'",
        ),
        ("host_experts", isinstance(config.model.offload, HostExperts), untried),
        ("cpu_layers", isinstance(config.parallel, HostAndGpu), untried),
        (
            field,
            isinstance(config.parallel, Pipeline) and config.device.info.is_cuda,
            f"{method} does not run over stages on GPUs; {others} with {field}",
        ),
        # Other CPUs or tile tables round differently, so that ranks would compute different drafts.
        (
            "rank_address",
            args.local_ranks is not None,
            f"drafts of a model are not for ranks of several hosts, which may round them differently; {others}",
        ),
        (
            "speculative_config",
            config.media is not None and drafts.method != "mtp",
            f"{drafts.method!r} drafts from text alone, without pictures or sounds; {others}, or set max_images=0",
        ),
    ):
        if refused:
            raise ConfigError(f"{name}: {why}", field=name)
