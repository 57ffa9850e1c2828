"""Broken model files, made from a good one with a seed: `python -m tests.fuzz_files 2000` runs so many of each kind.

Each is read as `slipstream info` reads it, and its tokenizer and template are tried. Right is success or one of our errors.
With `--command` each runs as the real command with 8 GiB of memory and 20 s (slower: a process each).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import SlipstreamError

NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**64, 10**30, -(2**31), 0.0, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), 1.5,
]  # fmt: skip
OTHERS: list[Any] = [None, True, False, "", "x", "\ud800", "é" * 1000, "a" * 100_000, [], {}, [[]], [None], {"a": {}}, [1, "x"]]
TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}", "{{ messages.__class__ }}", "{% for %}", "{{", "{{ 1 / 0 }}",
    "{{ raise_exception(messages) }}", "{% include 'x' %}",
]  # fmt: skip


def any_value(rng: random.Random) -> Any:
    return rng.choice(NUMBERS if rng.random() < 0.6 else OTHERS)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One thing of it changed, removed or added, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        what = rng.random()
        if what < 0.1:
            del changed[key]
        elif what < 0.15:
            new = rng.choice(["quantization_config", "rope_scaling", "layer_types", "sliding_window", "text_config", "x"])
            changed[new] = any_value(rng)
        else:
            changed[key] = mutate_json(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    return any_value(rng)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", rng.choice([2**63, 2**32, 2**31, 2**20, 0, 2**64 - 1]))
            case 2:
                changed[at : at + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e38]))
            case 3:
                del changed[at : at + rng.choice([1, 4, 8, 1000])]
            case 4:
                changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 4, 8])))
            case 5:
                del changed[at:]
        if not changed:
            changed = bytearray(b"G")
    return bytes(changed)


def broken_folder(good: Path, into: Path, rng: random.Random) -> Path:
    shutil.copytree(good, into)
    names = ["config.json"] * 4 + ["tokenizer.json"] * 2
    names += ["tokenizer_config.json", "generation_config.json", "model.safetensors"]
    file = into / rng.choice(names)
    what = rng.random()
    if not file.is_file():
        value = mutate_json({"eos_token_id": 1, "temperature": 0.5, "do_sample": True}, rng)
        file.write_text(json.dumps(value), "utf-8", "replace")
    elif file.suffix == ".json" and what < 0.8:
        value = json.loads(file.read_text())
        for _ in range(rng.choice([1, 1, 1, 3])):
            value = mutate_json(value, rng)
        if file.name == "tokenizer_config.json" and isinstance(value, dict) and rng.random() < 0.5:
            value["chat_template"] = rng.choice(TEMPLATES)
        file.write_text(json.dumps(value), "utf-8", "replace")
    elif what < 0.85:
        file.write_bytes(b'{"a":' * 100_000)
    elif what < 0.9:
        named = rng.choice(["../x", "/etc/passwd", 5, "y"])
        (into / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": named}}))
    else:
        data = file.read_bytes()
        head = mutate_bytes(data[:4000], rng)
        file.write_bytes(head + data[4000:])
    return into


def broken_gguf(good: Path, into: Path, rng: random.Random) -> Path:
    data = good.read_bytes()
    head = data.find(b"tokenizer.ggml.tokens")
    cut = min(len(data), rng.choice([200, 2000, max(200, head), len(data)]))
    into.write_bytes(mutate_bytes(data[:cut], rng) + data[cut:])
    return into


def ask(path: Path) -> str:
    """What comes of it: "ok", an error of ours, or else what went wrong."""
    from slipstream.cli.main import build_parser
    from slipstream.spec.description import read_spec

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = build_parser().parse_args(["info", str(path)])
            args.handler(args)
        tokenizer = Tokenizer.for_model(read_spec(path))
        ids = tokenizer.encode("Hello, world! 1234 <|im_end|> </s>")
        tokenizer.decode(ids)
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except SlipstreamError as error:
        if len(str(error)) > 4000:
            return "a long error"
        return type(error).__name__
    return "ok"


def command(path: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "slipstream", "info", str(path)], capture_output=True, text=True, timeout=20, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30)),
    )  # fmt: skip
    if found.returncode not in (0, 2, 3) or "internal error" in found.stderr or "Traceback" in found.stderr:
        raise AssertionError(f"exit code {found.returncode}: {found.stderr[-500:]}")
    return f"exit {found.returncode}"


def run(kind: str, good: Path, seeds: range, tried: Any = ask) -> tuple[collections.Counter[str], list[str]]:
    """The outcomes by name, and what should not have happened."""
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    make = broken_folder if kind == "folder" else broken_gguf
    for seed in seeds:
        with tempfile.TemporaryDirectory() as scratch:
            path = make(good, Path(scratch) / ("model" if kind == "folder" else "model.gguf"), random.Random(f"{kind} {seed}"))
            begin = time.monotonic()
            try:
                outcomes[tried(path)] += 1
            except (Exception, AssertionError) as error:
                wrong.append(f"{kind} {seed}: {type(error).__name__}: {str(error)[:300]}")
                outcomes["wrong"] += 1
            if (seconds := time.monotonic() - begin) > 15:
                wrong.append(f"{kind} {seed}: {seconds:.1f} s")
    return outcomes, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--command", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for kind, good in good_files(Path(scratch)).items():
            found, wrong = run(kind, good, range(args.begin, args.begin + args.count), command if args.command else ask)
            print(kind, dict(found))
            print("\n".join(wrong))
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most")


def good_files(scratch: Path) -> dict[str, Path]:
    """A folder and a GGUF file of tiny models."""
    from tests import tiny_models
    from tests.engine.test_tokenizer import GOLDEN
    from tests.model.test_gguf_models import LEAST, write

    folder = scratch / "good"
    tiny_models.build_with_tokenizer(folder)
    tokenizer = {f"tokenizer.ggml.{key}": value for key, value in GOLDEN["byte_level"].items() if "." not in key}
    metadata = {f"llama.{key}": value for key, value in LEAST.items()} | {"llama.rope.freq_base": 1e4, "a.text": "b"}
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    tensors = {"token_embd.weight": (np.zeros((len(tokenizer["tokenizer.ggml.tokens"]), 32)), "F32")}
    tensors |= {f"blk.{i}.attn_norm.weight": (np.zeros(32), "F32") for i in range(2)}
    tensors["rope_freqs.weight"] = np.ones(4), "F32"
    write(scratch / "good.gguf", tensors, **metadata, **tokenizer, **template)
    return {"folder": folder, "gguf": scratch / "good.gguf"}


if __name__ == "__main__":
    main()
