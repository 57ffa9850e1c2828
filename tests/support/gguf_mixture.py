"""A GGUF file in the shape of a mixture of experts, for random weights (`load_format="dummy"`)."""

from __future__ import annotations

import gguf
import numpy as np


def write(path, layers, *, hidden=2048, heads=(32, 4), width=768, experts=32):
    """Writes a GGUF file in Qwen3-30B-A3B's shape, with fewer experts. Types are mixed as in Q4_K_M, and weights are zeros."""
    of_heads, of_kv_heads = (128 * n for n in heads)
    shapes = {"token_embd": (32000, hidden), "output": (32000, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        own = {
            "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (128,), "attn_k_norm": (128,),
            "attn_q": (of_heads, hidden), "attn_k": (of_kv_heads, hidden), "attn_v": (of_kv_heads, hidden),
            "attn_output": (hidden, of_heads), "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, width, hidden), "ffn_up_exps": (experts, width, hidden),
            "ffn_down_exps": (experts, hidden, width),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    facts = {
        "block_count": layers, "context_length": 8192, "embedding_length": hidden, "feed_forward_length": width,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": 128,
        "attention.value_length": 128, "expert_count": experts, "expert_used_count": 8,
        "expert_feed_forward_length": width, "vocab_size": 32000,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3moe.rope.freq_base", 1e6)
    for name, fact in facts.items():
        writer.add_uint32(f"qwen3moe.{name}", fact)
    for name, shape in shapes.items():
        if len(shape) == 1 or name.endswith("_inp"):
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType.Q6_K if "down" in name else gguf.GGMLQuantizationType.Q4_K
        raw = np.zeros(gguf.quant_shape_to_byte_shape(shape, kind), np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
