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
    "SamplingParams": "slipstream.params.sampling",
    "StructuredOutputsParams": "slipstream.params.answer_forms",
    "LoRARequest": "slipstream.params.lora_request",
    "RequestOptions": "slipstream.params.options",
    "BeamSearchParams": "slipstream.params.search",
    "PoolingParams": "slipstream.params.search",
    "TextPrompt": "slipstream.params.prompts",
    "TokensPrompt": "slipstream.params.prompts",
    "RequestOutput": "slipstream.outputs",
    "CompletionOutput": "slipstream.outputs",
    "EmbeddingOutput": "slipstream.outputs",
    "ScoreOutput": "slipstream.outputs",
    "ClassificationOutput": "slipstream.engine.requests.pooled",
    "EncodingOutput": "slipstream.engine.requests.pooled",
    "SlipstreamError": "slipstream.errors",
    "WeightGroup": "slipstream.worker.weights.group",
}
_VLLM = {
    "AsyncEngineArgs": ("slipstream.config", "EngineArgs"),
    "PromptType": ("slipstream.params.prompts", "Prompt"),
    "EmbeddingRequestOutput": ("slipstream.outputs", "EmbeddingOutput"),
    "ScoringOutput": ("slipstream.outputs", "ScoreOutput"),
    "ScoringRequestOutput": ("slipstream.outputs", "ScoreOutput"),
    "ClassificationRequestOutput": ("slipstream.engine.requests.pooled", "ClassificationOutput"),
    "PoolingOutput": ("slipstream.engine.requests.pooled", "EncodingOutput"),
    "PoolingRequestOutput": ("slipstream.engine.requests.pooled", "EncodingOutput"),
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
    from slipstream.engine.requests.pooled import ClassificationOutput, EncodingOutput
    from slipstream.errors import SlipstreamError
    from slipstream.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput
    from slipstream.params.answer_forms import StructuredOutputsParams
    from slipstream.params.lora_request import LoRARequest
    from slipstream.params.options import RequestOptions
    from slipstream.params.prompts import TextPrompt, TokensPrompt
    from slipstream.params.sampling import SamplingParams
    from slipstream.params.search import BeamSearchParams, PoolingParams
    from slipstream.worker.weights.group import WeightGroup

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
    "WeightGroup",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:  # `from … import` would replace an AttributeError's message
        raise ImportError(f"slipstream has no {name}; {_ELSEWHERE[name]}", name=name)
    if name not in _PUBLIC and name not in _VLLM:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    import importlib

    module, own = _VLLM.get(name) or (_PUBLIC[name], name)
    return getattr(importlib.import_module(module), own)
