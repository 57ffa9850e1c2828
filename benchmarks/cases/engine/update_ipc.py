"""All weights of a model sent by CUDA IPC from a trainer's process to an engine, between two batches of requests.

    python benchmarks/engine.py --study update-ipc [--quantization fp8]

Both share one GPU. `send_s`: to say where the tensors are; `finish_s`: from then until the engine runs on. Of that `write_s` is
the engine's own figure. The first update also opens the handles and compiles. All updates have one checksum, since the weights
are the same, and every token of the second batch names the last version.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)


def train(model: str, told: Any, done: Any) -> None:
    """The trainer: random weights in bfloat16, named as transformers names them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.worker.weights.ipc import handle_of

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    torch.manual_seed(1)
    how: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    tensors = {name: torch.randn(x.shape, **how) * 0.02 for name, x in shapes.items()}
    torch.cuda.synchronize()
    told.put(
        {
            "names": list(tensors),
            "dtype_names": ["bfloat16"] * len(tensors),
            "shapes": [list(x.shape) for x in tensors.values()],
            "ipc_handles": [handle_of(x) for x in tensors.values()],
        }
    )
    done.wait()


def update(llm: Any, told: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    llm.start_weight_update()
    llm.update_weights(told)
    sent = time.perf_counter()
    made = llm.finish_weight_update()
    return {
        "send_s": round(sent - begin, 4),
        "finish_s": round(time.perf_counter() - sent, 4),
        "write_s": round(made.seconds, 4),
        "checksum": str(made.checksum),
    }


def run(args: argparse.Namespace, save: Any) -> None:
    from slipstream import LLM, SamplingParams

    spawn, model = multiprocessing.get_context("spawn"), str(common.CONFIGS / args.config)
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(args.requests)]
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    settings: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16")
    settings |= dict(
        quantization=args.quantization, max_model_len=2048, gpu_memory_utilization=0.55
    )
    with LLM(model, **settings) as llm:
        before = llm.generate(prompts, sampling, progress=False)
        told, done = spawn.Queue(), spawn.Event()
        trainer = spawn.Process(target=train, args=(model, told, done))
        trainer.start()
        where, updates = told.get(timeout=300), []
        for _ in range(args.updates):
            updates.append(update(llm, where))
            print(updates[-1], flush=True)
        done.set()
        trainer.join()
        after = [o.outputs[0] for o in llm.generate(prompts, sampling, progress=False)]
        version = llm.weights().weight_version
    pairs = zip(before, after, strict=True)
    save(
        model=Path(model).name,
        quantization=args.quantization,
        num_tokens=sum(len(o.token_ids) for o in after),
        num_tokens_of_another_version=sum(
            v != version for o in after for v in o.token_weight_versions
        ),
        num_answers_changed=sum(a.outputs[0].token_ids != b.token_ids for a, b in pairs),
        checksums_equal=len({u["checksum"] for u in updates}) == 1,
        updates=updates,
    )
