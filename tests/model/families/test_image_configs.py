"""Configs of published models that see, as far as pictures go: read, and a picture's tokens by their sizes."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from slipstream.engine.media.pictures import PictureProcessor
from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec

_LLAMA = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=300_000,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    hidden_act="silu",
)
_IDS = dict(image_token_id=7, video_token_id=8, vision_start_token_id=5, vision_end_token_id=6)
_MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
_QWEN3_ENCODER = {
    **dict(depth=27, hidden_act="gelu_pytorch_tanh", hidden_size=1152, in_channels=3),
    **dict(initializer_range=0.02, intermediate_size=4304, num_heads=16, out_hidden_size=64),
    **dict(num_position_embeddings=2304, patch_size=16, spatial_merge_size=2),
    "temporal_patch_size": 2,
}
_QWEN = {
    **dict(patch_size=16, temporal_patch_size=2, merge_size=2),
    **dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, processor_class="Qwen3VLProcessor"),
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
_GEMMA_TEXT = {k: v for k, v in _LLAMA.items() if k != "hidden_act"}
_GEMMA_TEXT |= dict(model_type="gemma4_text", head_dim=32, global_head_dim=64, sliding_window=512)
_COHERE = {
    **dict(model_type="cohere2", attention_bias=False, cache_implementation="hybrid", head_dim=32),
    **dict(hidden_act="silu", hidden_size=64, intermediate_size=96, layer_norm_eps=1e-5),
    **dict(logit_scale=0.25, max_position_embeddings=8192, num_attention_heads=2),
    **dict(
        num_hidden_layers=4, num_key_value_heads=1, order_of_interleaved_layers="local_attn_first"
    ),
    **dict(position_embedding_type="rope_gptj", rope_theta=50000, rotary_pct=1.0),
    **dict(sliding_window=4096, sliding_window_pattern=4, use_embedding_sharing=True),
    **dict(use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True),
    **dict(vocab_size=256000, layer_switch=4, use_qk_norm=False),
}
CONFIGS = {
    "qwen2_vl": (
        {
            **_LLAMA,
            **_IDS,
            **dict(vision_token_id=9, use_sliding_window=False, tie_word_embeddings=True),
            **dict(sliding_window=32768, max_window_layers=4, rope_theta=1e6),
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "vision_config": {
                **dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, in_chans=3),
                **dict(hidden_size=64, patch_size=14, spatial_merge_size=2),
                **dict(spatial_patch_size=14, temporal_patch_size=2),
            },
        },
        {
            **dict(min_pixels=3136, max_pixels=12845056, patch_size=14, temporal_patch_size=2),
            **dict(merge_size=2, image_processor_type="Qwen2VLImageProcessor"),
        },
        46 * 26,
    ),
    "qwen3_vl": (
        {
            **_IDS,
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                **_LLAMA,
                **dict(model_type="qwen3_vl_text", head_dim=128, attention_bias=False),
                **dict(rope_scaling=_MROPE, rope_theta=5e6),
            },
            "vision_config": {
                **_QWEN3_ENCODER,
                **dict(model_type="qwen3_vl", deepstack_visual_indexes=[1, 8, 24]),
            },
        },
        _QWEN,
        40 * 22,
    ),
    "qwen3_5": (
        {
            **_IDS,
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                **_LLAMA,
                **dict(model_type="qwen3_5_text", head_dim=256, full_attention_interval=4),
                **dict(attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32"),
                "rope_parameters": {
                    **dict(_MROPE, mrope_section=[11, 11, 10], rope_theta=1e7),
                    "partial_rotary_factor": 0.25,
                },
            },
            "vision_config": {
                **_QWEN3_ENCODER,
                **dict(model_type="qwen3_5", deepstack_visual_indexes=[]),
            },
        },
        _QWEN,
        40 * 22,
    ),
    "gemma4": (
        {
            **dict(image_token_id=7, video_token_id=8, audio_token_id=9, boi_token_id=5),
            **dict(eoi_token_id=6, boa_token_id=3, eoa_token_index=4, audio_config=None),
            **dict(vision_soft_tokens_per_image=280, tie_word_embeddings=True),
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {**_GEMMA_TEXT, "use_bidirectional_attention": "vision"},
            "vision_config": {
                **dict(model_type="gemma4_vision", hidden_size=768, intermediate_size=3072),
                **dict(num_hidden_layers=16, num_attention_heads=12, num_key_value_heads=12),
                **dict(head_dim=64, global_head_dim=None, hidden_activation="gelu_pytorch_tanh"),
                **dict(rms_norm_eps=1e-6, max_position_embeddings=131072, attention_bias=False),
                **dict(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}),
                **dict(pooling_kernel_size=3, patch_size=16, position_embedding_size=10240),
                **dict(use_clipped_linears=True, standardize=False, default_output_length=280),
            },
        },
        {
            **dict(do_normalize=False, image_mean=[0.0] * 3, image_std=[1.0] * 3, patch_size=16),
            **dict(max_soft_tokens=280, pooling_kernel_size=3, resample=3, rescale_factor=1 / 255),
        },
        22 * 12,
    ),
    "internvl": (
        {
            **dict(image_token_id=7, image_seq_length=256, downsample_ratio=0.5),
            **dict(projector_hidden_act="gelu", vision_feature_layer=-1),
            **dict(vision_feature_select_strategy="default"),
            "architectures": ["InternVLForConditionalGeneration"],
            "text_config": {**_LLAMA, "model_type": "qwen2", "use_sliding_window": False},
            "vision_config": {
                **dict(attention_bias=True, dropout=0.0, hidden_act="gelu", hidden_size=1024),
                **dict(image_size=[448, 448], initializer_factor=0.1, intermediate_size=4096),
                **dict(layer_norm_eps=1e-6, layer_scale_init_value=0.1, norm_type="layer_norm"),
                **dict(model_type="internvl_vision", num_attention_heads=16, num_channels=3),
                **dict(num_hidden_layers=24, patch_size=[14, 14], projection_dropout=0.0),
                **dict(use_absolute_position_embeddings=True, use_mask_token=False),
                **dict(use_mean_pooling=True, use_qk_norm=False),
            },
        },
        {
            **dict(crop_to_patches=False, data_format="channels_first", do_center_crop=None),
            **dict(default_to_square=True, do_convert_rgb=True, max_patches=12, min_patches=1),
            **dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225], resample=3),
            **dict(size={"height": 448, "width": 448}, processor_class="InternVLProcessor"),
        },
        256,
    ),
    "llava": (
        {
            **dict(ignore_index=-100, image_token_index=7, projector_hidden_act="gelu"),
            **dict(vision_feature_layer=-2, vision_feature_select_strategy="default"),
            **dict(vocab_size=32064, pad_token_id=32001, tie_word_embeddings=False),
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": dict(
                **dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5),
                vocab_size=32064,
            ),
            "vision_config": {
                **dict(model_type="clip_vision_model", hidden_size=1024, image_size=336),
                **dict(intermediate_size=4096, num_attention_heads=16, num_hidden_layers=24),
                **dict(patch_size=14, projection_dim=768, vocab_size=32000),
            },
        },
        {
            **dict(crop_size={"height": 336, "width": 336}, do_center_crop=True, resample=3),
            **dict(size={"shortest_edge": 336}, processor_class="LlavaProcessor"),
        },
        576,
    ),
    "paligemma": (
        {
            **dict(bos_token_id=2, eos_token_id=1, hidden_size=2048, ignore_index=-100),
            **dict(image_token_index=7, pad_token_id=0, projection_dim=2048),
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "text_config": dict(
                **dict(hidden_size=2048, intermediate_size=16384, model_type="gemma"),
                **dict(num_attention_heads=8, num_hidden_layers=18, num_image_tokens=256),
                **dict(num_key_value_heads=1, vocab_size=257216, torch_dtype="float32"),
            ),
            "vision_config": {
                **dict(hidden_size=1152, intermediate_size=4304, model_type="siglip_vision_model"),
                **dict(num_attention_heads=16, num_hidden_layers=27, num_image_tokens=256),
                **dict(patch_size=14, projection_dim=2048, projector_hidden_act="gelu_fast"),
                **dict(vision_use_head=False),
            },
        },
        {
            **dict(do_convert_rgb=None, do_normalize=True, do_rescale=True, do_resize=True),
            **dict(image_mean=[0.5, 0.5, 0.5], image_processor_type="SiglipImageProcessor"),
            **dict(image_seq_length=256, image_std=[0.5, 0.5, 0.5], resample=3),
            **dict(processor_class="PaliGemmaProcessor", size={"height": 224, "width": 224}),
        },
        256,
    ),
    "llava_onevision": (
        {
            **dict(ignore_index=-100, image_token_index=7, projector_hidden_act="gelu"),
            **dict(vision_feature_layer=-1, vision_feature_select_strategy="full"),
            **dict(vision_aspect_ratio="anyres_max_9", tie_word_embeddings=False),
            **dict(video_token_index=151647, use_image_newline_parameter=True),
            "image_grid_pinpoints": [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)],
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "text_config": dict(
                **dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944),
                **dict(num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4),
                **dict(rope_theta=1e6, vocab_size=152000, bos_token_id=151643),
            ),
            "vision_config": {
                **dict(hidden_size=1152, intermediate_size=4304, model_type="siglip_vision_model"),
                **dict(num_attention_heads=16, num_hidden_layers=26, image_size=384, patch_size=14),
                **dict(vision_use_head=False),
            },
        },
        {
            **dict(do_convert_rgb=True, do_normalize=True, do_pad=True, do_rescale=True),
            **dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5], resample=3),
            **dict(image_processor_type="LlavaOnevisionImageProcessor", do_resize=True),
            **dict(rescale_factor=1 / 255, size={"height": 384, "width": 384}),
            "image_grid_pinpoints": [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)],
        },
        729,
    ),
    "llava_next": (
        {
            **dict(ignore_index=-100, image_token_index=7, projector_hidden_act="gelu"),
            **dict(vision_feature_layer=-2, vision_feature_select_strategy="default"),
            **dict(vocab_size=32064, use_image_newline_parameter=True, tie_word_embeddings=False),
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
            "architectures": ["LlavaNextForConditionalGeneration"],
            "text_config": dict(
                **dict(model_type="mistral", max_position_embeddings=32768, rms_norm_eps=1e-5),
                **dict(num_key_value_heads=8, rope_theta=1e6, sliding_window=None),
                **dict(intermediate_size=14336, vocab_size=32064),
            ),
            "vision_config": {
                **dict(model_type="clip_vision_model", hidden_size=1024, image_size=336),
                **dict(intermediate_size=4096, num_attention_heads=16, num_hidden_layers=24),
                **dict(patch_size=14, projection_dim=768, vocab_size=32000),
            },
        },
        {
            **dict(aspect_ratio_setting="anyres", do_center_crop=True, do_pad=True, resample=3),
            **dict(crop_size={"height": 336, "width": 336}, size={"shortest_edge": 336}),
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        },
        576,
    ),
    "glm4v": (
        {
            **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
            **dict(attention_bias=True, image_token_id=7, video_token_id=8, num_key_value_heads=1),
            **dict(image_start_token_id=5, image_end_token_id=6, video_start_token_id=3),
            **dict(video_end_token_id=4, tie_word_embeddings=False, rope_theta=1e4),
            **dict(partial_rotary_factor=0.5),
            "architectures": ["Glm4vForConditionalGeneration"],
            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **dict(hidden_size=1536, depth=24, num_heads=12, attention_bias=False),
                **dict(intermediate_size=13696, hidden_act="silu", hidden_dropout_prob=0.0),
                **dict(initializer_range=0.02, image_size=336, patch_size=14, out_hidden_size=64),
                **dict(rms_norm_eps=1e-5, spatial_merge_size=2, temporal_patch_size=2),
            },
        },
        {
            **dict(patch_size=14, temporal_patch_size=2, merge_size=2, do_rescale=True),
            **dict(
                image_mean=[0.48145466, 0.4578275, 0.40821073], processor_class="Glm4vProcessor"
            ),
            "size": {"shortest_edge": 12544, "longest_edge": 47040000},
            "image_processor_type": "Glm4vImageProcessor",
        },
        46 * 26,
    ),
    "glm4v_moe": (
        {
            **dict(
                image_token_id=7, video_token_id=8, image_start_token_id=5, image_end_token_id=6
            ),
            **dict(video_start_token_id=3, video_end_token_id=4, tie_word_embeddings=False),
            "architectures": ["Glm4vMoeForConditionalGeneration"],
            "text_config": {
                **_LLAMA,
                **dict(model_type="glm4v_moe_text", attention_bias=True, first_k_dense_replace=1),
                **dict(head_dim=32, moe_intermediate_size=48, n_group=1, n_routed_experts=8),
                **dict(n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2),
                **dict(partial_rotary_factor=0.5, rope_theta=1e4, routed_scaling_factor=1.0),
                **dict(topk_group=1, use_qk_norm=False, pad_token_id=9),
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                **dict(model_type="glm4v_moe", hidden_size=1536, depth=24, num_heads=12),
                **dict(
                    attention_bias=False, attention_dropout=0.0, in_channels=3, out_hidden_size=64
                ),
                **dict(intermediate_size=10944, hidden_act="silu", image_size=336, patch_size=14),
                **dict(rms_norm_eps=1e-5, spatial_merge_size=2, temporal_patch_size=2),
            },
        },
        {
            **dict(patch_size=14, temporal_patch_size=2, merge_size=2, do_rescale=True),
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        },
        46 * 26,
    ),
    "glm_ocr": (
        {
            **dict(
                image_token_id=7, video_token_id=8, image_start_token_id=5, image_end_token_id=6
            ),
            **dict(video_start_token_id=3, video_end_token_id=4, tie_word_embeddings=False),
            "architectures": ["GlmOcrForConditionalGeneration"],
            "text_config": {
                **_LLAMA,
                **dict(model_type="glm_ocr_text", attention_bias=False, head_dim=128),
                **dict(num_nextn_predict_layers=1, pad_token_id=9),
                "rope_parameters": {
                    **dict(rope_type="default", mrope_section=[16, 24, 24], rope_theta=10000),
                    "partial_rotary_factor": 1.0,
                },
            },
            "vision_config": {
                **dict(model_type="glm_ocr_vision", hidden_size=1024, depth=24, num_heads=16),
                **dict(attention_bias=True, intermediate_size=4096, hidden_act="silu"),
                **dict(hidden_dropout_prob=0.0, image_size=336, patch_size=14, out_hidden_size=64),
                **dict(rms_norm_eps=1e-5, spatial_merge_size=2, temporal_patch_size=2),
            },
        },
        {
            **dict(patch_size=14, temporal_patch_size=2, merge_size=2, do_rescale=True),
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        },
        46 * 26,
    ),
    "kimi_k25": (
        {
            **dict(media_placeholder_token_id=7, ignore_index=-100, pad_token_id=9),
            **dict(tie_word_embeddings=False, use_unified_vision_chunk=True),
            "architectures": ["KimiK25ForConditionalGeneration"],
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "text_config": {
                **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
                **dict(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], ep_size=1),
                **dict(first_k_dense_replace=1, kv_lora_rank=32, moe_intermediate_size=48),
                **dict(n_group=1, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True),
                **dict(num_experts_per_tok=2, num_key_value_heads=2, num_nextn_predict_layers=0),
                **dict(q_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
                **dict(rope_theta=50000.0, routed_scaling_factor=2.827, scoring_func="sigmoid"),
                **dict(seq_aux=True, topk_group=1, topk_method="noaux_tc", aux_loss_alpha=0.001),
                **dict(moe_layer_freq=1, attention_bias=False, tie_word_embeddings=False),
                "rope_scaling": {
                    **dict(type="yarn", factor=64.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0),
                    **dict(mscale_all_dim=1.0, original_max_position_embeddings=4096),
                },
            },
            "vision_config": {
                **dict(model_type="kimi_k25", init_pos_emb_height=64, init_pos_emb_width=64),
                **dict(init_pos_emb_time=4, merge_kernel_size=[2, 2], merge_type="sd2_tpool"),
                **dict(mm_hidden_size=1152, mm_projector_type="patchmerger", patch_size=14),
                **dict(pos_emb_type="divided_fixed", projector_hidden_act="gelu"),
                **dict(projector_ln_eps=1e-5, text_hidden_size=64, vt_hidden_size=1152),
                **dict(video_attn_type="spatial_temporal", vt_intermediate_size=4304),
                **dict(vt_num_attention_heads=16, vt_num_hidden_layers=27),
            },
        },
        {
            "media_proc_cfg": {
                **dict(in_patch_limit=16384, patch_size=14, image_mean=[0.5] * 3),
                **dict(image_std=[0.5] * 3, merge_kernel_size=2, fixed_output_tokens=None),
                **dict(patch_limit_on_one_side=512, in_patch_limit_each_frame=4096),
                **dict(in_patch_limit_video=None, sample_fps=2.0, temporal_merge_kernel_size=4),
                **dict(max_num_frames_each_video=None, timestamp_mode="hh:mm:ss.fff"),
                "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
            },
        },
        46 * 26,
    ),
    "aya_vision": (
        {
            **dict(adapter_layer_norm_eps=1e-6, alignment_intermediate_size=28672),
            **dict(downsample_factor=2, image_token_index=7, vision_feature_layer=-1),
            **dict(vision_feature_select_strategy="full"),
            "architectures": ["AyaVisionForConditionalGeneration"],
            "text_config": _COHERE,
            "vision_config": {
                **dict(model_type="siglip_vision_model", hidden_size=1152, image_size=364),
                **dict(intermediate_size=4304, num_attention_heads=16, num_hidden_layers=27),
                **dict(patch_size=14, vision_use_head=False, layer_norm_eps=1e-6, num_channels=3),
                **dict(attention_dropout=0.0, hidden_act="gelu_pytorch_tanh"),
            },
        },
        {
            **dict(crop_to_patches=True, do_convert_rgb=True, max_patches=12, min_patches=1),
            **dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3),
            **dict(size={"height": 364, "width": 364}, processor_class="AyaVisionProcessor"),
        },
        169,
    ),
    "cohere2_vision": (
        {
            **dict(alignment_intermediate_size=36864, downsample_factor=2, image_token_id=7),
            "architectures": ["Cohere2VisionForConditionalGeneration"],
            "text_config": _COHERE,
            "vision_config": {
                **dict(model_type="siglip_vision_model", hidden_size=1152, image_size=512),
                **dict(intermediate_size=4304, num_attention_heads=16, num_hidden_layers=27),
                **dict(patch_size=16, vision_use_head=False, layer_norm_eps=1e-6, num_channels=3),
                **dict(attention_dropout=0.0, hidden_act="gelu_pytorch_tanh"),
            },
        },
        {
            **dict(crop_to_patches=True, do_convert_rgb=True, max_patches=12, min_patches=1),
            **dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3, patch_size=16),
            **dict(size={"height": 512, "width": 512}, do_pad=None),
        },
        256,
    ),
    "lfm2_vl": (
        {
            **dict(do_image_splitting=True, downsample_factor=2, encoder_patch_size=16),
            **dict(image_token_index=7, max_image_tokens=256, max_num_patches=1024, max_tiles=10),
            **dict(max_pixels_tolerance=2.0, min_image_tokens=64, min_tiles=2, tile_size=512),
            **dict(projector_bias=True, projector_hidden_act="gelu", projector_hidden_size=2560),
            **dict(use_image_special_tokens=True, use_thumbnail=True, vision_feature_layer=-1),
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "text_config": {
                **dict(model_type="lfm2", hidden_size=64, intermediate_size=96, norm_eps=1e-5),
                **dict(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1),
                **dict(vocab_size=65536, block_auto_adjust_ff_dim=True, block_dim=64),
                **dict(block_ff_dim=96, block_ffn_dim_multiplier=1.0, block_multiple_of=16),
                **dict(conv_L_cache=3, conv_bias=False, conv_dim=64, conv_dim_out=64),
                **dict(layer_types=["conv", "full_attention"] * 2, rope_theta=1e6, num_heads=2),
            },
            "vision_config": {
                **dict(model_type="siglip2_vision_model", hidden_size=1152, num_patches=256),
                **dict(attention_dropout=0.0, hidden_act="gelu_pytorch_tanh", patch_size=16),
                **dict(intermediate_size=4304, layer_norm_eps=1e-6, num_attention_heads=16),
                **dict(num_channels=3, num_hidden_layers=26, vision_use_head=False),
            },
        },
        {
            **dict(do_image_splitting=True, downsample_factor=2, encoder_patch_size=16),
            **dict(max_image_tokens=256, max_num_patches=1024, max_pixels_tolerance=2.0),
            **dict(max_tiles=10, min_image_tokens=64, min_tiles=2, tile_size=512, resample=2),
            **dict(return_row_col_info=True, size={"height": 512, "width": 512}, do_pad=True),
            **dict(use_thumbnail=True, image_processor_type="Lfm2VlImageProcessorFast"),
        },
        256,
    ),
    "mistral3": (
        {
            **dict(image_token_index=7, multimodal_projector_bias=False, spatial_merge_size=2),
            **dict(projector_hidden_act="gelu", vision_feature_layer=-1),
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
            "vision_config": {
                **dict(model_type="pixtral", hidden_size=1024, intermediate_size=4096),
                **dict(attention_dropout=0.0, head_dim=64, hidden_act="silu", image_size=1540),
                **dict(initializer_range=0.02, num_attention_heads=16, num_channels=3),
                **dict(num_hidden_layers=24, patch_size=14, rope_theta=10000.0),
            },
        },
        {"size": {"longest_edge": 1540}, "patch_size": 14, "do_pad": True},
        46 * 26,
    ),
    "exaone4_5": (  # as in the first files, whose top repeats the decoder's keys
        {
            **_LLAMA,
            **dict(image_token_id=7, video_token_id=8, vision_start_token_id=5),
            **dict(vision_end_token_id=6, vision_token_id=7, reorder_qk_norm=True),
            **dict(max_window_layers=4, sliding_window=None, rope_theta=1e6),
            "architectures": ["Exaone4_5_ForConditionalGeneration"],
            "text_config": {
                **_LLAMA,
                **dict(model_type="exaone4_5_text", image_token_id=7, num_kv_heads=1),
                **dict(reorder_qk_norm=True, rope_theta=1e6, sliding_window=4096),
                **dict(sliding_window_pattern="LLLG", max_window_layers=4),
                "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                "rope_scaling": {
                    **dict(factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0),
                    **dict(original_max_position_embeddings=8192, rope_type="llama3"),
                },
            },
            "vision_config": {
                **dict(model_type="exaone4_5_vision", depth=28, hidden_size=2048, num_heads=32),
                **dict(num_key_value_heads=8, fullatt_block_indexes=[6, 13, 20, 27]),
                **dict(hidden_act="silu", in_channels=3, in_chans=3, intermediate_size=5120),
                **dict(out_hidden_size=64, patch_size=14, spatial_merge_size=2),
                **dict(spatial_patch_size=14, temporal_patch_size=2, tokens_per_second=2),
                "window_size": 112,
            },
        },
        {
            **dict(min_pixels=3136, max_pixels=12845056, patch_size=14, temporal_patch_size=2),
            **dict(merge_size=2, image_processor_type="Qwen2VLImageProcessor"),
        },
        46 * 26,
    ),
    "cohere_compass": (
        {
            **_IDS,
            "architectures": ["CohereCompassForConditionalGeneration"],
            "tie_word_embeddings": True,
            "text_config": {
                **{k: v for k, v in _LLAMA.items() if k != "rms_norm_eps"},
                **dict(model_type="cohere_compass_text", hidden_size=256, head_dim=128),
                **dict(layer_norm_eps=1e-5, logit_scale=0.25, pooling=None, sliding_window=4096),
                **dict(attention_bias=False, sliding_window_pattern=4),
                "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                "rope_parameters": {
                    **dict(full_attention=None, rope_theta=50000, rope_type="default"),
                    "sliding_attention": {**_MROPE, "rope_theta": 50000},
                },
            },
            "vision_config": {
                **_QWEN3_ENCODER,
                **dict(model_type="cohere_compass", out_hidden_size=256),
                "deepstack_visual_indexes": [1, 2, 3],
            },
        },
        {**_QWEN, "image_processor_type": "CohereCompassImageProcessor"},
        40 * 22,
    ),
}


_TILES = {"aya_vision": 9, "cohere2_vision": 7}
"""Pieces of a picture of 1,280 by 720 pixels."""


def write(folder, family, **changes):
    config, processing, _ = CONFIGS[family]
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config, **changes}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))


@pytest.mark.parametrize("family", CONFIGS)
def test_published_configs_are_read(tmp_path, family):
    write(tmp_path, family)
    found = read_spec(tmp_path)
    assert found.spec.media is not None
    assert found.spec.media.token_id == 7
    processor = PictureProcessor(found.spec.media, found.processing, 1)
    pieces = processor.prepare(Image.new("RGB", (1280, 720))).pieces
    piece = pieces[0]
    # 2 × 4 tiles, and the whole; the whole, and a larger one
    assert len(pieces) == {
        "internvl": 9,
        "llava_next": 2,
        "llava_onevision": 2,
        "lfm2_vl": 3,
        **_TILES,
    }.get(family, 1)
    processor.close()
    assert piece.num_tokens == CONFIGS[family][2]
    assert read_spec(tmp_path).taking_media(0).spec.media is None


@pytest.mark.parametrize("family", [x for x in CONFIGS if x != "qwen2_vl"])
def test_an_unknown_key_of_the_encoder_is_refused(tmp_path, family):
    write(
        tmp_path, family, vision_config={**CONFIGS[family][0]["vision_config"], "a_new_switch": 1}
    )
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "vision_config.a_new_switch"


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "qwen3_5", "gemma4", "mistral3", "glm4v_moe", "glm_ocr", "cohere_compass"],
)
def test_a_model_without_an_encoder_is_its_decoder(tmp_path, family):
    write(tmp_path, family, vision_config=None)
    found = read_spec(tmp_path)
    assert found.spec.media is None
    assert found.processing is None


@pytest.mark.parametrize(
    ("family", "part", "change"),
    [
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [24, 8]}),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 2300}),
        ("qwen3_vl", "vision_config", {"out_hidden_size": 65}),
        ("qwen3_5", "vision_config", {"deepstack_visual_indexes": [8]}),
        ("gemma4", "vision_config", {"num_key_value_heads": 4}),
        ("mistral3", "vision_config", {"model_type": "clip_vision_model"}),
        ("mistral3", "vision_config", {"rope_parameters": {"rope_type": "yarn"}}),
        ("glm4v", "vision_config", {"out_hidden_size": 65}),
        ("kimi_k25", "vision_config", {"merge_type": "other"}),
        ("kimi_k25", "vision_config", {"merge_kernel_size": [2, 1]}),
        ("glm4v_moe", "text_config", {"use_qk_norm": True}),
        ("lfm2_vl", "vision_config", {"num_patches": 250}),
        ("paligemma", "vision_config", {"projection_dim": 1024}),
        ("llava_onevision", "text_config", {"model_type": "gemma"}),
        ("paligemma", "text_config", {"model_type": "gemma3_text"}),
        ("aya_vision", "vision_config", {"image_size": 384}),
        ("glm4v_moe", "text_config", {"model_type": "glm4v_text"}),
        ("exaone4_5", "text_config", {"reorder_qk_norm": False}),
        ("exaone4_5", "text_config", {"num_kv_heads": 2}),
        ("exaone4_5", "vision_config", {"model_type": "qwen2_5_vl"}),
        ("exaone4_5", "vision_config", {"window_size": 100}),
        ("cohere_compass", "text_config", {"rope_parameters": {"full_attention": None}}),
        ("cohere_compass", "text_config", {"head_dim": 64}),
        ("cohere_compass", "text_config", {"model_type": "cohere2"}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, family, part, change):
    write(tmp_path, family, **{part: {**CONFIGS[family][0][part], **change}})
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert next(iter(change)) in caught.value.field


@pytest.mark.parametrize("pinpoints", [[], [[336, 336]], [[672, 500]], [672]])
def test_pinpoints_that_are_not_several_squares_are_refused(tmp_path, pinpoints):
    write(tmp_path, "llava_next", image_grid_pinpoints=pinpoints)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "image_grid_pinpoints"


def test_a_prompt_whose_tokens_see_each_other_must_fit_in_the_window(tmp_path):
    text = dict(model_type="gemma2", hidden_size=2304, intermediate_size=9216, vocab_size=257216)
    text |= dict(num_attention_heads=8, num_hidden_layers=26, num_key_value_heads=4)
    text |= dict(query_pre_attn_scalar=256, sliding_window=4096)
    vision = {**CONFIGS["paligemma"][0]["vision_config"], "projection_dim": 2304, "image_size": 896}
    more = dict(text_config=text, vision_config=vision, hidden_size=2304, projection_dim=2304)
    write(tmp_path, "paligemma", **more)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "vision_config.image_size"


def test_pictures_larger_than_the_window_are_refused_where_they_see_themselves(tmp_path):
    write(tmp_path, "gemma4")
    processing = {**CONFIGS["gemma4"][1], "max_soft_tokens": 560}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processing))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "max_soft_tokens"


def test_voxtrals_published_config_is_read(tmp_path):
    audio = {
        **dict(model_type="voxtral_encoder", hidden_size=1280, intermediate_size=5120),
        **dict(num_attention_heads=20, num_key_value_heads=20, num_hidden_layers=32, head_dim=64),
        **dict(activation_function="gelu", layerdrop=0.0, max_source_positions=1500),
        **dict(num_mel_bins=128, scale_embedding=False, vocab_size=51866, dropout=0.0),
    }
    text = {
        **dict(model_type="llama", attention_bias=False, head_dim=128, hidden_size=3072),
        **dict(intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False),
        **dict(num_attention_heads=32, num_hidden_layers=30, num_key_value_heads=8),
        **dict(rms_norm_eps=1e-5, rope_theta=1e8, sliding_window=None, vocab_size=131072),
    }
    config = {
        **dict(model_type="voxtral", audio_token_id=24, projector_hidden_act="gelu"),
        **dict(architectures=["VoxtralForConditionalGeneration"], hidden_size=3072),
        **dict(audio_config=audio, text_config=text, torch_dtype="bfloat16", vocab_size=131072),
    }

    def write_config(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    write_config()
    found = read_spec(tmp_path).spec
    assert found.media.num_states(1) == 1500
    assert (found.media.pool, found.media.token_id) == (4, 24)
    for wrong in ({"a_new_switch": 1}, {"intermediate_size": 5000}, {"num_key_value_heads": 4}):
        write_config(audio_config={**audio, **wrong})
        with pytest.raises(UnsupportedModelError) as caught:
            read_spec(tmp_path)
        assert caught.value.field == f"audio_config.{next(iter(wrong))}"


def test_a_published_config_that_hears_is_read(tmp_path):
    audio = {
        **dict(model_type="qwen2_audio_encoder", num_mel_bins=128, encoder_layers=32),
        **dict(encoder_attention_heads=20, encoder_ffn_dim=5120, encoder_layerdrop=0.0),
        **dict(d_model=1280, dropout=0.0, attention_dropout=0.0, activation_function="gelu"),
        **dict(activation_dropout=0.0, scale_embedding=False, init_std=0.02),
        "max_source_positions": 1500,
    }
    text = {
        **dict(model_type="qwen2", bos_token_id=151643, eos_token_id=151645, use_mrope=False),
        **dict(intermediate_size=11008, max_position_embeddings=8192, rms_norm_eps=1e-5),
        **dict(rope_theta=10000, torch_dtype="bfloat16", vocab_size=156032),
    }
    config = {
        **dict(model_type="qwen2_audio", audio_token_index=151646, ignore_index=-100),
        **dict(architectures=["Qwen2AudioForConditionalGeneration"], vocab_size=156032),
        **dict(audio_config=audio, text_config=text, torch_dtype="bfloat16"),
    }
    processing = {
        **dict(chunk_length=30, feature_extractor_type="WhisperFeatureExtractor", n_fft=400),
        **dict(feature_size=128, hop_length=160, n_samples=480000, nb_max_frames=3000),
        **dict(padding_side="right", padding_value=0.0, return_attention_mask=True),
        **dict(processor_class="Qwen2AudioProcessor", sampling_rate=16000),
    }

    def write_both(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processing))

    write_both()
    found = read_spec(tmp_path).spec
    assert found.hears
    assert not found.sees
    assert found.media.num_states(30 * 16000) == 1500
    assert read_spec(tmp_path).taking_media(0).spec.media is None
    write_both(audio_config={**audio, "a_new_switch": 1})
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "audio_config.a_new_switch"
    write_both(text_config={**text, "use_mrope": True})
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == "use_mrope"
