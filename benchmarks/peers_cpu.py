"""A CPU's engines on one GGUF file: Slipstream, llama.cpp and OpenVINO GenAI, each in a process of its own, taking turns.

    python benchmarks/peers_cpu.py [--model smollm2] [--llamacpp PYTHON ...] [--openvino PYTHON] [--rounds 3]
    python benchmarks/peers_cpu.py --rewrite Q8_0 --ours slipstream --loads stream …     # BF16 likewise

PYTHON is the interpreter of an environment that has llama-cpp-python, or openvino-genai; without one the peer is left out.
Several builds of llama.cpp may be given. Building one for this machine, AVX-512 and all, takes a quarter of an hour:

    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" pip install --no-binary llama-cpp-python \\
        llama-cpp-python tokenizers gguf pyyaml

Of each engine and round: output tokens/s of one stream after its first token (128 in, 256 out), prompt tokens/s of a prompt
of 512, output tokens/s of 16 and 64 requests of 128/128 with prefill in the time, and peak memory. Medians of the rounds;
ratios within a round, since the machine's speed drifts. Slipstream runs the file as it is, rounded to int8, and that with
keys and values of 8 bits, which is OpenVINO's default. `--rewrite` writes the file's matrices in another of GGUF's types, for
all engines alike.

In the recorded results, do not compare llama.cpp's figures for 16 and 64 requests: the adapter then gave sequences decreasing
ids, and llama.cpp joins only increasing ones. docs/benchmarking.md has fair figures.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.workload import BenchRequest

OURS = ("slipstream", "slipstream int8", "slipstream int8, cache int8")
LOADS = {"stream": (1, 128, 256), "prefill": (1, 512, 1), "16": (16, 128, 128), "64": (64, 128, 128)}


def requests(count: int, n_in: int, n_out: int) -> list[BenchRequest]:
    rng = random.Random(count + n_in)
    return [
        BenchRequest(prompt_token_ids=tuple(rng.randrange(100, 49_000) for _ in range(n_in)), output_tokens=n_out)
        for _ in range(count)
    ]


def make(name: str, path: Path, threads: int) -> Any:
    if not name.startswith("slipstream"):
        from slipstream.bench.adapters import Setup, make_engine

        peer, settings = name.split()[0], {"num_threads": threads}
        return make_engine(Setup(engine=peer, model=path.stem, path=path, batch_size=64, max_model_len=528, settings=settings))
    from slipstream.bench.adapters.slipstream import OfflineSlipstream
    from slipstream.config import EngineArgs

    quantization = "int8" if name.startswith("slipstream int8") else None
    settings = EngineArgs(
        model=str(path),
        num_threads=threads,
        max_model_len=1024,
        max_num_seqs=64,
        quantization=quantization,
        kv_cache_dtype="int8" if name == "slipstream int8, cache int8" else "auto",
        skip_tokenizer_init=True,
    )
    return OfflineSlipstream(settings)


def rewritten(path: Path, kind: str, folder: Path) -> Path:
    """The GGUF file with its matrices in the type `kind`."""
    import gguf

    reader, wanted = gguf.GGUFReader(path), gguf.GGMLQuantizationType[kind]
    made = folder / f"{path.stem.split('.')[0]}.{kind}.gguf"
    writer = gguf.GGUFWriter(made, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def child(name: str, path: Path, threads: int, loads: Sequence[str]) -> None:
    engine = make(name, path, threads)
    engine.run(requests(2, 64, 16))
    found: dict[str, float] = {}
    for load in loads:
        count, n_in, n_out = LOADS[load]
        records = engine.run(requests(count, n_in, n_out))
        sent = min(r.sent for r in records)
        if load == "stream":
            found[load] = (n_out - 1) / (records[0].last_token - records[0].first_token)
        elif load == "prefill":
            found[load] = n_in / (records[0].first_token - sent)
        else:
            found[load] = count * n_out / (max(r.last_token for r in records) - sent)
        if load == ("prefill" if "prefill" in loads else "stream"):
            found["peak_mib_one_stream"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"figures": found, "build": engine.describe().get("system", "")}))


def measure(python: str, name: str, path: Path, threads: int, loads: Sequence[str]) -> tuple[dict[str, float], str]:
    """Its figures, and how it was built where it tells."""
    import common

    command = [python, __file__, "--child", name, "--model", str(path), "--threads", str(threads), "--loads", *loads]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=common.with_source())
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["figures"], found["build"]


def main(arguments: Sequence[str] | None = None) -> None:
    if "--child" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child")
        parser.add_argument("--model", type=Path)
        parser.add_argument("--threads", type=int)
        parser.add_argument("--loads", nargs="+")
        args = parser.parse_args(arguments)
        child(args.child, args.model, args.threads, args.loads)
        return
    import common

    from slipstream.hub import resolve_model
    from slipstream.plan.hardware import available_cores

    parser = common.parser(__doc__, "peers_cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--llamacpp", metavar="PYTHON", nargs="+", default=[])
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", nargs="+", choices=OURS, default=OURS)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--rewrite", metavar="TYPE", choices=["Q8_0", "BF16", "F16", "F32", "Q4_0"])
    args = parser.parse_args(arguments)
    path, threads = resolve_model(args.model), available_cores()
    with tempfile.TemporaryDirectory() as folder:
        path = rewritten(path, args.rewrite, Path(folder)) if args.rewrite else path
        compare(args, path, threads)


def compare(args: argparse.Namespace, path: Path, threads: int) -> None:
    import common

    from slipstream.bench.report import print_table

    engines = dict.fromkeys(args.ours, sys.executable)
    engines |= {"llamacpp" if i == 0 else f"llamacpp {i + 1}": python for i, python in enumerate(args.llamacpp)}
    engines |= {"openvino": args.openvino} if args.openvino else {}
    builds: dict[str, str] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(args.rounds):
        rounds.append({})
        for name, python in engines.items():
            rounds[-1][name], builds[name] = measure(python, name, path, threads, args.loads)
            print(name, {k: round(v, 1) for k, v in rounds[-1][name].items()}, flush=True)
    columns = list(next(iter(rounds[0].values())))
    medians = {n: {c: statistics.median(r[n][c] for r in rounds) for c in columns} for n in engines}
    ratios = {
        f"{ours} / {peer}": {c: statistics.median(r[ours][c] / r[peer][c] for r in rounds) for c in columns}
        for ours in args.ours
        for peer in engines
        if not peer.startswith("slipstream")
    }
    print_table("medians", ["", *columns], [[n, *(f"{v:,.1f}" for v in m.values())] for n, m in medians.items()])
    for name, build in builds.items():
        if build:
            print(f"{name}: {build}")
    print_table("ratios", ["", *columns], [[n, *(f"{v:.2f}" for v in m.values())] for n, m in ratios.items()])
    info = {"file": path.name, "threads": threads, "builds": builds}
    common.save(args.output, "peers_cpu", **info, medians=medians, ratios=ratios, rounds=rounds)


if __name__ == "__main__":
    main()
