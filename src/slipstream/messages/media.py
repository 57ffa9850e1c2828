"""Images and audio of a request. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Matrix: TypeAlias = "npt.NDArray[np.float32]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """A span of placeholders in a prompt, replaced by the embeddings of audio, an image or one of its tiles.

    `key` is a hash of `data`: spans with the same key have the same embeddings. `data` are pixels, uint8 [height,
    width, 3] in the encoder's size, or a spectrogram's frames, float32 [height, width]; empty in a fork, which uses
    its parent's. `gap`: tokens of text after each row, which belong to the span (Pixtral). `inner`: rows and columns
    of its grid that are not padding, if its tokens are scaled from them (LLaVA-OneVision). `joined`: number of tokens
    of its prompt, if all of them attend to each other (PaliGemma); else 0.
    """

    offset: int  # position of the first placeholder
    rows: int  # rows of tokens, one after the other
    columns: int
    key: bytes
    height: int
    width: int
    data: bytes = field(repr=False)
    gap: int = 0
    inner: tuple[int, ...] = ()
    joined: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.rows * (self.columns + self.gap)

    def num_embeddings(self, count: int) -> int:
        """Number of embeddings among the first `count` tokens of the span."""
        if not self.gap:
            return count
        rows, rest = divmod(count, self.columns + self.gap)
        return rows * self.columns + min(rest, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioWindow:
    """A window of audio for an encoder: its log-mel spectrogram, float32 [mels, num_frames] in the machine's byte order."""

    num_mel_bins: int
    data: bytes = field(repr=False)

    def frames(self) -> npt.NDArray[np.float32]:
        """Rows [num_frames, mels · 3]: each frame with the one before and the one after it, zeros outside the window."""
        import numpy as np

        spectrogram = np.frombuffer(self.data, np.float32).reshape(self.num_mel_bins, -1)
        padded = np.pad(spectrogram, ((0, 0), (1, 1)))
        around = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1)  # [mels, frames, 3]
        return np.ascontiguousarray(around.transpose(1, 0, 2)).reshape(spectrogram.shape[1], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentQuestion:
    """Request for the positions of a text's tokens in a window of audio. The first `num_skipped` tokens are
    not part of the text. Only the first `num_states` states are of audio, not of padding."""

    audio: AudioWindow
    token_ids: tuple[int, ...]
    num_skipped: int
    num_states: int
