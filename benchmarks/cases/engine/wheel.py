"""Steps from a wheel to an answer in a bare environment: wall and processor time of each step of
`quickstart --wheel`.

    python benchmarks/engine.py --study wheel --wheel slipstream-0.2.0-….whl

Each step is a process with a PATH of a shell's tools and a Python, without compiler, and with an empty home folder: nothing
is in pip's cache, no model is there, nothing was measured. What pip reads from its own settings of the machine stays.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = "quickstart_wheel"

TOOLS = ("sh", "env", "cat", "uname", "ldd", "rm", "cp", "mv", "ln", "mkdir", "sed", "grep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheel", type=Path, required=True)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tools, home, venv = folder / "tools", folder / "home", folder / "venv"
        tools.mkdir()
        home.mkdir()
        for name in TOOLS:
            if found := shutil.which(name):
                (tools / name).symlink_to(found)
        (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        env = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        env |= {"PATH": str(tools), "HOME": str(home)}
        command = str(venv / "bin" / "slipstream")
        answer = [command, "run", "smollm2", "Name the capital of France.", "--temperature", "0"]
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-compile"]
        steps = {
            "environment": [str(tools / "python3"), "-m", "venv", str(venv)],
            "install": [*pip, str(args.wheel.resolve())],
            "model": [command, "pull", "smollm2"],
            "first answer": answer,
            "next answer": answer,
        }
        found = dict[str, Any]()
        load = os.getloadavg()[0]
        for name, words in steps.items():
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run(words, check=True, env=env, cwd=home, stdin=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[name] = {"wall_s": time.monotonic() - begin, "processor_s": processor}
            print(name, found[name], flush=True)
        first = [found[name] for name in list(steps)[:4]]
        total = {k: sum(step[k] for step in first) for k in ("wall_s", "processor_s")}
        save(
            wheel=args.wheel.name,
            load_average=load,
            nice=os.nice(0),  # -20: about as on a quiet machine
            steps=found,
            to_the_first_answer=total,
        )
