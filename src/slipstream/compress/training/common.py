"""Common parts of all trainings: order of examples, parameter groups, receipt, and saved state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.base.files import write_whole
from slipstream.compress.steps import DraftHead, LoRA
from slipstream.costs.environment import environment, plain
from slipstream.costs.hardware import cpu_features
from slipstream.spec.description import ModelDescription

STATE_NAME = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state for each parameter."""


def in_bfloat16(device: torch.device) -> bool:
    """Whether matrix products are faster in bfloat16 on this device."""
    return device.type != "cpu" or "AVX-512 BF16" in cpu_features()


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: weight decay for matrices, none for vectors."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Epochs:
    """Chooses which of `count` examples a step uses, `size` at a time. An epoch contains each
    example once, in an order of its own. A step's examples depend on its number alone, so that a
    continued run uses the same."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed
        self._epoch, self._order = -1, list[int]()

    def indices(self, step: int) -> list[int]:
        found = []
        for place in range(step * self.size, (step + 1) * self.size):
            epoch, at = divmod(place, self.count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._epoch, self._order = (
                    epoch,
                    torch.randperm(self.count, generator=generator).tolist(),
                )
            found.append(self._order[at])
        return found


def write_receipt(
    file: Path, source: ModelDescription, settings: DraftHead | LoRA, **parts: Any
) -> dict[str, Any]:
    """Write a receipt: how `source` was trained with these settings, on which machine, and with
    what results. Returns it."""
    receipt = {
        "format": 1,
        **environment(),
        "model": source.name,
        "settings": asdict(settings),
        **parts,
    }
    file.write_text(json.dumps(receipt, indent=1, default=plain) + "\n")
    return receipt


# --- Saved state ------------------------------------------------------------------------------------------------------


def save_state(
    folder: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    *,
    write: bool = True,
) -> None:
    """Write parameters, moments and `about`, which contains the "step". The state is valid when
    state.json names it; then the previous one is deleted. If parameters are sharded, every process
    calls this, and one of them with `write`."""
    from safetensors.torch import save_file

    tensors = {f"parameter.{n}": full(p.detach()).cpu() for n, p in parameters.items()}
    for n, p in parameters.items():
        tensors |= {f"{key}.{n}": full(optimizer.state[p][key]).cpu() for key in MOMENTS}
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = f"state-{about['step']}.safetensors"
    save_file(tensors, folder / name)
    write_whole(folder / STATE_NAME, json.dumps({"file": name, **about}))
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def read_state(folder: Path) -> dict[str, Any] | None:
    """Read the `about` of the state in `folder`; None if there is none."""
    file = folder / STATE_NAME
    return json.loads(file.read_text()) if file.is_file() else None


@torch.no_grad()
def restore_state(
    folder: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
) -> None:
    """Set parameters and moments to those of the state found by `read_state`."""
    from safetensors.torch import load_file

    tensors = load_file(folder / about["file"])
    for n, p in parameters.items():
        p.copy_(_like(tensors[f"parameter.{n}"], p))
        moments = {key: _like(tensors[f"{key}.{n}"], p) for key in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(float(about["step"])), **moments}


def full(value: Tensor) -> Tensor:
    """Gather a sharded tensor from the ranks."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """Move a tensor to the parameter's device, sharded like it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device)
    return (
        distribute_tensor(value, parameter.device_mesh, parameter.placements)
        if isinstance(parameter, DTensor)
        else value
    )
