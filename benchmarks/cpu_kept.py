"""A start on a CPU that rounds the weights, and the next, which reads what the first kept (`weights_cache`).

    python benchmarks/cpu_kept.py [--config benchmarks/configs/phi-2] [--schemes int8 int4] [--rounds 3]

The checkpoint is written with random bfloat16 weights, and lies in the page cache; so does the file of kept weights at the next
start. Each load in a process of its own: seconds (wall, processor time) from the files to a model that runs, and the most
memory that the process ever held. `off`: neither kept nor read; `first`: rounded, and the file written; `next`: read. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.plan.hardware import available_cores

CONFIG = Path(__file__).parent / "configs" / "phi-2"


def write_checkpoint(config: Path, path: Path) -> None:
    import torch

    from slipstream.model.save import stored_tensors, write_tensors
    from slipstream.model.weights import dummy_parameters
    from slipstream.spec.description import read_spec

    path.mkdir()
    (path / "config.json").write_bytes((config / "config.json").read_bytes())
    description = read_spec(path)
    values = dummy_parameters(description, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    write_tensors(path, stored_tensors(description.family, description.spec, values))


def child(path: Path, scheme: str, folder: Path | None) -> None:
    import torch

    from slipstream.kernels.select import select_ops
    from slipstream.model.loader import load_model
    from slipstream.spec.scheme import SCHEMES

    threads, device = available_cores(), torch.device("cpu")
    torch.set_num_threads(threads)
    ops = select_ops(device, "cpu", num_threads=threads)
    wall, processor = time.perf_counter(), time.process_time()
    load_model(path, ops=ops, device=device, dtype=torch.bfloat16, scheme=SCHEMES[scheme], weights_folder=folder)
    found = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
    # Not `getrusage`, whose number begins with what the process that started this one held.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(json.dumps(found | {"peak_mib": int(peak.split()[1]) / 1024}))


def main(arguments: Sequence[str] | None = None) -> None:
    if "--child" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", nargs="+")
        path, scheme, *folder = parser.parse_args(arguments).child
        child(Path(path), scheme, Path(folder[0]) if folder else None)
        return
    import common

    from slipstream.bench.report import print_table

    parser = common.parser(__doc__, "cpu_kept")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--schemes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        path, kept = Path(place, "model"), Path(place, "kept")
        write_checkpoint(args.config, path)

        def load(scheme: str, *folder: Path) -> dict[str, float]:
            command = [sys.executable, __file__, "--child", str(path), scheme, *map(str, folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=common.with_source())
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return found

        for scheme in args.schemes:
            runs: dict[str, list[dict[str, float]]] = {"off": [], "first": [], "next": []}
            for _ in range(args.rounds):
                for file in kept.glob("*"):
                    file.unlink()
                runs["off"].append(load(scheme))
                runs["first"].append(load(scheme, kept))
                runs["next"].append(load(scheme, kept))
                print(scheme, {name: round(found[-1]["wall_s"], 2) for name, found in runs.items()}, flush=True)
            (file,) = kept.glob("*")
            results[scheme] = {
                name: {key: statistics.median(r[key] for r in found) for key in found[0]} for name, found in runs.items()
            }
            results[scheme]["file"] = {"mib": file.stat().st_size / 2**20}
    rows = [
        (f"{scheme}, {name}", f"{r['wall_s']:.2f}", f"{r['processor_s']:.2f}", f"{r['peak_mib']:,.0f}")
        for scheme, found in results.items()
        for name, r in found.items()
        if name != "file"
    ]
    print_table("weights, from the files to a model that runs", ("", "seconds", "processor seconds", "peak MiB"), rows)
    common.save(args.output, "cpu_kept", config=args.config.name, threads=available_cores(), results=results)


if __name__ == "__main__":
    main()
