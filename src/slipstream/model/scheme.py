"""Schemes: how the weights of a layer's products are held, and how their inputs are. Data, no torch.

| scheme | weights | inputs | scales |
| --- | --- | --- | --- |
| `fp8` | float8 e4m3 | float8 e4m3 | one a row of the weight, one a token, made as it comes |
| `int8` | int8 | int8 | the same |
| `int4` | 4 bits, −8 … 7 | the model's type | one a row and group of 128 (or 32) inputs |

All are symmetric: value = code · scale. The largest magnitude of a row falls on the end of the range (of a group of 4-bit
numbers on 7.5, between its two ends), and codes are rounded to nearest. Embeddings, norms and biases keep the
model's type, and so does the output head unless the scheme says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slipstream.errors import UnsupportedModelError

InputFormat: TypeAlias = Literal["fp8", "int8"]
"""An 8-bit form of activations: float8 e4m3 (up to 448) or int8 (up to 127), and a float32 scale a token."""

FORMAT_MAX: dict[InputFormat, float] = {"fp8": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """`inputs` None: the model's own type. `group_size` None: one scale a row of the weight. `head`: the output head too."""

    name: Literal["fp8", "int8", "int4"]
    weight_bits: int
    inputs: InputFormat | None
    group_size: int | None = None
    head: bool = False

    @property
    def multiple(self) -> int:
        """What the number of a product's inputs must be a multiple of."""
        return 16 if self.group_size is None else max(64, self.group_size)

    def weight_bytes(self, rows: int, inner: int) -> int:
        """Bytes of a weight [rows, inner], scales included."""
        groups = 1 if self.group_size is None else inner // self.group_size
        scale_bytes = 4 if self.group_size is None else 2
        return rows * inner * self.weight_bits // 8 + rows * groups * scale_bytes


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("fp8", 8, "fp8"),
    "fp8-head": Scheme("fp8", 8, "fp8", head=True),
    "int8": Scheme("int8", 8, "int8"),
    "int4": Scheme("int4", 4, None, group_size=128),
    "int4-g32": Scheme("int4", 4, None, group_size=32),
}
"""What `quantization=` takes."""


Method: TypeAlias = Literal["compressed-tensors", "gptq", "awq"]
"""Whose tools wrote a rounded checkpoint: how its tensors are called and packed."""


def checkpoint_scheme(config: Mapping[str, Any], *, tied_embeddings: bool) -> tuple[str, Method]:
    """The name in `SCHEMES` of what a `quantization_config` describes, and who wrote it; what it describes beyond that is an
    error that names the field.

    Inputs are always scaled token by token as they come: a checkpoint's own static input scales are not needed, and where
    they were asked for this is the finer way. The cache's type is a setting of the engine, so that its scales are not either.
    """
    read = _Fields(config, "quantization_config")
    read.expect("quant_method", "compressed-tensors", "gptq", "awq")
    if config["quant_method"] == "awq":
        read.expect("bits", 4)
        read.expect("version", "gemm", "GEMM")
        read.expect("zero_point", True)
        read.expect("modules_to_not_convert", None, [], ["lm_head"])
        read.expect("group_size", 128, 32)
        return ("int4" if config["group_size"] == 128 else "int4-g32"), "awq"
    if config["quant_method"] == "gptq":
        read.expect("bits", 4)
        read.expect("sym", True)
        read.expect("desc_act", False, None)
        read.expect("lm_head", False, None)
        read.expect("checkpoint_format", "gptq", "gptq_v2", None)
        read.expect("group_size", 128, 32)
        read.expect("dynamic", None, {})
        return ("int4" if config["group_size"] == 128 else "int4-g32"), "gptq"
    read.expect("format", "float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
    read.expect("quantization_status", "compressed", None)
    for name in ("transform_config", "sparsity_config"):
        read.expect(name, None, {})
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        read.refuse("config_groups", groups)
    (name, group) = next(iter(groups.items()))  # type: ignore[union-attr]
    read = _Fields(group, f"quantization_config.config_groups.{name}")
    read.expect("targets", ["Linear"])
    read.expect("output_activations", None)
    weights = _Fields(group.get("weights") or {}, f"{read.path}.weights")
    weights.expect("symmetric", True)
    weights.expect("dynamic", False, None)
    weights.expect("actorder", None, "static")
    bits, kind, strategy = (weights.values.get(k) for k in ("num_bits", "type", "strategy"))
    inputs = group.get("input_activations")
    if bits == 8 and strategy in ("channel", "tensor") and inputs is not None:
        found = {"float": "fp8", "int": "int8"}.get(str(kind))
        activations = _Fields(inputs, f"{read.path}.input_activations")
        activations.expect("num_bits", 8)
        activations.expect("type", kind)
        activations.expect("symmetric", True)
    elif bits == 4 and kind == "int" and strategy == "group" and inputs is None:
        found = {128: "int4", 32: "int4-g32"}.get(int(weights.values.get("group_size") or 0))
    else:
        found = None
    if found is None:
        weights.refuse("num_bits, type, strategy, group_size", (bits, kind, strategy, weights.values.get("group_size")))
    assert found is not None
    head_is_dense = tied_embeddings or "lm_head" in (config.get("ignore") or ())
    others = [i for i in config.get("ignore") or () if i != "lm_head"]
    if others:
        _Fields(config, "quantization_config").refuse("ignore", others)
    if not head_is_dense and f"{found}-head" not in SCHEMES:
        _Fields(config, "quantization_config").refuse("ignore", "no lm_head")
    return (found if head_is_dense else f"{found}-head"), "compressed-tensors"


class _Fields:
    """Reads an object of the config; what is not supported is refused by its path."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    def expect(self, name: str, *allowed: Any) -> None:
        value = self.values.get(name)
        if value not in allowed:
            self.refuse(name, value)

    def refuse(self, name: str, value: Any) -> None:
        raise UnsupportedModelError(
            f"{self.path}.{name}={value!r} is not supported; use the unquantised checkpoint with quantization=…, or one in FP8 "
            "or INT8 by rows with 8-bit inputs, or in INT4 by groups of 128 or 32",
            field=f"{self.path}.{name}",
        )
