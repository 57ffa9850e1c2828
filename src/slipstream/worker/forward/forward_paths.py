"""Forward paths that settings and a model spec allow, before a model is loaded. No torch.

`fast_paths` serves `slipstream info`. An engine uses the loaded model instead (`forward.Forwards`),
because weights and device may also rule a path out. `torch_reason`: why an engine needs torch;
without a reason its only path is the program (`HostForwards`).
"""

from __future__ import annotations

from slipstream.config import EngineConfig
from slipstream.config.forms import (
    DealtRequests,
    HostExperts,
    OneDevice,
    StreamedLayers,
    TensorParallel,
)
from slipstream.costs.estimate import by_cpu_kernels
from slipstream.kernels.cpu.native import CACHES, has_cpu_kernels
from slipstream.model.trace import HOST_EXPERTS, INT4_CACHE, SPLIT, STREAMED, covered
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import DisentangledSpec, ModelSpec
from slipstream.spec.reason import Reason


def fast_paths(config: EngineConfig, spec: ModelSpec) -> dict[str, Reason | None]:
    """The kernels' fast forward paths by name.

    The value is None if the path covers the model, otherwise the reason. Empty if these kernels have no fast paths.
    """
    model, parallel, on_cpu = config.model, config.parallel, by_cpu_kernels(config)
    if not on_cpu and (not config.device.info.is_cuda or config.device.kernels == "reference"):
        return {}
    name = "program" if on_cpu else "one-token"
    match model.offload, parallel:
        case HostExperts(), _:
            return {name: HOST_EXPERTS}
        case StreamedLayers(), _:
            return {name: STREAMED}
        case _ if config.cache.dtype == "int4":
            return {name: INT4_CACHE}
        case _, OneDevice():
            pass
        case _, (TensorParallel(sequence=False, context=1) | DealtRequests()) if not on_cpu:
            pass
        case _:
            return {name: SPLIT}
    return covered(spec, kernels="cpu" if on_cpu else "triton", num_ranks=parallel.num_ranks)


def torch_reason(config: EngineConfig, description: ModelDescription) -> Reason | None:
    """Reason why an engine with these settings needs torch; None if it does not."""
    reason = host_refusal(config, description)
    return reason if reason is not None else fast_paths(config, description.spec).get("program")


def host_refusal(config: EngineConfig, description: ModelDescription) -> Reason | None:
    """Reason why these settings, or loading this model, need torch; None if they do not.

    The model is not traced here. Missing operators are noticed when the program is compiled.
    """
    device, kept = config.device, config.cache.dtype
    table: tuple[tuple[bool, str], ...] = (
        (device.info.is_cuda, "the device is a GPU"),
        (device.kernels not in ("auto", "cpu"), f"kernels={device.kernels!r} are torch's"),
        (not has_cpu_kernels(), "the C++ kernels are not built"),
        (config.parallel.num_ranks > 1, "several ranks need torch to sum up their parts"),
        (kept not in CACHES, f"kv_cache_dtype: the C++ program has no cache of {kept}"),
        (
            isinstance(config.model.offload, StreamedLayers),
            "weights_bytes: layers that are read as they are needed run op by op",
        ),
        (config.lora is not None, "enable_lora: adapters are run by torch"),
        (config.model.routed_experts, "enable_return_routed_experts: torch notes the experts"),
    )
    found = next((Reason(text) for refused, text in table if refused), None)
    return found or load_refusal(description, config.model.load_format)


def load_refusal(description: ModelDescription, load_format: str) -> Reason | None:
    """Reason why loading a model, or running its prompts, needs torch; None if it does not."""
    spec, stored = description.spec, description.quantization
    table: tuple[tuple[bool, str], ...] = (
        (
            spec.media is not None,
            "the model has an image encoder, which torch runs (max_images=0 leaves it out)",
        ),
        (
            spec.encoder is not None and spec.encoder.audio is not None,
            "the model has an encoder of audio, whose input torch makes",
        ),
        (
            isinstance(getattr(spec.layers[0].attention, "position", None), DisentangledSpec),
            "disentangled attention (DeBERTa) is run by torch",
        ),
        (
            spec.reads_lengths,
            "attention to compressed keys (DeepSeek V4) or chosen blocks of keys (MiniMax M3) is run by torch",
        ),
        (
            stored is not None and stored.method == "mxfp4" and load_format != "dummy",
            "quantization_config: experts in mxfp4 are put together by torch (a GGUF file's need none)",
        ),
    )
    return next((Reason(text) for refused, text in table if refused), None)
