"""Runs a sound encoder (`spec/media/sound.py`): spectrograms → the embeddings of their tokens. Uses torch and the decoder's op
set, as `vision.py` does. Layers keep no state, so there is no cache.

Shapes: S states of a sound, N of all sounds, E the encoder's hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import MutableMapping, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.ops import OpSet
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.weights.forms import Linear
from slipstream.model.building import build_linear, build_norm
from slipstream.model.encoder import AudioInput
from slipstream.model.layers.residual import normed
from slipstream.model.vision import MAX_PATCHES, PRODUCTS, ImageTower, VisionLayer, pass_ends
from slipstream.spec.media.audio import FRAMES_PER_STATE
from slipstream.spec.media.sound import SoundSpec


class SoundTower:
    """A sound encoder of `spec`. Takes the `parameters` whose names begin with "vision." out of the mapping."""

    def __init__(
        self, spec: SoundSpec, parameters: MutableMapping[str, Tensor], ops: OpSet
    ) -> None:
        self.spec, self.ops = spec, ops
        own = {n: parameters.pop(n) for n in list(parameters) if n.startswith("vision.")}
        self.num_bytes = sum(value.numel() * value.element_size() for value in own.values())

        def linear(name: str) -> Linear:
            return build_linear(f"vision.{name}", own, ops, None, {})

        positions = own.pop("vision.positions.weight")
        self.device, self.dtype = positions.device, positions.dtype
        self.most_patches = MAX_PATCHES[self.device.type]
        self.audio = AudioInput(spec.audio, linear("first"), linear("second"), positions)
        self.layers = list[VisionLayer]()
        for i, layer in enumerate(spec.layers):
            name = f"layers.{i}."
            qkv, out, up, down = (linear(f"{name}{x}") for x in PRODUCTS)
            norms = {k: build_norm(n, f"vision.{name}{k}", own) for k, n in layer.norms.items()}
            self.layers.append(VisionLayer(layer, qkv, out, up, down, norms))
        self.final_norm = build_norm(spec.final_norm, "vision.final_norm", own)
        self.up = None if spec.activation is None else linear("connector.up")
        self.out = linear("connector.out")
        assert not own, f"unused: {list(own)}"

    @torch.inference_mode()
    def __call__(
        self, sounds: Sequence[Tensor], sizes: Sequence[tuple[int, int]] = ()
    ) -> list[Tensor]:
        """Frames of a spectrogram each, float32 [2 · S + 1, mels], of which the last one is read by its neighbour alone → the
        token embeddings of each sound [num_tokens, text size]."""
        counts = [len(sound) // FRAMES_PER_STATE for sound in sounds]
        ends = pass_ends(counts, self.most_patches)
        return [
            x
            for start, end in itertools.pairwise((0, *ends))
            for x in self._encode(sounds[start:end], counts[start:end])
        ]

    def _encode(self, sounds: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        ops, pool = self.ops, self.spec.pool
        h = torch.cat([self._states(x, n) for x, n in zip(sounds, counts, strict=True)])
        parts = PackedParts.of(list(counts), self.device)
        for layer in self.layers:
            h = layer(ops, h, parts)
        if self.up is not None and self.spec.activation is not None:  # of whole windows
            rows = normed(ops, self.final_norm, h).reshape(-1, pool * h.shape[1])
            rows = ops.activation(ops.linear(rows, self.up), self.spec.activation, gated=False)
            return list(ops.linear(rows, self.out).split([n // pool for n in counts]))
        pooled = [
            own[: len(own) // pool * pool].unflatten(0, (-1, pool)).mean(1)
            for own in h.split(list(counts))
        ]
        rows = ops.linear(normed(ops, self.final_norm, torch.cat(pooled)), self.out)
        return list(rows.split([len(own) for own in pooled]))

    def _states(self, frames: Tensor, count: int) -> Tensor:
        """The first layer's input [S, E]. Each frame is read with the one before and the one after it."""
        around = F.pad(frames, (0, 0, 1, 1)).unfold(0, 3, 1)[: count * FRAMES_PER_STATE]
        audio = dataclasses.replace(
            self.audio,
            spec=dataclasses.replace(self.spec.audio, num_states=count),
            positions=self.audio.positions[:count],
        )
        return audio(self.ops, around.flatten(1))

    def probe(self) -> int:
        """Encode a window so that its memory can be measured. Returns how many times that memory a pass may take."""
        audio = self.spec.audio
        self([torch.zeros(audio.num_frames + 1, audio.num_mel_bins, device=self.device)])
        return -(-self.most_patches // audio.num_states)


Tower: TypeAlias = ImageTower | SoundTower
"""The encoder of a model that sees or hears."""
