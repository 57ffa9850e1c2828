"""Audio encoders of chat models: the part of a model spec that converts sounds to embeddings of placeholder tokens. No
torch.

    states = layers(convolutions(log-mel frames) + positions)     Whisper's encoder, over the sound alone or whole windows
    tokens = out(norm(mean of `pool` neighbouring states))        or an MLP of as many states, each of them normed

A sound is one part of a prompt, next to its text. `AudioSpec` describes how a window of sound is encoded, here and in speech
models, whose whole prompt is audio.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.spec.functions import Activation, NormSpec, Shape
from slipstream.spec.layers import linear_shapes
from slipstream.spec.media.audio import HOP, AudioSpec
from slipstream.spec.media.medium import MediaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSpec(MediaSpec):
    """An audio encoder.

    - `audio`: the convolutions and the window's length.
    - `pool`: number of states averaged to one token. An incomplete group at the end is dropped.
    - `activation`: of an MLP over `pool` states, as wide as the decoder and without biases. None: a
      linear layer with a bias maps their mean.
    - `most_windows`: maximum windows of a sound. None: one window, and the encoder only reads the
      sound's own frames. Otherwise it reads whole windows, padded with silence (Voxtral).
    """

    medium = "audio"
    audio: AudioSpec
    final_norm: NormSpec
    pool: int
    activation: Activation | None = None
    most_windows: int | None = None

    def num_states(self, num_samples: int) -> int:
        """Number of states of a sound's own frames, without padding; of a whole window if the encoder reads whole
        windows."""
        if self.most_windows is not None:
            return self.audio.num_states
        num_frames = -(-num_samples // HOP)
        return (num_frames - 1) // 2 + 1

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """(dtype, [frames, mel bins]) of the input tensor."""
        return "float32", (height, width)

    def shapes(self, text_size: int) -> dict[str, Shape]:
        hidden = self.hidden_size
        found = {**MediaSpec.shapes(self, text_size), **self.audio.shapes("media", hidden)}
        if self.activation is None:
            return found | linear_shapes("media.connector.out", text_size, hidden, True)
        up = linear_shapes("media.connector.up", text_size, self.pool * hidden)
        return found | up | linear_shapes("media.connector.out", text_size, text_size)
