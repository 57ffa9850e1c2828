"""Dummy steps before the first request, to measure activations and to compile kernels."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from slipstream.model.encoder import pool
from slipstream.worker.start.dummy_steps import dummy_prefill, dummy_sampling

if TYPE_CHECKING:
    from slipstream.spec.model import AudioSpec
    from slipstream.worker.loaded_runner import LoadedRunner
    from slipstream.worker.runner import Runner
    from slipstream.worker.torch_loading import TorchLoaded

PROBE_TOKENS = 64
"""Tokens of the measured step if most activation bytes are known beforehand."""

MAX_PROBED = 512
"""Maximum tokens of the measured step on a CPU if activation bytes are not known.

2,048 tokens take half a minute. Larger steps are extrapolated. A prompt that must be computed whole
is measured whole.
"""

LOGITS_PROBED = 2**24
"""Maximum number of logits that this step samples: 64 MiB."""

FEW_ROWS = 8
"""Rows that this step samples.

Rows take equal memory. 64 rows of SmolLM2's vocabulary would take 95 MB, which the process keeps.
"""


def measure_activations(runner: TorchLoaded) -> int:
    """Bytes of activations in the largest step: a full prefill budget with every row sampled."""
    scheduling, size = runner.config.scheduling, runner.config.cache.block_size
    num_tokens, per_token = scheduling.max_num_batched_tokens, runner.forwards.token_bytes
    num_rows = few_rows = runner.config.max_num_sampled
    known, scale = 0, 1.0
    if per_token is not None:
        # a short step measures the rest, and leaves the process with less unused memory
        known = num_tokens * (per_token + (0 if runner.draft is None else runner.draft.token_bytes))
        num_tokens = min(num_tokens, PROBE_TOKENS)
        few_rows = min(num_rows, FEW_ROWS)
    elif not runner.platform.is_asynchronous:
        # otherwise a step of a million sequences would take all memory, and minutes
        whole = 0 if scheduling.enable_chunked_prefill else runner.config.model.max_model_len
        num_tokens = min(num_tokens, max(MAX_PROBED, whole))
        scale = scheduling.max_num_batched_tokens / num_tokens
        few_rows = min(num_rows, max(FEW_ROWS, LOGITS_PROBED // runner.model.spec.vocab_size))
    if runner.media is not None:
        before = runner.platform.start_peak()
        passes = runner.media.probe()
        known += max(0, runner.platform.peak() - before)
        if passes > 1:  # the first one's memory includes what libraries allocate once
            before = runner.platform.start_peak()
            runner.media.probe()
            known += (passes - 1) * max(0, runner.platform.peak() - before)
    length = min(runner.config.model.max_model_len, num_tokens)
    kv = runner.make_cache(1)
    meta, tokens = dummy_prefill(num_tokens, length, size, runner.device)
    before = runner.platform.start_peak()
    if (encoder := runner.model.spec.encoder) is not None and encoder.audio is None:
        runner.forwards.encode(tokens, kv, meta)
    elif encoder is not None and encoder.audio is not None and per_token is None:
        known += _probe_audio(runner, encoder.audio)
        before = runner.platform.start_peak()
    if runner.has_latents:  # queries are wider if a part of the prompt is in the cache
        runner.forwards.hidden(tokens, kv, dataclasses.replace(meta, from_start=False))
    if runner.draft is not None:
        runner.draft.probe(tokens, meta)
    hidden = runner.forwards.hidden(tokens, kv, meta)
    if not runner.model.spec.has_last:
        return known + int(scale * max(0, runner.platform.peak() - before))
    if not runner.model.spec.generates:
        pool(runner.ops, hidden, meta.query_start_loc, "mean")
        return known + int(scale * max(0, runner.platform.peak() - before))
    if few_rows < num_rows or scale > 1.0:
        known += int(scale * max(0, runner.platform.peak() - before))
        before = runner.platform.start_peak()
    logits = runner.forwards.logits(
        hidden[torch.arange(few_rows, device=runner.device) % num_tokens]
    )
    runner.ops.sample(logits, dummy_sampling(few_rows, runner.device))
    del logits, hidden
    return known + max(0, runner.platform.peak() - before) * num_rows // few_rows


def compile_kernels(runner: Runner) -> None:
    """Run a small prefill and two decodes, so that the first request waits for no compilation.

    A decode of one sequence uses separate kernels.
    """
    for num_tokens, length in compiled_steps(runner.loaded):
        meta, tokens = dummy_prefill(
            num_tokens, length, runner.config.cache.block_size, runner.device
        )
        if length == 1:
            meta = dataclasses.replace(meta, num_decodes=num_tokens)
        encoder = runner.model.spec.encoder
        if encoder is not None and encoder.audio is None:
            runner.forwards.encode(tokens, runner.kv, dataclasses.replace(meta, num_decodes=0))
        elif encoder is not None and encoder.audio is not None and length > 1:
            _encode_silence(runner, encoder.audio)
        hidden = runner.forwards.hidden(tokens, runner.kv, meta)
        if not runner.model.spec.generates or not runner.model.spec.has_last:
            continue
        logits = runner.forwards.logits(hidden[-2:])
        runner.ops.sample(logits, dummy_sampling(len(logits), runner.device))
    runner.platform.synchronize()


def _encode_silence(runner: Runner | TorchLoaded, audio: AudioSpec, kv: Any = None) -> None:
    """Encode a window. All of its blocks are the null block."""
    kv = runner.kv if kv is None else kv  # type: ignore[union-attr]
    size, device = runner.config.cache.block_size, runner.platform.device
    meta, _ = dummy_prefill(audio.num_states, audio.num_states, size, device)
    frames = torch.zeros(audio.num_frames, 3 * audio.num_mel_bins, device=device)
    runner.forwards.encode(frames, kv, meta)


def _probe_audio(runner: TorchLoaded, audio: AudioSpec) -> int:
    """Bytes needed by the audio windows of the largest step."""
    kv, before = runner.make_cache(1), runner.platform.start_peak()
    _encode_silence(runner, audio, kv)
    windows = max(1, runner.config.scheduling.max_num_batched_tokens // audio.num_states)
    return windows * max(0, runner.platform.peak() - before)


def compiled_steps(runner: LoadedRunner) -> list[tuple[int, int]]:
    """(tokens, length of the prompts) of each step that is run to compile kernels."""
    steps = [(64, 64), (4, 1), (1, 1)]
    if runner.has_latents:
        # short and long prompts from their first token on have separate kernels; activations were
        # measured only up to this number of tokens
        most = min(512, runner.config.scheduling.max_num_batched_tokens)
        steps += [(most, min(n, most, runner.config.model.max_model_len)) for n in (128, 512)]
    return steps
