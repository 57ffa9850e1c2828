"""Slipstream: makes large language models cheap and fast to run.

The public names are loaded when first used, so that `import slipstream` and `slipstream --help` cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_PUBLIC = {
    "LLM": "slipstream.engine.llm",
    "AsyncLLM": "slipstream.engine.async_llm",
    "EngineArgs": "slipstream.config",
    "EngineConfig": "slipstream.config",
    "SamplingParams": "slipstream.types",
    "StructuredOutputsParams": "slipstream.answer_forms",
    "LoRARequest": "slipstream.lora_request",
    "RequestOptions": "slipstream.types",
    "BeamSearchParams": "slipstream.search_params",
    "PoolingParams": "slipstream.search_params",
    "TextPrompt": "slipstream.types",
    "TokensPrompt": "slipstream.types",
    "RequestOutput": "slipstream.outputs",
    "CompletionOutput": "slipstream.outputs",
    "EmbeddingOutput": "slipstream.outputs",
    "ScoreOutput": "slipstream.outputs",
    "ClassificationOutput": "slipstream.engine.pooled",
    "EncodingOutput": "slipstream.engine.pooled",
    "SlipstreamError": "slipstream.errors",
}
_VLLM = {
    "AsyncEngineArgs": ("slipstream.config", "EngineArgs"),
    "PromptType": ("slipstream.types", "Prompt"),
    "EmbeddingRequestOutput": ("slipstream.outputs", "EmbeddingOutput"),
    "ScoringOutput": ("slipstream.outputs", "ScoreOutput"),
    "ScoringRequestOutput": ("slipstream.outputs", "ScoreOutput"),
    "ClassificationRequestOutput": ("slipstream.engine.pooled", "ClassificationOutput"),
    "PoolingOutput": ("slipstream.engine.pooled", "EncodingOutput"),
    "PoolingRequestOutput": ("slipstream.engine.pooled", "EncodingOutput"),
}
"""Names that vLLM has for some of these."""

_ELSEWHERE = {
    "LLMEngine": "use LLM, whose `stream` yields the answer as it comes, or AsyncLLM",
    "AsyncLLMEngine": "use `await AsyncLLM.start(EngineArgs(...))`",
    "ModelRegistry": "docs/adding-a-model.md says how a family of models is added",
    "initialize_ray_cluster": "leave it out: ranks are processes (docs/parallelism.md)",
}
"""Names of vLLM that have no equal here, and what to do instead."""

if TYPE_CHECKING:
    from slipstream.config import EngineArgs, EngineConfig
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.llm import LLM
    from slipstream.engine.pooled import ClassificationOutput, EncodingOutput
    from slipstream.errors import SlipstreamError
    from slipstream.lora_request import LoRARequest
    from slipstream.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput
    from slipstream.types import (
        BeamSearchParams,
        PoolingParams,
        RequestOptions,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EncodingOutput",
    "EngineArgs",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "SlipstreamError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:  # `from … import` would replace an AttributeError's message
        raise ImportError(f"slipstream has no {name}; {_ELSEWHERE[name]}", name=name)
    if name not in _PUBLIC and name not in _VLLM:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    import importlib

    module, own = _VLLM.get(name) or (_PUBLIC[name], name)
    return getattr(importlib.import_module(module), own)
