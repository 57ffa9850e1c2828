"""The scheduler's section of `EngineConfig`: the number of sequences and tokens of a step.

ConfigError if a step is too small for the sequences and prompts that it must hold.
"""

from __future__ import annotations

from slipstream.config.chosen import Chosen, Origins, positive
from slipstream.config.forms import (
    DraftSettings,
    Offload,
    ParallelConfig,
    SpeculationConfig,
    StreamedLayers,
)
from slipstream.config.sections import SchedulingConfig
from slipstream.config.settings import BATCH_WINDOW_S, MIXED_CHUNK, DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.spec.model import LatentAttentionSpec, ModelSpec, MoESpec


def scheduling_section(
    args: EngineArgs,
    spec: ModelSpec,
    device: DeviceInfo,
    max_model_len: int,
    *,
    offload: Offload,
    parallel: ParallelConfig,
    speculation: SpeculationConfig,
) -> tuple[SchedulingConfig, Origins]:
    chosen, chunked = Chosen(args), args.enable_chunked_prefill is not False
    # Each rank has its share of a step.
    ranks, streams = parallel.stage.num_caches, isinstance(offload, StreamedLayers)
    if spec.needs_full_prompt:
        chunked = chosen.needs_full_prompt("enable_chunked_prefill", not spec.is_encoder)
    elif spec.joins_prompts:
        chunked = chosen.needs_full_prompt("enable_chunked_prefill", False)
    if args.target_itl_ms is not None:
        _check_target_itl(args.target_itl_ms, chunked and not spec.needs_full_prompt)
    seqs_auto = 1024 if device.is_cuda else 256 if spec.is_encoder else 64
    why = "default for this kind of device"
    most = _sequences_with_states(spec, device, speculation) if spec.is_recurrent else seqs_auto
    if most < seqs_auto:
        seqs_auto, why = most, "as many as have room for their recurrent states"
    seqs = chosen("max_num_seqs", seqs_auto, "device", why)
    positive("max_num_seqs", seqs)
    # An encoder's whole step is one round trip of the host, which takes longer than 8,192 tokens of
    # a small model on a GPU. A step that copies layers to a GPU computes many tokens meanwhile.
    tokens_auto = (
        max(16384 if spec.is_encoder or streams else 8192, seqs)
        if device.is_cuda
        else max(512, seqs)
    )
    if not chunked:
        tokens_auto = max(tokens_auto, ranks * max_model_len, 2048 if spec.is_encoder else 0)
    # The encoder's whole prompt, plus a token of each other sequence.
    needed = spec.encoder.longest(max_model_len) + seqs if spec.encoder is not None else 0
    tokens_auto = max(tokens_auto, needed)
    picture = 0 if spec.media is None else spec.media.whole_tokens
    if picture:  # an image's tokens attend to each other
        tokens_auto = max(tokens_auto, picture + seqs)
    tokens = chosen(
        "max_num_batched_tokens", tokens_auto, "device", "keeps GEMMs above the compute knee"
    )
    mixed = chosen(
        "max_num_mixed_tokens",
        tokens,
        "default",
        "max_num_batched_tokens: many waiting tokens go before even gaps",
    )
    full = None if chunked else max_model_len
    _check_step_tokens(tokens, mixed, seqs, needed=needed, full_prompt=full, spec=spec, ranks=ranks)
    if tokens < picture + seqs * bool(picture):
        raise ConfigError(
            f"max_num_batched_tokens={tokens}: a step must hold a picture, of {picture} tokens that see each other, and a "
            f"token of each other sequence, {picture + seqs} in all; raise it, or lower max_num_seqs",
            field="max_num_batched_tokens",
        )
    # A step that copies layers takes long with any number of tokens. Each chunk reads experts
    # again, and latent attention is several times faster if a step computes whole prompts.
    is_plain = not any(
        isinstance(x, (MoESpec, LatentAttentionSpec))
        for y in spec.layers
        for x in (y.mlp, y.attention)
    )
    may_cut = (
        chunked and not spec.needs_full_prompt and args.target_itl_ms is None and mixed == tokens
    )
    cuts = may_cut and is_plain and not streams
    window = chosen(
        "batch_window_s",
        BATCH_WINDOW_S,
        "default",
        "long enough to gather a batch, too short to be noticed",
    )
    if window < 0:
        raise ConfigError("batch_window_s must not be negative", field="batch_window_s")
    if args.max_queue is not None:
        positive("max_queue", args.max_queue)
    config = SchedulingConfig(
        policy=args.scheduling_policy,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_num_mixed_tokens=mixed,
        enable_chunked_prefill=chunked,
        batch_window_s=window,
        max_queue=args.max_queue,
        target_itl_ms=args.target_itl_ms,
        mixed_chunk=MIXED_CHUNK if cuts else None,
        pipeline_steps=parallel.num_stages,
        num_ranks=ranks,
    )
    return config, chosen.origins


HOST_STATE_BYTES = 2**31
"""Maximum default bytes of running sequences' states in host memory: half of the cache there."""


AUTO_DRAFTS = 3
"""Number of drafts per sequence whose states the default number of sequences allows for, if the engine chooses the
number of drafts."""


def _sequences_with_states(
    spec: ModelSpec, device: DeviceInfo, speculation: SpeculationConfig
) -> int:
    """Number of sequences, a power of two, whose states take a quarter of a GPU's memory, or a
    fifth of a host's free memory."""
    slots = 2
    if isinstance(speculation, DraftSettings):
        slots += speculation.num_speculative_tokens or AUTO_DRAFTS
    room = device.memory_bytes // 4
    if not device.is_cuda:
        room = min(HOST_STATE_BYTES, device.free_bytes // 5)
    count = room // (slots * spec.state_bytes(2))
    return 1 << max(0, count.bit_length() - 1)


def _check_target_itl(target_ms: float, chunked: bool) -> None:
    if not 0 < target_ms < float("inf"):
        raise ConfigError(
            f"target_itl_ms={target_ms} must be a number of milliseconds above 0",
            field="target_itl_ms",
        )
    if not chunked:
        raise ConfigError(
            "target_itl_ms cuts prompts into chunks, which enable_chunked_prefill=False forbids, and an encoder's prompt does; "
            "leave it out",
            field="target_itl_ms",
        )


def _check_step_tokens(
    tokens: int,
    mixed: int,
    seqs: int,
    *,
    needed: int,
    full_prompt: int | None,
    spec: ModelSpec,
    ranks: int,
) -> None:
    """Raise ConfigError if the maximum tokens of a step are too few.

    A step must hold a token of each sequence; with an encoder, `needed` tokens; without chunked
    prefill, a prompt of `full_prompt` tokens.
    """
    positive("max_num_batched_tokens", tokens)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}: one decode step would not fit; raise it or "
            "lower max_num_seqs",
            field="max_num_batched_tokens",
        )
    if full_prompt is not None and tokens < ranks * full_prompt:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"without chunked prefill{' (an encoder has none)' * spec.is_encoder} max_num_batched_tokens={tokens} must hold a "
            f"whole prompt{each} (max_model_len={full_prompt}); raise it, lower max_model_len, or enable chunked prefill",
            field="max_num_batched_tokens",
        )
    positive("max_num_mixed_tokens", mixed)
    if not seqs <= mixed <= tokens:
        raise ConfigError(
            f"max_num_mixed_tokens={mixed} must lie between max_num_seqs={seqs}, which one decode step takes, and "
            f"max_num_batched_tokens={tokens}, which no step exceeds",
            field="max_num_mixed_tokens",
        )
    if mixed < needed:
        raise ConfigError(
            f"max_num_mixed_tokens={mixed} (at most max_num_batched_tokens={tokens}): a step must hold a whole prompt for the "
            f"encoder and a token of each other sequence, {needed} in all; raise it, or lower max_model_len or max_num_seqs",
            field="max_num_mixed_tokens" if mixed < tokens else "max_num_batched_tokens",
        )
    if mixed < tokens and full_prompt is not None:
        raise ConfigError(
            f"without chunked prefill a step holds whole prompts, and max_num_mixed_tokens={mixed} can't bound it; leave it "
            "out or enable chunked prefill",
            field="max_num_mixed_tokens",
        )
