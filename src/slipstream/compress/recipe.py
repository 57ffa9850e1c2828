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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from slipstream.base.arguments import likely_value
from slipstream.base.files import parse_json, read_yaml
from slipstream.compress.gguf.mix import GGUF, MIXES
from slipstream.compress.steps import (
    Distill,
    DraftHead,
    LoRA,
    PruneSettings,
    Sparsify,
    require,
    require_at_least,
    require_inside,
    require_share,
)
from slipstream.errors import ConfigError
from slipstream.evals.text import DEFAULT_TEXT
from slipstream.spec.scheme import FORMATS, RowFormat, WeightFormat

RECIPE_NAME = "slipstream-recipe.json"
"""File in a compressed checkpoint with the recipe that made it."""

FEW_WINDOWS, MANY_WINDOWS = 16, 64
"""Number of calibration windows, unless a recipe sets it. With 16 and with 64, SmolLM2's int8 has a mean KL
of 0.0073 and 0.0074 nats, and its int4-awq-gptq one of 0.120 and 0.098. Others have not been compared."""

GroupSize: TypeAlias = int | Literal["auto", "channel", "tensor"]


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
class Budget:
    """Allocates bits to linear layers (`quantize.mixed`): at most `average` bits per weight, scales
    and zero points included, for the least measured KL divergence."""

    average: float
    choices: tuple[int, ...] = (2, 3, 4, 6, 8)
    num_windows: int = 4
    context: int = 256  # tokens of each window

    @property
    def nearest(self) -> int:
        """The choice of bits nearest to the average."""
        return min(self.choices, key=lambda bits: (abs(bits - self.average), bits))

    def check(self) -> None:
        require(
            self,
            lambda choices: set(choices) <= set(range(2, 9)),
            "numbers of bits from 2 to 8",
            "choices",
        )
        if len(set(self.choices)) < 2:
            raise ConfigError("choices needs two numbers of bits or more", field="choices")
        if not min(self.choices) < self.average <= max(self.choices) + 1:
            raise ConfigError(
                f"average={self.average} must lie between the fewest and most bits of choices",
                field="average",
            )
        require_at_least(self, 1, "num_windows")
        require_at_least(self, 2, "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """Quantizes the weights of linear layers, and with `head` that of the output head.

    `inputs`: with fp8 or int8, inputs are quantized to 8 bits too, with a scale per token, or one calibrated scale with
    `static_inputs`. `scaling` moves magnitude between inputs and weights before rounding. `rounding` is the method of
    choosing codes. `clip` searches each scale for the least squared error. A `group_size` of auto is the largest of 128, 64
    and 32 that divides the number of inputs, or a whole row (channel) with 8-bit inputs. `overrides` change format and
    rounding of linear layers by name pattern.
    """

    bits: int | Budget = 4
    kind: Literal["int", "float"] = "int"
    group_size: GroupSize = "auto"
    symmetric: bool = True
    inputs: RowFormat | None = None
    static_inputs: bool = False
    rounding: Literal["nearest", "gptq", "learned"] = "nearest"
    scaling: Literal["awq", "smoothquant"] | None = None
    clip: bool = True
    head: bool = False
    ignore: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    damping: float = 0.01  # GPTQ: added to the Hessian's diagonal, as a fraction of its mean
    act_order: bool = True  # GPTQ: columns of large inputs first
    true_sequential: bool = (
        True  # GPTQ: calibrate each linear layer after the layer's earlier ones were quantized
    )
    alpha: float | Literal["search"] = (
        "search"  # SmoothQuant: the fraction of magnitude moved to the weights
    )
    begin: Literal["nearest", "gptq"] = "nearest"  # initial codes of learned rounding
    num_steps: int = 200  # learned rounding
    step_tokens: int = 2048  # learned rounding
    # LLM.int8(): input columns that reach this magnitude are not quantized
    outliers: float | None = None
    # fraction of the change of a linear layer's inputs that its weight compensates
    catch_up: float = 0.0

    def check(self) -> None:
        if isinstance(self.bits, Budget):
            self.bits.check()
            if self.kind != "int" or self.inputs is not None:
                raise ConfigError(
                    "a budget of bits is for integer weights with inputs in the model's type",
                    field="bits",
                )
        else:
            _format(self)
        if self.static_inputs and self.inputs is None:
            raise ConfigError("static_inputs needs inputs: fp8 or int8", field="static_inputs")
        if self.scaling == "smoothquant" and self.inputs is None:
            raise ConfigError(
                "smoothquant is for rounded inputs: set inputs: int8 or fp8, or use awq",
                field="scaling",
            )
        if self.outliers is not None and (
            self.inputs != "int8" or self.static_inputs or self.outliers <= 0
        ):
            raise ConfigError(
                f"outliers={self.outliers} must be above 0, and needs inputs: int8 without static_inputs",
                field="outliers",
            )
        if isinstance(self.alpha, float) and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} must lie between 0 and 1", field="alpha")
        require_inside(self, "damping")
        require_at_least(self, 1, "num_steps", "step_tokens")
        require_share(self, "catch_up")
        for pattern, given in self.overrides.items():
            unknown = given.keys() - OVERRIDABLE
            if unknown:
                raise ConfigError(
                    f"{min(unknown)!r} can't be overridden; {', '.join(sorted(OVERRIDABLE))} can",
                    field=f"overrides.{pattern}",
                )
            base = {name: value for name, value in _shallow(self).items() if name in OVERRIDABLE}
            own = build(Quantize, {**base, **given}, f"overrides.{pattern}")
            if isinstance(own.bits, Budget):
                raise ConfigError("bits must be a number here", field=f"overrides.{pattern}.bits")

    def of(self, product: str) -> Quantize | None:
        """Settings of a linear layer; None if it is not quantized."""
        if any(fnmatchcase(product, pattern) for pattern in self.ignore) or (
            product == "head" and not self.head
        ):
            return None
        found = self
        for pattern, given in self.overrides.items():
            if fnmatchcase(product, pattern):
                found = build(
                    Quantize, {**_shallow(found), "overrides": {}, **given}, f"overrides.{pattern}"
                )
        return found

    def format(self, inner: int, bits: int | None = None) -> WeightFormat:
        """Format of a linear layer with `inner` inputs; `bits` if a budget allocated them. ConfigError if groups don't
        divide the inputs."""
        found = _format(self, bits)
        if self.group_size == "auto" and self.inputs is None and found.kind == "int":
            size = next((s for s in GROUP_SIZES if inner % s == 0), None)
            return dataclasses.replace(found, group_size=size)
        if found.group_size is not None and inner % found.group_size:
            raise ConfigError(
                f"group_size={found.group_size} does not divide the {inner} inputs of a product; take auto, or override it",
                field="group_size",
            )
        return found

    @property
    def needs_text(self) -> bool:
        """Whether the step needs calibration text."""
        asked = (
            self.rounding,
            *(given.get("rounding", "nearest") for given in self.overrides.values()),
        )
        static = (
            self.static_inputs,
            *(given.get("static_inputs", False) for given in self.overrides.values()),
        )
        return (
            any(r != "nearest" for r in asked)
            or any(static)
            or self.scaling is not None
            or isinstance(self.bits, Budget)
            or self.catch_up > 0
            or self.outliers is not None
        )


GROUP_SIZES = (128, 64, 32)
OVERRIDABLE = frozenset(
    ("bits", "group_size", "symmetric", "rounding", "clip", "kind", "inputs", "static_inputs")
)


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
        return [{STEP_NAMES[type(step)]: _plain(step)} for step in self.steps]


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
            found.append(_checked(given, where))
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


def build(kind: type[Any], settings: Any, where: str) -> Any:
    """Build a step from plain data. ConfigError if a setting is unknown, missing or of another type."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} must be a table of settings", field=where)
    hints = get_type_hints(kind)
    unknown = [k for k in settings if k not in hints]
    if unknown:
        raise ConfigError(
            f"{where} has no setting {unknown[0]!r}; it has {', '.join(hints)}",
            field=f"{where}.{unknown[0]}",
        )
    values = {k: _value(v, hints[k], f"{where}.{k}") for k, v in settings.items()}
    lacking = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if lacking:
        raise ConfigError(f"{where} lacks {lacking[0]!r}", field=f"{where}.{lacking[0]}")
    return _checked(kind(**values), where)


def _checked(step: Any, where: str) -> Any:
    try:
        step.check()
    except ConfigError as error:
        name = f"{where}.{error.field}"
        raise ConfigError(f"{name}: {error.message}", field=name) from None
    return step


def _value(value: Any, hint: Any, where: str) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        origin = get_origin(option)
        if option is type(None) and value is None:
            return None
        if origin is Literal and value in get_args(option) and not isinstance(value, bool):
            return value
        if origin is tuple and isinstance(value, (list, tuple)):
            return tuple(_value(v, get_args(option)[0], where) for v in value)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return dict(value)
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            if isinstance(value, (option, Mapping)):
                return value if isinstance(value, option) else build(option, value, where)
            continue
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if (
            isinstance(option, type)
            and isinstance(value, option)
            and (option is bool or not isinstance(value, bool))
        ):
            return value
    raise ConfigError(f"{where} = {value!r} must be {_describe(options)}", field=where)


def _describe(options: Sequence[Any]) -> str:
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            words.append("a list")
        else:
            plain = hasattr(option, "__name__") and not dataclasses.is_dataclass(option)
            words.append(
                "null" if option is type(None) else option.__name__ if plain else "a table"
            )
    return " or ".join(words)


def _format(q: Quantize, bits: int | None = None) -> WeightFormat:
    bits = bits if bits is not None else q.bits if isinstance(q.bits, int) else 4
    if not 2 <= bits <= 8:
        raise ConfigError(f"bits={bits} must lie between 2 and 8", field="bits")
    if q.kind == "float" and bits not in (4, 8):
        raise ConfigError("kind: float has bits: 8 or 4", field="bits")
    if q.kind == "float" and not q.symmetric:
        raise ConfigError("kind: float is symmetric", field="symmetric")
    if q.kind == "float" and bits == 4:
        return _float4(q)
    if isinstance(q.group_size, int) and q.group_size not in GROUP_SIZES:
        raise ConfigError(
            f"group_size={q.group_size} must be 128, 64, 32, auto, channel or tensor",
            field="group_size",
        )
    if q.inputs is not None:
        if (q.inputs == "fp8") != (q.kind == "float"):
            raise ConfigError(
                f"inputs: {q.inputs} go with kind: {'float' if q.inputs == 'fp8' else 'int'}",
                field="inputs",
            )
        if bits != 8 or not q.symmetric or isinstance(q.group_size, int):
            raise ConfigError(
                "weights that meet 8-bit inputs have bits: 8, symmetric: true, and group_size: channel or tensor",
                field="inputs",
            )
    if q.group_size == "tensor" and q.inputs is None:
        raise ConfigError("group_size: tensor needs 8-bit inputs; use channel", field="group_size")
    return WeightFormat(
        kind=q.kind,
        bits=bits,
        group_size=q.group_size if isinstance(q.group_size, int) else None,
        symmetric=q.symmetric,
        whole=q.group_size == "tensor",
        inputs=q.inputs,
        static_inputs=q.static_inputs,
    )


def _float4(q: Quantize) -> WeightFormat:
    """NVFP4's format, or MXFP4's with groups of 32."""
    if q.group_size not in ("auto", 16, 32):
        raise ConfigError(
            f"group_size={q.group_size} of 4-bit floats must be 16 (NVFP4) or 32 (MXFP4)",
            field="group_size",
        )
    for name, value in (("inputs", q.inputs), ("outliers", q.outliers)):
        if value is not None:
            raise ConfigError(
                f"{name}: inputs of 4-bit floats keep the model's type; leave it out", field=name
            )
    if q.rounding == "learned":
        raise ConfigError(
            "rounding: learned is for integers and 8-bit floats; use gptq", field="rounding"
        )
    return FORMATS["mxfp4-all" if q.group_size == 32 else "nvfp4"]


def _shallow(q: Quantize) -> dict[str, Any]:
    return {f.name: getattr(q, f.name) for f in dataclasses.fields(q)}


def _plain(step: Any) -> dict[str, Any]:
    return {
        f.name: _plain(v) if dataclasses.is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(step)
        for v in (getattr(step, f.name),)
    }
