"""Recipes: the steps of a compression, as data. No torch.

A recipe is a list of steps, in YAML or in Python. A step is its name alone, or its name with settings:

    - calibrate: {text: sharegpt, num_windows: 64}
    - quantize: {bits: 4, group_size: 64, rounding: gptq, ignore: ["layers.0.*"]}
    - kv_cache: {form: fp8}

A recipe can also be the name of a preset. Errors name the path of a wrong setting ("steps[1].quantize.bits")
and the allowed values.

A *product* is a linear layer. Its name is that of Slipstream's parameter, such as "layers.3.mlp.down"; there
are attention.qkv, attention.out, recurrent.in, recurrent.out, mlp.up, mlp.down, experts.up, experts.down,
shared.up and shared.down in a layer, and "head". Patterns with * match several.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from slipstream.base.arguments import likely_value
from slipstream.base.files import parse_json, read_yaml
from slipstream.compress.gguf.mix import GGUF, MIXES
from slipstream.compress.quantize_step import Budget, Quantize
from slipstream.compress.step_data import build, checked, plain
from slipstream.compress.steps import (
    Distill,
    DraftHead,
    LoRA,
    PruneSettings,
    Sparsify,
    require,
    require_at_least,
    require_inside,
)
from slipstream.errors import ConfigError
from slipstream.evals.text import DEFAULT_TEXT
from slipstream.spec.scheme import RowFormat

RECIPE_NAME = "slipstream-recipe.json"
"""File in a compressed checkpoint with the recipe that made it."""

FEW_WINDOWS, MANY_WINDOWS = 16, 64
"""Number of calibration windows, unless a recipe sets it. With 16 and with 64, SmolLM2's int8 has a mean KL
of 0.0073 and 0.0074 nats, and its int4-awq-gptq one of 0.120 and 0.098. Others have not been compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """The calibration text: `num_windows` windows of `context` tokens (`evals.text`), or by default
    as many as `Recipe.calibration_windows` says."""

    text: str = DEFAULT_TEXT
    num_windows: int | None = None
    context: int = 512

    def check(self) -> None:
        require(self, lambda value: value is None or value >= 1, "at least 1", "num_windows")
        require_at_least(self, 2, "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """A random Hadamard rotation of the residual stream (QuaRot), folded into the weights before
    quantization. It spreads outliers without changing the model's outputs. A tied output head is untied."""

    seed: int = 0

    def check(self) -> None:
        require_at_least(self, 0, "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class QAT:
    """Trains the quantized weights and their scales, after `quantize` or `gguf`, towards the outputs of
    the original model. It ends after `num_steps`, or after `minutes`.

    It needs memory for four copies of the model in float32, and the original. The text is the
    calibration text, or `num_windows` windows from the same source, the first of which calibrate.
    Training can use much more text than calibration."""

    num_windows: int | None = None
    num_steps: int = 200
    minutes: float | None = None
    step_tokens: int = 2048
    learning_rate: float = 2e-5
    warmup: float = 0.05  # fraction of steps in which the learning rate rises; then it falls to 0 along a cosine
    seed: int = 0

    def check(self) -> None:
        require(self, lambda value: value is None or value >= 1, "at least 1", "num_windows")
        require_at_least(self, 1, "num_steps", "step_tokens")
        require(self, lambda value: value is None or value > 0, "above 0", "minutes")
        require_at_least(self, 0, "seed")
        require_inside(self, "learning_rate")
        require(self, lambda value: 0 <= value < 1, "a share from 0 to below 1", "warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Calibrates the scales of an 8-bit KV cache: one per layer ("tensor") or kv head ("head")."""

    form: RowFormat = "fp8"
    per: Literal["tensor", "head"] = "tensor"
    margin: float = 1.1  # factor on the maximum magnitude in calibration

    def check(self) -> None:
        require(self, lambda value: 1 <= value <= 4, "between 1 and 4", "margin")


S = TypeVar("S")
Step: TypeAlias = (
    Calibrate
    | PruneSettings
    | Distill
    | Rotate
    | Sparsify
    | Quantize
    | QAT
    | KVCache
    | DraftHead
    | LoRA
    | GGUF
)

STEPS: dict[str, type[Step]] = {
    "calibrate": Calibrate,
    "prune": PruneSettings,
    "distill": Distill,
    "rotate": Rotate,
    "sparsify": Sparsify,
    "quantize": Quantize,
    "qat": QAT,
    "kv_cache": KVCache,
    "draft_head": DraftHead,
    "lora": LoRA,
    "gguf": GGUF,
}

STEP_NAMES = {kind: name for name, kind in STEPS.items()}

LAYER_STEPS = (Rotate, Sparsify, Quantize, QAT, KVCache)
"""Steps that `run.py` applies, in their order."""

PRESETS: dict[str, list[Any]] = {
    "fp8": [{"quantize": {"bits": 8, "kind": "float", "inputs": "fp8"}}],
    "fp8-gptq": [{"quantize": {"bits": 8, "kind": "float", "inputs": "fp8", "rounding": "gptq"}}],
    "fp8-static": [
        {
            "quantize": {
                "bits": 8,
                "kind": "float",
                "group_size": "tensor",
                "inputs": "fp8",
                "static_inputs": True,
            }
        }
    ],
    "int8": [{"quantize": {"bits": 8, "inputs": "int8", "scaling": "smoothquant"}}],
    "int8-outliers": [{"quantize": {"bits": 8, "inputs": "int8", "outliers": 6.0}}],
    "int4-awq": [{"quantize": {"bits": 4, "scaling": "awq"}}],
    "int4-gptq": [{"quantize": {"bits": 4, "rounding": "gptq"}}],
    "int4-awq-gptq": [
        {"quantize": {"bits": 4, "scaling": "awq", "rounding": "gptq", "symmetric": False}}
    ],
    "nvfp4": [{"quantize": {"bits": 4, "kind": "float", "group_size": 16}}],
    "nvfp4-gptq": [
        {"quantize": {"bits": 4, "kind": "float", "group_size": 16, "rounding": "gptq"}}
    ],
    "mxfp4": [{"quantize": {"bits": 4, "kind": "float", "group_size": 32}}],
    "mxfp4-gptq": [
        {"quantize": {"bits": 4, "kind": "float", "group_size": 32, "rounding": "gptq"}}
    ],
    "2:4": [{"sparsify": {"pattern": "2:4"}}],
    "2:4-int8": [{"sparsify": {"pattern": "2:4"}}, {"quantize": {"bits": 8, "inputs": "int8"}}],
    "int4-learned": [{"quantize": {"bits": 4, "rounding": "learned"}}],
    "draft:eagle3": [{"draft_head": {"kind": "eagle3"}}],
    "draft:medusa": [{"draft_head": {"kind": "medusa"}}],
    "lora": [{"lora": {}}],
}
"""Presets by name. Further names: `w4a16-mixed:Xbpw` (X bits per weight on average), `draft:1/3` or
`draft:small` (a draft model with this fraction of the parameters), `gguf:TYPE` and `gguf:Xbpw`."""

OTHERS = {
    "awq": "int4-awq",
    "gptq": "int4-gptq",
    "w4a16": "int4-gptq",
    "w8a8": "int8",
    "smoothquant": "int8",
}
"""Our preset for each name that other libraries use."""

_DRAFT = re.compile(r"draft:(\d+)/(\d+)")
_BITS = re.compile(r"(\d+(?:\.\d+)?)BPW")
_MIXED = re.compile(r"w4a16-mixed:(\d+(?:\.\d+)?)bpw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The steps of a compression. `name` is that of the preset or the file."""

    steps: tuple[Step, ...]
    name: str = "custom"

    def one(self, kind: type[S]) -> S | None:
        """The step of this class, or None."""
        return next((s for s in self.steps if isinstance(s, kind)), None)

    @property
    def budget(self) -> Budget | None:
        """The budget of bits, if `quantize` has one."""
        quantize = self.one(Quantize)
        return quantize.bits if quantize is not None and isinstance(quantize.bits, Budget) else None

    @property
    def calibration(self) -> Calibrate:
        """Calibration text of the recipe, or the default one."""
        return self.one(Calibrate) or Calibrate()

    @property
    def calibration_windows(self) -> int:
        """Number of calibration windows: the recipe's; else few for SmoothQuant before rounding to nearest, which
        needs only maxima and a sample; else many, because AWQ and GPTQ need Hessians, and others were not compared."""
        if (asked := self.calibration.num_windows) is not None:
            return asked
        quantize = self.one(Quantize)
        if (
            quantize is None
            or quantize.scaling != "smoothquant"
            or quantize.outliers is not None
            or quantize.static_inputs
            or any(own.get("static_inputs") for own in quantize.overrides.values())
            or self.budget is not None
            or not all(isinstance(step, (Calibrate, Quantize, Rotate)) for step in self.steps)
        ):
            return MANY_WINDOWS
        kinds = [quantize.rounding, *(o.get("rounding") for o in quantize.overrides.values())]
        return FEW_WINDOWS if set(kinds) <= {"nearest", None} else MANY_WINDOWS

    @property
    def num_windows(self) -> int:
        """Number of windows that calibration and training need."""
        qat = self.one(QAT)
        return max(self.calibration_windows, 0 if qat is None else qat.num_windows or 0)

    @property
    def reshapes(self) -> bool:
        """Whether it has steps that change the model's shape (`pipeline`)."""
        return any(isinstance(step, (PruneSettings, Distill)) for step in self.steps)

    def as_data(self) -> list[dict[str, Any]]:
        """Data from which `parse` makes this recipe, with every setting."""
        return [{STEP_NAMES[type(step)]: plain(step)} for step in self.steps]


def read_recipe(given: str) -> Recipe:
    """A preset by name, or a YAML file."""
    if (steps := preset(given)) is not None:
        return parse(steps, name=given)
    path = Path(given).expanduser()
    if not path.is_file():
        names = [
            *PRESETS,
            "w4a16-mixed:3.5bpw",
            "draft:1/3",
            *(f"gguf:{kind}" for kind in (*MIXES, "4.5bpw")),
        ]
        hint = likely_value(OTHERS.get(given.lower(), given), names)
        raise ConfigError(
            f"recipe={given!r} is neither a file nor a preset; presets are {', '.join(names)}{hint}",
            field="recipe",
        )
    try:
        data = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"recipe {path} can't be read as YAML: {error}", field="recipe"
        ) from error
    return parse(data, name=path.name)


def recipe_of(checkpoint: Path) -> Recipe | None:
    """Recipe that made a checkpoint; None if there is none. ConfigError if this version can't read it."""
    file = checkpoint / RECIPE_NAME
    if not file.is_file():
        return None
    try:
        return parse(parse_json(file.read_bytes()))
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{file} is not a recipe that this version can read: {error}", field=RECIPE_NAME
        ) from error


BACK_OFF = ("Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
"""GGUF types that --back-off tries, in this order."""


def more_bits(recipe: Recipe) -> list[Recipe]:
    """Recipes with one more bit, two more bits, … up to 8; for a budget in steps of half a bit up
    to its largest choice."""
    quantize, blocks = recipe.one(Quantize), recipe.one(GGUF)
    if blocks is not None:
        later = list(MIXES)[list(MIXES).index(blocks.name) + 1 :]
        tried: list[tuple[str, GGUF]] = [
            (kind, dataclasses.replace(blocks, type=kind))
            for kind in MIXES
            if kind in BACK_OFF and kind in later
        ]
        if blocks.bits is not None:
            more = [blocks.bits + i / 2 for i in range(1, int(2 * (8.5 - blocks.bits)) + 1)]
            tried = [(f"{bits:g} bits", dataclasses.replace(blocks, bits=bits)) for bits in more]
        return [
            Recipe(
                steps=tuple(own if step is blocks else step for step in recipe.steps),
                name=f"{recipe.name} with {shown}",
            )
            for shown, own in tried
        ]
    if quantize is None:
        return []

    def changed(bits: int | Budget, shown: str) -> Recipe:
        own = dataclasses.replace(quantize, bits=bits)
        steps = tuple(own if step is quantize else step for step in recipe.steps)
        return dataclasses.replace(recipe, steps=steps, name=f"{recipe.name} with {shown} bits")

    if quantize.kind == "float":
        return []
    if isinstance(quantize.bits, int):
        return [changed(bits, str(bits)) for bits in range(quantize.bits + 1, 9)]
    budget, found = quantize.bits, []
    average = budget.average + 0.5
    while average < max(budget.choices):
        found.append(changed(dataclasses.replace(budget, average=average), f"{average:g}"))
        average += 0.5
    return found


def preset(name: str) -> list[Any] | None:
    if found := _MIXED.fullmatch(name):
        return [{"quantize": {"bits": {"average": float(found[1])}, "rounding": "gptq"}}]
    name = "draft:1/3" if name == "draft:small" else name
    if (found := _DRAFT.fullmatch(name)) and 0 < int(found[1]) < int(found[2]):
        steps = {
            "num_steps": 4000,
            "batch_size": 32,
            "micro_batch": 8,
            "learning_rate": 1e-3,
            "num_windows": 16384,
        }
        return [
            {"prune": {"size": int(found[1]) / int(found[2])}},
            {"distill": {**steps, "state_weight": 0.1}},
        ]
    if name.lower().startswith("gguf:"):
        kind = name[len("gguf:") :].upper()
        if found := _BITS.fullmatch(kind):
            return [{"gguf": {"bits": float(found[1])}}]
        return [{"gguf": {"type": kind}}]
    return PRESETS.get(name)


def parse(steps: Any, *, name: str = "custom") -> Recipe:
    """Build a recipe from plain data. ConfigError names the path of a wrong setting."""
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        raise ConfigError(
            "a recipe is a list of steps, each a name or a name with settings", field="steps"
        )
    found: list[Step] = []
    for i, given in enumerate(steps):
        where = f"steps[{i}]"
        if isinstance(given, tuple(STEPS.values())):
            found.append(checked(given, where))
            continue
        if isinstance(given, str):
            given = {given: {}}
        if not isinstance(given, Mapping) or len(given) != 1:
            raise ConfigError(
                f"{where} must be a step's name, or one name with its settings", field=where
            )
        ((kind, settings),) = given.items()
        if kind not in STEPS:
            raise ConfigError(f"{where}: {kind!r} is no step; {', '.join(STEPS)} are", field=where)
        found.append(build(STEPS[kind], settings or {}, f"{where}.{kind}"))
    for kind in {type(s) for s in found}:
        if sum(isinstance(s, kind) for s in found) > 1:
            raise ConfigError(
                f"the recipe has the step {kind.__name__} twice; say it once", field="steps"
            )
    recipe = Recipe(steps=tuple(found), name=name)
    quantize = recipe.one(Quantize)
    blocks = recipe.one(GGUF)
    if (qat := recipe.one(QAT)) is not None:
        if blocks is None and (
            quantize is None or quantize.static_inputs or quantize.group_size == "tensor"
        ):
            raise ConfigError(
                "qat needs a gguf step before it, or a quantize step with scales by row or group and without static_inputs",
                field="qat",
            )
        if quantize is not None and quantize.kind == "float" and quantize.bits == 4:
            raise ConfigError(
                "qat trains integers and 8-bit floats; leave it out, or round to those", field="qat"
            )
        least = recipe.calibration_windows
        if qat.num_windows is not None and qat.num_windows < least:
            raise ConfigError(
                f"num_windows={qat.num_windows} is below the {least} of calibrate; give at least as many",
                field="qat",
            )
    layers = [kind for kind in LAYER_STEPS if recipe.one(kind) is not None]
    if [type(s) for s in found if isinstance(s, LAYER_STEPS)] != layers:
        order = ", ".join(STEP_NAMES[kind] for kind in layers)
        raise ConfigError(f"list these steps in the order {order}", field="steps")
    fixed = quantize is not None and isinstance(quantize.bits, int) and recipe.one(QAT) is None
    if recipe.one(Rotate) is not None and not fixed:
        raise ConfigError(
            "rotate needs a quantize step after it, with a number of bits and without qat",
            field="rotate",
        )
    others = [kind for kind in layers if kind is not QAT]
    if blocks is not None and others:
        raise ConfigError(
            f"gguf rounds by itself; leave {STEP_NAMES[others[0]]} out", field="steps"
        )
    if blocks is not None and qat is not None and found.index(blocks) > found.index(qat):
        raise ConfigError("list these steps in the order gguf, qat", field="steps")
    for kind, step in (("draft_head", DraftHead), ("lora", LoRA)):
        if recipe.one(step) is not None and len(found) > 1:
            raise ConfigError(
                f"{kind} leaves the model as it is; it must be a recipe's only step", field="steps"
            )
    if all(isinstance(s, Calibrate) for s in found):
        raise ConfigError("the recipe only calibrates; add a step such as quantize", field="steps")
    return recipe
