"""Runs an audio encoder (`spec/media/sound.py`): spectrograms → token embeddings. Uses torch and
the decoder's op set.

Shapes: S states of a sound, E the encoder's hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.ops import OpSet
from slipstream.kernels.packed_parts import PackedParts
from slipstream.model.encoder import AudioInput
from slipstream.model.layers.residual import normed
from slipstream.model.media import MediaTower
from slipstream.spec.media.audio import FRAMES_PER_STATE
from slipstream.spec.media.sound import SoundSpec


class SoundTower(MediaTower):
    """The audio encoder that `spec` describes."""

    spec: SoundSpec

    def __init__(
        self, spec: SoundSpec, parameters: MutableMapping[str, Tensor], ops: OpSet
    ) -> None:
        super().__init__(spec, parameters, ops)
        first, second = self._linear("audio.first"), self._linear("audio.second")
        positions = self._own.pop("media.positions.weight")
        self.audio = AudioInput(spec.audio, first, second, positions)
        self.up = None if spec.activation is None else self._linear("connector.up")
        self.out = self._linear("connector.out")
        assert not self._own, f"unused: {list(self._own)}"

    @torch.inference_mode()
    def __call__(
        self, sounds: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()
    ) -> list[Tensor]:
        """Spectrograms, float32 [2 · S + 1, mels] each → token embeddings of each sound
        [num_tokens, text size]. The last frame only serves as its neighbour's context."""
        return self._in_passes(sounds)

    def _size(self, given: Tensor) -> int:
        return len(given) // FRAMES_PER_STATE

    def _encode(self, given: Sequence[Tensor]) -> list[Tensor]:
        ops, pool = self.ops, self.spec.pool
        counts = [self._size(sound) for sound in given]
        h = torch.cat([self._states(x, n) for x, n in zip(given, counts, strict=True)])
        parts = PackedParts.of(counts, self.device)
        for layer in self.layers:
            h = layer(ops, h, parts)
        if self.up is not None and self.spec.activation is not None:  # if whole windows are read
            if self.final_norm is not None:
                h = normed(ops, self.final_norm, h)
            rows: Any = ops.linear(h.reshape(-1, pool * h.shape[1]), self.up)
            rows = ops.activation(rows, self.spec.activation, gated=False)
            return list(ops.linear(rows, self.out).split([n // pool for n in counts]))
        pooled = [
            own[: len(own) // pool * pool].unflatten(0, (-1, pool)).mean(1)
            for own in h.split(counts)
        ]
        h = torch.cat(pooled)
        if self.final_norm is not None:
            h = normed(ops, self.final_norm, h)
        return list(ops.linear(h, self.out).split([len(own) for own in pooled]))

    def _states(self, frames: Tensor, count: int) -> Tensor:
        """The first layer's input [S, E]. Each frame is convolved with the previous and the next one."""
        around = F.pad(frames, (0, 0, 1, 1)).unfold(0, 3, 1)[: count * FRAMES_PER_STATE]
        audio = dataclasses.replace(
            self.audio,
            spec=dataclasses.replace(self.spec.audio, num_states=count),
            positions=self.audio.positions[:count],
        )
        return audio(self.ops, around.flatten(1))

    def probe(self) -> int:
        audio = self.spec.audio
        self([torch.zeros(audio.num_frames + 1, audio.num_mel_bins, device=self.device)])
        return -(-self.most_patches // audio.num_states)
