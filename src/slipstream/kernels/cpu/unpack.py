"""Unpacks weights in the C++ kernels' order (csrc/cpu/formats.h), with torch on any device.

So a GPU computes with experts that are packed for the CPU: their bytes are copied, and unpacked
there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.packed import PackedExperts

PANEL, GROUP = 16, 32
"""Rows of a panel, and inputs of a group, as in csrc/cpu/formats.h."""

FOUR_BITS = {
    native.Q4: (8, 2, 1),
    native.Q4M: (0, 2, 1),
    native.W4: (8, 4, 4),
    native.W4M: (0, 4, 4),
    native.W4M32: (0, 4, 1),
}
"""Layout by kind: the code of 0, the bytes of a scale, and the number of groups that share one."""

WITH_MINIMA = (native.Q4M, native.W4M, native.W4M32)
BITS = {native.F32: 32, native.BF16: 16, native.I8: 8, native.MX: 4, **dict.fromkeys(FOUR_BITS, 4)}

MX_BIAS = 127
"""Bias of MX's stored exponents, which are those of half the scale."""


def unpack(data: Tensor, w: PackedExperts, out: Tensor) -> None:
    """Unpacks experts' bytes `data`, uint8 [experts, stride], to `out` [experts, rows, inner], in
    its type.

    `w` only describes how they are packed.
    """
    panels, groups = -(-w.rows // PANEL), -(-w.inner // GROUP)
    code_bytes = native.load().ss_packed_bytes(native.F32, PANEL, w.inner) * BITS[w.kind] // 32
    codes, rest = data[:, : panels * code_bytes], data[:, panels * code_bytes :]
    count = len(data)
    if w.kind == native.F32:
        numbers = codes.view(torch.float32).view(count, panels, -1, PANEL).transpose(2, 3)
    elif w.kind == native.BF16:
        numbers = (
            codes.view(torch.bfloat16).view(count, panels, -1, PANEL, 2).transpose(2, 3).flatten(3)
        )
    elif w.kind == native.I8:
        scales = _floats(rest, panels, 1, 4)
        numbers = (
            codes.view(count, panels, -1, PANEL, 4)
            .transpose(2, 3)
            .flatten(3)
            .float()
            .sub_(128.0)
            .mul_(scales)
        )
    else:
        lines = codes.view(count, panels, groups, 4, PANEL, 4)
        # [experts, panels, groups, half, line, rows, 4]
        halves = torch.stack((lines & 15, lines >> 4), dim=3)
        grouped = halves.permute(0, 1, 5, 2, 3, 4, 6).reshape(count, panels, PANEL, groups, GROUP)
        if w.kind == native.MX:
            exponents = (
                rest[:, : panels * groups * PANEL]
                .view(count, panels, groups, PANEL)
                .transpose(2, 3)
            )
            numbers = _twice_e2m1(grouped) * torch.exp2(exponents.float() - MX_BIAS)[..., None]
        else:
            start, size, each = FOUR_BITS[w.kind]
            num_scales = -(-groups // each)
            scales = _floats(rest, panels, num_scales, size).repeat_interleave(each, dim=3)[
                :, :, :, :groups, None
            ]
            numbers = grouped.float().sub_(start).mul_(scales)
            if w.kind in WITH_MINIMA:
                minima = _floats(
                    rest[:, panels * num_scales * PANEL * size :], panels, num_scales, size
                )
                numbers += minima.repeat_interleave(each, dim=3)[:, :, :, :groups, None]
        numbers = numbers.flatten(3)
    out.copy_(numbers.flatten(1, 2)[:, : w.rows, : w.inner])


def _twice_e2m1(codes: Tensor) -> Tensor:
    """Returns float32, shaped as `codes`: twice the values of MX's codes, uint8 with a sign bit,
    two exponent bits and one mantissa bit.

    It uses arithmetic, because a table from the host can't be copied while a CUDA graph is
    captured.
    """
    magnitude = (codes & 7).int()
    normal = (2 | magnitude & 1) << ((magnitude >> 1) - 1).clamp_(min=0)
    return torch.where(magnitude < 2, magnitude, normal).float() * (1 - (codes >> 3).float() * 2)


def _floats(data: Tensor, panels: int, num: int, size: int) -> Tensor:
    """Reads scales, `num` for each row of a panel, `size` bytes each: float32
    [experts, panels, rows, num]."""
    kind = torch.float32 if size == 4 else torch.float16
    found = data[:, : panels * num * PANEL * size].view(kind).view(len(data), panels, num, PANEL)
    return found.float().transpose(2, 3)
