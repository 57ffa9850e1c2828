"""Image encoders alone against transformers', on the same pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engine.media.pictures import PictureProcessor
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from tests.support.vision_models import build_vision, picture, their_inputs, token_id

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "gemma3",
    "qwen3_vl",
    "qwen3_5",
    "gemma4",
    "gemma4_large",
    "mistral3",
    "internvl",
    "llava",
    "llava_next",
    "glm4v",
    "kimi_k25",
    "lfm2_vl",
    "aya_vision",
    "cohere2_vision",
    "paligemma",
    "llava_onevision",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "exaone4_5",
    "cohere_compass",
)
SIZES = ((50, 37), (30, 61), (97, 20), (16, 16), (8, 120))
CPU = torch.device("cpu")


def features(model, given):
    """[tokens, (1 + DeepStack's layers) · E] of all pictures."""
    names = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
    names += ("pixel_attention_mask", "spatial_shapes")
    with torch.no_grad():
        made = model.model.get_image_features(**{k: given[k] for k in names if k in given})
    layers = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
    flat = [torch.cat(list(x)) if isinstance(x, list | tuple) else x.flatten(0, -2) for x in layers]
    return torch.cat(flat, dim=1)


LARGE = {"tower": {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": True}}
"""InternVL's encoder of 6B parameters."""


@pytest.mark.parametrize("ops", [ReferenceOps, CpuOps])
@pytest.mark.parametrize("family", [*FAMILIES, "internvl-large"])
def test_encoders_equal_those_of_transformers(family, ops, tmp_path):
    family, _, large = family.partition("-")
    model = build_vision(tmp_path, family, seed=5, **(LARGE if large else {}))
    pictures = [picture(i, *size) for i, size in enumerate(SIZES)]
    theirs = features(
        model,
        their_inputs(
            family,
            [token_id(family, "<bos>") if "gemma" in family else 1],
            pictures,
            of_one_prompt=False,
        ),
    )
    found = read_spec(tmp_path)
    processor = PictureProcessor(found.spec.media, found.processing, 16)
    pieces = [piece for x in pictures for piece in processor.prepare(x).pieces]
    processor.close()
    tower = load_model(tmp_path, ops=ops(), device=CPU, dtype=torch.float32).tower
    raw = [
        torch.from_numpy(np.frombuffer(x.data, np.uint8).reshape(x.height, x.width, 3).copy())
        for x in pieces
    ]
    sizes = [(x.rows, x.columns, *x.inner) for x in pieces]
    ours = tower(raw, sizes)
    assert [len(x) for x in ours] == [x.num_tokens for x in pieces]
    whole = torch.cat(ours)
    assert whole.shape == theirs.shape
    assert (whole - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    alone = torch.cat([tower([x], [size])[0] for x, size in zip(raw, sizes, strict=True)])
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=1e-4)
