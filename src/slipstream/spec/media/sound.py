"""Sound encoders: the part of a model spec that turns sounds into embeddings of placeholder tokens. No torch.

    states = layers(convolutions(log-mel frames) + positions)     Whisper's encoder, over the sound alone or whole windows
    tokens = out(norm(mean of `pool` neighbouring states))        or an MLP of as many states, each of them normed

A sound stands in a prompt as a picture does, in one row of tokens. So it joins through the same places: spans of placeholders,
hashes in the prefix cache's keys, a cache of embeddings. The answers that a `VisionSpec` gives about a picture are here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import Activation, NormSpec, Shape
from slipstream.spec.layers import linear_shapes
from slipstream.spec.media.audio import HOP, AudioSpec
from slipstream.spec.media.vision import DeepStackSpec, ImageProcessing, PromptFormat, VisionSpec

if TYPE_CHECKING:
    from slipstream.spec.model import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSpec:
    """An encoder of sounds.

    - `audio`: the convolutions and the window's length.
    - `pool`: states whose mean is one token. States that are left over at the end have none.
    - `token_id`: the placeholder that an embedding replaces.
    - `activation`: that of the MLP, as wide as the decoder and without biases, of `pool` states; without it there is one
      product of their mean, with a bias.
    - `most_windows`: the longest sound. None: one window, and the encoder reads the sound alone. Otherwise it reads each
      window whole, with the silence after the sound (Voxtral).
    """

    hidden_size: int
    audio: AudioSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    pool: int
    token_id: int
    prompt: PromptFormat
    activation: Activation | None = None
    most_windows: int | None = None

    @property
    def medium(self) -> Literal["image", "audio"]:
        return "audio"

    # What pictures of other models have, and no sound.
    @property
    def bidirectional(self) -> Literal["all", "windowed", "prompt"] | None:
        return None

    @property
    def whole_tokens(self) -> int:
        return 0

    @property
    def deepstack(self) -> DeepStackSpec | None:
        return None

    @property
    def own_input_id(self) -> int | None:
        return None

    def num_states(self, num_samples: int) -> int:
        """States of a sound's own frames, without those of the silence after it; of a whole window."""
        if self.most_windows is not None:
            return self.audio.num_states
        num_frames = -(-num_samples // HOP)
        return (num_frames - 1) // 2 + 1

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """The type and shape of a span's numbers: frames by mel bands."""
        return "float32", (height, width)

    def shapes(self, text_size: int) -> dict[str, Shape]:
        """The shapes of all parameters. `text_size` is the decoder's hidden size."""
        hidden, bins = self.hidden_size, self.audio.num_mel_bins
        found: dict[str, Shape] = {
            "vision.first.weight": (hidden, 3 * bins),
            "vision.first.bias": (hidden,),
            "vision.second.weight": (hidden, 3 * hidden),
            "vision.second.bias": (hidden,),
            "vision.positions.weight": (self.audio.num_states, hidden),
            **self.final_norm.shapes("vision.final_norm"),
        }
        if self.activation is None:
            found |= linear_shapes("vision.connector.out", text_size, hidden, True)
        else:
            found |= linear_shapes("vision.connector.up", text_size, self.pool * hidden)
            found |= linear_shapes("vision.connector.out", text_size, text_size)
        for i, layer in enumerate(self.layers):
            found |= {f"vision.layers.{i}.{k}": v for k, v in layer.shapes(hidden).items()}
        return found

    def check(self, vocab_size: int) -> None:
        """Raise UnsupportedModelError for sizes that contradict each other."""
        if not 0 <= self.token_id < vocab_size:
            raise UnsupportedModelError(
                f"the sound token {self.token_id} is not one of the {vocab_size} tokens",
                field="audio_token_index",
            )
        if self.hidden_size % self.layers[0].self_attention.num_heads:
            message = f"d_model ({self.hidden_size}) is not a multiple of the encoder's heads"
            raise UnsupportedModelError(message, field="encoder_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundProcessing:
    """The preprocessing of a sound: Whisper's spectrogram of whole windows, with silence after the sound."""

    def most_tokens(self, sound: SoundSpec) -> int:
        return sound.audio.num_states // sound.pool


MediaSpec: TypeAlias = VisionSpec | SoundSpec
MediaProcessing: TypeAlias = ImageProcessing | SoundProcessing
