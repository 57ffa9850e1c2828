"""One decode step of one sequence, all layers, in one kernel. `kernel.cu` has the method; this
file decides which decoders it can run, and defines the kernel's constants.

1. All programs (thread blocks) run at once, one per multiprocessor. CUDA refuses the launch if they
   can't.
2. Weights have 16 bits, are FP8 or INT8 with a scale per row, or INT4 with a scale per group.
   Experts can't be INT4. In bfloat16 weights can be NVFP4 or MXFP4, in the order in which
   `float4.py` packs them, and experts MXFP4 next to 16-bit weights. Of GGUF's types those of
   `coded.py`, a type for each product of a layer.
3. Layers may have different windows, in two cache groups.
4. Layers may have the gated delta rule in place of attention, all with the same sizes."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.layouts import LayerTensors, MLAShape, TokenShape
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.tracing.token_shape import OTHER_RANK, inner_sizes, size_refusal
from slipstream.kernels.tracing.token_shape import widths as widths
from slipstream.kernels.triton.cuda import CudaKernel
from slipstream.kernels.triton.one_token import coded
from slipstream.kernels.triton.pointwise import activation_arguments
from slipstream.kernels.weights.forms import (
    CodedLinear,
    Float4Linear,
    GroupedLinear,
    JoinedLinear,
    Linear,
    ScaledLinear,
    chunk_of,
)
from slipstream.kernels.weights.quantize import SMALLEST
from slipstream.platform import platform_of
from slipstream.platform.collectives import RankGroup
from slipstream.platform.cuda import CudaPlatform
from slipstream.platform.meta import MetaPlatform
from slipstream.spec.reason import Reason
from slipstream.spec.recurrent import GatedDeltaSpec

SOURCES = (
    Path(__file__).parents[1] / "instructions.cu",
    *(
        Path(__file__).with_name(f"{part}.cu")
        for part in ("units", "products", "attention", "mla", "experts", "delta", "kernel")
    ),
)
"""Source files, compiled as one text in this order."""
NORMS = {"rms": 1, "layer": 2}
FORMS = {torch.bfloat16: 0, torch.float16: 0, torch.float8_e4m3fn: 1, torch.int8: 3}
GROUPED, MXFP4, NVFP4, CODED = 2, 4, 5, 6
CACHES = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 8, torch.int8: 7}
WARPS = 8
"""Consumer warps of a thread block."""
PRODUCER_WARPS = 2
"""Warps that copy weights."""
RING = {
    0: (1024, 3),
    1: (1024, 3),
    2: (2048, 2),
    3: (1024, 3),
    4: (1024, 4),
    5: (1024, 4),
    6: (1024, 3),
}
"""(STEP_BYTES, DEPTH) by weight format: bytes of a row in a stage of the ring, and the most stages
in flight. Measured on an H200, except those of 4-bit floats."""
MAX_SPLITS = 64
ONE_HEAD_KEYS = 4096
"""Maximum length of a sequence, in tokens, for which a thread block attends over latents for one head."""
HEADS_PER_BLOCK = 4
"""Heads per thread block in sequences longer than ONE_HEAD_KEYS, if it divides their number."""
MAX_LATENT_SPLITS = 32
LATENT_DEPTH = 6
"""Stages in flight during latent attention. There may be more than elsewhere, because most rows
come from L2."""

POINTERS = (
    *(
        "norm",
        "norm_bias",
        "mlp_norm",
        "mlp_norm_bias",
        "q_norm",
        "k_norm",
        "k",
        "v",
        "k_scale",
        "v_scale",
    ),
    *(
        f"{name}{part}"
        for name in ("qkv", "out", "up", "down")
        for part in ("", "_scales", "_bias")
    ),
    *(
        "router",
        "router_bias",
        "correction",
        "shared_up",
        "shared_up_scales",
        "shared_down",
        "shared_down_scales",
    ),
    *("shared_weight", "expert_counts", "logits"),
    *("latent", "latent_scales", "latent_bias", "keys", "values"),
    *("sinks", "window", "table", "up_factor", "down_factor"),
    *("gates", "conv", "conv_bias", "decay", "time", "delta_norm", "conv_states", "states"),
    *(
        f"{name}_rows"
        for name in ("qkv", "out", "up", "down", "latent", "shared_up", "shared_down")
    ),
    "form_numbers",
)
"""Entries of a layer's row in the kernel's table, in order; 0 for a tensor that the layer lacks.
With latent attention `qkv` makes queries only, `k_norm` norms the latent, and `v` is a view of `k`.
Of a recurrent layer `qkv` makes the inputs of the rule and its gate. Not pointers: `window`, `table`
(number of the block table), and factors of MXFP4 experts. `rows` of 4-bit floats: see
`Float4Linear.row_factors`. In GGUF's types `qkv` makes queries and keys and `latent` values, and
`rows` are codes' high bits (`coded.py`)."""


def form_of(product: Linear) -> int:
    """Returns the number that the kernel's source has for a weight's format."""
    if isinstance(product, CodedLinear | JoinedLinear):
        return CODED
    if isinstance(product, Float4Linear):
        return NVFP4 if product.group_size == 16 else MXFP4
    return GROUPED if isinstance(product, GroupedLinear) else FORMS[product.weight.dtype]


def refusal(
    shape: TokenShape, product: Linear, rotary: int | None, experts: Linear | None = None
) -> Reason | None:
    """Return why the kernel can't run such layers on any device; None if it can. `experts`: see
    `OpSet.one_token`."""
    s, grouped = shape, isinstance(product, GroupedLinear)
    if isinstance(product, GroupedLinear):
        if product.codes != "int4" or product.zeros is not None:
            return Reason("the one-token kernel has no 4-bit weights with zero points or of floats")
    elif type(product) not in (Float4Linear, CodedLinear, JoinedLinear) and (
        type(product) not in (Linear, ScaledLinear) or product.weight.dtype not in FORMS
    ):
        kind = f"{type(product).__name__} of {product.weight.dtype}".replace("torch.", "")
        return Reason(f"the one-token kernel has no product with a {kind}")
    if s.latent is not None and not covers_latents(s, s.latent, form_of(product)):
        return Reason("the one-token kernel has no latent attention of these sizes")
    if grouped and s.experts is not None:
        return Reason("the one-token kernel has no 4-bit experts")
    if experts is not None and not (
        isinstance(experts, Float4Linear) and product.weight.dtype == torch.bfloat16
    ):
        return Reason(
            "the one-token kernel has experts that are held as other products are, or 4-bit floats beside bfloat16"
        )
    if isinstance(product, GroupedLinear) and not all(
        chunk_of(n, product.group_size) >= 128 for n in inner_sizes(s)
    ):
        return Reason(
            "the one-token kernel reads 4-bit weights in chunks of 128, and the model's are shorter"
        )
    if form_of(product) == CODED:
        return coded.shape_refusal(s) or size_refusal(s, 4, rotary)
    if isinstance(product, Float4Linear):  # rows are filled up
        return size_refusal(s, 16, rotary)
    return size_refusal(s, 4 if grouped else product.weight.dtype.itemsize * 8, rotary)


def down_inputs(s: TokenShape) -> int:
    """Maximum number of inputs of a layer's down projections."""
    dense, expert, shared = widths(s)
    return max(dense, 0 if s.experts is None else s.experts.num_experts_per_token * expert + shared)


def covers_latents(shape: TokenShape, latent: MLAShape, form: int) -> bool:
    """Whether the kernel supports latent attention of these sizes."""
    queries, row = (
        shape.num_heads * (latent.nope_dim + latent.rotary_dim),
        latent.rank + latent.rotary_dim,
    )
    return (
        latent.rotary_dim % 8 == 0
        and 0 < latent.rotary_dim <= 64
        and latent.rank % 256 == 0
        and 0 < latent.rank * 2 <= RING[form][0]
        and latent.nope_dim % 16 == queries % 16 == row % 16 == 0
    )


def heads_per_block(shape: TokenShape) -> int:
    """Number of heads for which one program attends in a long sequence of latents."""
    return HEADS_PER_BLOCK if shape.num_heads % HEADS_PER_BLOCK == 0 else 1


def delta_columns(d: GatedDeltaSpec, programs: int) -> int:
    """Number of columns of a head's state that one program computes: the smallest for which there
    are enough programs, with at least 1,024 elements."""
    parts = 1
    while (
        d.num_heads * parts * 2 <= programs
        and d.key_dim * d.value_dim // parts >= 2048
        and d.value_dim // parts >= 16
    ):
        parts *= 2
    return d.value_dim // parts


def stages(shape: TokenShape, product: Linear, shared_bytes: int) -> int:
    """Number of the ring's stages that fit in shared memory next to a product's input, or next to
    attention with any cache type. The kernel needs three. `products.cu` computes the same sizes at
    its top."""
    s, heads = shape, shape.num_heads // shape.num_kv_heads
    values = 0 if s.delta is None else s.delta.v_size
    widest = max(s.hidden_size, down_inputs(s), s.num_heads * s.head_dim, values)
    form = form_of(product)
    step_bytes = RING[form][0]
    stage, row, sums = 16 * (step_bytes + 64), widest * (1 if form == FORMS[torch.int8] else 2), 0
    if isinstance(product, GroupedLinear):
        stage, sums = stage + step_bytes * 2 // product.group_size * 32, widest // 32 * 4
    if form == CODED:
        stage, row, sums = coded.MAX_STAGE, row + 32, coded.sum_bytes(widest)
    if isinstance(product, Float4Linear):
        stage = step_bytes * (18 if form == NVFP4 else 17)
    attention = 0
    rows = 4 + heads + WARPS * heads  # of float32; and the queries, of 16 bits
    attention = 4 * (heads * s.head_dim // 2 + rows * s.head_dim + (2 * WARPS + 1) * 8)
    if (own := s.latent) is not None:
        row_of_cache = own.rank + own.rotary_dim
        attention = 4 * (
            (heads_per_block(s) + 1) * row_of_cache + own.nope_dim + WARPS * (own.rank + 2)
        )
    if s.delta is not None:
        rule = 4 * (2 * s.delta.key_dim + (1 + 2 * WARPS) * s.delta.value_dim)
        attention = max(attention, rule)
    # barriers, pointers, tiles' sums, scratch; alignment
    other = 512 + 2 * 8 * 64 + 2 * WARPS * 16 * 4 + 256 + 2 * 128
    if s.experts is not None:
        other += s.experts.num_experts_per_token * 128 + (s.experts.num_experts + 4) * 4
    return (shared_bytes - other - sums - max(row, attention)) // stage


def one_token(
    shape: TokenShape,
    layers: Sequence[LayerTensors],
    product: Linear,
    cos_sin: Tensor | None,
    group: RankGroup | None = None,
    experts: Linear | None = None,
) -> OneTokenStep | Reason:
    """`OpSet.one_token`, for an op set without `deterministic`."""
    reason = _refusal_here(shape, layers, product, cos_sin, group, experts)
    if group is not None and not group.least(reason is None)[0]:  # `share` would wait for all ranks
        return reason or OTHER_RANK
    if reason is not None:
        return reason
    platform = platform_of(product.weight.device)
    return OneTokenStep(
        shape,
        layers,
        product,
        cos_sin,
        programs=platform.multiprocessors,
        shared_bytes=platform.shared_bytes,
        group=group,
        shared=() if group is None else group.share(shared_size(shape, group.size)),
        experts=experts,
    )


def _refusal_here(
    shape: TokenShape,
    layers: Sequence[LayerTensors],
    product: Linear,
    cos_sin: Tensor | None,
    group: RankGroup | None,
    experts: Linear | None,
) -> Reason | None:
    """Return why the kernel can't run on this rank's device; None if it can."""
    device = product.weight.device
    if not platform_of(device).arch.one_token_kernel:
        return Reason("the one-token kernel needs a Hopper GPU", notable=False)
    if len(layers) < 2:
        return Reason("the one-token kernel needs two layers or more")
    if (
        reason := refusal(shape, product, None if cos_sin is None else cos_sin.shape[1], experts)
    ) is not None:
        return reason
    if form_of(product) == CODED:
        if group is not None:
            return Reason("the one-token kernel of several ranks has no GGUF types")
        if (reason := coded.refusal(layers, shape)) is not None:
            return reason
    platform = platform_of(device)
    programs, shared_bytes = platform.multiprocessors, platform.shared_bytes
    if shape.num_kv_heads > programs:  # a program attends for at most one kv head
        return Reason(
            f"the one-token kernel has {programs} programs here, and the model {shape.num_kv_heads} kv heads"
        )
    if (d := shape.delta) is not None and (
        d.num_heads > programs or d.key_dim * delta_columns(d, programs) > 16384
    ):
        return Reason(
            f"the one-token kernel has {programs} programs here, too few for the states of {d.num_heads} heads"
        )
    if stages(shape, experts or product, shared_bytes) < 3:
        return Reason(
            "the one-token kernel's ring of weights does not fit into shared memory beside rows of this width"
        )
    if group is not None and group.peer_collectives is None:
        return Reason(
            "the one-token kernel of several ranks writes to peers' memory, which can't be mapped here"
        )
    return None


def shared_size(shape: TokenShape, num_ranks: int) -> int:
    """Bytes of the memory that a rank shares with the others (`Ranks` in the source): partial sums,
    and a counter."""
    return (2 * num_ranks * shape.hidden_size + 4) * 4


def by_tiles(layer: LayerTensors, *, gated: bool) -> LayerTensors:
    """A layer of grouped weights with its scales [in / group_size, out] copied into the kernel's
    reading order [tile, group, 16]. A gated tile has 8 gates and their 8 ups."""
    found = dict(layer)
    for name in ("qkv", "latent", "out", "up", "down"):
        scales = layer.get(f"{name}_scales")
        if not isinstance(scales, Tensor):
            continue
        sides = 2 if name == "up" and gated else 1
        tiles = scales.view(len(scales), sides, -1, 16 // sides).permute(2, 0, 1, 3)
        found[f"{name}_scales"] = tiles.reshape(-1, len(scales), 16).contiguous()
    return found


def by_rows(layer: LayerTensors) -> LayerTensors:
    """A layer with its `values` [H, rank, V], which project latents to values, copied to [H, V,
    rank], so that rows are contiguous."""
    values = layer["values"]
    assert isinstance(values, Tensor)
    return {**layer, "values": values.transpose(1, 2).contiguous()}


class OneTokenStep:
    """The function of `OpSet.one_token`, run by `programs` thread blocks with `shared_bytes` of
    shared memory each. The tensors of `layers` must not move. One stream only."""

    def __init__(
        self,
        shape: TokenShape,
        layers: Sequence[LayerTensors],
        product: Linear,
        cos_sin: Tensor | None,
        *,
        programs: int,
        shared_bytes: int,
        group: RankGroup | None = None,
        shared: Sequence[Tensor] = (),
        experts: Linear | None = None,
    ) -> None:
        """`shared`: for each rank of `group` its zeroed memory of `shared_size` bytes, as mapped by
        this rank."""
        self.shape = s = shape
        self.layers, self.product, self.cos_sin, self.experts = layers, product, cos_sin, experts
        self.num_tables = 1 + max(int(layer.get("table") or 0) for layer in layers)
        self.device = device = product.weight.device
        self.programs, self.shared_bytes = programs, shared_bytes
        self.splits = max(1, min(MAX_SPLITS, self.programs // s.num_kv_heads))
        if s.latent is not None:
            self.splits = max(
                1, min(MAX_LATENT_SPLITS, self.programs // (s.num_heads // heads_per_block(s)))
            )
            self.layers = [by_rows(layer) for layer in layers]
        if form_of(product) == CODED:
            self.layers = [coded.tensors(layer, s) for layer in layers]
        if isinstance(product, GroupedLinear):
            self.layers = [by_tiles(layer, gated=s.gated) for layer in self.layers]
        norm = layers[0]["norm"]
        assert isinstance(norm, Tensor)
        self.dtype = norm.dtype
        q = s.num_heads * s.head_dim
        made = (s.num_heads * (1 + s.output_gate) + 2 * s.num_kv_heads) * s.head_dim
        if (own := s.latent) is not None:
            made = s.num_heads * (own.nope_dim + own.rotary_dim) + own.rank + own.rotary_dim
        values = gates = 0
        if s.delta is not None:
            values, gates = s.delta.v_size, 2 * s.delta.num_heads
            made = max(made, s.delta.conv_channels + values)
        # and the output of attention
        self._qkv = torch.zeros(made + q, dtype=self.dtype, device=device)
        self._mid = torch.zeros(down_inputs(s), dtype=self.dtype, device=device)
        # in recurrent layers: the rule's results, and its gates
        self._partials = torch.zeros(max(self.splits * q, values), device=device)
        self._softmax = torch.zeros(max(self.splits * s.num_heads * 2, gates), device=device)
        num_logits = 0 if s.experts is None else s.experts.num_experts + 1
        self._logits = torch.zeros(num_logits, dtype=torch.float32, device=device)
        self._counters = torch.zeros(4 + s.num_kv_heads, dtype=torch.int32, device=device)
        self.rank, self.num_ranks = (0, 1) if group is None else (group.rank, group.size)
        self._peers = shared  # they stay mapped as long as they are referenced
        self._shared = torch.tensor([x.data_ptr() for x in shared] or [0], dtype=torch.int64).to(
            device
        )
        self._kv: Sequence[LayerKV] | None = None
        self._kernels: dict[
            tuple[torch.dtype, int], Callable[[int, int, Sequence[Tensor | int]], None]
        ] = {}
        # a captured graph reads the table that it was captured with
        self._tables: list[Tensor] = []
        self._held: list[Tensor] = []

    def __call__(self, x: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """x [1, E], the input of the first layer → the residual after the last layer [1, E], in
        place."""
        if self._kv is not kv:
            self._kv = kv
            self._tables.append(self._table(kv))
        attended = next(x for x in kv if x.state is None)
        key = attended.k.dtype, attended.block_size
        if key not in self._kernels:
            self._kernels[key] = self.compiled(self.definitions(*key))
        cos_sin = self._partials if self.cos_sin is None else self.cos_sin
        tensors = (
            x,
            self._tables[-1],
            self._qkv,
            self._mid,
            self._partials,
            self._softmax,
            self._counters,
            cos_sin,
        )
        first, second = (meta.of_group(i % self.num_tables).block_table for i in range(2))
        states = (self._counters,) * 2  # not read
        if meta.states is not None:
            states = meta.states.read, meta.states.write
        steps = (meta.positions, first, meta.seq_lens, self._shared, second, *states)
        self._kernels[key](
            self.programs, (WARPS + PRODUCER_WARPS) * 32, (*tensors, *steps, len(self.layers))
        )
        return x

    def compiled(
        self, definitions: Mapping[str, int | float]
    ) -> Callable[[int, int, Sequence[Tensor | int]], None]:
        platform = platform_of(self.product.weight.device)
        assert isinstance(platform, CudaPlatform | MetaPlatform)
        return CudaKernel(
            platform, SOURCES, "one_token", definitions, shared_bytes=self.shared_bytes
        )

    def definitions(self, cache: torch.dtype, block_size: int) -> dict[str, int | float]:
        """C macros: the values of the names in capitals in the kernel's source."""
        s, w = self.shape, self.product
        layer = next(x for x in self.layers if x.get("gates") is None)  # with attention
        dense, expert, _ = widths(s)
        sizes = {"E": s.hidden_size, "Q": s.num_heads * s.head_dim, "F": dense or expert}
        sizes["V"] = sizes["Q"] if s.delta is None else s.delta.v_size
        own = s.latent or MLAShape(nope_dim=0, rotary_dim=0, rank=0, eps=0.0)
        if s.latent is not None and CACHES[cache] != 16:
            raise ConfigError(
                "latent attention has no 8-bit cache; use kv_cache_dtype='auto'",
                field="kv_cache_dtype",
            )
        grouped = isinstance(w, GroupedLinear)
        forms = (
            coded.masks(self.layers) if form_of(w) == CODED else dict.fromkeys(coded.PRODUCTS, 0)
        )
        # the other formats do not read it
        size = w.group_size if isinstance(w, GroupedLinear) else 128
        form = form_of(w)
        activate: Any = activation_arguments(s.activation)
        return {
            "E": s.hidden_size,
            "F": dense or expert,
            "H": s.num_heads,
            "HK": s.num_kv_heads,
            "D": s.head_dim,
            "R": 0 if self.cos_sin is None else self.cos_sin.shape[1],
            "BLOCK_SIZE": block_size,
            "CACHE": CACHES[cache],
            "FORM": form,
            "EXPERT_FORM": form if self.experts is None else form_of(self.experts),
            **{f"{name.upper()}_FORMS": mask for name, mask in forms.items()},
            "ALL_FORMS": functools.reduce(operator.or_, forms.values()),
            "STEP_BYTES": RING[form][0],
            "DEPTH": RING[form][1],
            "GROUP": size,
            **{
                f"CODES_{name}": chunk_of(n, size) if grouped else size for name, n in sizes.items()
            },
            "HALF": self.dtype == torch.float16,
            "KIND": activate["KIND"],
            "ALPHA": activate["alpha"],
            "LIMIT": activate["limit"],
            "GATED": s.gated,
            "PARALLEL": s.parallel,
            "NORM": NORMS[s.norm],
            "MLP_NORM": NORMS[s.norm] if s.mlp_norm else 0,
            "NORM_BIAS": layer.get("norm_bias") is not None,
            "QK_NORM": layer.get("q_norm") is not None,
            "SINKED": layer.get("sinks") is not None,
            "OUTPUT_GATE": s.output_gate,
            **self._delta(),
            "WINDOWS": any(x.get("window") for x in self.layers),
            "TABLES": self.num_tables,
            **{
                f"{name.upper()}_BIAS": layer.get(f"{name}_bias") is not None
                for name in ("qkv", "out", "up", "down")
            },
            **self._mixture(),
            "INTERLEAVED": s.interleaved,
            "EPS": float(s.norm_eps),
            "MLP_EPS": float(s.mlp_norm_eps),
            "NORM_OFFSET": float(s.norm_offset),
            "QK_EPS": float(s.qk_eps),
            "QK_OFFSET": float(s.qk_offset),
            "SCALE": float(s.scale),
            "LATENT": s.latent is not None,
            "NOPE": own.nope_dim,
            "RANK": own.rank,
            "LATENT_EPS": float(own.eps),
            "ONE_HEAD_KEYS": ONE_HEAD_KEYS,
            "LATENT_DEPTH": LATENT_DEPTH,
            "HEADS_PER_BLOCK": heads_per_block(s),
            "SMALLEST": SMALLEST,
            "SPLITS": self.splits,
            "THIS_RANK": self.rank,
            "RANKS": self.num_ranks,
            "CTAS": self.programs,
            "SHARED": self.shared_bytes,
            "WARPS": WARPS,
            "PRODUCER_WARPS": PRODUCER_WARPS,
        }

    def _mixture(self) -> dict[str, int | float]:
        """C macros for layers with experts."""
        m, (dense, expert, shared) = self.shape.experts, widths(self.shape)
        return {
            "X": 0 if m is None else m.num_experts,
            "TOP": 1 if m is None else m.num_experts_per_token,
            "FE": expert or dense,
            "FS": shared,
            "DENSE": dense > 0,
            "SIGMOID": m is not None and m.scores == "sigmoid",
            "CORRECTED": m is not None and bool(m.correction),
            "NORMALIZE": m is not None and m.normalize,
            "WEIGHT_SCALE": 1.0 if m is None else float(m.weight_scale),
            "ROUTER_BIAS": m is not None and m.router_bias,
            "WEIGHED": m is not None and m.shared is not None and m.shared.weighed,
        }

    def _delta(self) -> dict[str, int | float]:
        """C macros for layers with the gated delta rule."""
        d = self.shape.delta
        if d is None:
            names = "HEADS KEY_HEADS K V WIDTH COLUMNS SCALE EPS TWICE SIGMOID CONV_BIAS"
            return dict.fromkeys(("DELTA", *(f"DELTA_{name}" for name in names.split())), 0)
        return {
            "DELTA": 1,
            "DELTA_HEADS": d.num_heads,
            "DELTA_KEY_HEADS": d.num_key_heads,
            "DELTA_K": d.key_dim,
            "DELTA_V": d.value_dim,
            "DELTA_WIDTH": d.conv_width,
            "DELTA_COLUMNS": delta_columns(d, self.programs),
            "DELTA_SCALE": d.key_dim**-0.5,
            "DELTA_EPS": d.eps,
            "DELTA_TWICE": d.negative_eigenvalues,
            "DELTA_SIGMOID": d.gate == "sigmoid",
            "DELTA_CONV_BIAS": any(x.get("conv_bias") is not None for x in self.layers),
        }

    def _table(self, kv: Sequence[LayerKV]) -> Tensor:
        table = []
        for layer, cache in zip(self.layers, kv, strict=True):
            tensors = {
                **layer,
                "k": cache.k,
                "v": cache.v,
                "k_scale": cache.k_scale,
                "v_scale": cache.v_scale,
            }
            tensors["logits"] = self._logits
            if cache.state is not None:
                tensors |= {"conv_states": cache.state.conv, "states": cache.state.recurrent}
            table.append([self._address(tensors.get(name)) for name in POINTERS])
        return torch.tensor(table, dtype=torch.int64).to(self.device)

    def _address(self, tensor: Tensor | float | None) -> int:
        if tensor is None or isinstance(tensor, int):
            return tensor or 0
        if isinstance(tensor, float):
            return int.from_bytes(struct.pack("<f", tensor), "little")
        # a view into a larger tensor; products must be aligned, and the copy is small
        if tensor.data_ptr() % 16:
            tensor = tensor.clone()
            self._held.append(tensor)
        return tensor.data_ptr()
