"""Tiny random models that take pictures, written by transformers, with a tokenizer, a template, and an image processor each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

BYTES = 256
"""The first ids are bytes; special tokens follow."""

SPECIAL = {
    "smolvlm": (
        *(
            "<|im_start|>",
            "<end_of_utterance>",
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
        ),
        *(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)),
    ),
    "gemma3": (
        "<bos>",
        "<end_of_turn>",
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    ),
    "qwen2_5_vl": (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
}
IMAGE = {"smolvlm": "<image>", "gemma3": "<image_soft_token>", "qwen2_5_vl": "<|image_pad|>"}
PLACEHOLDER = {"smolvlm": "<image>", "gemma3": "<start_of_image>", "qwen2_5_vl": "<|image_pad|>"}
QWEN3 = {
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}
"""The names of transformers' classes."""
VOCAB = 288
TEMPLATES = {
    "smolvlm": (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "gemma3": (
        "<bos>{% for message in messages %}{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
        "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ item['text'] | trim }}{% endif %}"
        "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    ),
    "qwen2_5_vl": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
SPECIAL["internvl"] = ("<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>")
IMAGE["internvl"] = PLACEHOLDER["internvl"] = "<IMG_CONTEXT>"
SPECIAL["llava"] = ("<s>", "</s>", "<image>")
IMAGE["llava"] = PLACEHOLDER["llava"] = "<image>"
for _table in (SPECIAL, IMAGE, PLACEHOLDER):
    _table["llava_next"] = _table["llava"]
for _name in ("internvl", "llava", "llava_next"):
    TEMPLATES[_name] = TEMPLATES["smolvlm"].replace("<image>", IMAGE[_name])
GEMMA4 = ("gemma4", "gemma4_large")
"""Gemma 4 like E2B and E4B (inputs of layers, bounds of products), and like 26B and 31B (pictures
that see themselves)."""
SPECIAL["mistral3"] = ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
IMAGE["mistral3"] = PLACEHOLDER["mistral3"] = "[IMG]"
TEMPLATES["mistral3"] = (
    "<s>{% for message in messages %}[INST]{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}[IMG]{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}[/INST]{% endfor %}"
)
for _like in GEMMA4:
    SPECIAL[_like] = (
        *(
            "<bos>",
            "<turn|>",
            "<|image>",
            "<|image|>",
            "<image|>",
            "<|audio|>",
            "<|video|>",
            "<pad>",
        ),
    )
    IMAGE[_like] = PLACEHOLDER[_like] = "<|image|>"
    TEMPLATES[_like] = TEMPLATES["gemma3"].replace("<start_of_image>", "<|image|>")
for _like in (*QWEN3, "qwen2_vl", "exaone4_5"):
    for _table in (SPECIAL, IMAGE, PLACEHOLDER, TEMPLATES):
        _table[_like] = _table["qwen2_5_vl"]
SPECIAL["cohere_compass"] = ("<|IM_START|>", "<|VISION_START|>", "<|VISION_END|>")
SPECIAL["cohere_compass"] += ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>")
IMAGE["cohere_compass"] = PLACEHOLDER["cohere_compass"] = "<|IMAGE_PAD|>"
TEMPLATES["cohere_compass"] = (
    "{% for message in messages %}<|IM_START|>{{ message['role'] }}:{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
GLM = {"glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe", "glm46v": "Glm46V", "glm_ocr": "GlmOcr"}
"""The names of transformers' classes."""
for _like in GLM:
    SPECIAL[_like] = ("<|user|>", "<|assistant|>", "<|image|>", "<|video|>")
    SPECIAL[_like] += ("<|begin_of_image|>", "<|end_of_image|>")
    IMAGE[_like] = PLACEHOLDER[_like] = "<|image|>"
    TEMPLATES[_like] = (
        "{% for message in messages %}<|{{ message['role'] }}|>\n{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
        "<|begin_of_image|><|image|><|end_of_image|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
SPECIAL["kimi_k25"] = ("<|im_user|>", "<|im_end|>", "<|media_begin|>", "<|media_content|>")
SPECIAL["kimi_k25"] += ("<|media_end|>", "<|media_pad|>", "<|media_film|>")
IMAGE["kimi_k25"] = PLACEHOLDER["kimi_k25"] = "<|media_pad|>"
TEMPLATES["kimi_k25"] = (
    "{% for message in messages %}<|im_user|>{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<|media_begin|>image<|media_content|>"
    "<|media_pad|><|media_end|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
SPECIAL["lfm2_vl"] = ("<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>")
SPECIAL["lfm2_vl"] += ("<|img_thumbnail|>",)
SPECIAL["lfm2_vl"] += tuple(f"<|img_row_{r}_col_{c}|>" for r in range(1, 5) for c in range(1, 5))
IMAGE["lfm2_vl"] = PLACEHOLDER["lfm2_vl"] = "<image>"
TEMPLATES["lfm2_vl"] = TEMPLATES["qwen2_5_vl"].replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<image>"
)
COHERE = ("aya_vision", "cohere2_vision")
for _like in COHERE:
    SPECIAL[_like] = ("<|START|>", "<|END|>", "<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>")
    SPECIAL[_like] += ("<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL")
    SPECIAL[_like] += tuple(f"TILE_{i}" for i in range(1, 7))
    IMAGE[_like] = "<|IMG_PATCH|>"
    PLACEHOLDER[_like] = "<image>" if _like == "aya_vision" else "<|IMG_PATCH|>"
    TEMPLATES[_like] = (
        "{% for message in messages %}<|START|>{{ message['role'] }}:{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
        + PLACEHOLDER[_like]
        + "{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|END|>{% endfor %}"
    )
for _table in (SPECIAL, IMAGE, PLACEHOLDER, TEMPLATES):
    _table["llava_onevision"] = _table["llava"]
SPECIAL["llava_onevision"] += ("<video>",)
PALIGEMMA = ("paligemma", "paligemma2")
for _like in PALIGEMMA:
    SPECIAL[_like] = ("<bos>", "<eos>", "<image>")
    IMAGE[_like] = PLACEHOLDER[_like] = "<image>"
    TEMPLATES[_like] = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for item in message['content'] %}{% if item['type'] == 'image' %}<image>{% else %}{{ item['text'] }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
_TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=287,
    pad_token_id=None,
    initializer_range=0.3,
)
_SIGLIP = dict(
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=4,
    initializer_range=0.2,
)


_MIXTURE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)


def token_id(family: str, token: str) -> int:
    return BYTES + SPECIAL[family].index(token)


def _config(family: str, **more: Any) -> Any:
    import transformers as t

    image = token_id(family, IMAGE[family])
    if family == "smolvlm":
        text = {**_TEXT, "model_type": "llama", "tie_word_embeddings": False}
        return t.SmolVLMConfig(
            text_config=text, vision_config=_SIGLIP, image_token_id=image, scale_factor=2, **more
        )
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        text = {
            **_TEXT,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "layer_types": kinds,
        }
        text |= {"query_pre_attn_scalar": 20}
        return t.Gemma3Config(
            text_config=text,
            vision_config={
                **_SIGLIP,
                "vision_use_head": False,
                "model_type": "siglip_vision_model",
            },
            mm_tokens_per_image=16,
            image_token_index=image,
            boi_token_index=token_id(family, "<start_of_image>"),
            eoi_token_index=token_id(family, "<end_of_image>"),
            **more,
        )
    if family in GEMMA4:
        return _gemma4_config(family, more)
    if family in ("internvl", "llava", "llava_next"):
        return _with_class_token(family, image, more)
    if family in COHERE:
        return _cohere_config(family, image, more)
    if family == "llava_onevision":
        return _onevision_config(image, more)
    if family in PALIGEMMA:
        return _paligemma_config(family, image, more)
    if family == "lfm2_vl":
        return _lfm_config(image, more)
    if family == "kimi_k25":
        return _kimi_config(image, more)
    if family in GLM:
        return _glm_config(family, image, more)
    if family == "mistral3":
        text = {**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None}
        vision = dict(
            model_type="pixtral",
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=4,
            image_size=64,
            hidden_act="silu",
            initializer_range=0.2,
        )
        return t.Mistral3Config(
            text_config=text,
            vision_config=vision,
            image_token_index=image,
            tie_word_embeddings=False,
            **more,
        )
    if family == "cohere_compass":
        return _compass_config(image, more)
    if family == "exaone4_5":
        return _exaone_config(image, more)
    ids = {f"{n}_token_id": token_id(family, f"<|{n}|>") for n in ("vision_start", "vision_end")}
    ids |= {"image_token_id": image, "video_token_id": token_id(family, "<|video_pad|>")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
    if family == "qwen2_vl":
        vision = dict(embed_dim=48, hidden_size=32, depth=2, num_heads=2, patch_size=4, mlp_ratio=2)
        text = {**_TEXT, "rope_parameters": rope}
        return t.Qwen2VLConfig(text_config=text, vision_config=vision, **ids, **more)
    if family in QWEN3:
        return _qwen3_config(family, rope, ids, more)
    text = {**_TEXT, "rope_parameters": rope}
    vision = dict(
        depth=3,
        hidden_size=32,
        intermediate_size=44,
        num_heads=2,
        patch_size=4,
        window_size=16,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        initializer_range=0.2,
    )
    return t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **more)


def _gemma4_config(family: str, more: Any) -> Any:
    import transformers as t

    is_large = family == "gemma4_large"
    text = {
        **_TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 90,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0 if is_large else 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0 if is_large else 2,
        "use_bidirectional_attention": "vision" if is_large else None,
        "initializer_range": 0.2,
        "pad_token_id": token_id(family, "<pad>"),
        **more.pop("text", {}),
    }
    vision = dict(
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        position_embedding_size=256,
        standardize=is_large,
        use_clipped_linears=not is_large,
        initializer_range=0.2,
    )
    ids = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
    ids |= {"boi": "<|image>", "eoi": "<image|>"}
    numbers = {f"{name}_token_id": token_id(family, token) for name, token in ids.items()}
    return t.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, **numbers, **more
    )


def _glm_config(family: str, image: int, more: Any) -> Any:
    import transformers as t

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text = {**_TEXT, "hidden_size": 64, "rope_parameters": {**rope, "mrope_section": [1, 2, 1]}}
    moe = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2)
    if family == "glm4v_moe":
        text |= {**moe, "topk_group": 1, "head_dim": 16}
    if family == "glm_ocr":
        text["head_dim"] = 32
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
    if family == "glm46v":
        text["model_type"] = "glm4v_text"
    vision = dict(
        depth=2,
        hidden_size=48,
        intermediate_size=100,
        num_heads=2,
        patch_size=4,
        image_size=20,
        out_hidden_size=64,
        attention_bias=family in ("glm4v_moe", "glm_ocr"),
        initializer_range=0.2,
    )
    if family == "glm46v":
        vision["model_type"] = "glm4v_vision"
    ids = {"image_token_id": image, "video_token_id": token_id(family, "<|video|>")}
    for kind in ("image", "video"):
        ids |= {f"{kind}_start_token_id": token_id(family, "<|begin_of_image|>")}
        ids |= {f"{kind}_end_token_id": token_id(family, "<|end_of_image|>")}
    kind = getattr(t, f"{GLM[family]}Config")
    return kind(text_config=text, vision_config=vision, **ids, **more)


def _cohere_config(family: str, image: int, more: Any) -> Any:
    import transformers as t

    text = {**_TEXT, "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 90}
    text["logit_scale"] = 1.0  # which transformers forgets
    vision = {**_SIGLIP, "vision_use_head": False, "model_type": "siglip_vision_model"}
    own = dict(text_config=text, vision_config={**vision, "image_size": 24}, image_token_id=image)
    if family == "aya_vision":
        return t.AyaVisionConfig(**own, alignment_intermediate_size=40, **more)
    return t.Cohere2VisionConfig(**own, alignment_intermediate_size=40, **more)


def _lfm_config(image: int, more: Any) -> Any:
    import transformers as t

    text = {
        **_TEXT,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "block_auto_adjust_ff_dim": False,
    }
    text |= {"layer_types": ["conv", "full_attention"] * 2}
    vision = {k: v for k, v in _SIGLIP.items() if k != "image_size"}
    vision |= {"model_type": "siglip2_vision_model", "num_patches": 25, "vision_use_head": False}
    own = dict(projector_hidden_size=40, image_token_id=image)
    return t.Lfm2VlConfig(text_config=text, vision_config=vision, **own, **more)


def _kimi_config(image: int, more: Any) -> Any:
    import transformers as t

    text = {**_TEXT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "num_hidden_layers": 3}
    text |= dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16)
    text |= dict(v_head_dim=16, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1)
    text |= dict(moe_intermediate_size=24, first_k_dense_replace=1, n_group=1, topk_group=1)
    vision = dict(
        hidden_size=48,
        intermediate_size=100,
        num_attention_heads=2,
        num_hidden_layers=2,
        patch_size=4,
        pos_emb_height=6,
        pos_emb_width=6,
    )
    ids = {"image_token_id": image, "video_token_id": token_id("kimi_k25", "<|media_film|>")}
    own = dict(projection_hidden_size=48, tie_word_embeddings=False)
    return t.Kimi_K25Config(text_config=text, vision_config=vision, **ids, **own, **more)


def _qwen3_config(family: str, rope: dict[str, Any], ids: dict[str, int], more: Any) -> Any:
    import transformers as t

    # As published: time has more frequencies than rows and columns.
    rope = {**rope, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**_TEXT, "num_hidden_layers": 4, "head_dim": 16, "rope_parameters": rope}
    text |= (_MIXTURE if family.endswith("moe") else {}) | more.pop("text", {})
    vision = dict(
        depth=3,
        hidden_size=48,
        intermediate_size=100,
        num_heads=2,
        patch_size=4,
        out_hidden_size=text["hidden_size"],
        num_position_embeddings=25,
        initializer_range=0.2,
    )
    if family.startswith("qwen3_5"):
        text |= dict(
            head_dim=32,
            rope_parameters={**rope, "partial_rotary_factor": 0.5},
            **({"shared_expert_intermediate_size": 24} if family.endswith("moe") else {}),
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    else:
        vision["deepstack_visual_indexes"] = [0, 2]
    kind = getattr(t, f"{QWEN3[family]}Config")
    return kind(text_config=text, vision_config=vision, **ids, **more)


def _compass_config(image: int, more: Any) -> Any:
    import transformers as t

    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {**_TEXT, "num_hidden_layers": 4, "hidden_size": 64, "sliding_window": 90}
    text |= {"layer_types": kinds, "logit_scale": 0.5, "initializer_range": 0.2}
    text["rope_parameters"] = {"full_attention": None, "sliding_attention": rope}
    vision = dict(
        depth=3,
        hidden_size=48,
        intermediate_size=100,
        num_heads=2,
        patch_size=4,
        out_hidden_size=64,
        num_position_embeddings=25,
        deepstack_visual_indexes=[0, 2],
        initializer_range=0.2,
    )
    names = {"video": "VIDEO_PAD", "vision_start": "VISION_START", "vision_end": "VISION_END"}
    ids = {f"{n}_token_id": token_id("cohere_compass", f"<|{x}|>") for n, x in names.items()}
    ids["image_token_id"] = image
    return t.CohereCompassConfig(text_config=text, vision_config=vision, **ids, **more)


def _exaone_config(image: int, more: Any) -> Any:
    import transformers as t

    text = {**_TEXT, "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 90}
    vision = dict(
        depth=3,
        hidden_size=32,
        intermediate_size=44,
        num_heads=4,
        num_key_value_heads=2,
        patch_size=4,
        window_size=16,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        initializer_range=0.2,
    )
    ids = {"image_token_id": image, "video_token_id": token_id("exaone4_5", "<|video_pad|>")}
    return t.Exaone4_5_Config(text_config=text, vision_config=vision, **ids, **more)


def _onevision_config(image: int, more: Any) -> Any:
    import transformers as t

    vision = {**_SIGLIP, "vision_use_head": False, "model_type": "siglip_vision_model"}
    ids = {"image_token_index": image, "video_token_index": token_id("llava_onevision", "<video>")}
    pinpoints = PROCESSING["llava_onevision"]["image_grid_pinpoints"]
    own = dict(image_grid_pinpoints=pinpoints, vision_aspect_ratio="anyres_max_3")
    vision["image_size"] = 26  # a tile's last pixels are in no patch, as in the published ones
    text = {**_TEXT, "model_type": "qwen2"}
    return t.LlavaOnevisionConfig(text_config=text, vision_config=vision, **ids, **own, **more)


def _paligemma_config(family: str, image: int, more: Any) -> Any:
    import transformers as t

    text = {**_TEXT, "model_type": "gemma", "head_dim": 16}
    if family == "paligemma2":
        text |= {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 300}
        text |= {"query_pre_attn_scalar": 20}
    vision = {**_SIGLIP, "vision_use_head": False, "model_type": "siglip_vision_model"}
    own = dict(projection_dim=32, image_token_index=image)
    return t.PaliGemmaConfig(text_config=text, vision_config=vision, **own, **more)


PROCESSING: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 2,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 16 * 16,
        "max_pixels": 48 * 48,
        "resample": 3,
    },
}
"""Contents of preprocessor_config.json."""
PROCESSING["qwen2_vl"] = PROCESSING["exaone4_5"] = PROCESSING["qwen2_5_vl"]
PROCESSING["cohere_compass"] = {
    **PROCESSING["qwen2_5_vl"],
    "image_processor_type": "CohereCompassImageProcessor",
}
PROCESSING["internvl"] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 16, "width": 16},
    "crop_to_patches": True,
    "max_patches": 6,
}
PROCESSING["llava"] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 24},
    "crop_size": {"height": 24, "width": 24},
}
PROCESSING["llava_next"] = {
    "image_processor_type": "LlavaNextImageProcessor",
    **{key: PROCESSING["llava"][key] for key in ("size", "crop_size")},
    "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
}
PROCESSING["mistral3"] = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": 4, "width": 4},
    "size": {"longest_edge": 60},
}
for _like in GLM:
    PROCESSING[_like] = {
        "image_processor_type": "Glm4vImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 48 * 48},
    }
PROCESSING["aya_vision"] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 24, "width": 24},
    "crop_to_patches": True,
    "max_patches": 6,
}
PROCESSING["cohere2_vision"] = {
    "image_processor_type": "Cohere2VisionImageProcessorFast",
    "size": {"height": 24, "width": 24},
    "max_patches": 6,
    "patch_size": 3,
}
PROCESSING["lfm2_vl"] = {
    "image_processor_type": "Lfm2VlImageProcessor",
    "encoder_patch_size": 4,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "max_tiles": 4,
    "tile_size": 24,
}
PROCESSING["llava_onevision"] = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": 26, "width": 26},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_grid_pinpoints": [[26 * h, 26 * w] for h in range(1, 4) for w in range(1, 4)],
}
for _like in PALIGEMMA:
    PROCESSING[_like] = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 3,
    }
PROCESSING["kimi_k25"] = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "max_patches": 130,
    "size": {"max_height": 20, "max_width": 20},
}
for _like in GEMMA4:
    PROCESSING[_like] = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
        "do_normalize": False,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "resample": 3,
    }
for _like in QWEN3:
    PROCESSING[_like] = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _with_class_token(family: str, image: int, more: dict[str, Any]) -> Any:
    import transformers as t

    sizes = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2)
    if family.startswith("llava"):
        vision = dict(model_type="clip_vision_model", **sizes, patch_size=4, image_size=24)
        own = dict(text_config={**_TEXT, "model_type": "llama"}, image_seq_length=36)
        kind = t.LlavaConfig
        if family == "llava_next":
            kind, pinpoints = t.LlavaNextConfig, PROCESSING[family]["image_grid_pinpoints"]
            own["image_grid_pinpoints"] = pinpoints
        return kind(vision_config=vision, image_token_index=image, **own, **more)
    tower = {"use_mean_pooling": False, **more.pop("tower", {})}
    vision = dict(model_type="internvl_vision", attention_bias=True, **sizes, **tower)
    vision |= dict(patch_size=4, image_size=16)
    text = {**_TEXT, "model_type": "qwen3", "head_dim": 8}
    own = dict(image_token_id=image, image_seq_length=4, tie_word_embeddings=False)
    return t.InternVLConfig(text_config=text, vision_config=vision, **own, **more)


def build_vision(path: Path, family: str, *, seed: int = 0, **more: Any) -> Any:
    """The model, in `path` with all its files. `more`: of its config; of Qwen 3 and Gemma 4 "text", of its decoder's."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    kinds = {
        "smolvlm": t.SmolVLMForConditionalGeneration,
        "gemma3": t.Gemma3ForConditionalGeneration,
        "qwen2_5_vl": t.Qwen2_5_VLForConditionalGeneration,
        **{k: getattr(t, f"{v}ForConditionalGeneration") for k, v in (QWEN3 | GLM).items()},
        **dict.fromkeys(GEMMA4, t.Gemma4ForConditionalGeneration),
        "llava_onevision": t.LlavaOnevisionForConditionalGeneration,
        **dict.fromkeys(PALIGEMMA, t.PaliGemmaForConditionalGeneration),
        "kimi_k25": t.Kimi_K25ForConditionalGeneration,
        "cohere_compass": t.CohereCompassForConditionalGeneration,
        "exaone4_5": t.Exaone4_5_ForConditionalGeneration,
        "lfm2_vl": t.Lfm2VlForConditionalGeneration,
        "aya_vision": t.AyaVisionForConditionalGeneration,
        "cohere2_vision": t.Cohere2VisionForConditionalGeneration,
        "mistral3": t.Mistral3ForConditionalGeneration,
        "qwen2_vl": t.Qwen2VLForConditionalGeneration,
        "internvl": t.InternVLForConditionalGeneration,
        "llava": t.LlavaForConditionalGeneration,
        "llava_next": t.LlavaNextForConditionalGeneration,
    }
    model = kinds[family](_config(family, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        _shake(model)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(path, SPECIAL[family], TEMPLATES[family])
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSING[family]))
    return model


def _shake(model: Any) -> None:
    """Numbers of Gemma 4 that are learned beside gradients, or keep scores that are not scaled from being one-hot."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight") and "Gemma4" in type(model).__name__:
            parameter.mul_(0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("input_min", "output_min")):
            buffer.fill_(-1.5 - torch.rand(()).item())
        elif name.endswith(("input_max", "output_max")):
            buffer.fill_(1.5 + torch.rand(()).item())
        elif name.endswith(("layer_scalar", "std_scale")):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("std_bias"):
            buffer.normal_(0.0, 0.3)


def write_tokenizer(path: Path, special: tuple[str, ...], template: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def picture(seed: int, width: int = 50, height: int = 37) -> Any:
    """A random picture, smooth enough that scaling does not make it grey."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def prompt_of(family: str, *pictures: Any, words: str = "ab ", end: str = " cd?") -> dict[str, Any]:
    text = words + " and ".join(PLACEHOLDER[family] for _ in pictures) + end
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def mixed_prompts(family: str) -> list[dict[str, Any]]:
    """Prompts with two pictures, one and none. The last one has a picture of the first."""
    return [
        prompt_of(family, picture(1), picture(2, 30, 61)),
        prompt_of(family, picture(3)),
        {"prompt_token_ids": [5, 6, 7]},
        prompt_of(family, picture(1), words="ef "),
    ]


def largest_difference(answer: Any, theirs: Any) -> float:
    """Largest difference of the log-probabilities of the prompt's tokens."""
    ids = answer.prompt_token_ids
    own = [position.chosen.logprob for position in answer.prompt_logprobs[1:]]
    return max(abs(a - theirs[i, ids[i + 1]].item()) for i, a in enumerate(own))


def from_source(module: str, *names: str) -> Any:
    """Functions and classes of a module that can't be imported here, because it needs torchvision."""
    import ast
    import importlib.util
    import math
    from functools import lru_cache

    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    parts = [x for x in tree.body if getattr(x, "name", "") in names]
    made: dict[str, Any] = {"math": math, "lru_cache": lru_cache, "np": np}
    for part in parts:  # methods alone count
        if isinstance(part, ast.ClassDef):
            part.bases, part.decorator_list = [], []
            part.body = [x for x in part.body if isinstance(x, ast.FunctionDef)]
            part.body = [x for x in part.body if not x.name.endswith("process")]
            for method in part.body:
                method.returns = None
                for given in (*method.args.args, method.args.kwarg):
                    if given is not None:
                        given.annotation = None
    exec(compile(ast.Module(parts, []), found.origin, "exec"), made)
    return made


class KimiImages:
    """transformers' processor of Kimi K2.5, but by Pillow."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        import torch
        from PIL import Image

        module = "transformers.models.kimi_k25.image_processing_kimi_k25"
        resize = from_source(module, "navit_resize")["navit_resize"]
        p, side = self.own["patch_size"], self.own["size"]["max_height"]
        patches, grids = [], []
        for image in images:
            limits = (p, self.own["merge_size"], self.own["max_patches"], side)
            (height, width), (tall, wide) = resize(image.height, image.width, *limits)
            whole = Image.new("RGB", (wide, tall))
            whole.paste(image.resize((width, height), Image.Resampling.BICUBIC))
            values = (np.asarray(whole, np.float32) / 255 - 0.5) / 0.5
            cut = values.reshape(tall // p, p, wide // p, p, 3)
            patches.append(cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, p, p))
            grids.append([1, tall // p, wide // p])
        made = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids)}
        return made if return_tensors == "np" else {k: torch.tensor(v) for k, v in made.items()}


class LFMImages:
    """transformers' processor of LFM2-VL, but by Pillow."""

    min_tiles = 2

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own
        module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
        names = ("round_by_factor", "find_closest_aspect_ratio", "Lfm2VlImageProcessor")
        kind = from_source(module, *names)["Lfm2VlImageProcessor"]
        self.theirs = kind.__new__(kind)

    def pieces(self, image: Any) -> tuple[list[Any], int, int]:
        from PIL.Image import Resampling

        most, tile = self.own["max_image_tokens"], self.own["tile_size"]
        height, width = image.height, image.width
        given = (2, self.own["min_image_tokens"], most, self.own["encoder_patch_size"])
        size = self.theirs.smart_resize(height, width, *given)
        whole = image.resize(size, Resampling.BILINEAR)
        if not self.theirs._is_image_too_large(height, width, most, given[3], 2, 2.0):
            return [whole], 1, 1
        limits = (self.min_tiles, self.own["max_tiles"], tile)
        columns, rows, *sides, _ = self.theirs._get_grid_layout(height, width, *limits)
        scaled = image.resize(tuple(sides), Resampling.BILINEAR)
        places = [(x * tile, y * tile) for y in range(rows) for x in range(columns)]
        return [*(scaled.crop((x, y, x + tile, y + tile)) for x, y in places), whole], rows, columns

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        import torch

        p, patches, shapes = self.own["encoder_patch_size"], [], []
        for piece in [piece for image in images for piece in self.pieces(image)[0]]:
            values = (np.asarray(piece, np.float32) / 255 - 0.5) / 0.5
            cut = values.reshape(piece.height // p, p, piece.width // p, p, 3)
            patches.append(cut.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * 3))
            shapes.append([piece.height // p, piece.width // p])
        most = max(map(len, patches))
        padded = [np.pad(x, ((0, most - len(x)), (0, 0))) for x in patches]
        mask = [np.arange(most) < len(x) for x in patches]
        made = {"pixel_values": np.stack(padded), "pixel_attention_mask": np.stack(mask)}
        made["spatial_shapes"] = np.array(shapes)
        return made if return_tensors == "np" else {k: torch.tensor(v) for k, v in made.items()}


class CohereImages:
    """transformers' processor of Command A Vision, but by Pillow."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own
        module = "transformers.models.cohere2_vision.image_processing_cohere2_vision"
        names = ("get_all_supported_aspect_ratios", "get_optimal_tiled_canvas")
        self.canvas = from_source(module, *names)["get_optimal_tiled_canvas"]

    def pieces(self, image: Any) -> list[Any]:
        from PIL.Image import Resampling

        side = self.own["size"]["height"]
        limits = ((image.height, image.width), (side, side), 1, self.own["max_patches"])
        columns, rows = self.canvas(*limits)
        scaled = image.resize((columns * side, rows * side), Resampling.BICUBIC)
        places = [(x * side, y * side) for y in range(rows) for x in range(columns)]
        found = [scaled.crop((x, y, x + side, y + side)) for x, y in places]
        whole = image.resize((side, side), Resampling.BICUBIC)
        return found if len(found) == 1 else [*found, whole]

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        import torch
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        pieces = [piece for image in images for piece in self.pieces(image)]
        values = np.stack([np.asarray(x, np.float32) / 255 for x in pieces])
        values = (values - np.float32(OPENAI_CLIP_MEAN)) / np.float32(OPENAI_CLIP_STD)
        values = values.transpose(0, 3, 1, 2)
        return {"pixel_values": values if return_tensors == "np" else torch.tensor(values)}


BY_SOURCE = {"kimi_k25": KimiImages, "lfm2_vl": LFMImages, "cohere2_vision": CohereImages}
"""Processors of which transformers has only those by torchvision."""


def their_processor(family: str) -> Any:
    """transformers' image processor with the same settings, by Pillow."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kinds = {
        "smolvlm": SmolVLMImageProcessorPil,
        "gemma3": Gemma3ImageProcessorPil,
        "qwen2_5_vl": Qwen2VLImageProcessorPil,
        **dict.fromkeys(("qwen2_vl", "exaone4_5", "cohere_compass"), Qwen2VLImageProcessorPil),
        **dict.fromkeys(QWEN3, Qwen2VLImageProcessorPil),
        **dict.fromkeys(GEMMA4, Gemma4ImageProcessorPil),
        **dict.fromkeys(GLM, Glm4vImageProcessorPil),
        "llava_onevision": LlavaOnevisionImageProcessorPil,
        **dict.fromkeys(PALIGEMMA, SiglipImageProcessorPil),
        "mistral3": PixtralImageProcessorPil,
        **dict.fromkeys(("internvl", "aya_vision"), GotOcr2ImageProcessorPil),
        "llava": CLIPImageProcessorPil,
        "llava_next": LlavaNextImageProcessorPil,
    }
    own = {k: v for k, v in PROCESSING[family].items() if k != "image_processor_type"}
    if family in BY_SOURCE:
        return BY_SOURCE[family](own)
    if family == "mistral3":  # as PixtralProcessor does
        own["patch_size"] = {"height": 8, "width": 8}
    return kinds[family](**own)


def their_inputs(
    family: str, tokens: list[int], pictures: list[Any], *, of_one_prompt: bool = True
) -> dict[str, Any]:
    """Inputs of transformers' model for a prompt that has all placeholders."""
    import torch

    ids = torch.tensor([tokens])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kinds = (ids == token_id(family, IMAGE[family])).int()
    if family == "gemma3" or family in PALIGEMMA:  # of the latter, all tokens of a prompt are alike
        given["token_type_ids"] = kinds * (family == "gemma3")
    elif family.startswith("qwen") or family in (*GEMMA4, *GLM, "cohere_compass"):
        given["mm_token_type_ids"] = kinds
    if pictures:
        is_nested = family == "smolvlm" or (family == "llava_onevision" and of_one_prompt)
        nested = [pictures] if is_nested else pictures
        made = their_processor(family)(nested, return_tensors="pt")
        given |= {
            k: v
            for k, v in made.items()
            if k
            in (
                *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids"),
                *("image_sizes", "spatial_shapes", "batch_num_images"),
            )
        }
    return given
