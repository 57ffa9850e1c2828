"""Packs weights for a CPU's C++ kernels and copies blocks, all in NumPy arrays. These are the parts
of an op set that run outside the layers. `row_sampler.py` samples.

So a step that is one C++ program (`model/step_program.py`) needs no torch. The ops themselves are
in `cpu.py`. Weights are packed once, and the packed form replaces the dense one:

1. `int8` has a scale per row. Its inputs are quantized to 8 bits with a scale for every 32 of a
   token.
2. An int8 weight with enough zeros (`SPARSE_FROM`) is held sparse: a bit per element and the
   non-zero elements. Patterns (2:4, N:M) are not treated specially.
3. GGUF's types are used as they are (`native.BLOCK_KINDS`), and so are 4-bit weights by groups of 128
   or 32 (GPTQ, AWQ). Weights that are quantized to 4 bits here have a scale and a minimum per
   group, found by search (csrc/cpu/round4.h). Their inputs are quantized as for `int8`
   (docs/quantization.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.packed import NativeLinear, Packed, stand_in
from slipstream.kernels.cpu.packed_file import read_packed, write_packed
from slipstream.kernels.cpu.program.mla import pack_head_weight
from slipstream.kernels.cpu.program.moe import (
    NativeExperts,
    group_form,
    pack_expert_weight,
    round_groups,
)
from slipstream.kernels.cpu.program.programs import LinearProgram
from slipstream.kernels.cpu.sampling.row_sampler import RowSampler
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.weights.forms import (
    BlockLinear,
    BlockRows,
    GroupedLinear,
    Linear,
    ScaledLinear,
)
from slipstream.spec.devices.cpu_isas import CPU_ISAS
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.scheme import NATIVE_PRODUCTS, Scheme

Weights = npt.NDArray[Any]

SPARSE_FROM, SPARSE_FROM_ELSEWHERE = 0.4, 0.8
"""Share of zeros from which an int8 weight is held sparse: where an instruction expands bytes
(`vpexpandb`), and elsewhere.

A sparse weight takes (1 − zeros) + 1/8 of the dense one's bytes. With the instruction, a product of
one token spends about 8 instructions on 64 elements, few enough to keep ahead of memory. Without
it, it spends about 60, so sparsity pays only with few bytes or many cores
(`benchmarks/kernels.py`).
"""


TOKENS, ROUNDS = (2, 4, 8, 12, 16, 24, 32, 64), 3
"""Tried token counts, and rounds of measurement, in `faster_from`."""

COPIES_BYTES, MAX_COPIES = 32 * 2**20, 64
"""Total size and maximum number of the copies of a dense weight that a measurement multiplies in
turn. Several are needed because in a step a product's weights come from memory, not from a
processor's cache."""


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """`BlockTensors` of arrays: row b of each is a part of block b."""

    arrays: list[Weights]


class HostOps(RowSampler):
    """Packs weights for the kernels.

    `isa` forces an instruction set; the default is the machine's best. `sparse_from` overrides
    `SPARSE_FROM`. With `dense_copies`, sparse weights are held dense as well.
    """

    name = "cpu"
    has_host_experts = False
    rounded = NATIVE_PRODUCTS["cpu"]
    block_types = frozenset(native.BLOCK_KINDS)
    shares_prefixes = False
    takes_rows = False
    output_multiple = 1

    def __init__(
        self,
        num_threads: int = 1,
        isa: str | None = None,
        sparse_from: float | None = None,
        *,
        dense_copies: bool = False,
    ) -> None:
        super().__init__(ThreadPool(num_threads, isa))
        chosen = SPARSE_FROM if CPU_ISAS[self.pool.isa].expands_bytes else SPARSE_FROM_ELSEWHERE
        self._sparse_from = chosen if sparse_from is None else sparse_from
        self.arena = Arena(self.pool)
        self._dense_copies = dense_copies
        # 0: not measured yet, which the first sparse weight triggers; None: never
        self._dense_from: int | None = 0

    def describe(self) -> str:
        return f"cpu (C++, {self.pool.isa})"

    def quantize_weight(
        self, weight: Weights, bias: Weights | None, scheme: Scheme | None = None
    ) -> NativeLinear:
        if scheme is not None and scheme.name == "int4":
            packed = Packed.empty(four_bits(scheme), weight.shape[0], weight.shape[1], self.arena)
            packed.put_dense(weight)
            return _native(weight, bias, (packed,))
        if scheme is not None and scheme.name == "mxfp4":
            return self.pack_weight(round_groups(weight, bias, scheme))
        if scheme is not None and scheme.name != "int8":
            raise _no_product(scheme)
        if scheme is not None:
            return _native(weight, bias, (self._eight_bits(weight, None),))
        kind = native.BF16 if arrays.type_name(weight) == "bfloat16" else native.F32
        packed = Packed.empty(kind, weight.shape[0], weight.shape[1], self.arena)
        packed.put_dense(weight)
        return _native(weight, bias, (packed,))

    def pack_weight(self, w: Linear) -> NativeLinear:
        kept: Any = w.weight
        if isinstance(w, NativeLinear):
            return _native(kept, w.bias, w.parts)
        if isinstance(w, BlockLinear):
            return _native(kept, w.bias, _pack_blocks(w, self.arena))
        if isinstance(w, GroupedLinear):
            form = group_form(w)
            packed = Packed.empty(form.kind, len(kept), kept.shape[1] * 4, self.arena)
            form.put(packed)
            return _native(stand_in((packed.rows, packed.inner), w.scales.dtype), w.bias, (packed,))  # type: ignore[arg-type]
        if isinstance(w, ScaledLinear) and kept.dtype == np.int8:
            return _native(
                stand_in(kept.shape, w.out_dtype),  # type: ignore[arg-type]
                w.bias,
                (self._eight_bits(kept, w.scales),),
            )
        raise ConfigError(
            "the CPU's kernels have no product with such weights; use kernels='reference'",
            field="kernels",
        )

    def _eight_bits(self, weight: Weights, scales: Any) -> Packed:
        """Packs codes with their scales, or quantizes values, in the faster of the dense and the
        sparse form."""
        dense = Packed.empty(native.I8, weight.shape[0], weight.shape[1], Arena(self.pool, 0))
        if scales is None:
            dense.put_dense(weight)
        else:
            dense.put_codes(weight, scales)
        if dense.zeros < self._sparse_from:
            return dense.moved(self.arena)
        sparse = dense.sparse(self.arena)
        return self._with_copy(sparse, dense) if self._dense_copies else sparse

    def _with_copy(self, sparse: Packed, dense: Packed) -> Packed:
        """Adds a dense copy to the sparse weight if this machine multiplies steps of some size
        faster with it."""
        if self._dense_from == 0:
            self._dense_from = faster_from(self.pool, sparse, dense)
        if self._dense_from is None:
            return sparse
        return replace(sparse, dense=dense.moved(self.arena).data, dense_from=self._dense_from)

    def quantize_experts(
        self,
        weight: Weights,
        scheme: Scheme | None = None,
        bias: Weights | None = None,
        *,
        num_experts: int,
    ) -> NativeExperts:
        if scheme is not None and scheme.name == "mxfp4":
            return pack_expert_weight(round_groups(weight, bias, scheme), num_experts, self.arena)
        if scheme is not None and scheme.name not in ("int8", "int4"):
            raise _no_product(scheme)
        dense: Any = Linear(weight=weight, bias=bias)  # type: ignore[arg-type]
        kind = None if scheme is None else native.I8 if scheme.name == "int8" else four_bits(scheme)
        return pack_expert_weight(dense, num_experts, self.arena, rounded=kind)

    def pack_experts(self, w: Linear, *, num_experts: int) -> NativeExperts:
        if isinstance(w, NativeExperts):
            bias: Any = None if w.bias is None else arrays.float32(w.bias)
            return replace(w, bias=bias)
        return pack_expert_weight(w, num_experts, self.arena)

    def pack_latent(
        self, expand: Weights, spec: LatentAttentionSpec
    ) -> tuple[NativeExperts, NativeExperts]:
        """Packs weights for `OpSet.pack_latent`."""
        heads = expand.reshape(spec.num_heads, -1, expand.shape[1])
        keys, values = heads[:, : spec.nope_dim], heads[:, spec.nope_dim :]
        return self.pack_heads(keys), self.pack_heads(values.swapaxes(1, 2))

    def pack_heads(self, weight: Weights) -> NativeExperts:
        return pack_head_weight(weight, self.arena)

    def embedding(self, table: Weights | Linear, tied: Linear | None) -> Weights | Linear:
        if isinstance(tied, NativeLinear) and all(
            p.kind not in (native.I8, native.S8) for p in tied.parts
        ):
            return tied  # the head's rows are exactly the table's
        return self.pack_weight(table) if isinstance(table, Linear) else table

    def place_of(self, table: Weights | Linear) -> tuple[None, Any]:
        return None, table.weight.dtype if isinstance(table, Linear) else table.dtype

    def position_tables(self, max_model_len: int, device: None) -> PositionTables:
        return PositionTables(max_model_len, device)

    def new_counts(self, num_experts: int, device: None) -> npt.NDArray[np.int64]:
        return np.zeros(num_experts, np.int64)

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        """Formats of a linear layer's weight with their bytes, for messages."""
        assert isinstance(w, NativeLinear | NativeExperts)
        found = [(native.KIND_NAMES[part.kind], part.data.size) for part in w.parts]
        copies = [
            part.dense for part in w.parts if isinstance(part, Packed) and part.dense is not None
        ]
        return found + [("int8 beside sparse int8", copy.size) for copy in copies]

    # --- Caches, as in `OpSet` ---

    def eight_bits(self, device: object) -> str:
        return "int8"

    def values_by_dim(self, dtype: object) -> bool:
        return False

    def block_rows(self, caches: Iterable[Weights]) -> BlockArrays:
        return BlockArrays(list({id(cache): cache for cache in caches}.values()))

    def copy_blocks(
        self, source: BlockArrays, target: BlockArrays, sources: Weights, targets: Weights
    ) -> None:
        for old, new in zip(source.arrays, target.arrays, strict=True):
            new[targets] = old[sources]

    # --- The file of packed linear layers ---

    @property
    def layout(self) -> str:
        return f"{native.library_digest()}-{self.pool.isa}-{self._sparse_from}"

    def write_products(self, path: Path, products: Mapping[str, Linear]) -> int:
        made = {
            n: w
            for n, w in products.items()
            if isinstance(w, (NativeLinear, NativeExperts)) and w.is_rounded
        }
        return write_packed(path, made) if len(made) == len(products) else 0

    def read_products(self, path: Path) -> dict[str, Linear]:
        found = read_packed(path, self.arena, self.pool.num_threads)
        if not self._dense_copies:
            return found
        return {
            name: self._with_copies(w) if isinstance(w, NativeLinear) else w
            for name, w in found.items()
        }

    def _with_copies(self, w: NativeLinear) -> NativeLinear:
        only = Arena(self.pool, 0)
        parts = [
            self._with_copy(p, p.unfolded(only)) if p.kind == native.S8 else p for p in w.parts
        ]
        return replace(w, parts=tuple(parts))


def _native(weight: Weights, bias: Any, parts: tuple[Packed, ...]) -> NativeLinear:
    kept: Any = stand_in(weight.shape, weight.dtype)
    return NativeLinear(
        weight=kept,
        bias=None if bias is None else arrays.float32(bias),  # type: ignore[arg-type]
        parts=parts,
    )


def _pack_blocks(w: BlockLinear, arena: Arena) -> tuple[Packed, ...]:
    """Packs GGUF blocks. If all rows have one type, there is one part; otherwise there is one for
    the rows of each of the checkpoint's tensors."""
    rows, inner = w.weight.shape
    if len({piece.type for piece in w.pieces}) == 1:
        packed = Packed.empty(native.BLOCK_KINDS[w.pieces[0].type], rows, inner, arena)
        for piece in w.pieces:
            _put_rows(packed, piece, piece.start)
        return (packed,)
    parts = []
    for piece in sorted(w.pieces, key=lambda piece: piece.start):
        packed = Packed.empty(native.BLOCK_KINDS[piece.type], piece.rows, inner, arena)
        _put_rows(packed, piece, 0)
        parts.append(packed)
    return tuple(parts)


def _put_rows(packed: Packed, piece: BlockRows, start: int) -> None:
    """Packs the rows of a piece, to rows `start` and after, and releases their pages."""
    for begin, end in piece.lots():
        to = None if piece.order is None else piece.order[begin:end] + np.int32(start)
        packed.put_blocks(piece.blocks[begin:].ctypes.data, end - begin, start + begin, to)


def four_bits(scheme: Scheme) -> int:
    """Returns the kind (`native.Q4M`, …) for weights of an `int4` scheme, whose groups have 32
    elements (as in GGUF's Q4_1) or 128. ConfigError for others."""
    kinds = {32: native.Q4M, 128: native.W4M}
    if scheme.group_size not in kinds:
        raise _no_product(scheme)
    return kinds[scheme.group_size]


def faster_from(pool: ThreadPool, sparse: Packed, dense: Packed) -> int | None:
    """Measures the number of tokens from which a product with the dense form of a weight is faster.

    Returns one of `TOKENS`, or None if the sparse form is faster with all of them. Bisection takes
    0.1 to 0.5 s; it assumes that if dense is faster with some number of tokens, it is so with more.
    """
    copies, arena = min(MAX_COPIES, -(-COPIES_BYTES // dense.data.size)), Arena(pool)
    shape = np.broadcast_to(np.float32(0), (dense.rows, dense.inner))

    def repeated(part: Packed) -> LinearProgram:
        first, *more = (_native(shape, None, (part.moved(arena),)) for _ in range(copies))
        return LinearProgram(pool, first, more)

    forms = [repeated(sparse), repeated(dense)]

    def seconds(form: LinearProgram, x: npt.NDArray[np.float32]) -> float:
        form(x)
        return pool.last_s

    def dense_is_faster(tokens: int) -> bool:
        x = np.ones((tokens, dense.inner), np.float32)
        rounds = [[seconds(form, x) for form in forms] for _ in range(ROUNDS)]
        sparse_s, dense_s = (min(times) for times in zip(*rounds, strict=True))
        return bool(dense_s < sparse_s)

    first = bisect_left(TOKENS, True, key=dense_is_faster)
    return TOKENS[first] if first < len(TOKENS) else None


def _no_product(scheme: Scheme) -> ConfigError:
    which = f"{scheme.name} product" + (
        f" with groups of {scheme.group_size}" if scheme.name == "int4" else ""
    )
    return ConfigError(
        f"the CPU's kernels have no {which}; use 'int8' or 'int4'", field="quantization"
    )
