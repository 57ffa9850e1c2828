"""Families of which transformers has a class and Slipstream has not, with the reason, which the error gives."""

from __future__ import annotations

_SHORT_CONVOLUTIONS = (
    "keys, values and the outputs of attention and MLP each pass a short convolution with a state of its own, and scores "
    "have a bias that each query computes from its distance to a key"
)
_INKLING_2 = f"{_SHORT_CONVOLUTIONS}, and the inputs of layers are weighted sums of the outputs of blocks of layers"
REFUSED = {
    "zaya": "its attention convolves queries and keys with the tokens before and takes half of each value from the token "
    "before, its routers add the states of the routers before, and its residual stream is scaled channel by channel",
    "inkling_mm_model": _SHORT_CONVOLUTIONS,
    "inkling_text": _SHORT_CONVOLUTIONS,
    "inkling2": _INKLING_2,
    "inkling2_text": _INKLING_2,
    "inkling2_loop": _INKLING_2,
    "inkling2_loop_text": _INKLING_2,
}
"""Mapping from `model_type` to what the family computes that no description here can say."""
