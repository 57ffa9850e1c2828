"""The attention of DeepSeek's layers on a CPU: milliseconds of processor time a layer, compiled against torch's operators
one by one, and the share of the floor.

    python benchmarks/cpu_latent.py [--model deepseek-v2-lite] [--layers 4] [--context 1024] [--threads 1]

Layers are a real model's, with next to no MLP (32 wide) and no vocabulary; several, so that no cache holds their weights.
Decodes of 1 and 16 sequences with `context` tokens each, and a prompt of 512. The floor is the longer of reading the layer's
products and latents once, at the rate that this machine reads, and of multiplying, at its rate in bfloat16; what is multiplied
is what attention over latents is, not over keys and values made of them. The two take turns, round after round; the median of
each.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch

from slipstream.kernels import native
from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.cpu_torch import CpuOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, cache_tensors
from slipstream.kernels.native import Program, StepInputs, ThreadPool
from slipstream.model.decoder import Decoder
from slipstream.model.program import CpuProgram, compile_program
from slipstream.spec.description import read_spec
from slipstream.spec.model import LatentAttentionSpec, ModelSpec, MoESpec
from slipstream.spec.parameters import parameters
from slipstream.worker.roofline import MULTIPLY_ROUNDS, READ_BYTES, REPEATS

CONFIGS = Path(__file__).parent / "configs"
BLOCK_SIZE = 16


def attention_alone(path: Path, num_layers: int) -> ModelSpec:
    whole = read_spec(path).spec
    layer = whole.layers[0]
    mlp = layer.mlp.expert if isinstance(layer.mlp, MoESpec) else layer.mlp
    layer = replace(layer, mlp=replace(mlp, intermediate_size=32))
    return replace(whole, layers=(layer,) * num_layers, vocab_size=256)


def rates_of(pool: ThreadPool) -> dict[str, float]:
    """Bytes and operations in a second of processor time: the best of some runs (see `worker/roofline.py`)."""
    found = {}
    for name, size, rounds in (("read", READ_BYTES, 1), ("bfloat16", 2**20, MULTIPLY_ROUNDS)):
        what, data, program = native.CEILINGS.index(name), torch.ones(size, dtype=torch.uint8).zero_(), Program(pool)
        program.add("ceiling", what, data, size, rounds)
        work = size if name == "read" else 2 * native.load().ss_ceiling_macs(pool.pointer, what, rounds)
        times = []
        for _ in range(REPEATS):
            program.profile("processor")
            program.run(StepInputs(num_tokens=1))
            times += program.profile(None)
        found[name] = 1e9 * work / min(times)
    return found


def floor_of(
    a: LatentAttentionSpec, hidden: int, num_seqs: int, num_new: int, length: int, rates: dict[str, float]
) -> dict[str, float]:
    """What a layer reads and multiplies at least."""
    products = sum(p.rows * p.inner for p in a.products(hidden)) + a.num_heads * a.kv_rank * (a.nope_dim + a.value_dim)
    seen = num_seqs * sum(range(length - num_new + 1, length + 1))
    num_bytes = 2 * (products + num_seqs * length * a.head_dim)
    operations = 2 * (num_seqs * num_new * products + seen * a.num_heads * (a.head_dim + a.kv_rank))
    floor = max(num_bytes / rates["read"], operations / rates["bfloat16"])
    return {"mb": num_bytes / 1e6, "gflop": operations / 1e9, "floor_ms": 1e3 * floor}


@torch.inference_mode()
def main() -> None:
    parser = common.parser(__doc__, "cpu_latent")
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="(default: 1) of more, waiting counts as well")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    spec, ops = attention_alone(CONFIGS / args.model, args.layers), NativeOps(args.threads)
    a = spec.layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    rates, results = rates_of(ops.pool), []
    made = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in parameters(spec).items()}
    longest = max(args.context, args.prompt)
    ours, theirs = (Decoder(spec, dict(made), own, max_model_len=longest) for own in (ops, CpuOps()))
    del made
    whole = compile_program(ours)
    assert isinstance(whole, CpuProgram), whole
    program = whole.programs[0]
    for num_seqs, num_new, length in ((1, 1, args.context), (16, 1, args.context), (1, args.prompt, args.prompt)):
        num_blocks = 1 + num_seqs * -(-length // BLOCK_SIZE)
        kv = [
            LayerKV(*cache_tensors(a, num_blocks, BLOCK_SIZE, lambda shape: torch.randn(shape).bfloat16()))
            for _ in spec.layers
        ]
        tokens, times = torch.zeros(num_seqs * num_new, dtype=torch.int32), dict[str, list[float]](compiled=[], torch=[])
        program.profile("processor")
        for i in range(args.rounds + 1):
            for name, way in (("compiled", whole), ("torch", theirs)):
                meta = AttentionMetadata.uniform(num_seqs, num_new, length, block_size=BLOCK_SIZE)
                begin = time.process_time()
                way.forward(tokens, kv, meta)
                if i:
                    times[name].append((time.process_time() - begin) / args.layers)
        of_operators: dict[str, float] = {}
        for op, ns in zip(program.operators, program.profile(None), strict=True):
            shape = "" if op.weights is None else f" {op.weights.rows} × {op.weights.inner}"
            key = op.name + shape
            of_operators[key] = of_operators.get(key, 0.0) + ns / 1e6 / args.layers / (args.rounds + 1)
        median = {name: common.median(found) for name, found in times.items()}
        row: dict[str, Any] = {"sequences": num_seqs, "new": num_new, "length": length}
        row |= floor_of(a, spec.hidden_size, num_seqs, num_new, length, rates)
        row |= {f"{name}_ms": 1e3 * s for name, s in median.items()} | {"operators_ms": of_operators}
        row |= {"times_torch": median["torch"] / median["compiled"]}
        row |= {"share_of_floor": row["floor_ms"] / row["compiled_ms"]}
        results.append(row)
        what = f"{num_seqs} × {num_new} new of {length}"
        print(
            f"{what:20} {row['compiled_ms']:8.3f} ms compiled, {row['torch_ms']:8.3f} torch ({row['times_torch']:.2f} ×), "
            f"floor {row['floor_ms']:.3f} ({row['mb']:.1f} MB, {row['gflop']:.2f} GFLOP): {row['share_of_floor']:.0%}"
        )
        print("    " + ", ".join(f"{name} {ms:.3f}" for name, ms in of_operators.items() if ms > 0.01 * row["compiled_ms"]))
    isa = ops.pool.isa
    common.save(
        args.output, "cpu_latent", model=args.model, threads=args.threads, instruction_set=isa, ceilings=rates, results=results
    )


if __name__ == "__main__":
    main()
