"""A GGUF file of random weights in the shape of a small hybrid, for `peers_cpu.py`: both engines load the same file.

    pip install gguf
    python benchmarks/random_gguf.py lfm2-350m Q8_0 FILE

The tokenizer has no text: prompts are token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "lfm2-350m": {
        "embedding_length": 1024,
        "feed_forward_length": 4608,
        "vocab_size": 65536,
        "head_count": 16,
        "kv_heads": [8 * (i in (2, 5, 8, 10, 12, 14)) for i in range(16)],
        "l_cache": 3,
    }
}


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as llama.cpp's converter writes LFM2."""
    e, f, v = (shape[k] for k in ("embedding_length", "feed_forward_length", "vocab_size"))
    head = e // shape["head_count"]
    yield "token_embd.weight", (v, e)
    yield "token_embd_norm.weight", (e,)
    for i, kv in enumerate(shape["kv_heads"]):
        own: dict[str, tuple[int, ...]] = {"attn_norm": (e,), "ffn_norm": (e,)}
        own |= {"ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}
        if kv:
            own |= {"attn_q": (e, e), "attn_output": (e, e), "attn_q_norm": (head,)}
            own |= {"attn_k": (kv * head, e), "attn_v": (kv * head, e), "attn_k_norm": (head,)}
        else:
            own |= {"shortconv.in_proj": (3 * e, e), "shortconv.out_proj": (e, e)}
            own["shortconv.conv"] = (e, shape["l_cache"])
        for name, size in own.items():
            yield f"blk.{i}.{name}.weight", size


def write(path: Path, shape: dict[str, Any], kind: str) -> None:
    import gguf

    w, rng = gguf.GGUFWriter(path, "lfm2"), np.random.default_rng(0)
    w.add_block_count(len(shape["kv_heads"]))
    w.add_context_length(32768)
    w.add_embedding_length(shape["embedding_length"])
    w.add_feed_forward_length(shape["feed_forward_length"])
    w.add_head_count(shape["head_count"])
    w.add_head_count_kv(shape["kv_heads"])
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(1e6)
    w.add_vocab_size(shape["vocab_size"])
    w.add_shortconv_l_cache(shape["l_cache"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("lfm2")
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    w.add_token_list(letters + [f"tok{i}" for i in range(256, shape["vocab_size"])])
    w.add_token_merges(["t o", "to k"])
    w.add_eos_token_id(2)
    for name, size in tensors(shape):
        x = rng.standard_normal(size, dtype=np.float32)
        if len(size) == 1:
            w.add_tensor(name, 1 + 0.1 * x)
        elif name.endswith("shortconv.conv.weight"):
            w.add_tensor(name, 0.5 * x)
        else:
            how = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(x * size[1] ** -0.5, how)
            w.add_tensor(name, packed, raw_dtype=how)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", help="a type of GGUF's, such as Q8_0")
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.path, SHAPES[args.shape], args.kind)
