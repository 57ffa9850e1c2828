"""A decode step of one sequence: the layers as one kernel and kernel by kernel, without the head. On a GPU:

    python benchmarks/gpu_one_token.py OUT.json llama-3-8b:fp8:fp8 llama-3-8b::bfloat16 llama-3-8b:int4:fp8 gpt-j-6b:fp8:fp8

Each argument is MODEL:SCHEME:CACHE, with random weights. Written: how far the hidden states are apart at some lengths (of FP8
and INT8 that is mostly inputs on the other side of two codes), and milliseconds from graphs, medians of five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.kernels.metadata import AttentionMetadata, LayerKV, cache_tensors
from slipstream.kernels.triton import TritonOps
from slipstream.model.loader import load_model
from slipstream.model.one_token import compile_one_token
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import SCHEMES

CUDA = torch.device("cuda")
NUM_BLOCKS = 300
CACHES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


def milliseconds(f: Callable[[], object], times: int = 20) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        f()
        graph.capture_begin()
        f()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / times)
    return sorted(found)[2]


@torch.inference_mode()
def measure(name: str, scheme: str, cache: str) -> dict[str, object]:
    model = load_model(
        Path(__file__).parent / "configs" / name,
        ops=TritonOps(),
        device=CUDA,
        dtype=torch.bfloat16,
        max_model_len=4096 if name != "gpt-j-6b" else 2048,
        load_format="dummy",
        seed=0,
        scheme=SCHEMES[scheme] if scheme else None,
    )
    decoder, kind, kv = model.decoder, CACHES[cache], []
    torch.manual_seed(1)
    for layer in model.spec.layers:
        k, v = cache_tensors(
            layer.attention,
            NUM_BLOCKS,
            16,
            lambda shape: (torch.randn(shape, device=CUDA) * 0.5).to(kind),
            values_by_dim=kind.itemsize == 1,
        )
        scale = torch.full((k.shape[1],), 0.3, device=CUDA) if kind.itemsize == 1 else None
        kv.append(LayerKV(k, v, scale, scale))
    token, fused = torch.tensor([77], device=CUDA, dtype=torch.int32), compile_one_token(decoder)
    assert not isinstance(fused, Reason), f"{name} with {scheme or 'no scheme'} runs kernel by kernel: {fused}"

    apart, times = {}, {}
    for length in (1, 200, 1000, 2000):
        here = AttentionMetadata.alone(length - 1, 1, block_size=16, device=CUDA)
        theirs = decoder.forward(token, kv, here).float()
        h = decoder.embedded(token, here)

        def kernels(h: torch.Tensor = h, here: AttentionMetadata = here) -> None:
            x, residual = h.clone(), None
            for layer, own in zip(decoder.layers, kv, strict=True):
                x, residual = layer(decoder.ops, x, residual, own, here)

        ours = fused.forward(token, kv, here).float()
        apart[length] = ((ours - theirs).norm() / theirs.norm()).item()
        x = h.clone()
        one = milliseconds(lambda x=x, here=here: fused.layers(x, kv, here))  # type: ignore[misc]
        times[length] = {"one kernel": one, "kernel by kernel": milliseconds(kernels)}
        print(name, scheme, cache, length, f"{apart[length]:.1e}", times[length], flush=True)
    return {"model": name, "scheme": scheme, "cache": cache, "relative_difference": apart, "ms": times}


def main() -> None:
    out, *names = sys.argv[1:]
    rows = []
    for name in names:
        model, scheme, cache = name.split(":")
        rows.append(measure(model, scheme, cache))
        torch.cuda.empty_cache()
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
