"""Sound encoders: the part of a model spec that turns sounds of a chat into embeddings of placeholder tokens. No torch.

    states = layers(convolutions(log-mel frames) + positions)     Whisper's encoder, over the sound alone or whole windows
    tokens = out(norm(mean of `pool` neighbouring states))        or an MLP of as many states, each of them normed

A sound is a part of a prompt, next to its text. Audio (`AudioSpec`) is what a window of one is made into, here as in a speech
model, whose prompt is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.spec.functions import Activation, NormSpec, Shape
from slipstream.spec.layers import linear_shapes
from slipstream.spec.media.audio import HOP, AudioSpec
from slipstream.spec.media.medium import MediaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSpec(MediaSpec):
    """An encoder of sounds.

    - `audio`: the convolutions and the window's length.
    - `pool`: states whose mean is one token. States that are left over at the end have none.
    - `activation`: that of the MLP, as wide as the decoder and without biases, of `pool` states; without it there is one
      product of their mean, with a bias.
    - `most_windows`: the longest sound. None: one window, and the encoder reads the sound alone. Otherwise it reads each
      window whole, with the silence after the sound (Voxtral).
    """

    medium = "audio"
    audio: AudioSpec
    final_norm: NormSpec
    pool: int
    activation: Activation | None = None
    most_windows: int | None = None

    def num_states(self, num_samples: int) -> int:
        """States of a sound's own frames, without those of the silence after it; of a whole window."""
        if self.most_windows is not None:
            return self.audio.num_states
        num_frames = -(-num_samples // HOP)
        return (num_frames - 1) // 2 + 1

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """Frames by mel bands."""
        return "float32", (height, width)

    def shapes(self, text_size: int) -> dict[str, Shape]:
        hidden = self.hidden_size
        found = {**MediaSpec.shapes(self, text_size), **self.audio.shapes("media", hidden)}
        if self.activation is None:
            return found | linear_shapes("media.connector.out", text_size, hidden, True)
        up = linear_shapes("media.connector.up", text_size, self.pool * hidden)
        return found | up | linear_shapes("media.connector.out", text_size, text_size)
