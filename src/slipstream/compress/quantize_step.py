"""The step `quantize` of a recipe: formats, methods, and a budget of bits. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from slipstream.compress.step_data import build
from slipstream.compress.steps import require, require_at_least, require_inside, require_share
from slipstream.errors import ConfigError
from slipstream.spec.scheme import FORMATS, RowFormat, WeightFormat

GroupSize: TypeAlias = int | Literal["auto", "channel", "tensor"]


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
    # GPTQ: calibrate each linear layer after the layer's earlier ones were quantized
    true_sequential: bool = True
    # SmoothQuant: the fraction of magnitude moved to the weights
    alpha: float | Literal["search"] = "search"
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
