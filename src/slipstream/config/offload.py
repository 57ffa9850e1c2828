"""Checks the setting `weights_bytes`. ConfigError names a setting that conflicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.config.settings import DeviceInfo, EngineArgs, num_ranks, split_setting
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


def check_offload(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> None:
    """Raise ConfigError if this model, these settings or this device do not allow reading layers in
    each step."""
    on_cpu = not device.is_cuda
    drafts = args.speculative_config is not None or args.speculative_model not in (
        None,
        "ngram",
        "suffix",
    )
    if not isinstance(args.weights_bytes, int) or args.weights_bytes < 1:
        raise _refused(f"it must be a number of bytes above 0, got {args.weights_bytes!r}")
    for applies, why in (
        (
            on_cpu and args.kernels not in ("auto", "cpu"),
            f"it needs the CPU's C++ kernels, not kernels={args.kernels!r}",
        ),
        (num_ranks(args) > 1, f"it is for one device; leave {split_setting(args)} at 1"),
        (model.spec.kind != "a decoder", f"it is for decoders, and this is {model.spec.kind}"),
        (args.enable_lora, "adapters need all weights in memory; leave out enable_lora"),
        (
            model.spec.vision is not None and args.max_images != 0,
            "a model with an image encoder needs all weights in memory; set max_images=0",
        ),
        (
            drafts,
            "drafts of a model need all weights in memory; use speculative_model='ngram' or 'suffix'",
        ),
        (
            on_cpu and model.quantization is not None and model.quantization.rounds,
            "on a CPU it covers dense and GGUF checkpoints, and this one's weights are rounded in another way; convert it to "
            "GGUF",
        ),
        (
            args.dense_copies is True and device.is_cuda,
            "dense copies of 4-bit weights would be copied to the GPU in each step; leave out dense_copies",
        ),
    ):
        if applies:
            raise _refused(why)


def _refused(why: str) -> ConfigError:
    return ConfigError(f"weights_bytes: {why}", field="weights_bytes")
