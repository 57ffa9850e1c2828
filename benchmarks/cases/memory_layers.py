"""A decoder with a bound on the weights that it keeps in memory: tokens a second beside what reading alone allows.

    python benchmarks/memory.py --study layers                    # random weights of TinyLlama 1.1B's shape, half of them kept
    python benchmarks/memory.py --study layers --share 0.3 --batches 1,16
    python benchmarks/memory.py --study layers --device cuda      # a GPU: OPT-30B's shape in bfloat16, of which it has 16 GiB

On a CPU:

1. all: all weights in memory, one C++ program a step.
2. memory: a bound of `--share` of the weights, while the system keeps the file in memory: reading is a copy.
3. disk: the same, and the system forgets what was read.

For 2 and 3 the bound is what a step reads over the rate at which the same layers are read without computing (`LayerStream.
measure_read_rate`), measured just before and just after. Tokens a second are the median of three runs; the ways take turns.

On a GPU layers lie in the host's pinned memory: `host` is with a bound, `all` without one if the GPU holds all weights
(`--with-all`). The bound on the speed is again what a step copies over the rate of the same copies alone. Prompts have 64
tokens, and tokens a second are those of decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    **dict(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
    ),
    **dict(
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    ),
    **dict(tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, model_type="llama"),
)
PROMPT = 64
"""Tokens of a prompt on a GPU."""
OPT_30B = dict(
    architectures=["OPTForCausalLM"],
    **dict(
        vocab_size=50272,
        hidden_size=7168,
        ffn_dim=28672,
        num_hidden_layers=48,
        num_attention_heads=56,
    ),
    **dict(
        max_position_embeddings=2048,
        word_embed_proj_dim=7168,
        do_layer_norm_before=True,
        activation_function="relu",
    ),
    **dict(
        bos_token_id=2, eos_token_id=2, pad_token_id=1, model_type="opt", torch_dtype="bfloat16"
    ),
)
ROUNDS = 3


RECORD = "offload"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the weights that are kept (default: 0.5)"
    )
    parser.add_argument(
        "--batches", default=None, help="sequences at once (default: 1,8; on a GPU 256)"
    )
    parser.add_argument("--tokens", type=int, default=12, help="tokens of an answer (default: 12)")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--weights-gib", type=float, default=16.0, help="GiB of weights on the GPU (default: 16)"
    )
    parser.add_argument(
        "--with-all", action="store_true", help="on a GPU: also with all weights there"
    )
    parser.add_argument(
        "--layers", type=int, default=None, help="on a GPU: layers of the model (default: 48)"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.device == "cuda" and args.output == common.RESULTS / "offload.json":
        args.output = common.RESULTS / "offload_gpu.json"
    batches = [
        int(text)
        for text in (args.batches or ("256" if args.device == "cuda" else "1,8")).split(",")
    ]
    with tempfile.TemporaryDirectory() as folder:
        if args.device == "cuda":
            own = {} if args.layers is None else {"num_hidden_layers": args.layers}
            (Path(folder) / "config.json").write_text(json.dumps(OPT_30B | own))
            found = measure_gpu(Path(folder), args, batches)
            save(**found)
            return
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        found = measure(Path(folder), args, batches)
    save(**found)


def measure(folder: Path, args: argparse.Namespace, batches: list[int]) -> dict[str, Any]:
    from slipstream import LLM
    from slipstream.config import EngineArgs
    from slipstream.costs.estimate import all_weights_bytes, estimate
    from slipstream.spec.description import read_spec

    settings: dict[str, Any] = dict(
        device="cpu", load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16"
    )
    settings |= dict(max_model_len=256, max_num_seqs=max(batches), kv_cache_bytes=256 * 2**20)
    settings |= dict(quantization=args.quantization, download_dir=str(folder / "models"))
    config, _ = estimate(EngineArgs(model=str(folder), **settings), read_spec(folder))
    bound = int(args.share * all_weights_bytes(config, read_spec(folder)))
    rows: dict[str, Any] = {}
    begin = time.perf_counter()
    with LLM(str(folder), weights_bytes=bound, **settings) as llm:
        start_s = time.perf_counter() - begin
        ledger = llm.core.ledger
        decoder = llm.core.executor.runner.model.decoder
        stream = decoder.stream
        per_step = sum(size for _, size in stream._spans.values())
        print(
            f"start {start_s:.1f} s; {ledger.weights_bytes / 2**20:,.0f} MiB kept, {per_step / 2**20:,.0f} MiB read a step"
        )
        for batch in batches:
            for way in ("memory", "disk"):
                rows[f"{way}, {batch}"] = streamed(llm, stream, way, batch, args.tokens, per_step)
                print(f"{way}, batch {batch}: {rows[f'{way}, {batch}']}", flush=True)
    with LLM(str(folder), **settings) as llm:
        weights = llm.core.ledger.weights_bytes
        for batch in batches:
            rows[f"all, {batch}"] = {
                "tokens_a_second": common.median(
                    [rate(llm, batch, args.tokens) for _ in range(ROUNDS)]
                )
            }
            print(f"all, batch {batch}: {rows[f'all, {batch}']}", flush=True)
    return {
        "share": args.share,
        "weights_bytes": weights,
        "bound_bytes": bound,
        "kept_bytes": ledger.weights_bytes,
        "read_bytes_a_step": per_step,
        "start_s": start_s,
        "load_average": os.getloadavg(),
        "rows": rows,
    }


def measure_gpu(folder: Path, args: argparse.Namespace, batches: list[int]) -> dict[str, Any]:
    from slipstream import LLM

    settings: dict[str, Any] = dict(
        device="cuda", load_format="dummy", skip_tokenizer_init=True, max_model_len=256
    )
    settings |= dict(
        max_num_seqs=max(batches), quantization=args.quantization, enable_prefix_caching=False
    )
    rows: dict[str, Any] = {}
    bound = int(args.weights_gib * 2**30)
    begin = time.perf_counter()
    with LLM(str(folder), weights_bytes=bound, **settings) as llm:
        start_s, phases = time.perf_counter() - begin, dict(llm.core.executor.phases)
        ledger, stream = llm.core.ledger, llm.core.executor.runner.model.decoder.stream
        print(
            f"start {start_s:.1f} s {phases}; {ledger.weights_bytes / 2**30:.2f} GiB there, ",
            end="",
        )
        gb_per_s = stream.measure_read_rate() / 1e9
        print(
            f"{stream.step_bytes / 2**30:.2f} GiB copied a step; alone {gb_per_s:.2f} GB/s",
            flush=True,
        )
        for batch in batches:
            alone, times = [stream.measure_read_rate()], []
            rate(llm, batch, 1, PROMPT)  # kernels are compiled
            for _ in range(ROUNDS):
                times.append(rate(llm, batch, args.tokens, PROMPT))
                alone.append(stream.measure_read_rate())
            limit = batch * max(alone) / stream.step_bytes
            own = common.median(times)
            rows[f"host, {batch}"] = {
                "tokens_a_second": own,
                "each_run": times,
                "copying_alone_bytes_a_second": alone,
                "tokens_a_second_by_copying_alone": limit,
                "share_of_that": own / limit,
            }
            print(f"host, batch {batch}: {rows[f'host, {batch}']}", flush=True)
        per_step, kept = stream.step_bytes, ledger.weights_bytes
        del stream
    if args.with_all:
        with LLM(str(folder), **settings) as llm:
            for batch in batches:
                rate(llm, batch, 1, PROMPT)
                times = [rate(llm, batch, args.tokens, PROMPT) for _ in range(ROUNDS)]
                rows[f"all, {batch}"] = {"tokens_a_second": common.median(times), "each_run": times}
                print(f"all, batch {batch}: {rows[f'all, {batch}']}", flush=True)
    return {
        "bound_bytes": bound,
        "kept_bytes": kept,
        "copied_bytes_a_step": per_step,
        "start_s": start_s,
        "phases": phases,
        "rows": rows,
    }


def streamed(
    llm: Any, stream: Any, way: str, batch: int, tokens: int, per_step: int
) -> dict[str, Any]:
    """Tokens a second, and what reading alone allows."""
    stream.forgets = way == "disk"
    if way == "disk":
        stream.flush()
    else:
        stream.measure_read_rate()  # so that the system has all of it
    rates, times = [stream.measure_read_rate()], []
    waited, begin = stream.waited_s, time.perf_counter()
    for _ in range(ROUNDS):
        times.append(rate(llm, batch, tokens))
    waited = (stream.waited_s - waited) / (time.perf_counter() - begin)
    rates.append(stream.measure_read_rate())
    best = max(rates)
    limit = batch * best / per_step
    own = common.median(times)
    return {
        "tokens_a_second": own,
        "reading_alone_bytes_a_second": rates,
        "tokens_a_second_by_reading_alone": limit,
        "share_of_that": own / limit,
        "share_of_time_waiting": waited,
    }


def rate(llm: Any, batch: int, tokens: int, prompt: int = 3) -> float:
    """Tokens a second of the decode, from the difference of a long and a short run."""
    from slipstream import SamplingParams

    def run(count: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        prompts = [
            {"prompt_token_ids": [7 + i, *range(11, 9 + 2 * prompt, 2)]} for i in range(batch)
        ]
        begin = time.perf_counter()
        llm.generate(prompts, sampling, progress=False)
        return time.perf_counter() - begin

    return batch * tokens / (run(tokens + 1) - run(1))
