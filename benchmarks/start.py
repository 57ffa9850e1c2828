"""A start on a CPU: from a process's start to its first token beside other engines, and what kept weights save.

    python benchmarks/start.py [--llamacpp PYTHON] [--openvino PYTHON] [--rounds 5]              # record start.json
    python benchmarks/start.py --measure kept [--config benchmarks/configs/phi-2] [--schemes int8 int4]   # start_kept.json

Engines: each in a process of its own, taking turns; the model's file is in the page cache. Slipstream's is `slipstream run`.
The clock runs from the process's start to the first of 32 tokens, imports included, and beside it the processor time of all
threads until then, which a busy neighbour changes less. The memory is the most that the process ever held until then. `--also
NAME=FOLDER` measures another source tree of Slipstream in the same rounds. Medians. Each engine starts once before the rounds:
modules are compiled by then, as pip leaves them.

Kept: a start that rounds the weights keeps them, and the next one reads them (`weights_cache`). The checkpoint has random
bfloat16 weights and lies in the page cache, as does the file of kept weights. Each load runs in a process of its own: seconds
of wall and processor time from the files to a model that runs, and the most memory. `off`: neither kept nor read; `first`:
rounded, and the file written; `next`: read. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.costs.hardware import available_cores, seconds_since_process_start

PROMPT, ANSWER = 16, 32
TEXT = "Once upon a time, in a small town at the edge of a forest, there lived"  # some 16 tokens
CONFIG = Path(__file__).parent / "configs" / "phi-2"


def peer(name: str, path: Path, threads: int) -> None:
    """A peer's start, in this process."""
    from peers_cpu import make, requests

    engine = make(name, path, threads, (1, 1024), {})
    age = seconds_since_process_start() or 0.0
    begin = time.perf_counter()
    processor = time.process_time()
    (record,) = engine.run(requests(1, PROMPT, ANSWER))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "first_token_s": age + record.first_token - begin,
                "processor_s": processor,
                "peak_mib": peak,
            }
        )
    )


def slipstream(path: Path, threads: int, env: Mapping[str, str]) -> dict[str, float]:
    """`slipstream run`, as a user starts it: until the first character of its answer."""
    sizes = [
        "--max-tokens",
        str(ANSWER),
        "--max-model-len",
        "1024",
        "--num-threads",
        str(threads),
        "--device",
        "cpu",
    ]
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "run",
        str(path),
        TEXT,
        "--raw",
        "--temperature",
        "0",
        *sizes,
    ]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        found = {"first_token_s": time.perf_counter() - begin}
        if first:
            own = Path("/proc", str(process.pid))
            ticks = (own / "stat").read_text().rpartition(")")[2].split()[11:13]
            found["processor_s"] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            found["has_torch"] = float("libtorch" in (own / "maps").read_text())
            (peak,) = (
                line
                for line in (own / "status").read_text().splitlines()
                if line.startswith("VmHWM:")
            )
            found["peak_mib"] = int(peak.split()[1]) / 1024
        process.stdout.read()
        errors = process.stderr.read().decode()
        if process.wait() or not first:
            raise SystemExit(f"slipstream: {errors[-2000:]}")
    return found


def write_checkpoint(config: Path, path: Path) -> None:
    import torch

    from slipstream.model.load.weights import dummy_parameters
    from slipstream.model.save import stored_tensors, write_tensors
    from slipstream.spec.description import read_spec

    path.mkdir()
    (path / "config.json").write_bytes((config / "config.json").read_bytes())
    description = read_spec(path)
    values = dummy_parameters(description, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    write_tensors(path, stored_tensors(description.family, description.spec, values))


def load_child(path: Path, scheme: str, folder: Path | None) -> None:
    import torch

    from slipstream.kernels.select import select_ops
    from slipstream.model.load.loader import load_model
    from slipstream.spec.scheme import SCHEMES

    threads, device = available_cores(), torch.device("cpu")
    torch.set_num_threads(threads)
    ops = select_ops(device, "cpu", num_threads=threads)
    wall, processor = time.perf_counter(), time.process_time()
    load_model(
        path,
        ops=ops,
        device=device,
        dtype=torch.bfloat16,
        scheme=SCHEMES[scheme],
        weights_folder=folder,
    )
    found = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
    # Not `getrusage`, whose number begins with what the process that started this one held.
    peak = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    print(json.dumps(found | {"peak_mib": int(peak.split()[1]) / 1024}))


def engines(args: argparse.Namespace) -> None:
    import common

    from slipstream.bench.report import print_table
    from slipstream.hub import resolve_model

    path, threads = resolve_model(args.model), available_cores()
    path.read_bytes()
    trees = {"slipstream": None} | {
        name: tree for name, _, tree in (text.partition("=") for text in args.also)
    }
    peers = {n: p for n, p in (("llamacpp", args.llamacpp), ("openvino", args.openvino)) if p}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(args.rounds + 1):
            found = {
                name: slipstream(path, threads, environment(tree, compiled))
                for name, tree in trees.items()
            }
            for name, python in peers.items():
                command = [
                    python,
                    __file__,
                    "--child",
                    name,
                    "--model",
                    str(path),
                    "--threads",
                    str(threads),
                ]
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=False,
                    env=environment(None, compiled),
                )
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stderr[-2000:]}")
                found[name] = json.loads(done.stdout.splitlines()[-1])
            rounds.append(found | {"machine": {"load": os.getloadavg()[0]}})
    del rounds[0]
    pythons = [*trees, *peers, "machine"]
    medians = {
        n: {k: statistics.median(r[n][k] for r in rounds) for k in rounds[0][n]} for n in pythons
    }
    columns = sorted({k for m in medians.values() for k in m})
    rows = [[n, *(f"{m[c]:.2f}" if c in m else "–" for c in columns)] for n, m in medians.items()]
    print_table("medians", ["", *columns], rows)
    common.save(
        args.output or common.RESULTS / "start.json",
        "start",
        medians=medians,
        rounds=rounds,
        threads=threads,
    )


def environment(tree: str | None, compiled: str) -> dict[str, str]:
    """Environment with the source of this tree or another, and a folder for modules that are
    compiled once."""
    import common

    found = common.with_source()
    if tree is not None:
        found["PYTHONPATH"] = os.pathsep.join([str(Path(tree) / "src"), found["PYTHONPATH"]])
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found | {"PYTHONPYCACHEPREFIX": compiled}


def kept(args: argparse.Namespace) -> None:
    import common

    from slipstream.bench.report import print_table

    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        path, held = Path(place, "model"), Path(place, "kept")
        write_checkpoint(args.config, path)

        def load(scheme: str, *folder: Path) -> dict[str, float]:
            command = [sys.executable, __file__, "--load", str(path), scheme, *map(str, folder)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=common.with_source()
            )
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return found

        for scheme in args.schemes:
            runs: dict[str, list[dict[str, float]]] = {"off": [], "first": [], "next": []}
            for _ in range(args.rounds):
                for file in held.glob("*"):
                    file.unlink()
                runs["off"].append(load(scheme))
                runs["first"].append(load(scheme, held))
                runs["next"].append(load(scheme, held))
                print(
                    scheme,
                    {name: round(found[-1]["wall_s"], 2) for name, found in runs.items()},
                    flush=True,
                )
            (file,) = list(held.glob("*")) or [None]
            if file is None:
                raise SystemExit(f"{args.config}: so small a model's weights are not kept")
            results[scheme] = {
                name: {key: statistics.median(r[key] for r in found) for key in found[0]}
                for name, found in runs.items()
            }
            results[scheme]["file"] = {"mib": file.stat().st_size / 2**20}
    rows = [
        (
            f"{scheme}, {name}",
            f"{r['wall_s']:.2f}",
            f"{r['processor_s']:.2f}",
            f"{r['peak_mib']:,.0f}",
        )
        for scheme, found in results.items()
        for name, r in found.items()
        if name != "file"
    ]
    print_table(
        "weights, from the files to a model that runs",
        ("", "seconds", "processor seconds", "peak MiB"),
        rows,
    )
    output = args.output or common.RESULTS / "start_kept.json"
    common.save(
        output, "start_kept", config=args.config.name, threads=available_cores(), results=results
    )


def main(arguments: Sequence[str] | None = None) -> None:
    if "--child" in sys.argv or "--load" in sys.argv:
        parser = argparse.ArgumentParser()
        for option, kind in (("--child", str), ("--model", Path), ("--threads", int)):
            parser.add_argument(option, type=kind)
        parser.add_argument("--load", nargs="+")
        args = parser.parse_args(arguments)
        if args.load:
            path, scheme, *folder = args.load
            load_child(Path(path), scheme, Path(folder[0]) if folder else None)
        else:
            peer(args.child, args.model, args.threads)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", choices=("engines", "kept"), default="engines")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, help="(default: 5; of kept 3)")
    parser.add_argument("--model", default="smollm2", help="engines: (default: smollm2)")
    parser.add_argument(
        "--llamacpp", metavar="PYTHON", help="engines: its environment's interpreter"
    )
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="engines: its environment's interpreter"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME=FOLDER", help="engines: other source trees"
    )
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="kept: (default: benchmarks/configs/phi-2)"
    )
    parser.add_argument(
        "--schemes", nargs="+", default=["int8", "int4"], help="kept: (default: int8 int4)"
    )
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or {"engines": 5, "kept": 3}[args.measure]
    (engines if args.measure == "engines" else kept)(args)


if __name__ == "__main__":
    main()
