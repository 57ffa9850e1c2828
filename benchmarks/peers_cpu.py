"""A CPU's engines on one GGUF file: Slipstream, llama.cpp, OpenVINO GenAI, ONNX Runtime GenAI, each in a process of its own,
taking turns.

    python benchmarks/peers_cpu.py --peer "llama.cpp Q4_1" llamacpp PYTHON - --peer "OpenVINO int8" openvino PYTHON FOLDER \\
        --text FILE --cores 2 4 [--rounds 3] [--seconds 400]
    python benchmarks/peers_cpu.py --rewrite Q8_0 --ours slipstream --groups one …     # BF16 likewise
    python benchmarks/peers_cpu.py --rewrite BF16 --zeros 0.7 --ours "slipstream int8" --groups 16

A peer is a name, an engine, the interpreter of an environment that has llama-cpp-python, openvino-genai or onnxruntime-genai,
and what it runs: a GGUF file, a folder exported for it, or `-` for the file that Slipstream runs. Building llama.cpp for this
machine, AVX-512 and all, takes a quarter of an hour:

    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" pip install --no-binary llama-cpp-python \\
        llama-cpp-python tokenizers gguf pyyaml

Groups, each in a process of its own, that reserves its cache for no more than it is asked:

    one   one sequence of up to 1,024 tokens: output tokens/s after the first (128 in, 256 out), prompt tokens/s of a prompt of
          512 (the median of three), the most memory that the process held
    16    16 requests of 128/128 at once: output tokens/s with prefill in the time; the most memory
    64    the same of 64

A process's turn waits until the cores are idle and a copy runs at `QUIET_COPY` of the fastest seen; what it found is in the
record. Medians of the rounds; ratios within a round, since the machine's speed drifts. The record is written after every turn.
`--text` adds each engine's perplexity: windows of 512 tokens of the text, tokenized once, every token but a window's first
scored by the engine's own log-probabilities, not on the pinned cores and before the timed turns.

Slipstream runs the file as it is, rounded to int8, and that with keys and values of 8 bits, which is OpenVINO's default.
`--rewrite` writes the file's matrices in another of GGUF's types, for all engines alike. `--zeros` adds a copy of that file in
which this share of each row's weights, those nearest to zero, is zero (the embedding keeps its own): a pattern to time, not a
model to use.

In the records of November 22 and before, do not compare llama.cpp's figures for 16 and 64 requests: the adapter then gave
sequences decreasing ids, and llama.cpp joins only increasing ones. Their memory is of a cache for 64 sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.bench.workload import BenchRequest

OURS: dict[str, dict[str, str]] = {
    "slipstream": {},
    "slipstream int8": {"quantization": "int8"},
    "slipstream, cache int8": {"kv_cache_dtype": "int8"},
    "slipstream int8, cache int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
GROUPS = {"one": (1, 1024), "16": (16, 272), "64": (64, 272)}
"""Sequences, and tokens of each, that the engine makes room for."""
WINDOW = 512
QUIET_BUSY, QUIET_COPY = 0.05, 0.85
LATE = 45.0
"""Seconds that a turn may last beyond `--seconds`."""


@dataclass(frozen=True)
class Contender:
    name: str
    engine: str
    python: str
    path: Path
    settings: dict[str, str]


def requests(count: int, n_in: int, n_out: int, seed: int = 0) -> list[BenchRequest]:
    rng = random.Random(count + n_in + seed)
    return [
        BenchRequest(
            prompt_token_ids=tuple(rng.randrange(100, 49_000) for _ in range(n_in)),
            output_tokens=n_out,
        )
        for _ in range(count)
    ]


def make(
    engine: str, path: Path, threads: int, room: tuple[int, int], settings: dict[str, str]
) -> Any:
    from slipstream.bench.adapters import EngineSetup, make_engine

    num_seqs, length = room
    given: dict[str, Any] = {
        "num_threads": threads,
        **({"device": "cpu"} if engine == "slipstream" else {}),
        **settings,
    }
    return make_engine(
        EngineSetup(
            engine=engine,
            model=path.stem,
            path=path,
            batch_size=num_seqs,
            max_model_len=length,
            settings=given,
        )
    )


def rewritten(path: Path, kind: str, folder: Path, zeros: float = 0.0) -> Path:
    """The GGUF file with its matrices in the type `kind`. Of each row of every matrix but the embedding, the share `zeros` of
    weights that are nearest to zero becomes zero."""
    import gguf
    import numpy as np

    reader, wanted = gguf.GGUFReader(path), gguf.GGMLQuantizationType[kind]
    made = (
        folder
        / f"{path.stem.split('.')[0]}.{kind}{f'.{zeros:.0%}'.replace('%', '') if zeros else ''}.gguf"
    )
    writer = gguf.GGUFWriter(made, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if zeros and values.ndim > 1 and tensor.name != "token_embd.weight":
            lowest = np.argpartition(np.abs(values), num := int(zeros * values.shape[1]), axis=1)[
                :, :num
            ]
            np.put_along_axis(values, lowest, 0.0, axis=1)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def peak_mib() -> float:
    """The most memory that this process held. Not `getrusage`, whose number begins with what its parent held."""
    peak = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(peak.split()[1]) / 1024


def figures(engine: Any, group: str) -> dict[str, float]:
    """Figures of a group, measured on an engine that has run before."""
    engine.run(requests(2, 64, 16))
    if group == "one":
        (record,) = engine.run(requests(1, 128, 256))
        stream = 255 / (record.last_token - record.first_token)
        prompts = [engine.run(requests(1, 512, 1, seed))[0] for seed in range(3)]
        prefill = statistics.median(512 / (r.first_token - r.sent) for r in prompts)
        return {"stream": stream, "prefill": prefill, "peak_mib": peak_mib()}
    count = int(group)
    records = engine.run(requests(count, 128, 128))
    seconds = max(r.last_token for r in records) - min(r.sent for r in records)
    return {group: count * 128 / seconds, "peak_mib": peak_mib()}


def child(words: Sequence[str]) -> None:
    """One turn in this process: `engine path settings group cores`, or of the group `perplexity` windows for a file of them."""
    engine_name, path, settings, group, cores, windows = words
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    from slipstream.costs.hardware import available_cores

    threads = available_cores() if cores else 2
    begin = time.monotonic()
    engine = make(
        engine_name, Path(path), threads, GROUPS.get(group, (1, 1024)), json.loads(settings)
    )
    load_s = time.monotonic() - begin
    if group == "perplexity":
        logprobs = [
            engine.token_logprobs(window) for window in json.loads(Path(windows).read_text())
        ]
        found = {"perplexity": math.exp(-sum(map(sum, logprobs)) / sum(map(len, logprobs)))}
    else:
        found = figures(engine, group)
    build = engine.describe().get("system", "")
    print(json.dumps({"figures": found, "build": build, "load_s": load_s, "threads": threads}))


def turn(
    contender: Contender, group: str, cores: Sequence[int], windows: str = "", timeout: float = 180
) -> dict[str, Any]:
    """Output of a child, or `failed` with the reason."""
    import common

    words = [
        contender.engine,
        contender.path,
        json.dumps(contender.settings),
        group,
        ",".join(map(str, cores)),
        windows,
    ]
    command = [contender.python, __file__, "--child", *map(str, words)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=common.with_source(),
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {timeout:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr[-600:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Quiet:
    """Waits until nothing else keeps the cores or the memory busy, as far as that can be seen from here."""

    def __init__(self, cores: Sequence[int], most_s: float) -> None:
        import numpy as np

        self._names = {f"cpu{core}" for core in cores}
        self._most_s, self._best = most_s, 0.0
        self._from, self._to = np.ones(2**23), np.zeros(2**23)  # 64 MiB each

    def wait(self) -> dict[str, Any]:
        """Waits for a quiet machine. Returns the last look: the busy share of the cores, stolen
        time included, and a copy's GB/s, read and written."""
        begin = time.monotonic()
        while True:
            busy, copied = self._busy(), self._copy()
            self._best = max(self._best, copied)
            quiet = busy < QUIET_BUSY and copied > QUIET_COPY * self._best
            waited = time.monotonic() - begin
            if quiet or waited > self._most_s:
                return {
                    "quiet": quiet,
                    "busy": round(busy, 3),
                    "copy_gb_s": round(copied, 1),
                    "waited_s": round(waited, 1),
                }
            time.sleep(0.5)

    def _busy(self) -> float:
        before = self._ticks()
        time.sleep(0.3)
        idle, total = (now - then for now, then in zip(self._ticks(), before, strict=True))
        return 1 - idle / total if total else 0.0

    def _ticks(self) -> tuple[int, int]:
        """Idle ones, and all, of the cores together."""
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        rows = [[int(n) for n in line[1:9]] for line in lines if line[0] in self._names]
        return sum(row[3] + row[4] for row in rows), sum(map(sum, rows))

    def _copy(self) -> float:
        import numpy as np

        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            np.copyto(self._to, self._from)
            seconds.append(time.perf_counter() - begin)
        return 2 * self._to.nbytes / min(seconds) / 1e9


def windows_of(text: Path, model: Path, most: int) -> list[list[int]]:
    from slipstream.engine.text.tokenizer import Tokenizer
    from slipstream.spec.description import read_spec

    ids = Tokenizer.for_model(read_spec(model), None).encode(text.read_text(encoding="utf-8"))[
        :most
    ]
    return [list(ids[i : i + WINDOW]) for i in range(0, len(ids), WINDOW)]


def main(arguments: Sequence[str] | None = None) -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    import common

    from slipstream.hub import resolve_model

    parser = common.parser(__doc__, "peers_cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--peer", nargs=4, action="append", default=[], metavar=("NAME", "ENGINE", "PYTHON", "FILE")
    )
    parser.add_argument("--ours", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[3], help="of all groups, or of each (default: 3)"
    )
    parser.add_argument("--rewrite", metavar="TYPE", choices=["Q8_0", "BF16", "F16", "F32", "Q4_0"])
    parser.add_argument(
        "--zeros",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="with --rewrite: also with so many zeros",
    )
    parser.add_argument("--text", type=Path, help="the perplexity of this text")
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="RECORD",
        help="instead of --text: perplexities of another run's record",
    )
    parser.add_argument("--text-tokens", type=int, default=4096, help="of the text (default: 4096)")
    parser.add_argument(
        "--cores", type=int, nargs="+", help="run the turns on these (default: all)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=20,
        help="seconds that a turn waits for quiet at most (default: 20)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no turn after so many, and end 45 s later",
    )
    args = parser.parse_args(arguments)
    if args.zeros and not args.rewrite:
        parser.error("--zeros needs --rewrite BF16, say: zeros are not kept by every type")
    path, ours = resolve_model(args.model), [(name, OURS[name]) for name in args.ours]
    with tempfile.TemporaryDirectory() as folder:
        source, path = path, rewritten(path, args.rewrite, Path(folder)) if args.rewrite else path
        contenders = [
            Contender(name, "slipstream", sys.executable, path, settings) for name, settings in ours
        ]
        if args.zeros:
            sparse = rewritten(source, args.rewrite, Path(folder), args.zeros)
            contenders += [
                replace(c, name=f"{c.name}, {args.zeros:.0%} zeros", path=sparse)
                for c in contenders
            ]
        for name, engine, python, file in args.peer:
            contenders.append(
                Contender(name, engine, python, path if file == "-" else Path(file), {})
            )
        compare(args, contenders, path)


def compare(args: argparse.Namespace, contenders: Sequence[Contender], path: Path) -> None:
    begin, cores = time.monotonic(), args.cores or sorted(os.sched_getaffinity(0))
    quiet = Quiet(cores, args.wait)
    of_text = (
        perplexities(args, contenders, path)
        if args.text
        else recorded(args.scores, contenders)
        if args.scores
        else {}
    )
    turns: list[dict[str, Any]] = []
    failed: dict[str, str] = {
        name: found["failed"] for name, found in of_text.items() if "failed" in found
    }
    for i, group in enumerate(args.groups):
        for number in range(args.rounds[min(i, len(args.rounds) - 1)]):
            for contender in contenders:
                name = contender.name
                if f"{name}, {group}" in failed or time.monotonic() - begin > args.seconds:
                    continue
                state = quiet.wait()
                left = args.seconds - (time.monotonic() - begin)
                found = turn(contender, group, cores, timeout=min(180.0, left + LATE))
                if "failed" in found:
                    failed[f"{name}, {group}"] = found["failed"]
                    print(f"{name}, {group}: {found['failed']}", flush=True)
                    continue
                turns.append({"group": group, "round": number, "name": name, **found, **state})
                print(
                    f"{group} {name}",
                    {k: round(v, 1) for k, v in found["figures"].items()},
                    state,
                    flush=True,
                )
                save(args.output, contenders, path, cores, of_text, turns, failed)
    save(args.output, contenders, path, cores, of_text, turns, failed)
    show(summary(contenders, turns), of_text)
    print(
        f"written: {args.output}; {sum(not t['quiet'] for t in turns)} of {len(turns)} turns not quiet"
    )


def perplexities(
    args: argparse.Namespace, contenders: Sequence[Contender], path: Path
) -> dict[str, dict[str, Any]]:
    """Perplexities by contender, computed several at a time with two threads each."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(windows_of(args.text, path, args.text_tokens), file)
        file.flush()
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            found = pool.map(lambda c: turn(c, "perplexity", (), file.name), contenders)
            return dict(zip([c.name for c in contenders], found, strict=True))


def recorded(record: Path, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    """The perplexities in a record, of those that ran the same file by the same name."""
    found = json.loads(record.read_text())
    same = [
        c.name
        for c in contenders
        if found["ran"].get(c.name) == c.path.name and found["perplexity"].get(c.name)
    ]
    return {name: {"figures": {"perplexity": found["perplexity"][name]}} for name in same}


def summary(
    contenders: Sequence[Contender], turns: Sequence[dict[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """`medians` of each contender's figures, and `ratios` of ours to peers, medians of those within a round."""
    by_round: dict[tuple[str, str], dict[int, float]] = {}
    for t in turns:
        for figure, value in t["figures"].items():
            column = f"{figure} {t['group']}" if figure == "peak_mib" else figure
            by_round.setdefault((t["name"], column), {})[t["round"]] = value
    medians: dict[str, dict[str, float]] = {}
    for (name, column), values in by_round.items():
        medians.setdefault(name, {})[column] = statistics.median(values.values())
    ratios: dict[str, dict[str, float]] = {}
    kinds = {c.name: c.engine for c in contenders}
    sparse = {c.name for c in contenders if c.name.endswith(" zeros")}
    for one in medians:
        for other in medians:
            if kinds[one] == "slipstream" and (
                kinds[other] != "slipstream" or (one in sparse and other not in sparse)
            ):
                for column in (c for c in medians[one] if c in medians[other]):
                    mine, its = by_round[one, column], by_round[other, column]
                    if both := [mine[r] / its[r] for r in mine.keys() & its.keys()]:
                        ratios.setdefault(f"{one} / {other}", {})[column] = statistics.median(both)
    return {"medians": medians, "ratios": ratios}


def save(
    output: Path,
    contenders: Sequence[Contender],
    path: Path,
    cores: Sequence[int],
    of_text: dict[str, dict[str, Any]],
    turns: Sequence[dict[str, Any]],
    failed: dict[str, str],
) -> None:
    import common

    found = summary(contenders, turns)
    info = {"file": path.name, "cores": cores, "ran": {c.name: c.path.name for c in contenders}}
    builds = {t["name"]: t["build"] for t in turns if t["build"]}
    text = {name: of.get("figures", {}).get("perplexity") for name, of in of_text.items()}
    with contextlib.redirect_stdout(None):  # it tells that it wrote, which is after every turn
        common.save(
            output,
            "peers_cpu",
            **info,
            builds=builds,
            perplexity=text,
            **found,
            failed=failed,
            turns=turns,
        )


def show(found: dict[str, dict[str, dict[str, float]]], of_text: dict[str, dict[str, Any]]) -> None:
    from slipstream.bench.report import print_table

    for title, table in found.items():
        columns = list(dict.fromkeys(column for row in table.values() for column in row))
        rows = []
        for name, row in table.items():
            cells = [f"{row[c]:,.2f}" if c in row else "–" for c in columns]
            score = of_text.get(name, {}).get("figures", {}).get("perplexity")
            rows.append(
                [name, *cells, *([f"{score:.2f}" if score else "–"] if title == "medians" else [])]
            )
        print_table(title, ["", *columns, *(["perplexity"] if title == "medians" else [])], rows)


if __name__ == "__main__":
    main()
