"""Families of which transformers has a class and Slipstream has not, with the reason, which the error gives."""

from __future__ import annotations

_SHORT_CONVOLUTIONS = (
    "keys, values and the outputs of attention and MLP each pass a short convolution with a state of its own, and scores "
    "have a bias that each query computes from its distance to a key"
)
_INKLING_2 = f"{_SHORT_CONVOLUTIONS}, and the inputs of layers are weighted sums of the outputs of blocks of layers"
_LARGE_4 = (
    "its rotary frequencies and the factors of queries by position are learned, some layers of latent attention have no "
    "rotated keys, and layers may read another layer's latents"
)
_QWEN_4 = (
    "its index chooses blocks of averaged keys, residual streams are mixed by low-rank gates, and embeddings of n-grams "
    "pass a convolution with a state of its own"
)
_GLM_5 = (
    "its latent attention has no rotated keys, and its index chooses groups of tokens, whose keys are pooled with weights "
    "that each token computes"
)
REFUSED = {
    "mistral_large4": _LARGE_4,
    "mistral_large4_text": _LARGE_4,
    "qwen4_exp": _QWEN_4,
    "qwen4_exp_text": _QWEN_4,
    "glm5_next": _GLM_5,
    "glm5_next_text": _GLM_5,
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
