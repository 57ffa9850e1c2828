"""What kernels ask of a device, once each. Without a GPU, in Triton's interpreter: one processor, Hopper's shared memory."""

from __future__ import annotations

import functools

import torch

HOPPER_SHARED_BYTES = 227 * 1024


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Of a multiprocessor's shared memory what one program may take."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined, no-any-return]  # torch's stubs lack it
