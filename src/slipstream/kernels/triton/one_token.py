"""All layers of a decode step of one sequence in one kernel, with 4-bit weights.

Such a step is bound by reading every weight once, and as some 225 kernels it waits half of its time: for launches, and for
the memory to be busy again after each. Here one program stays on each multiprocessor and walks through the layers; where a
part needs what all programs made, they meet at a counter in memory, and while they wait the weights that come next are
already on their way. A layer is:

    norm → q, k, v | rope, cache, attention | output, into the residual | norm → up, activation | down, into the residual

with a meeting at each bar (a parallel block has one fewer). Every program norms the whole row for itself, which is cheaper
than waiting for one to do it. Attention splits the keys over the programs of a kv head; the last to finish adds the parts
up (as `parts.sum_parts`).

All programs must run at once: there are as many as multiprocessors, and nothing else may hold one for good. With 8 and 16
bits a weight the kernels one by one are faster (benchmarks/GPU_NOTES.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import AttentionMetadata, LayerKV, TokenShape
from slipstream.kernels.quantize import chunk_of
from slipstream.kernels.triton.overlap import follow, overlapped
from slipstream.kernels.triton.pointwise import ACTIVATIONS, _cached
from slipstream.kernels.triton.token_product import arrive, fetch, product, wait

NORMS = {"rms": 1, "layer": 2}

POINTERS = (
    *("norm", "norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm", "k", "v", "k_scale", "v_scale"),
    *(f"{name}{part}" for name in ("qkv", "out", "up", "down") for part in ("", "_scales", "_bias")),
)
"""What a layer's row of the table points at, in this order; 0 where there is nothing."""

CACHED = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""A cache's type, as the kernel calls it."""

KEYS = 64
"""Keys that attention takes at once."""
TILE = (8, 2, 4, 96 * 1024)
"""Warps, rows of a warp, pieces under way, bytes fetched ahead: measured on an H200."""
FEWEST_TILES = 4
"""Tiles of keys that are not split: to add parts up takes as long as some of them."""
MOST_SPLITS = 16


@triton.jit
def _address(scratch_ptr, table_ptr, i, KIND: tl.constexpr):
    """Entry i of a layer's row, as a pointer: entries are distances from the scratch in units of 16 bytes, which tells the
    compiler that the widest loads are aligned."""
    return scratch_ptr.to(tl.pointer_type(KIND)) + tl.load(table_ptr + i) * (128 // KIND.primitive_bitwidth)


@triton.jit
def _turned(
    source_ptr,
    ds,
    live,
    norm_ptr,
    table_ptr,
    eps,
    offset,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads of q or k [heads, D]: normed, and their first R dimensions turned (`pointwise._rope_kernel`)."""
    x = tl.load(source_ptr + ds, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    norm = 1.0
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= norm * (tl.load(norm_ptr + ds, mask=ds < D, other=0.0).to(tl.float32) + offset)
    if R > 0:
        if INTERLEAVED:
            other, angle, sign = ds ^ 1, ds // 2, tl.where(ds % 2 == 0, -1.0, 1.0)
        else:
            other, angle = (ds + R // 2) % R, ds % (R // 2)
            sign = tl.where(ds < R // 2, -1.0, 1.0)
        turns = ds < R
        y = tl.load(source_ptr + other, mask=live & turns, other=0.0, cache_modifier=".cg").to(tl.float32)
        if HAS_NORM:
            y *= norm * (tl.load(norm_ptr + other, mask=turns, other=0.0).to(tl.float32) + offset)
        cos = tl.load(table_ptr + angle, mask=turns, other=0.0)
        sin = tl.load(table_ptr + R // 2 + angle, mask=turns, other=0.0)
        x = tl.where(turns, x * cos + sign * y * sin, x)
    return x


@triton.jit
def _attend(
    qkv_ptr,
    seen_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    angles_ptr,
    block_table_ptr,
    length,
    part_ptr,
    counter_ptr,
    qk_eps,
    qk_offset,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    FEWEST: tl.constexpr,
    PROGRAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
):
    """Some of the keys of one kv head. Who has the last of them first brings the new key and value there."""
    G: tl.constexpr = H // HK
    tiles = tl.cdiv(length, KEYS)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), FEWEST)
    used = tl.cdiv(tiles, each)
    for item in range(tl.program_id(0), used * HK, PROGRAMS):
        head, split = item % HK, item // HK
        gs, ds = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)[None, :]
        live = (gs < G)[:, None] & (ds < D)
        kind: tl.constexpr = qkv_ptr.dtype.element_ty
        q = _turned(
            qkv_ptr + (head * G + gs)[:, None] * D, ds, live, q_norm_ptr, angles_ptr, qk_eps, qk_offset, D, R, INTERLEAVED,
            QK_NORM,
        )  # fmt: skip
        q = q.to(kind)
        factor = scale * 1.4426950408889634
        k_scale, v_scale = 1.0, 1.0
        if SCALED:
            k_scale, v_scale = tl.load(k_scale_ptr + head), tl.load(v_scale_ptr + head)
            factor *= k_scale
        if split == used - 1:
            new = length - 1
            block = tl.load(block_table_ptr + new // BLOCK_SIZE).to(tl.int64) * HK + head
            one = tl.arange(0, 1)[:, None]
            fresh = _turned(
                qkv_ptr + (H + head + one) * D, ds, ds < D, k_norm_ptr, angles_ptr, qk_eps, qk_offset, D, R, INTERLEAVED,
                QK_NORM,
            )  # fmt: skip
            fresh = _cached(fresh, k_scale, k_ptr, SCALED)
            tl.store(k_ptr + (block * BLOCK_SIZE + new % BLOCK_SIZE) * D + ds, fresh, mask=ds < D)
            fresh = tl.load(qkv_ptr + (H + HK + head + one) * D + ds, mask=ds < D, other=0.0, cache_modifier=".cg")
            fresh = _cached(fresh.to(tl.float32), v_scale, v_ptr, SCALED)
            if BY_DIM:
                tl.store(v_ptr + (block * D + ds) * BLOCK_SIZE + new % BLOCK_SIZE, fresh, mask=ds < D)
            else:
                tl.store(v_ptr + (block * BLOCK_SIZE + new % BLOCK_SIZE) * D + ds, fresh, mask=ds < D)
            tl.debug_barrier()
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for tile in range(split * each, tl.minimum(split * each + each, tiles)):
            keys = tile * KEYS + tl.arange(0, KEYS)
            here = keys < length
            block = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=here, other=0).to(tl.int64) * HK + head
            inside, place = ds < D, keys % BLOCK_SIZE
            k = tl.load(k_ptr + (block * BLOCK_SIZE + place)[:, None] * D + ds, mask=inside, other=0.0).to(kind)
            if BY_DIM:
                v_at = v_ptr + (block[:, None] * D + ds) * BLOCK_SIZE + place[:, None]
            else:
                v_at = v_ptr + (block * BLOCK_SIZE + place)[:, None] * D + ds
            v = tl.load(v_at, mask=inside, other=0.0).to(kind)
            s = tl.where(here[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * factor, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(kind), v, acc * fade[:, None], input_precision="ieee")
            top = higher
        acc *= v_scale
        if used == 1:
            tl.store(seen_ptr + (head * G + gs)[:, None] * D + ds, (acc / total[:, None]).to(kind), mask=live)
        else:
            size: tl.constexpr = H * (BLOCK_D + 2)
            mine = part_ptr + split * size + (head * G + gs) * (BLOCK_D + 2)
            tl.store(mine[:, None] + ds, acc, mask=(gs < G)[:, None])
            tl.store(mine + BLOCK_D, top, mask=gs < G)
            tl.store(mine + BLOCK_D + 1, total, mask=gs < G)
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr + 2 + head, 1, sem="acq_rel") == used - 1:
                all_gs = tl.arange(0, BLOCK_H)
                splits = tl.arange(0, BLOCK_SPLITS)[:, None]
                parts = part_ptr + splits * size + (head * G + all_gs)[None, :] * (BLOCK_D + 2)
                there = (splits < used) & (all_gs < G)[None, :]
                tops = tl.load(parts + BLOCK_D, mask=there, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(parts + BLOCK_D + 1, mask=there, other=0.0, cache_modifier=".cg")
                accs = tl.load(
                    parts[:, :, None] + ds[None, :, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
                )
                fades = tl.where(there, tl.exp2(tops - tl.max(tops, 0)[None, :]), 0.0)
                whole = tl.sum(accs * fades[:, :, None], 0) / tl.sum(totals * fades, 0)[:, None]
                tl.store(
                    seen_ptr + (head * G + all_gs)[:, None] * D + ds,
                    whole.to(kind),
                    mask=(all_gs < G)[:, None] & (ds < D),
                )
                tl.store(counter_ptr + 2 + head, 0)


@triton.jit
def _one_token_kernel(
    x_ptr,
    table_ptr,
    scratch_ptr,
    own_ptr,
    part_ptr,
    counter_ptr,
    cos_sin_ptr,
    positions_ptr,
    block_table_ptr,
    seq_lens_ptr,
    num_layers,
    eps,
    mlp_eps,
    offset,
    qk_eps,
    qk_offset,
    scale,
    E: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    FEWEST: tl.constexpr,
    PARALLEL: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    MLP_NORM: tl.constexpr,
    QKV_BIAS: tl.constexpr,
    OUT_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BY_DIM: tl.constexpr,
    CACHE: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK_E: tl.constexpr,
    CHUNK_Q: tl.constexpr,
    CHUNK_F: tl.constexpr,
    POINTERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    DEEP: tl.constexpr,
    PTX: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    kind: tl.constexpr = x_ptr.dtype.element_ty
    Q: tl.constexpr = H * D
    QKV: tl.constexpr = (H + 2 * HK) * D
    ROWS: tl.constexpr = WARPS * EACH
    UNITS_QKV: tl.constexpr = (QKV + ROWS - 1) // ROWS
    UNITS_E: tl.constexpr = (E + ROWS - 1) // ROWS
    UNITS_F: tl.constexpr = (F + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    qkv_ptr = scratch_ptr
    seen_ptr = scratch_ptr + QKV
    mid_ptr = seen_ptr + Q
    own_ptr = own_ptr + pid * (BLOCK_E + BLOCK_F + BLOCK_Q)
    own_mid_ptr, own_seen_ptr = own_ptr + BLOCK_E, own_ptr + BLOCK_E + BLOCK_F
    first_qkv, last_qkv = pid * UNITS_QKV // PROGRAMS * ROWS, (pid + 1) * UNITS_QKV // PROGRAMS * ROWS
    first_e, last_e = pid * UNITS_E // PROGRAMS * ROWS, (pid + 1) * UNITS_E // PROGRAMS * ROWS
    first_f, last_f = pid * UNITS_F // PROGRAMS * ROWS, (pid + 1) * UNITS_F // PROGRAMS * ROWS
    fetch(_address(scratch_ptr, table_ptr, 10, tl.int32), first_qkv, last_qkv, E // 2, AHEAD, PROGRAMS)
    if PDL:
        follow()
    length = tl.load(seq_lens_ptr)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr) * R
    met = 0
    for layer in range(num_layers):
        row = table_ptr + layer * POINTERS
        qkv_w, qkv_s = _address(scratch_ptr, row, 10, tl.int32), _address(scratch_ptr, row, 11, kind)
        out_w, out_s = _address(scratch_ptr, row, 13, tl.int32), _address(scratch_ptr, row, 14, kind)
        up_w, up_s = _address(scratch_ptr, row, 16, tl.int32), _address(scratch_ptr, row, 17, kind)
        down_w, down_s = _address(scratch_ptr, row, 19, tl.int32), _address(scratch_ptr, row, 20, kind)
        out_b, down_b = _address(scratch_ptr, row, 15, kind), _address(scratch_ptr, row, 21, kind)
        # --- q, k, v
        x_scale = product(
            qkv_w, qkv_s, _address(scratch_ptr, row, 12, kind), x_ptr, _address(scratch_ptr, row, 0, kind),
            _address(scratch_ptr, row, 1, kind), own_ptr, qkv_ptr, counter_ptr, met, eps, offset, 1.0, QKV, E, BLOCK_E,
            CHUNK_E, SIZE, True, NORM, NORM_BIAS, QKV_BIAS, False, -1, False, PROGRAMS, WARPS, EACH, DEEP, PTX,
        )  # fmt: skip
        met += PROGRAMS
        arrive(counter_ptr, PROGRAMS)
        if PARALLEL:
            fetch(up_w, first_f, last_f, E // 2, AHEAD, PROGRAMS)
        else:
            fetch(out_w, first_e, last_e, Q // 2, AHEAD, PROGRAMS)
        # --- attention
        wait(counter_ptr, met, PROGRAMS)
        _attend(
            qkv_ptr, seen_ptr, _address(scratch_ptr, row, 6, CACHE), _address(scratch_ptr, row, 7, CACHE),
            _address(scratch_ptr, row, 8, tl.float32), _address(scratch_ptr, row, 9, tl.float32),
            _address(scratch_ptr, row, 4, kind), _address(scratch_ptr, row, 5, kind), angles_ptr, block_table_ptr, length,
            part_ptr, counter_ptr, qk_eps, qk_offset, scale, H, HK, D, R, BLOCK_SIZE, BLOCK_G, BLOCK_H, BLOCK_D,
            BLOCK_SPLITS, KEYS, SPLITS, FEWEST, PROGRAMS, INTERLEAVED, QK_NORM, SCALED, BY_DIM,
        )  # fmt: skip
        if not PARALLEL:
            met += PROGRAMS
            arrive(counter_ptr, PROGRAMS)
            fetch(up_w, first_f, last_f, E // 2, AHEAD, PROGRAMS)
            # --- output
            product(
                out_w, out_s, out_b, seen_ptr, seen_ptr, seen_ptr, own_seen_ptr, x_ptr, counter_ptr, met, eps, offset, 1.0,
                E, Q, BLOCK_Q, CHUNK_Q, SIZE, True, 0, False, OUT_BIAS, True, -1, False, PROGRAMS, WARPS, EACH, DEEP, PTX,
            )  # fmt: skip
            met += PROGRAMS
            arrive(counter_ptr, PROGRAMS)
        # --- up
        product(
            up_w, up_s, _address(scratch_ptr, row, 18, kind), x_ptr, _address(scratch_ptr, row, 2, kind),
            _address(scratch_ptr, row, 3, kind), own_ptr, mid_ptr, counter_ptr, met, mlp_eps, offset, x_scale, F, E,
            BLOCK_E, CHUNK_E, SIZE, MLP_NORM != 0, MLP_NORM, NORM_BIAS, UP_BIAS, False, KIND, GATED, PROGRAMS, WARPS, EACH,
            DEEP // 2 if GATED else DEEP, PTX,
        )  # fmt: skip
        met += PROGRAMS
        arrive(counter_ptr, PROGRAMS)
        fetch(down_w, first_e, last_e, F // 2, AHEAD, PROGRAMS)
        # --- down
        if PARALLEL:
            product(
                out_w, out_s, out_b, seen_ptr, seen_ptr, seen_ptr, own_seen_ptr, x_ptr, counter_ptr, met, eps, offset, 1.0,
                E, Q, BLOCK_Q, CHUNK_Q, SIZE, True, 0, False, OUT_BIAS, True, -1, False, PROGRAMS, WARPS, EACH, DEEP, PTX,
            )  # fmt: skip
            tl.debug_barrier()
        product(
            down_w, down_s, down_b, mid_ptr, mid_ptr, mid_ptr, own_mid_ptr, x_ptr, counter_ptr, met, eps, offset, 1.0, E,
            F, BLOCK_F, CHUNK_F, SIZE, True, 0, False, DOWN_BIAS, True, -1, False, PROGRAMS, WARPS, EACH, DEEP, PTX,
        )  # fmt: skip
        if layer + 1 < num_layers:
            met += PROGRAMS
            arrive(counter_ptr, PROGRAMS)
            fetch(_address(scratch_ptr, row + POINTERS, 10, tl.int32), first_qkv, last_qkv, E // 2, AHEAD, PROGRAMS)
    # The last to leave makes the counters ready for the next step.
    if tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(counter_ptr, 0)
        tl.store(counter_ptr + 1, 0)


class OneTokenStep:
    """`OpSet.one_token`. `layers` are read at the first call with a cache, and must stay. One stream only."""

    def __init__(
        self, shape: TokenShape, layers: Sequence[Mapping[str, Tensor | None]], size: int, cos_sin: Tensor | None
    ) -> None:
        self.shape = s = shape
        self.layers, self.size, self.cos_sin = layers, size, cos_sin
        weight, scales = layers[0]["qkv"], layers[0]["qkv_scales"]
        assert weight is not None
        assert scales is not None
        self.device = device = weight.device
        self.programs = 1
        if device.type == "cuda":
            self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = max(1, min(MOST_SPLITS, self.programs // s.num_kv_heads)) if self.programs > 1 else 3
        self._block_h = triton.next_power_of_2(s.num_heads // s.num_kv_heads)
        self._block_d = max(16, triton.next_power_of_2(s.head_dim))
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self._blocks = [triton.next_power_of_2(n) for n in (s.hidden_size, s.intermediate_size, q)]
        self._scratch = torch.zeros(2 * (q + kv) + s.intermediate_size, dtype=scales.dtype, device=device)
        self._own = torch.zeros(self.programs * sum(self._blocks), dtype=torch.float16, device=device)
        parts = self.splits * s.num_heads * (self._block_d + 2)
        self._parts = torch.zeros(parts, dtype=torch.float32, device=device)
        self._counters = torch.zeros(2 + s.num_kv_heads, dtype=torch.int32, device=device)
        self._kv: Sequence[LayerKV] | None = None
        self._tables: list[Tensor] = []  # a captured graph reads the one of its time
        self._held: list[Tensor] = []

    def __call__(self, x: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """x [1, E], what the first layer reads → the residual after the last [1, E], in place."""
        if self._kv is not kv:
            self._kv = kv
            self._tables.append(self._table(kv))
        s, layer = self.shape, self.layers[0]
        warps, each, deep, ahead = TILE
        chunks = [chunk_of(n, self.size) for n in (s.hidden_size, s.num_heads * s.head_dim, s.intermediate_size)]
        _one_token_kernel[(self.programs,)](
            x,
            self._tables[-1],
            self._scratch,
            self._own,
            self._parts,
            self._counters,
            self._parts if self.cos_sin is None else self.cos_sin,
            meta.positions,
            meta.block_table,
            meta.seq_lens,
            len(self.layers),
            s.norm_eps,
            s.mlp_norm_eps,
            s.norm_offset,
            s.qk_eps,
            s.qk_offset,
            s.scale,
            E=s.hidden_size,
            F=s.intermediate_size,
            H=s.num_heads,
            HK=s.num_kv_heads,
            D=s.head_dim,
            R=0 if self.cos_sin is None else self.cos_sin.shape[1],
            BLOCK_SIZE=kv[0].block_size,
            BLOCK_E=self._blocks[0],
            BLOCK_F=self._blocks[1],
            BLOCK_Q=self._blocks[2],
            BLOCK_G=max(16, self._block_h),
            BLOCK_H=self._block_h,
            BLOCK_D=self._block_d,
            BLOCK_SPLITS=triton.next_power_of_2(self.splits),
            KEYS=KEYS,
            SPLITS=self.splits,
            FEWEST=FEWEST_TILES,
            PARALLEL=s.parallel,
            NORM=NORMS[s.norm],
            NORM_BIAS=layer.get("norm_bias") is not None,
            MLP_NORM=NORMS[s.norm] if s.mlp_norm else 0,
            QKV_BIAS=layer.get("qkv_bias") is not None,
            OUT_BIAS=layer.get("out_bias") is not None,
            UP_BIAS=layer.get("up_bias") is not None,
            DOWN_BIAS=layer.get("down_bias") is not None,
            GATED=s.gated,
            KIND=ACTIVATIONS[s.activation],
            INTERLEAVED=s.interleaved,
            QK_NORM=layer.get("q_norm") is not None,
            SCALED=kv[0].k_scale is not None,
            BY_DIM=kv[0].v.stride(2) == 1,
            CACHE=CACHED[kv[0].k.dtype],
            SIZE=self.size,
            CHUNK_E=chunks[0],
            CHUNK_Q=chunks[1],
            CHUNK_F=chunks[2],
            POINTERS=len(POINTERS),
            PROGRAMS=self.programs,
            WARPS=warps,
            EACH=each,
            DEEP=deep,
            AHEAD=ahead,
            PTX=self.device.type == "cuda",
            num_warps=warps,
            **overlapped(x),
        )
        return x

    def _table(self, kv: Sequence[LayerKV]) -> Tensor:
        table = []
        for layer, cache in zip(self.layers, kv, strict=True):
            tensors = {**layer, "k": cache.k, "v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
            table.append([self._distance(tensors.get(name)) for name in POINTERS])
        return torch.tensor(table, dtype=torch.int64).to(self.device)

    def _distance(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        if tensor.data_ptr() % 16:  # a view of something: a small one, since products are as they should be
            tensor = tensor.clone()
            self._held.append(tensor)
        return (tensor.data_ptr() - self._scratch.data_ptr()) // 16
