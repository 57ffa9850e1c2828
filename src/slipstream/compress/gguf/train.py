"""Quantisation-aware training of a GGUF file: its blocks learn to predict as the original does.

1. A matrix keeps a float32 weight, and the scales and minima of its blocks. The model computes with what the file would hold:
   the nearest codes, scales as float16 or as multiples of their superblock's number.
2. Gradients pass straight through rounding to weights that are not cut off, and to scales and minima as in LSQ (Esser et al.
   2020). Vectors that the file holds in float32, such as norms, are trained, too.
3. The loss is KL(original‖file) of the next token on the calibration text; the optimizer is AdamW without weight decay.

Tensors of one type and length of rows are rounded together. Memory holds the weights, their gradients and AdamW's moments in
float32, the model's parameters with their gradients twice more, and the original in the type of the calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.compress.calibrate import BATCH_TOKENS, HELD_BYTES
from slipstream.compress.gguf.blocks import (
    LEVELS,
    WRITABLE,
    BlockGrid,
    Blocks,
    codes_of,
    form_of,
    pack,
    values_of,
)
from slipstream.compress.gguf.mix import PlannedBlocks
from slipstream.compress.gguf.source import places, put
from slipstream.compress.quantize.qat import MAX_GRAD_NORM, check_loss, rate, share_done
from slipstream.compress.quantize.rounding import straight_through
from slipstream.compress.recipe import QAT
from slipstream.compress.training.objective import LOGITS_BYTES
from slipstream.kernels.weights.gguf_codes import book, split
from slipstream.model.load.weights import load_parameters
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription
from slipstream.spec.stored.gguf_types import BY_NAME, QuantType

KEPT_BYTES = 64
"""Bytes that a layer keeps for the backward pass, by token and hidden size, as an estimate."""


@dataclass(slots=True)
class TrainedBlocks:
    """Tensors of one type whose rows have the same length, one after another. Scales are `scales` · exp(`growth`), minima
    `mins` + `shift` · |`scales`|, before they are stored as the type has them."""

    quant: QuantType
    tensors: tuple[PlannedBlocks, ...]
    weight: Tensor  # float32 [rows, in]
    scales: Tensor  # float32 [rows, groups]
    mins: Tensor | None
    d: Tensor | None  # float16 [rows, superblocks]
    dmin: Tensor | None
    growth: Tensor  # [rows, groups]
    shift: Tensor | None
    book: Tensor

    @classmethod
    def of(
        cls,
        kind: str,
        tensors: Sequence[PlannedBlocks],
        blocks: Sequence[Tensor],
        original: Sequence[Tensor],
    ) -> TrainedBlocks:
        """Begins at `blocks`. A weight is the original one where that has the file's code, else what the file has."""
        quant, form, device = BY_NAME[kind], form_of(BY_NAME[kind]), original[0].device
        raw = torch.cat([b.reshape(-1, quant.block_bytes) for b in blocks])
        found = split(raw.numpy().astype(np.int32), kind)
        inner = original[0].shape[-1]
        per_row = inner // quant.block_size

        def halves(bits: Any) -> Tensor:
            return torch.from_numpy(bits.astype(np.uint16).view(np.float16)).to(device)

        def rows_of(numbers: Tensor) -> Tensor:
            return numbers.reshape(-1, per_row * (numbers.numel() // len(raw)))

        d = dmin = mins = None
        if form.scales == "halves":
            scales = rows_of(halves(found.scales)).float()
            mins = None if found.mins is None else rows_of(halves(found.mins)).float()
        elif form.scales == "exponents":
            scales = rows_of(torch.from_numpy(found.scales).to(device)).float().sub(127).exp2()
        else:
            level, low = found.scales, found.mins
            if form.scales == "nibbles":
                level, low = level & 15, level >> 4
            d = rows_of(halves(found.d))
            scales = rows_of(torch.from_numpy(level).to(device)).float() * _spread(
                d, form.group, quant
            )
            if low is not None:
                dmin = rows_of(halves(found.dmin))
                mins = rows_of(torch.from_numpy(low).to(device)).float()
                mins *= _spread(dmin, form.group, quant)
        codes = rows_of(torch.from_numpy(found.codes).to(device))
        weight = torch.cat([x.reshape(-1, inner) for x in original]).float()
        each = [None if x is None else x.repeat_interleave(form.group, 1) for x in (scales, mins)]
        assert each[0] is not None
        written = values_of(form, codes.float(), each[0], each[1])
        same = codes_of(form, weight, each[0], each[1]) == codes
        growth = torch.zeros_like(scales)
        return cls(
            quant,
            tuple(tensors),
            torch.where(same, weight, written).requires_grad_(),
            scales,
            mins,
            d,
            dmin,
            # a power of two has no steps small enough to be trained
            growth.requires_grad_(form.scales != "exponents"),
            None if mins is None else torch.zeros_like(mins).requires_grad_(),
            torch.from_numpy(book(form))
            .to(device)
            .sort()
            .values[form.bits == 8 :],  # see `codes_of`
        )

    @property
    def parameters(self) -> list[Tensor]:
        found = [self.weight, self.growth, self.shift]
        return [x for x in found if x is not None and x.requires_grad]

    def numbers(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minima as the file stores them, with gradients."""
        scales = self.scales * self.growth.exp()
        mins = None
        if self.mins is not None and self.shift is not None:
            mins = self.mins + self.shift * self.scales.abs()
            mins = straight_through(mins, self._kept(mins.detach(), self.dmin))
        return straight_through(scales, self._kept(scales.detach(), self.d)), mins

    def _kept(self, x: Tensor, unit: Tensor | None) -> Tensor:
        if self.quant.name in LEVELS:
            assert unit is not None
            return self._levels(x, unit) * _spread(unit, form_of(self.quant).group, self.quant)
        return (
            x
            if form_of(self.quant).scales == "exponents"
            else x.clamp(-65504, 65504).half().float()
        )

    def _levels(self, x: Tensor, unit: Tensor) -> Tensor:
        each = _spread(unit, form_of(self.quant).group, self.quant)
        level = torch.where(each == 0, 0.0, x / torch.where(each == 0, 1.0, each)).round()
        return level.clamp(*LEVELS[self.quant.name])

    def rounded(self) -> Tensor:
        """The values that the file would hold [rows, in], with gradients. They pass straight through rounding to codes."""
        scales, mins = self.numbers()
        x, each = self.weight.unflatten(1, (scales.shape[1], -1)), scales[..., None]
        low = None if mins is None else mins[..., None]
        y = x if low is None else x + low
        y = torch.where(each == 0, 0.0, y / torch.where(each == 0, 1.0, each))
        y = torch.minimum(torch.maximum(y, self.book[0]), self.book[-1])
        at = y.detach()
        if form_of(self.quant).book == "linear":
            nearest = at.round()
        else:
            nearest = self.book[torch.bucketize(at, (self.book[1:] + self.book[:-1]) / 2)]
        made = straight_through(y, nearest) * each
        return (made if low is None else made - low).flatten(1)

    @torch.no_grad()
    def packed(self) -> dict[str, Blocks]:
        """The file's blocks by tensor, each in its shape."""
        form = form_of(self.quant)
        scales, mins = self.numbers()
        levels = None if self.d is None else self._levels(scales, self.d)
        if form.scales == "exponents":
            levels = scales.log2().round() + 127
        low = None if self.dmin is None or mins is None else self._levels(mins, self.dmin)
        whole = BlockGrid(self.quant, scales, mins, levels, low, self.d, self.dmin)
        made, begin = dict[str, Blocks](), 0
        for tensor in self.tensors:
            end = begin + tensor.num_values // self.weight.shape[1]
            parts = (
                x if x is None else x[begin:end]
                for x in (scales, mins, levels, low, self.d, self.dmin)
            )
            grid = BlockGrid(whole.quant, *parts)  # type: ignore[arg-type]
            own = None if grid.mins is None else grid.each(grid.mins)
            codes = codes_of(form, self.weight[begin:end].detach(), grid.each(grid.scales), own)
            made[tensor.name] = pack(grid, codes.to(torch.uint8))
            begin = end
        return made


def _spread(unit: Tensor, group: int, quant: QuantType) -> Tensor:
    """A number of each superblock for each of its groups."""
    return unit.float().repeat_interleave(quant.block_size // group, 1)


def divergence(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ KL(teacher‖student) of these logits [N, V], its gradient in the student's logits)."""
    ours, theirs = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    p = theirs.exp()
    total = theirs.sub_(ours).mul_(p).sum()  # in place: these are the largest tensors of a step
    return total, ours.exp_().sub_(p).to(student.dtype)


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TrainingWindows:
    """Windows with the original's final hidden states, as many as fit in `room` tokens."""

    windows: Sequence[Sequence[int]]
    original: WholeModel
    device: torch.device
    room: int
    known: dict[int, Tensor]

    @torch.no_grad()
    def hidden(self, chosen: Sequence[int]) -> Tensor:
        missing = [i for i in chosen if i not in self.known]
        found = {i: self.known[i] for i in chosen if i in self.known}
        if missing:
            batch = SequenceBatch.of([list(self.windows[i]) for i in missing], self.device)
            states = self.original.hidden(batch).split(batch.lengths)
            for i, state in zip(missing, states, strict=True):
                found[i] = state
                if self.room >= len(state):
                    self.room -= len(state)
                    self.known[i] = state.clone()
        return torch.cat([found[i] for i in chosen])


def train_blocks(
    source: ModelDescription,
    planned: Sequence[PlannedBlocks],
    read_blocks: Callable[[PlannedBlocks], Tensor],
    windows: Sequence[Sequence[int]],
    settings: QAT,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the bytes of the trained tensors, by their names in the file, and the receipt of the training. `read_blocks`
    gives a tensor's bytes. The model computes in `dtype`. ConfigError if the loss becomes infinite or NaN."""
    table, spec = places(source), source.spec
    values = load_parameters(source, dtype=torch.float32, device=device)
    longest = max(len(w) for w in windows)
    teacher = WholeModel(
        spec, {n: v.to(dtype, copy=True) for n, v in values.items()}, max_len=longest
    )
    teacher.requires_grad_(False)
    stacks, vectors = _stacks(source, planned, read_blocks, values)
    batch_tokens = min(settings.step_tokens, BATCH_TOKENS[device.type])
    kept = KEPT_BYTES * batch_tokens * spec.hidden_size * spec.num_layers
    student = WholeModel(
        spec, values, max_len=longest, recompute=device.type == "cpu" or kept > _free(device) // 3
    )
    fixed = set(values) - {table[t.name].target for s in stacks for t in s.tensors}
    fixed -= {table[name].target for name in vectors}
    leaves = dict(student.named_parameters())
    for name in fixed:
        leaves[name].requires_grad_(False)
    room = (HELD_BYTES if device.type == "cpu" else _free(device) // 4) // (
        spec.hidden_size * dtype.itemsize
    )
    text = _TrainingWindows(windows, teacher, device, room, {})

    def assembled() -> dict[str, Tensor]:
        """The parameters of the model that the file would be, with gradients."""
        made = {
            n: torch.empty_like(p, requires_grad=False) for n, p in leaves.items() if n not in fixed
        }
        for stack in stacks:
            rows = stack.rounded()
            counts = [t.num_values // rows.shape[1] for t in stack.tensors]
            for tensor, part in zip(stack.tensors, rows.split(counts), strict=True):
                put(made, table[tensor.name], part.view(tensor.shape))
        for name, vector in vectors.items():
            put(made, table[name], vector)
        return made

    def backward(chosen: Sequence[int], num_tokens: int) -> Tensor:
        batch = SequenceBatch.of([list(windows[i]) for i in chosen], device)
        target, total = text.hidden(chosen), torch.zeros((), device=device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            hidden = student.hidden(batch)
            inner = hidden.detach().requires_grad_()
            count = -(-len(inner) * spec.vocab_size // LOGITS_BYTES)
            for rows, theirs in zip(inner.chunk(count), target.chunk(count), strict=True):
                logits = student.logits(rows)
                with torch.no_grad():
                    loss, gradient = divergence(logits.detach(), teacher.logits(theirs))
                logits.backward(gradient / num_tokens)
                total += loss
        hidden.backward(inner.grad)
        return total / num_tokens

    own = [p for stack in stacks for p in stack.parameters] + list(vectors.values())
    optimizer = torch.optim.AdamW(own, lr=1.0, weight_decay=0.0, fused=device.type == "cuda")
    draws, order, losses = torch.Generator().manual_seed(settings.seed), list[int](), list[Tensor]()
    per_step = max(1, settings.step_tokens // longest)
    per_batch = max(1, batch_tokens // longest)
    begin, done, num_tokens = time.monotonic(), 0.0, 0
    while done < 1:
        made = assembled()
        with torch.no_grad():
            for name, value in made.items():
                leaves[name].copy_(value)
                leaves[name].grad = None
        while len(order) < per_step:
            order += torch.randperm(len(windows), generator=draws).tolist()
        chosen, order = order[:per_step], order[per_step:]
        count = sum(len(windows[i]) for i in chosen)
        parts = [chosen[i : i + per_batch] for i in range(0, per_step, per_batch)]
        losses.append(torch.stack([backward(part, count) for part in parts]).sum())
        reached = {n: v for n, v in made.items() if v.requires_grad and leaves[n].grad is not None}
        torch.autograd.backward([*reached.values()], [leaves[n].grad for n in reached])
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(done, settings)
        torch.nn.utils.clip_grad_norm_(own, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_tokens += count
        # the previous step's loss: waiting for this one's would let the device idle
        if len(losses) > 1:
            check_loss(len(losses) - 2, losses[-2])
        progress(len(losses))
        done = share_done(len(losses), time.monotonic() - begin, settings)
    check_loss(len(losses) - 1, losses[-1])
    found = {n: torch.from_numpy(b) for stack in stacks for n, b in stack.packed().items()}
    found |= {n: v.detach().cpu().contiguous().view(torch.uint8) for n, v in vectors.items()}
    receipt = {
        "num_steps": len(losses),
        "num_tokens": num_tokens,
        "num_windows": len(windows),
        "seconds": time.monotonic() - begin,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "losses": [round(float(loss), 5) for loss in torch.stack(losses).cpu()],
    }
    return found, receipt


def _stacks(
    source: ModelDescription,
    planned: Iterable[PlannedBlocks],
    read_blocks: Callable[[PlannedBlocks], Tensor],
    values: Mapping[str, Tensor],
) -> tuple[list[TrainedBlocks], dict[str, Tensor]]:
    """The matrices that are trained, by type and length of rows, and the vectors."""
    from slipstream.compress.gguf.source import read_tensor

    table, groups, vectors = places(source), dict[tuple[str, int], list[PlannedBlocks]](), {}
    for tensor in planned:
        if tensor.type in WRITABLE:
            groups.setdefault((tensor.type, tensor.shape[-1]), []).append(tensor)
        elif tensor.type == "F32" and len(tensor.shape) == 1:
            exact = read_tensor(source, tensor.name, table[tensor.name], values)
            vectors[tensor.name] = exact.clone().requires_grad_()
    stacks = [
        TrainedBlocks.of(
            kind,
            own,
            [read_blocks(t) for t in own],
            [read_tensor(source, t.name, table[t.name], values) for t in own],
        )
        for (kind, _), own in groups.items()
    ]
    return stacks, vectors


def _free(device: torch.device) -> int:
    return 0 if device.type == "cpu" else platform_of(device).memory()[0]
