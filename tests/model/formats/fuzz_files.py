"""Broken model files, made from good ones with a seed, through the real commands `slipstream info` and `slipstream run`.

    python -m tests.model.formats.fuzz_files --cases 2000 --kind gguf
    python -m tests.model.formats.fuzz_files --cases 2000 --kind folder --output counts.json

A folder's case breaks its weights, config, tokenizer or chat template. Each command has 8 GiB of memory and 20 s, in a fork
of this process, which has imported everything before. Right is success, or one of our errors by its exit code; wrong are a
signal, no end in time, "internal error", a traceback and an endless message. The exit code is 1 if anything was wrong.

`run_cases` with `ask` tries cases in the process itself, as `info` and a prompt's first steps: a quick check for the suite.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import SlipstreamError

MEMORY_BYTES, LIMIT_S = 8 * 2**30, 20.0
LONGEST = 8000
"""Characters of an error, its usage lines included."""

NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**64, 10**30, -(2**31), 0.0, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), 1.5,
]  # fmt: skip
OTHERS: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "\ud800",
    "é" * 1000,
    "a" * 100_000,
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    [1, "x"],
]
TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}", "{{ messages.__class__ }}", "{% for %}", "{{", "{{ 1 / 0 }}",
    "{{ raise_exception(messages) }}", "{% include 'x' %}", "{{ " + "[" * 2000 + "]" * 2000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500, "{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(messages) }}",
]  # fmt: skip
DEPTHS = (60, 130, 500, 5000, 100_000)
NESTS = [
    ("[", "]"), ('{"a":', "}"), ('[{"type":"Sequence","normalizers":', "}]"), ('{"type":"Sequence","pretokenizers":[', "]}"),
]  # fmt: skip
DEEP = "the deep part"


def nested(rng: random.Random) -> str:
    """JSON of lists and objects within each other, now and then without its end."""
    begin, end = rng.choice(NESTS)
    depth = rng.choice(DEPTHS)
    return begin * depth + ("1" + end * depth if rng.random() < 0.8 else "")


def deepened(value: Any, rng: random.Random) -> str:
    """The JSON of a value with one of its parts, or a new one, nested deeply."""
    spot = value
    while isinstance(spot, dict) and spot:
        key = rng.choice([*spot, "x"])
        if key not in spot or not isinstance(spot[key], dict) or rng.random() < 0.5:
            spot[key] = DEEP
            break
        spot = spot[key]
    text = json.dumps(value)
    return text.replace(json.dumps(DEEP), nested(rng)) if json.dumps(DEEP) in text else nested(rng)


def deep_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is nested deeply, with its length or one that is not true."""
    size = int.from_bytes(data[:8], "little")
    header = deepened(json.loads(data[8 : 8 + size]), rng).encode()
    said = rng.choice([len(header), len(header), len(header) // 2, 2**40, 2**63])
    return said.to_bytes(8, "little") + header + data[8 + size :]


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
            new = rng.choice(
                [
                    "quantization_config",
                    "rope_scaling",
                    "layer_types",
                    "sliding_window",
                    "text_config",
                    "x",
                ]
            )
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
    for _ in range(rng.choice([1, 1, 1, 2])):
        at = rng.randrange(len(changed))
        match rng.choice([0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5]):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at : at + 8] = struct.pack(
                    "<Q", rng.choice([2**63, 2**32, 2**31, 2**20, 0, 2**64 - 1])
                )
            case 2:
                changed[at : at + 4] = struct.pack(
                    "<f", rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e38])
                )
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
    names = ["config.json"] * 4 + ["tokenizer.json"] * 3 + ["model.safetensors"] * 3
    names += ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"] * 2
    file = into / rng.choice(names)
    what = rng.random()
    if rng.random() < 0.15 and file.suffix != ".jinja":
        if file.suffix == ".safetensors":
            file.write_bytes(deep_header(file.read_bytes(), rng))
        else:
            value = json.loads(file.read_text()) if file.is_file() else {"eos_token_id": 1}
            file.write_text(deepened(value, rng))
    elif file.suffix == ".jinja":
        template = json.loads((into / "tokenizer_config.json").read_text())[
            "chat_template"
        ].encode()
        file.write_bytes(
            rng.choice(TEMPLATES).encode() if what < 0.3 else mutate_bytes(template, rng)
        )
    elif not file.is_file():
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
        cut = rng.choice([64, 4000, len(data)])
        file.write_bytes(mutate_bytes(data[:cut], rng) + data[cut:])
    return into


def broken_gguf(good: Path, into: Path, rng: random.Random) -> Path:
    """A change anywhere in it, near its beginning, or behind the name of a key or a tensor; or a deep list in front."""
    data = good.read_bytes()
    if rng.random() < 0.1:
        into.write_bytes(with_deep_list(data, rng))
        return into
    at = [
        found.start()
        for found in re.finditer(rb"llama\.|general\.|tokenizer\.|blk\.|token_embd|output", data)
    ]
    begin, length = rng.choice(
        [(0, 200), (0, 2000), (0, len(data)), *((i, 80) for i in rng.sample(at, 3))]
    )
    end = min(len(data), begin + length)
    into.write_bytes(data[:begin] + mutate_bytes(data[begin:end], rng) + data[end:])
    return into


def with_deep_list(data: bytes, rng: random.Random) -> bytes:
    """One more key, whose value is a list of lists of lists; the innermost may say that it is very long."""
    depth, kind = rng.choice([3, 5, 100, 100_000]), 9
    count = int.from_bytes(data[16:24], "little")
    name = b"general.deep"
    value = struct.pack("<IQ", kind, 1) * depth
    value += struct.pack("<IQ", 4, rng.choice([0, 1, 2**31, 2**63])) + bytes(4)
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    return data[:16] + struct.pack("<Q", count + 1) + entry + data[24:]


@functools.cache
def parser() -> argparse.ArgumentParser:
    from slipstream.cli.main import build_parser

    return build_parser()


def ask(path: Path) -> str:
    """Outcome of a file: "ok", an error of ours, or a description of the fault."""
    from slipstream.spec.description import read_spec

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = parser().parse_args(["info", str(path)])
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
    """Exit codes of `info` and `run`. Raises AssertionError with the fault."""
    found = []
    for words in (
        ["info", str(path)],
        ["run", str(path), "Hello, world! 1234", "--max-tokens", "4"],
    ):
        code, said = forked(words, path.parent)
        if (
            code not in (0, 1, 2, 3)
            or "internal error" in said
            or "Traceback" in said
            or len(said) > LONGEST
        ):
            ended = "no end" if code is None else f"exit code {code}"
            raise AssertionError(f"{words[0]}: {ended}: {said[:200]} … {said[-600:]}")
        found.append(f"{words[0]} {code}")
    return ", ".join(found)


def forked(words: list[str], folder: Path) -> tuple[int | None, str]:
    """(exit code, what was said on standard error) of a command; a signal is negative, and None is no end in time."""
    from tests.support.preloaded import fork_command

    def limit() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    with tempfile.TemporaryFile() as said, open(os.devnull, "r+b") as nothing:
        fds = [os.dup(nothing.fileno()), os.dup(nothing.fileno()), os.dup(said.fileno())]
        child = fork_command("slipstream", words, str(folder), dict(os.environ), fds, limit)
        for fd in fds:
            os.close(fd)
        deadline, code, pause = time.monotonic() + LIMIT_S, None, 0.001
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what it may have left
        if code is None:
            os.waitpid(child, 0)
        said.seek(0)
        return code, said.read().decode(errors="replace")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder. Unlike tempfile's, it is not removed when a fork ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def run_cases(
    kind: str,
    good: Path,
    seeds: range,
    tried: Callable[[Path], str] = ask,
    done: Callable[[collections.Counter[str], list[str]], None] = lambda outcomes, wrong: None,
) -> tuple[collections.Counter[str], list[str]]:
    """The outcomes by name, and what should not have happened. `done` gets both after each case."""
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    make = broken_folder if kind == "folder" else broken_gguf
    for seed in seeds:
        with scratch_folder() as scratch:
            path = make(
                good,
                scratch / ("model" if kind == "folder" else "model.gguf"),
                random.Random(f"{kind} {seed}"),
            )
            begin = time.process_time()  # which a busy machine does not stretch
            try:
                outcomes[tried(path)] += 1
            except Exception as error:
                wrong.append(f"{kind} {seed}: {type(error).__name__}: {str(error)[:1000]}")
                outcomes["wrong"] += 1
            if tried is ask and (seconds := time.process_time() - begin) > 15:
                wrong.append(f"{kind} {seed}: {seconds:.1f} s")
        done(outcomes, wrong)
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=2000, metavar="N", help="of each kind (default: 2000)"
    )
    parser.add_argument(
        "--kind", choices=("gguf", "folder"), action="append", help="(default: both)"
    )
    parser.add_argument(
        "--begin", type=int, default=0, metavar="N", help="the first case's number (default: 0)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the counts as JSON")
    args = parser.parse_args()
    from tests.support import preloaded

    counts: dict[str, Any] = {}
    with scratch_folder() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        if not (child := os.fork()):  # building computes, and a fork of what has computed can hang
            good_files(scratch)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        preloaded.load()
        for kind in args.kind or ("folder", "gguf"):
            sound = command(scratch / GOOD[kind])  # also measures the machine, once
            assert sound == "info 0, run 0", sound
            begin = time.monotonic()

            def done(
                outcomes: collections.Counter[str],
                wrong: list[str],
                kind: str = kind,
                begin: float = begin,
            ) -> None:
                cases, seconds = outcomes.total(), round(time.monotonic() - begin)
                counts[kind] = {
                    "begin": args.begin,
                    "cases": cases,
                    "seconds": seconds,
                    "outcomes": dict(outcomes),
                    "wrong": list(wrong),
                }
                if cases % 50 == 0 or cases == args.cases:  # what is broken off is counted, too
                    print(
                        kind, cases, f"{seconds} s", dict(outcomes), *wrong, sep="\n  ", flush=True
                    )
                    if args.output:
                        args.output.write_text(json.dumps(counts, indent=1) + "\n")

            run_cases(
                kind,
                scratch / GOOD[kind],
                range(args.begin, args.begin + args.cases),
                command,
                done,
            )
    return int(any(found["wrong"] for found in counts.values()))


GOOD = {"folder": "good", "gguf": "good.gguf"}


def good_files(scratch: Path) -> dict[str, Path]:
    """A folder and a GGUF file of tiny models that run."""
    from tests.engine.text.test_tokenizer import GOLDEN
    from tests.model.formats.test_gguf_models import LEAST, write
    from tests.support import tiny_models

    tiny_models.write_with_tokenizer(scratch / GOOD["folder"])
    tokenizer = {
        f"tokenizer.ggml.{key}": value
        for key, value in GOLDEN["byte_level"].items()
        if "." not in key
    }
    metadata = {f"llama.{key}": value for key, value in LEAST.items()} | {
        "llama.rope.freq_base": 1e4,
        "a.text": "b",
    }
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    shapes = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }
    shapes |= {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    kinds = {"attn_q": "Q8_0", "ffn_up": "Q4_0", "ffn_gate": "Q5_1", "ffn_down": "Q4_1"}
    rng = np.random.default_rng(0)
    num_tokens = len(tokenizer["tokenizer.ggml.tokens"])
    tensors = {
        "token_embd.weight": (rng.normal(size=(num_tokens, 32)), "F32"),
        "output_norm.weight": (np.ones(32), "F32"),
    }
    for name, shape in shapes.items():
        value = np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) / 6
        tensors[f"blk.0.{name}.weight"] = (value, kinds.get(name, "F32"))
    tensors["rope_freqs.weight"] = np.ones(4), "F32"
    write(scratch / GOOD["gguf"], tensors, **metadata, **tokenizer, **template)
    return {kind: scratch / name for kind, name in GOOD.items()}


if __name__ == "__main__":
    raise SystemExit(main())
