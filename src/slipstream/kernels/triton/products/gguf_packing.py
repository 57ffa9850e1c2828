"""Packing of GGUF's blocks for the kernels of `gguf.py`: codes by bits, then scales, in slabs of
`SLAB` rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.triton.products.gguf import expand
from slipstream.kernels.weights import gguf_codes
from slipstream.kernels.weights.forms import (
    BlockLinear,
    BlockRows,
    CodedLinear,
    JoinedLinear,
    Linear,
)
from slipstream.spec.stored.gguf_types import BY_NAME, FORMS, CodeForm

SLAB = 8
"""Rows whose words are stored together."""
PACKED_VALUES = 1 << 23
"""Number of values laid out at a time. Their int32 temporaries take some 200 MB."""


def pack(w: BlockLinear, *, dense: bool = False) -> CodedLinear | JoinedLinear:
    """Pack a weight on its device for the kernels; with `dense` it also gets a dense copy in the
    model's dtype. Neighboring rows of the same type become one part."""
    device, dtype = torch.device(w.device or "cpu"), w.weight.dtype
    parts: list[CodedLinear] = []
    pieces = sorted(w.pieces, key=lambda piece: piece.start)
    first = 0
    for at, piece in enumerate(pieces):
        if at + 1 == len(pieces) or pieces[at + 1].type != piece.type:
            own = pieces[first : at + 1]
            bias = None
            if w.bias is not None:
                bias = w.bias[own[0].start : own[-1].start + own[-1].rows]
            parts.append(_pack_rows(own, w.weight.shape[1], device, dtype, bias))
            first = at + 1
    for piece in pieces:
        piece.release(0, piece.rows)
    made: CodedLinear | JoinedLinear = parts[0]
    if len(parts) > 1:
        made = JoinedLinear(weight=parts[0].weight, parts=tuple(parts))
    return dataclasses.replace(made, dense=expand(made)) if dense else made


def pack_experts(w: BlockLinear, num_experts: int) -> Linear:
    """Pack the stacked weights of experts. Those in MXFP4 get the layout of their own kernel.
    Weights are expanded to dense ones if they mix types, or if an expert's number of rows is not a
    multiple of `SLAB`."""
    device, dtype, (outer, inner) = torch.device(w.device or "cpu"), w.weight.dtype, w.weight.shape
    rows, types = outer // num_experts, {piece.type for piece in w.pieces}
    whole = len(types) == 1 and rows % SLAB == 0
    out = None if whole else torch.empty(outer, inner, dtype=dtype, device=device)
    made = empty(w.pieces[0].type, outer, inner, device, dtype, w.bias) if whole else None
    for piece in w.pieces:
        each = piece.rows // num_experts
        order = np.arange(each) if piece.order is None else piece.order
        at = np.arange(num_experts)[:, None] * rows + piece.start + order
        if made is not None:
            _write(made, piece.blocks, at.reshape(-1))
        elif out is not None:
            step = max(1, PACKED_VALUES // inner)
            for begin in range(0, piece.rows, step):
                some = dataclasses.replace(
                    piece, blocks=piece.blocks[begin : begin + step], order=None
                )
                part = _pack_rows([some], inner, device, dtype, None)
                out[torch.from_numpy(at.reshape(-1)[begin : begin + step]).to(device)] = expand(
                    part
                )
        piece.release(0, piece.rows)
    return Linear(weight=out, bias=w.bias) if made is None else made  # type: ignore[arg-type]


def _pack_rows(
    pieces: Sequence[BlockRows],
    inner: int,
    device: torch.device,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> CodedLinear:
    made = empty(pieces[0].type, sum(piece.rows for piece in pieces), inner, device, dtype, bias)
    for piece in pieces:
        order = np.arange(piece.rows) if piece.order is None else piece.order
        _write(made, piece.blocks, piece.start - pieces[0].start + order)
    return made


def empty(
    kind: str, rows: int, inner: int, device: torch.device, dtype: torch.dtype, bias: Tensor | None
) -> CodedLinear:
    """Allocates a packed weight filled with zeros, which remain where rows or inputs are
    padding."""
    form = FORMS[kind]
    slabs, units = -(-rows // SLAB), -(-inner // (8 * form.group))
    words = slabs, units, SLAB, form.group
    zeros = functools.partial(torch.zeros, device=device)
    low, high = zeros(words, dtype=torch.int32), None
    if form.bits in (2, 3):
        low = zeros(words, dtype=torch.int16)
    elif form.bits == 8:
        low = zeros((slabs, units, 2, SLAB, form.group), dtype=torch.int32)
    if form.bits in (3, 5):
        high = zeros(words, dtype=torch.int8)
    elif form.bits == 6:
        high = zeros(words, dtype=torch.int16)
    factors = zeros((units, num_words(form), slabs * SLAB), dtype=torch.int32)
    d = zeros((-(-inner // 256), slabs * SLAB), dtype=torch.int32) if form.shares_d else None
    return CodedLinear(
        weight=low, high=high, factors=factors, d=d, bias=bias, type=kind, rows=rows, inner=inner, dtype=dtype
    )  # fmt: skip


def num_words(form: CodeForm) -> int:
    """Number of words that hold a unit's scales and minima."""
    own = 4 if form.scales == "halves" else 2
    return own * (2 if form.mins and form.scales != "nibbles" else 1)


def _write(w: CodedLinear, blocks: np.ndarray, rows: np.ndarray) -> None:
    """Pack rows of a GGUF file, `blocks` [n, bytes], into the rows `rows` [n] of the weight."""
    if w.weight.device.type == "meta":
        return
    at = max(1, PACKED_VALUES // w.inner)
    for begin in range(0, len(rows), at):
        raw = torch.from_numpy(np.array(blocks[begin : begin + at])).to(w.weight.device)
        own = torch.from_numpy(np.asarray(rows[begin : begin + at], np.int64)).to(raw.device)
        _write_some(w, raw.int(), own)


def _write_some(w: CodedLinear, raw: Tensor, rows: Tensor) -> None:
    form, count = FORMS[w.type], len(raw)
    group, units = form.group, w.factors.shape[0]
    found = gguf_codes.split(raw.reshape(-1, BY_NAME[w.type].block_bytes), w.type)
    slab, within = rows // SLAB, rows % SLAB

    def padded(x: Tensor, size: int) -> Tensor:
        x = x.reshape(count, -1)
        return F.pad(x, (0, size - x.shape[1]))

    def words(fields: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Packs n bit fields into each word: [count, units, n, …] → [count, units, …]."""
        made = fields[:, :, 0].clone()
        for i in range(1, fields.shape[2]):
            made |= fields[:, :, i] << width * i
        return made.to(dtype)

    codes = padded(found.codes, units * 8 * group).view(count, units, 8, group)
    high = None
    if form.bits == 8:
        signed = padded(found.codes - 128, units * 8 * group).view(codes.shape) & 255
        w.weight[slab, :, 0, within] = words(signed[:, :, :4], 8, torch.int32)
        w.weight[slab, :, 1, within] = words(signed[:, :, 4:], 8, torch.int32)
    else:
        width = 2 if form.bits < 4 else 4
        kind = torch.int16 if width == 2 else torch.int32
        w.weight[slab, :, within] = words(codes & ((1 << width) - 1), width, kind)
        high = codes >> width
    if w.high is not None:
        assert high is not None
        width = 2 if form.bits == 6 else 1
        w.high[slab, :, within] = words(high, width, w.high.dtype)
    own = []
    for numbers in (found.scales, found.mins):
        if numbers is not None:
            per, width = (2, 16) if form.scales == "halves" else (4, 8)
            fields = padded(numbers & ((1 << width) - 1), units * 8).view(count, units, -1, per)
            own.append(words(fields.transpose(2, 3), width, torch.int32))
    w.factors[:, :, rows] = torch.cat(own, dim=2).permute(1, 2, 0)
    if w.d is not None:
        assert found.d is not None
        d = found.d if found.dmin is None else found.d | found.dmin << 16
        w.d[:, rows] = d.view(count, -1).T
