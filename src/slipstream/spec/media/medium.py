"""Common spec of image and audio encoders: their embeddings replace placeholder tokens in the prompt. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import NormSpec, Shape
from slipstream.spec.media.prompts import PromptFormat

if TYPE_CHECKING:
    from slipstream.spec.model import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """An image or audio encoder, as the engine and the decoder see it.

    - `token_id`: the placeholder that an embedding replaces.
    - `own_input_id`: the token whose per-layer inputs an image's tokens use.
    - `bidirectional`: in the decoder, all tokens of an image attend to each other, in all layers (Gemma 3) or in those
      with a window (Gemma 4). So one step must contain the whole image. `whole_tokens`: maximum tokens of an image,
      from the preprocessing. "prompt": all tokens of a prompt with pictures attend to each other (PaliGemma).
    """

    # key of the encoder's inputs in a prompt's `multi_modal_data`
    medium: ClassVar[Literal["image", "audio"]]
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    token_id: int
    prompt: PromptFormat
    own_input_id: int | None = None
    bidirectional: Literal["all", "windowed", "prompt"] | None = None
    whole_tokens: int = 0

    @property
    def num_added(self) -> int:
        """Number of leading decoder layers after which the encoder's extra outputs are added to the states of image tokens
        (DeepStack)."""
        return 0

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of the input tensor of one image or audio clip of this size."""
        raise NotImplementedError

    def shapes(self, text_size: int) -> dict[str, Shape]:
        """Shapes of all parameters. `text_size`: the decoder's hidden size."""
        found = dict[str, Shape]()
        for i, layer in enumerate(self.layers):
            found |= {f"media.layers.{i}.{k}": x for k, x in layer.shapes(self.hidden_size).items()}
        if self.final_norm is not None:
            found |= self.final_norm.shapes("media.final_norm")
        return found

    def check(self, vocab_size: int) -> None:
        """Raise UnsupportedModelError if sizes contradict each other."""
        if not 0 <= self.token_id < vocab_size:
            raise UnsupportedModelError(
                f"the {self.medium} token {self.token_id} is not one of the {vocab_size} tokens",
                field=f"{self.medium}_token_id",
            )
        if not self.layers:
            raise UnsupportedModelError(
                f"the {self.medium} encoder has no layers", field="num_hidden_layers"
            )
        if self.hidden_size % self.layers[0].self_attention.num_heads:
            message = f"hidden_size ({self.hidden_size}) is not a multiple of the encoder's heads"
            raise UnsupportedModelError(message, field="num_attention_heads")
