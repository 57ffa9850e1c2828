"""The common part of encoders of pictures and sounds: their embeddings stand in the place of placeholder tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.errors import UnsupportedModelError
from slipstream.spec.functions import NormSpec, Shape

if TYPE_CHECKING:
    from slipstream.spec.model import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """The form of pictures in a prompt's text.

    `placeholder` is a chat template's text for a picture. `token` is the token whose embeddings are
    replaced. `style` says how the placeholder becomes a run of tokens:

    1. `plain`: one token for each embedding (Qwen).
    2. `framed`: `begin`, the tokens, `end` (Gemma 4). `surrounded`: with empty lines around (Gemma 3).
    3. `rows`: a run for each row of tokens, each with `row_end` after it, the last with `end`
    (Pixtral).
    4. `tiles`: a run for each tile, in rows with names, and one for the whole picture (Idefics 3,
       SmolVLM).
    5. `framed_tiles`: the same in one frame without ends of rows, with another name for the whole (LFM2-VL).
    6. `numbered`: tiles by number and the whole, in one frame (Aya Vision). `lined`: the same without numbers, with `row_end`
       after each (Command A Vision). Here `rows` is their number, with the whole.
    7. `prefix`: the tokens alone; `begin` after the last picture, `end` after the whole prompt, nothing before it
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
        """Tokens of text after each row of a picture's tokens."""
        return int(self.style == "rows")

    def text(self, num_tokens: int, rows: int = 0, columns: int = 0, whole: int = 0) -> str:
        """The text for a picture. Each of its `rows` × `columns` tiles, and the whole, have
        `num_tokens` embeddings; in the style `rows` these are rows and columns of tokens. In `framed_tiles` the whole of a
        picture in tiles has `whole`, 0 if it is left out."""
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
    """An encoder of pictures or sounds, as the engine and the decoder see it.

    - `token_id`: the placeholder that an embedding replaces.
    - `own_input_id`: the token whose row of the layers' own inputs a picture's tokens read.
    - `bidirectional`: the decoder's tokens of a picture attend to all of it, in all layers (Gemma 3)
      or in those with a window (Gemma 4). So a step holds all `whole_tokens` that a picture has at
      most, which the preprocessing tells. "prompt": all tokens of a prompt with pictures attend to each other (PaliGemma).
    """

    medium: ClassVar[
        Literal["image", "audio"]
    ]  # the key of its inputs in a prompt's `multi_modal_data`
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
        """The decoder's first layers after which rows are added to the states of a picture's tokens."""
        return 0

    def numbers(self, height: int, width: int) -> tuple[str, tuple[int, ...]]:
        """The type and shape of a span's numbers."""
        raise NotImplementedError

    def shapes(self, text_size: int) -> dict[str, Shape]:
        """The shapes of all parameters. `text_size` is the decoder's hidden size."""
        found = dict[str, Shape]()
        for i, layer in enumerate(self.layers):
            found |= {f"media.layers.{i}.{k}": x for k, x in layer.shapes(self.hidden_size).items()}
        if self.final_norm is not None:
            found |= self.final_norm.shapes("media.final_norm")
        return found

    def check(self, vocab_size: int) -> None:
        """Raise UnsupportedModelError for sizes that contradict each other."""
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
