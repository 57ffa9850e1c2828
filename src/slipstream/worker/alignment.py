"""Computes a text's attention to its audio, from which word times are computed. Runs between two
steps. See `model.alignment`."""

from __future__ import annotations

import torch

from slipstream.errors import EngineError
from slipstream.messages.media import AlignmentQuestion, Matrix
from slipstream.model.alignment import cross_weights, smoothed
from slipstream.worker.runner import Runner


def attention_of(runner: Runner, asked: AlignmentQuestion) -> Matrix:
    """Returns the attention of each of the text's tokens to each encoder state of the audio, [tokens, states].
    EngineError if it can't be computed."""
    description, decoder = runner.model.description, runner.model.decoder
    speech, encoder = description.speech, description.spec.encoder
    assert speech is not None
    assert encoder is not None
    assert encoder.audio is not None
    assert decoder.stream is None, "weights_bytes is for decoders"
    size = runner.config.cache.block_size
    runner.settle()
    try:
        with runner.platform.values.inference():
            frames = runner.platform.upload(asked.audio.frames())
            weights = cross_weights(decoder, frames, asked.token_ids, speech.alignment_heads, size)
            kept = weights[:, asked.num_skipped :, : asked.num_states]
            found: Matrix = smoothed(kept, encoder.audio.median_filter).cpu().numpy()
            return found
    except (torch.OutOfMemoryError, MemoryError) as error:  # the engine continues
        raise EngineError(
            f"times of words need more memory than is left ({error}); leave word times out, or lower gpu_memory_utilization"
        ) from error
