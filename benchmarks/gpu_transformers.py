"""Hugging Face transformers on the same GPU, in its simplest use: static batches of `generate`, random weights.

    python benchmarks/gpu_transformers.py OUT.json [--config llama-3-8b] [--batches 1,512]

128 tokens in, 128 out, greedy, bfloat16; output tokens per second of the second of two runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--batches", default="1,512")
    args = parser.parse_args()
    config = transformers.AutoConfig.from_pretrained(HERE / "configs" / args.config)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    result: dict[str, object] = {"transformers": transformers.__version__, "device": torch.cuda.get_device_name()}
    for batch in map(int, args.batches.split(",")):
        prompt = torch.randint(0, config.vocab_size, (batch, 128), device="cuda")
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=128,
                min_new_tokens=128,
                do_sample=False,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        result[f"128/128x{batch}"] = batch * 128 / seconds
        print(batch, round(batch * 128 / seconds, 1), flush=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
