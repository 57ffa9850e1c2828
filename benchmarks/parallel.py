"""One model on two GPUs beside one: equality, the time of a token, throughput, and the collectives that it rests on.

    python benchmarks/parallel.py                          # all; record parallel.json
    python benchmarks/parallel.py --only equality,collectives

1. equality: small models of random weights in float32, greedy, the same tokens by one GPU and by two (op by op and in graphs;
   tensor and sequence parallel, two stages, mixtures by both splits), of short prompts and of one of 3,000 tokens.
2. collectives: sums, gathers and exchanges between the GPUs (collectives.py).
3. token: one sequence, milliseconds a token between the 64th and the 320th.
4. throughput: 1,024 requests (`--requests`) of 128 random tokens in and out, all there at the start; output tokens a second.
   "two replicas" are two engines at the same time, a GPU and as many requests each. Engines of one GPU run two at a time.
5. mixtures: the same for mixtures.
6. large: a model of 70 billion parameters on two GPUs: its start, and 4 sequences of 1,024 tokens in and out.
7. context: 8 prompts of 131,072 random tokens, FP8 weights and cache: seconds of the first prompt, then milliseconds of a step
   of all 8 (`--prompts`) whose prompts are cached, by one GPU and by two that share keys and tokens out. No two prompts begin
   alike.

Every engine runs in a process of its own, without a prefix cache. Weights are random (load_format="dummy"): speed does not
depend on them. `--engines TEXT` runs only those whose name has the text. The record is written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from collectives import SIZES_KB, collectives

PARTS = ("equality", "collectives", "token", "throughput", "mixtures", "large", "context")
LONG = 131072
"""Tokens of a prompt of `context`."""
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    **dict(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
    ),
    **dict(
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    ),
    **dict(tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, model_type="llama"),
)
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "one kv head": {**LLAMA, "num_key_value_heads": 1},
    "qwen3_moe": {
        **LLAMA,
        **dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            head_dim=32,
            num_experts=8,
        ),
        **dict(num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True),
    },
    "deepseek_v3": {
        **LLAMA,
        **dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3"),
        **dict(kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16),
        **dict(v_head_dim=32, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2),
        **dict(moe_intermediate_size=128, first_k_dense_replace=1, n_group=2, topk_group=1),
        **dict(norm_topk_prob=True, routed_scaling_factor=1.0, num_key_value_heads=8),
    },
}
TENSOR, EXPERTS, STAGES, CONTEXT = (
    {"tensor_parallel_size": 2},
    {"expert_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"context_parallel_size": 2},
)
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (TENSOR, {**TENSOR, "sequence_parallel": True}, STAGES, CONTEXT),
    "one kv head": (TENSOR, CONTEXT),
    "qwen3_moe": (TENSOR, {**TENSOR, **EXPERTS}, EXPERTS, STAGES, CONTEXT),
    "deepseek_v3": (TENSOR, CONTEXT),
}


def main() -> None:
    parser = common.parser(__doc__, "parallel")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--model", default=str(common.CONFIGS / "llama-3-8b"), help="a folder with a config.json"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--requests", type=int, default=1024, help="of throughput and mixtures, at once"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of context, at once")
    parser.add_argument("--largest-kb", type=int, default=SIZES_KB[-1], help="of collectives")
    parser.add_argument(
        "--engines",
        default="",
        help="only engines whose name has this text, or one of several between |",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(json.loads(args.one))))
        return
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    work = {
        "equality": equality,
        "collectives": collectives,
        "token": token_times,
        "throughput": throughput,
    }
    work |= {"mixtures": mixtures, "large": large, "context": context}
    found = {}
    for part in chosen:
        begin = time.perf_counter()
        found[part] = work[part](args)
        print(f"[{part}: {time.perf_counter() - begin:.0f} s]", flush=True)
        common.save(args.output, "parallel", **found)


def engine(
    what: str,
    settings: dict[str, Any],
    gpu: int | str | None = None,
    requests: int = 1024,
    lengths: dict[str, int] | None = None,
) -> Any:
    """Result of `run_one` in a process of its own, on GPU number `gpu` if given; a text if it
    failed. `lengths`: tokens of prompts and answers ("input", "output") other than the usual."""
    task = json.dumps(
        {"what": what, "settings": settings, "requests": requests, "lengths": lengths or {}}
    )
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    command = [sys.executable, __file__, "--one", task]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **seen})
    for line in done.stderr.splitlines():
        if line.startswith("WARNING"):
            print(line, flush=True)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return (done.stderr.strip().splitlines() or ["ended without a word"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def engines(
    args: argparse.Namespace, tasks: dict[str, tuple[str, dict[str, Any], int | None]], at_once: int
) -> dict[str, Any]:
    """`engine` for each task that `args.engines` names, so many at a time."""
    tasks = {
        key: task
        for key, task in tasks.items()
        if any(text in key for text in args.engines.split("|"))
    }
    with ThreadPoolExecutor(at_once) as pool:
        jobs = {key: pool.submit(engine, *task, args.requests) for key, task in tasks.items()}
        found = {}
        for key, job in jobs.items():
            found[key] = job.result()
            print(f"{key}: {str(found[key])[:200]}", flush=True)
    return found


def run_one(task: dict[str, Any]) -> Any:
    from slipstream.errors import OutOfMemoryError

    try:
        return run_engine(task)
    except OutOfMemoryError as error:
        return f"it does not fit: {str(error)[:200]}"


def run_engine(task: dict[str, Any]) -> Any:
    from slipstream import LLM, SamplingParams

    begin = time.perf_counter()
    lengths = {"input": 128, "output": 128} | task.get("lengths", {})
    how = {
        **task["settings"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": task["what"] == "long",
    }
    with LLM(**how) as llm:
        start_s = time.perf_counter() - begin
        rng = random.Random(0)

        def prompts(count: int, length: int) -> list[Any]:
            return [
                {"prompt_token_ids": [rng.randrange(2, 1000) for _ in range(length)]}
                for _ in range(count)
            ]

        def run(requests: list[Any], tokens: int) -> tuple[float, list[list[int]]]:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            begin = time.perf_counter()
            outputs = llm.generate(requests, sampling, progress=False)
            return time.perf_counter() - begin, [o.outputs[0].token_ids for o in outputs]

        if task["what"] == "tokens":
            if task.get("lengths"):
                return run(prompts(3, lengths["input"]), lengths["output"])[1]
            return run([*prompts(1, 100), *prompts(5, 17), *prompts(1, 3000)], 32)[1]
        if task["what"] == "token":
            one = prompts(1, 64)
            run(one, 64)
            times = [(run(one, 320)[0] - run(one, 64)[0]) / 256 * 1e3 for _ in range(5)]
            greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
            answer = llm.generate(prompts(1, 64), greedy, progress=False)[0].outputs[0]
            of_tokens = [
                found[i].logprob
                for i, found in zip(answer.token_ids, answer.logprobs or (), strict=True)
            ]
            found = {"token_ids": answer.token_ids, "logprobs": of_tokens}
            return {"ms_a_token": common.median(times), "all": times, "start_s": start_s, **found}
        if task["what"] == "long":
            long = task.get("lengths", {}).get("input", LONG)
            run(prompts(1, min(9000, long)), 2)  # kernels and graphs
            many = prompts(task["requests"], long)
            first = run(many[:1], 1)[0]
            run(many, 1)
            fewer, more = (run(many, n)[0] for n in (33, 161))
            return {
                "first_token_s": first,
                "ms_a_step": (more - fewer) / 128 * 1e3,
                "kv_tokens": llm.core.ledger.num_kv_tokens,
                "start_s": start_s,
            }
        if task["what"] == "update":
            return {**update_of(llm, task["settings"]), "start_s": start_s}
        found: dict[str, Any] = {"start_s": start_s}
        if task["what"] in ("four", "large"):
            size = 1024 if task["what"] == "four" else lengths["input"]
            run(prompts(4, size), 16)
            first, whole = run(prompts(4, size), 1)[0], run(prompts(4, size), size)[0]
            found |= {"ms_a_token": (whole - first) / (size - 1) * 1e3, "first_token_s": first}
            if task["what"] == "four":
                return found
        count, given, answer = task["requests"], lengths["input"], lengths["output"]
        # Sizes of steps that were not captured yet.
        run(prompts(min(count, max(8, 2**15 // given)), given), min(32, answer))
        many = prompts(count, given)
        if task["what"] == "throughput":
            run(many, answer)
        repeats = 3 if task["what"] == "throughput" else 1
        times = [run(many, answer)[0] for _ in range(repeats)]
        return found | {"tokens_a_second": count * answer / common.median(times), "seconds": times}


def update_of(llm: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Two updates of a Llama's weights by a trainer on another device, or on the CPU."""
    import threading

    import torch

    from slipstream import WeightGroup

    c = json.loads((Path(settings["model"]) / "config.json").read_text())
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c.get("head_dim")
    dim = dim or hidden // c["num_attention_heads"]
    q, kv = dim * c["num_attention_heads"], dim * c["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": [c["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [c["vocab_size"], hidden],
    }
    for i in range(c["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [q, hidden],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, q],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    on_gpu = settings["device"] == "cuda"
    device, backend = ("cuda:1", "nccl") if on_gpu else ("cpu", "gloo")
    dtype = getattr(torch, settings["dtype"])
    tensors = [0.02 * torch.randn(shape, dtype=dtype, device=device) for shape in shapes.values()]
    group: list[Any] = []
    turn = threading.Semaphore(0)

    def train() -> None:
        group.append(WeightGroup("127.0.0.1", 29653, 0, 2, backend=backend, device=device))
        for _ in range(2):
            turn.acquire()
            for tensor in tensors:
                group[0].broadcast(tensor)

    trainer = threading.Thread(target=train, daemon=True)  # an error here ends the process
    trainer.start()
    how = {"master_address": "127.0.0.1", "master_port": 29653, "world_size": 2, "backend": backend}
    llm.init_weight_transfer_engine({"init_info": how})
    told = {
        "names": list(shapes),
        "dtype_names": [settings["dtype"]] * len(shapes),
        "shapes": list(shapes.values()),
    }
    times, sums = [], []
    for _ in range(2):
        llm.start_weight_update(told)
        turn.release()
        begin = time.perf_counter()
        llm.update_weights({"update_info": told})
        sums.append(llm.finish_weight_update().checksum)
        times.append(time.perf_counter() - begin)
    trainer.join()
    equal = "equal" if sums[0] == sums[1] else "other than before"
    return {"seconds": times[-1], "first_s": times[0], "checksums": equal}


def equality(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tasks: dict[str, tuple[str, dict[str, Any], int | None]] = {}
        for name, config in SMALL.items():
            model = Path(folder) / name
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config))
            settings = dict(
                model=str(model),
                device=args.device,
                dtype="float32",
                max_model_len=4096,
                kv_cache_bytes=2**27,
            )
            tasks[name] = ("tokens", settings, None)
            for way in WAYS[name]:
                for eager in (True, False):
                    key = f"{name}, {', '.join(f'{k} {v}' for k, v in way.items())}, {'op by op' if eager else 'graphs'}"
                    tasks[key] = ("tokens", {**settings, **way, "enforce_eager": eager}, None)
        answers = engines(args, tasks, 6)
    found: dict[str, Any] = {}
    for key, tokens in answers.items():
        alone = answers.get(key.split(", ")[0])
        ran = isinstance(tokens, list) and isinstance(alone, list)
        found[key] = tokens == alone if ran else f"{alone} / {tokens}"
        print(f"{key}: {'equal' if found[key] is True else found[key]}", flush=True)
    return found


def token_times(args: argparse.Namespace) -> dict[str, Any]:
    settings = dict(model=args.model, device=args.device, max_model_len=2048, max_num_seqs=8)
    schemes: dict[str, dict[str, Any]] = {
        "bfloat16": settings,
        "fp8": {**settings, "quantization": "fp8"},
    }
    found = engines(
        args,
        {
            f"{name}, 1 GPU": ("token", made, gpu)
            for gpu, (name, made) in enumerate(schemes.items())
        },
        2,
    )
    found |= engines(
        args,
        {f"{name}, 2 GPUs": ("token", {**made, **TENSOR}, None) for name, made in schemes.items()},
        1,
    )
    for name in schemes:
        found[f"{name}, answers"] = compared(
            found.get(f"{name}, 1 GPU"), found.get(f"{name}, 2 GPUs")
        )
        print(f"{name}, answers: {found[f'{name}, answers']}", flush=True)
    return found


def compared(one: Any, two: Any) -> dict[str, Any]:
    """How many tokens of two greedy answers are the same from the first on, and how far their log-probabilities are apart."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return {}
    pairs = list(zip(one["token_ids"], two["token_ids"], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    apart = [
        abs(a - b) for a, b in zip(one["logprobs"][:same], two["logprobs"][:same], strict=True)
    ]
    return {"same": same, "of": len(pairs), "farthest_logprob": max(apart, default=0.0)}


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    settings = dict(model=args.model, device=args.device, quantization="fp8", max_model_len=8192)
    found = engines(
        args, {f"fp8, two replicas: {gpu}": ("throughput", settings, gpu) for gpu in range(2)}, 2
    )
    ways = {"tensor parallel": TENSOR, "two stages": STAGES}
    found |= engines(
        args,
        {f"fp8, {name}": ("throughput", {**settings, **way}, None) for name, way in ways.items()},
        1,
    )
    return found | engines(args, {"fp8, 1 GPU": ("throughput", settings, 0)}, 1)


def mixtures(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        name: dict(
            model=str(common.CONFIGS / name),
            device=args.device,
            quantization="fp8",
            max_model_len=8192,
        )
        for name in ("qwen3-30b-a3b", "mixtral-8x7b")
    }
    found = engines(
        args,
        {
            f"{name}, 1 GPU": ("throughput", made, gpu)
            for gpu, (name, made) in enumerate(settings.items())
        },
        2,
    )
    ways = {
        "tensor parallel": TENSOR,
        "tensor and expert parallel": {**TENSOR, **EXPERTS},
        "requests dealt out": EXPERTS,
    }
    for key, way in ways.items():
        found |= engines(
            args,
            {
                f"{name}, {key}": ("throughput", {**made, **way}, None)
                for name, made in settings.items()
            },
            1,
        )
    return found


def large(args: argparse.Namespace) -> dict[str, Any]:
    model = str(common.CONFIGS / "llama-3-70b")
    settings = dict(
        model=model,
        device=args.device,
        quantization="fp8",
        max_model_len=4096,
        max_num_seqs=8,
        **TENSOR,
    )
    return engines(args, {"llama-3-70b, fp8, 2 GPUs": ("four", settings, None)}, 1)


def context(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((Path(args.model) / "config.json").read_text())
        config["max_position_embeddings"] = LONG + 1024
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = dict(
            model=folder,
            device=args.device,
            quantization="fp8",
            kv_cache_dtype="fp8",
            max_num_seqs=8,
            max_num_batched_tokens=8192,
        )
        args.requests = args.prompts
        ways = {"context, 2 GPUs": ("long", {**settings, **CONTEXT}, None)}
        found = engines(args, {**ways, "context, 1 GPU": ("long", settings, 0)}, 1)
    one, two = found.get("context, 1 GPU"), found.get("context, 2 GPUs")
    if isinstance(one, dict) and isinstance(two, dict):
        found |= {f"{k}, times one GPU": one[k] / two[k] for k in ("first_token_s", "ms_a_step")}
        print({k: v for k, v in found.items() if "times" in k}, flush=True)
    return found


if __name__ == "__main__":
    main()
