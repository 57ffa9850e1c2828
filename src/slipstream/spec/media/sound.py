"""Sound encoders: the part of a model spec that turns sounds of a chat into embeddings of placeholder tokens. No torch.

    states = layers(convolutions(log-mel frames) + positions)     Whisper's encoder, over the sound alone
    tokens = out(norm(mean of `pool` neighbouring states))

A sound is a part of a prompt, next to its text. Audio (`AudioSpec`) is what a window of one is made into, here as in a speech
model, whose prompt is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.spec.functions import NormSpec, Shape
from slipstream.spec.media.audio import HOP, AudioSpec
from slipstream.spec.media.medium import MediaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSpec(MediaSpec):
    """An encoder of sounds of one window at most.

    - `audio`: the convolutions and the window's length.
    - `pool`: states whose mean is one token. States that are left over at the end have none.
    """

    medium = "audio"
    audio: AudioSpec
    final_norm: NormSpec
    pool: int

    def num_states(self, num_samples: int) -> int:
        """States of a sound's own frames, without those of the silence after it."""
        num_frames = -(-num_samples // HOP)
        return (num_frames - 1) // 2 + 1

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """Frames by mel bands."""
        return "float32", (height, width)

    def shapes(self, text_size: int) -> dict[str, Shape]:
        return {
            **MediaSpec.shapes(self, text_size),
            **self.audio.shapes("media", self.hidden_size),
            "media.connector.out.weight": (text_size, self.hidden_size),
            "media.connector.out.bias": (text_size,),
        }
