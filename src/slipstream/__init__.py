"""Slipstream: makes large language models cheap and fast to run.

The public names are loaded when first used, so that `import slipstream` and `slipstream --help` cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_PUBLIC = {
    "LLM": "slipstream.engine.llm",
    "AsyncLLM": "slipstream.engine.async_llm",
    "EngineConfig": "slipstream.config",
    "SamplingParams": "slipstream.types",
    "StructuredOutputsParams": "slipstream.types",
    "LoRARequest": "slipstream.types",
    "RequestOptions": "slipstream.types",
    "BeamSearchParams": "slipstream.types",
    "RequestOutput": "slipstream.outputs",
    "CompletionOutput": "slipstream.outputs",
    "SlipstreamError": "slipstream.errors",
}

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.llm import LLM
    from slipstream.errors import SlipstreamError
    from slipstream.outputs import CompletionOutput, RequestOutput
    from slipstream.types import (
        BeamSearchParams,
        LoRARequest,
        RequestOptions,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
