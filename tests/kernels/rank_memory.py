"""Ranks in one process, over memory that all of them hold: what `peer_collectives` needs of a group."""

from __future__ import annotations

import torch

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.plain.reference import ReferenceOps


class Rank:
    """A group as a rank sees it. The ranks make their calls one after another."""

    def __init__(self, rank, memories, device="cpu"):
        self.rank, self.size, self.memories, self.peer_collectives = (
            rank,
            len(memories),
            memories,
            None,
        )
        self.device = torch.device(device)

    def share(self, num_bytes):
        for i, held in enumerate(self.memories):
            if held is None:
                self.memories[i] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return tuple(self.memories)

    def least(self, *numbers):
        return list(numbers)


def numbers(shape, dtype, seed):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made[..., ::7] = -0.0  # two of them are what the kernel takes for nothing
    made[..., 14:16] = -0.0
    return made.to(dtype)


def wanted(op, given, rank):
    """The result that `op` of all ranks' `given` leaves on `rank`."""
    size = len(given)
    if op == "gather":
        return torch.stack(given)
    if op == "exchange":
        return torch.stack([x.unflatten(0, (size, -1))[rank] for x in given])
    total = sum((x.float() for x in given[1:]), given[0].float()).to(given[0].dtype)
    if op == "sum":
        return total
    each = -(-len(total) // size)
    whole = torch.cat((total, total.new_zeros(each * size - len(total), *total.shape[1:])))
    return whole.unflatten(0, (size, each))[rank]


def call(sums, op):
    return sums if op == "sum" else getattr(sums, op)


def are_empty(ranks):
    """Whether nothing that was sent lies in any rank's memory."""
    from slipstream.kernels.triton import peer_collectives  # imports Triton

    return all(
        bool((r._peers[r.group.rank].view(torch.int32) == peer_collectives.EMPTY).all())
        for r in ranks
    )


def norm_of(kind, width, dtype):
    return NormParams(
        kind=kind,
        weight=numbers((width,), dtype, 4),
        eps=1e-5,
        bias=numbers((width,), dtype, 3) if kind == "layer" else None,
        offset=0.5 if kind == "rms" else 0.0,
    )


def check_norms(found, given, norm, residual, inputs):
    """Ranks' results of `all_reduce_norm`, on the CPU: equal totals, the reference's norms of them
    but for the order in which squares are added, and equal codes."""
    dtype = given[0].dtype
    summed = wanted("sum", given, 0)
    expected, total = ReferenceOps().norm(summed, norm, residual=residual, inputs=inputs)
    for normed, own in found:
        assert torch.equal(own, total)
        if inputs is None:
            tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(normed, expected, rtol=tolerance, atol=1e-5)
            continue
        torch.testing.assert_close(
            normed.scales.flatten(), expected.scales.flatten(), rtol=1e-2, atol=0
        )
        by = expected.scales.repeat_interleave(128, 1) if inputs == "fp8-block" else expected.scales
        apart = (normed.values.float() - expected.values.float()).abs() * by
        assert (apart <= by * (1.01 if inputs == "int8" else 32.0)).all()  # a step of the codes
        assert (apart > 0).float().mean() < 0.02
    if inputs is not None:
        first = found[0][0].values.view(torch.uint8)
        assert all(torch.equal(first, normed.values.view(torch.uint8)) for normed, _ in found)
