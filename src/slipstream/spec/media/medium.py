"""Common spec of image and audio encoders: their embeddings replace placeholder tokens in the prompt. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import NormSpec, Shape

if TYPE_CHECKING:
    from slipstream.spec.model import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How images appear in a prompt's text.

    `placeholder`: a chat template's text for an image. `token` is the token whose embeddings are replaced. `style`:
    how a placeholder is expanded to a run of tokens:

    1. `plain`: one token for each embedding (Qwen).
    2. `framed`: `begin`, the tokens, `end` (Gemma 4). `surrounded`: with empty lines around (Gemma 3).
    3. `rows`: a run for each row of tokens, each followed by `row_end`, the last by `end` (Pixtral).
    4. `tiles`: a run for each tile, in rows with names, and one for the whole picture (Idefics 3,
       SmolVLM).
    5. `framed_tiles`: the same in one frame without row ends, with another name for the whole image (LFM2-VL).
    6. `numbered`: numbered tiles and the whole image, in one frame (Aya Vision). `lined`: the same without numbers,
       each followed by `row_end` (Command A Vision). Here the argument `rows` counts the tiles and the whole image.
    7. `prefix`: only the tokens; `begin` follows the last image, `end` the whole prompt, and nothing precedes it
       (PaliGemma).
    """

    placeholder: str
    token: str
    style: Literal[
        "plain",
        "framed",
        "surrounded",
        "rows",
        "tiles",
        "framed_tiles",
        "numbered",
        "lined",
        "prefix",
    ]
    begin: str = ""
    end: str = ""
    row_end: str = ""

    @property
    def gap(self) -> int:
        """Number of text tokens after each row of an image's tokens."""
        return int(self.style == "rows")

    def text(self, num_tokens: int, rows: int = 0, columns: int = 0, whole: int = 0) -> str:
        """The prompt text of one image. Each of its `rows` × `columns` tiles, and the whole image, has
        `num_tokens` embeddings; in the style `rows` these are rows and columns of tokens. In `framed_tiles`,
        `whole` is the number of embeddings of the whole image; 0 if it is left out."""
        if self.style == "rows":
            line = self.token * columns
            return f"{line}{self.row_end}" * (rows - 1) + line + self.end
        run = self.token * num_tokens
        if self.style in ("plain", "prefix"):
            return run
        if self.style == "framed":
            return f"{self.begin}{run}{self.end}"
        if self.style == "surrounded":
            return f"\n\n{self.begin}{run}{self.end}\n\n"
        if self.style == "numbered":
            numbered = "".join(f"TILE_{i}{run}" for i in range(1, rows))
            return f"{self.begin}{numbered}TILE_GLOBAL{run}{self.end}"
        if self.style == "lined":
            return f"{self.begin}{(run + self.row_end) * rows}{self.end}"
        if self.style == "framed_tiles":
            tiles = [
                f"<|img_row_{row}_col_{column}|>{run}"
                for row in range(1, rows + 1)
                for column in range(1, columns + 1)
            ]
            if whole:
                tiles.append("<|img_thumbnail|>" + self.token * whole)
            return f"{self.begin}{''.join(tiles) or run}{self.end}"
        last = f"{self.begin}<global-img>{run}{self.begin}"
        if not rows and not columns:
            return last
        lines = (
            "".join(
                f"{self.begin}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + last


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """An image or audio encoder, as the engine and the decoder see it.

    - `token_id`: the placeholder that an embedding replaces.
    - `own_input_id`: the token whose per-layer inputs an image's tokens use.
    - `bidirectional`: in the decoder, all tokens of an image attend to each other, in all layers (Gemma 3) or in those
      with a window (Gemma 4). So one step must contain the whole image. `whole_tokens`: maximum tokens of an image,
      from the preprocessing. "prompt": all tokens of a prompt with pictures attend to each other (PaliGemma).
    """

    medium: ClassVar[
        Literal["image", "audio"]
    ]  # key of the encoder's inputs in a prompt's `multi_modal_data`
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
