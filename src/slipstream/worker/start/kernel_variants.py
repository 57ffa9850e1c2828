"""Every kernel of an engine, found on a described GPU before the engine starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.config import EngineArgs
from slipstream.kernels.triton.variants import Variant, recording
from slipstream.platform import platform_of
from slipstream.platform.meta import MetaPlatform
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.start.kernel_steps import KernelSteps


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Triton's variants, and kernels in CUDA C++ (`kernels/triton/cuda.py`)."""

    variants: frozenset[Variant]
    sources: frozenset[Any]


def find_kernels(args: EngineArgs, capability: tuple[int, int]) -> EngineKernels:
    """The kernels of an engine with these settings on a GPU of this compute capability.

    Steps run op by op in one engine, and in graphs in another: padding changes some variants.
    """
    device = "meta:{}{}".format(*capability)
    args = replace(args, device=device, load_format="dummy", skip_tokenizer_init=True, canary="off")
    with recording(capability) as found:
        for eager in (True, False):
            executor = LocalExecutor.build(replace(args, enforce_eager=args.enforce_eager or eager))
            executor.warm_up()
            if isinstance(executor.runner, ModelRunner) and executor.runner.model.spec.generates:
                steps = KernelSteps(executor.runner)
                (steps.run_forwards if eager else steps.run_samplings)()
            while executor.capture_next():
                pass
            executor.shutdown()
            if args.enforce_eager:
                steps.run_samplings()
                break
    platform = platform_of(torch.device("meta"))
    assert isinstance(platform, MetaPlatform)
    return EngineKernels(frozenset(found), frozenset(platform.cuda_sources))
