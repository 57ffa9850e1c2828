"""Every run of one kind of machine, with two, four or eight GPUs, in one call of ten minutes.

    python benchmarks/nodes.py                            # as many GPUs as there are; record nodes_2.json and nodes_2.md
    python benchmarks/nodes.py --gpus 8 --list            # the runs, and the seconds that they may take
    python benchmarks/nodes.py --only 70b,context         # some of them
    python benchmarks/nodes.py --all --seconds 1500       # those too that do not fit into ten minutes with the others
    python benchmarks/nodes.py --device cpu --gpus 2      # each form on CPU processes with a tiny model, to try the script

Checks come first, side by side: tests for several ranks, greedy tokens of small models in float32 that must be one device's,
and killed ranks on CPU processes. One device's load is a replica's, which all GPUs run at the same time. A form
is timed only if all its checks passed in this call. A run that does not fit into the time left (`--seconds`) is left out, and
the table says so: call it again with `--only`, which checks the forms of the runs that it names. Both files are written after
each run. Every engine has a process of its own and random weights (load_format="dummy").
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import parallel
from collectives import SIZES_KB, collectives

SECONDS = 570
FP8 = {"quantization": "fp8"}
FP8_ALL = {**FP8, "kv_cache_dtype": "fp8"}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-235b": (
        "qwen3-30b-a3b",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
        },
    ),
    "gpt-oss-120b": ("gpt-oss-20b", {"num_hidden_layers": 36, "num_local_experts": 128}),
    "long-8b": ("llama-3-8b", {"max_position_embeddings": parallel.LONG + 1024}),
}
"""Models without a folder of their own in benchmarks/configs: the one that they differ from, and in what."""


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table. `forms`: those that it times. `beside`: this project's earlier number, and its record.
    Checks next to each other run at the same time. An `extra` one runs with `--all`, or if `--only` names it."""

    name: str
    what: str
    seconds: int
    work: Callable[[Node], dict[str, Any]]
    forms: tuple[str, ...] = ()
    beside: str = ""
    is_check: bool = False
    extra: bool = False


Task = tuple[str, dict[str, Any], int | str | None]
"""Task of an engine: what it does, its settings, and its GPU, or several with commas; None: all."""


@dataclass(slots=True)
class Node:
    """The machine, and what is known of it. `tiny`: small models and loads, on CPU processes."""

    gpus: int
    device: str
    folder: Path
    end: float
    clock: Callable[[], float] = time.monotonic
    engine: Callable[..., Any] = parallel.engine
    forms: set[str] | None = None  # those that `greedy` checks, if not all
    equal: set[str] = field(default_factory=set)  # those that passed

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    def left(self) -> float:
        return self.end - self.clock()

    def model(self, name: str) -> str:
        """The folder of a model; on CPUs of a tiny one with the same layers."""
        base, changes = SHAPES.get(name, (name, {}))
        if self.tiny:
            small = "deepseek_v3" if "deepseek" in base else "llama"
            base, changes = "tiny", parallel.SMALL["qwen3_moe" if "qwen3" in base else small]
            changes = {**changes, "num_hidden_layers": max(3, self.gpus)}
        if not changes:
            return str(common.CONFIGS / base)
        made = self.folder / name
        made.mkdir(exist_ok=True)
        config = json.loads((common.CONFIGS / base / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(changes if self.tiny else config | changes))
        return str(made)

    def settings(self, model: str, **more: Any) -> dict[str, Any]:
        made = {"model": self.model(model), "device": self.device, "max_model_len": 4096, **more}
        if self.tiny:
            for name in ("quantization", "kv_cache_dtype", "max_num_batched_tokens"):
                made.pop(name, None)
            made |= {"dtype": "float32", "kv_cache_bytes": 2**22, "max_model_len": 256}
            made["max_num_seqs"] = 4
            made["kernels"] = "torch"  # dummy weights without torch are others than ranks draw
        return made

    def run(
        self,
        tasks: dict[str, Task],
        *,
        small: bool = False,
        **load: int,
    ) -> dict[str, Any]:
        """Results of engines, as many at a time as have GPUs of their own; of small models twelve."""
        alone = all(gpu is not None for *_, gpu in tasks.values())
        at_once = 1 if self.tiny else 12 if small else self.gpus if alone else 1
        with ThreadPoolExecutor(at_once) as pool:
            jobs = {
                key: pool.submit(
                    self.engine,
                    what,
                    made,
                    None if self.tiny else gpu,
                    load.get("requests", 1024),
                    {k: v for k, v in load.items() if k != "requests"},
                )
                for key, (what, made, gpu) in tasks.items()
            }
            return {key: job.result() for key, job in jobs.items()}


def sizes(node: Node, requests: int, given: int, answer: int) -> dict[str, int]:
    return (
        {"requests": 4, "input": 9, "output": 5}
        if node.tiny
        else {"requests": requests, "input": given, "output": answer}
    )


def times(one: Any, other: Any, name: str, *, slower: bool = False) -> float | None:
    """How many times as good `other` is, or None if one of them failed."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return None
    return one[name] / other[name] if slower else other[name] / one[name]


def forms_of(gpus: int) -> dict[str, dict[str, Any]]:
    """The ways in which so many devices share a model."""
    made = {
        "tensor": {"tensor_parallel_size": gpus},
        "stages": {"pipeline_parallel_size": gpus},
        "context": {"context_parallel_size": gpus},
        "experts": {"expert_parallel_size": gpus, "tensor_parallel_size": gpus},
        "dealt": {"expert_parallel_size": gpus},
    }
    if gpus > 2:
        half = gpus // 2
        made["halves"] = {"expert_parallel_size": half, "tensor_parallel_size": half}
        made["stages of two"] = {"tensor_parallel_size": 2, "pipeline_parallel_size": gpus // 2}
    return made


CHECKED: dict[str, tuple[str, ...]] = {
    "llama": ("tensor", "stages", "context", "stages of two"),
    "qwen3_moe": ("experts", "dealt", "halves"),
    "deepseek_v3": ("tensor", "context", "dealt"),
}


def command(words: Sequence[str], limit: float) -> tuple[int, list[str]]:
    """Exit code and lines of a Python program, which has this long."""
    begun = [sys.executable, *words]
    try:
        done = subprocess.run(begun, capture_output=True, text=True, timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        return 124, [f"cut after {limit:.0f} s"]
    text = done.stdout if done.stdout.strip() else done.stderr
    return done.returncode, text.strip().splitlines() or ["no output"]


PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m")


def tests(node: Node) -> dict[str, Any]:
    """The GPU tests for several ranks."""
    if node.tiny:
        return {"left out": "they need GPUs"}
    files = ("tests/gpu/worker/test_two_gpus.py", "tests/gpu/kernels/test_peer_collectives_gpu.py")
    code, words = command([*PYTEST, "gpu", *files, "-n", "8"], min(95.0, node.left()))
    return {"failed" if code else "passed": words[-1]}


def greedy(node: Node) -> dict[str, Any]:
    """Greedy tokens of small models by the node's forms, next to one device's."""
    found: dict[str, Any] = {}
    forms = forms_of(node.gpus)
    if node.forms is not None:
        forms = {name: form for name, form in forms.items() if name in node.forms}
    wrong, tasks = set(), dict[str, Task]()
    given = {"input": 9, "output": 5} if node.tiny else {}
    for name, ways in CHECKED.items():
        if not forms.keys() & ways:
            continue
        folder = node.folder / f"greedy-{name}"
        folder.mkdir(exist_ok=True)
        config = {**parallel.SMALL[name], "num_hidden_layers": max(3, node.gpus)}
        (folder / "config.json").write_text(json.dumps(config))
        settings = {
            **node.settings("tiny"),
            "model": str(folder),
            "dtype": "float32",
            "kv_cache_bytes": 2**27,
        }
        for way in ("one", *(way for way in ways if way in forms)):
            gpu = 0 if way == "one" else None
            tasks[f"{name}, {way}"] = ("tokens", settings | forms.get(way, {}), gpu)
    answers = node.run(tasks, small=True, **given)
    for key, tokens in answers.items():
        name, way = key.split(", ")
        if way != "one":
            one = answers[f"{name}, one"]
            same = isinstance(tokens, list) and tokens == one
            found[key] = "equal" if same else f"{str(one)[:80]} / {str(tokens)[:80]}"
            if not same:
                wrong.add(way)
    node.equal = forms.keys() - wrong
    return found


GREEDY = Run("greedy", "greedy tokens of the forms, and one device's", 100, greedy, is_check=True)


def sums(node: Node) -> dict[str, Any]:
    """Sums, gathers, scatters and exchanges, and how many are slower than published."""
    if node.tiny:
        return {"left out": "they need GPUs"}
    found = collectives(argparse.Namespace(largest_kb=SIZES_KB[-1]))
    slower = [
        f"{name} of {size} KB"
        for name in ("sum", "gather", "scatter", "exchange")
        for size in SIZES_KB
        if isinstance(
            own := found.get(f"one kernel{'' if name == 'sum' else f', {name}'}, {size} KB"), float
        )
        and own > found.get(f"{name}, published, {size} KB", own)
    ]
    return {**found, "slower than published": slower, "number slower": len(slower)}


def by_forms(model: str, names: Sequence[str], **more: Any) -> Callable[[Node], dict[str, Any]]:
    """Throughput of 128 tokens in and out by some forms and by one device, and of replicas."""

    def work(node: Node) -> dict[str, Any]:
        forms, made = forms_of(node.gpus), node.settings(model, **more)
        load = sizes(node, 1024, 128, 128)
        every: dict[str, Task] = {f"replica {i}": ("load", made, i) for i in range(node.gpus)}
        replicas = node.run(every, **load)
        found: dict[str, Any] = {"one": replicas["replica 0"]}
        rates = [x for x in replicas.values() if isinstance(x, dict)]
        if "replicas" in names and len(rates) == node.gpus:
            found["replicas"] = {"tokens_a_second": sum(x["tokens_a_second"] for x in rates)}
        for name in [name for name in names if name in node.equal]:
            found |= node.run({name: ("load", made | forms[name], None)}, **load)
        gains = {n: times(found["one"], x, "tokens_a_second") for n, x in found.items()}
        gains = {f"{n}, times one": x for n, x in gains.items() if x is not None and n != "one"}
        return {**found, **gains, "best, times one": max(gains.values(), default=None)}

    return work


def large(model: str, form: str, **more: Any) -> Callable[[Node], dict[str, Any]]:
    """Milliseconds a token of four requests, and throughput of 1,000 tokens in and out."""

    def work(node: Node) -> dict[str, Any]:
        made = node.settings(model, **more) | forms_of(node.gpus)[form]
        found: Any = node.run(
            {form: ("large", made, None)}, **sizes(node, 128 * node.gpus, 1000, 1000)
        )[form]
        if not isinstance(found, dict):
            return {"failed": found}
        return {**found, "tokens_a_second_a_gpu": found["tokens_a_second"] / node.gpus}

    return work


def halves(model: str, **more: Any) -> Callable[[Node], dict[str, Any]]:
    """Throughput of 1,000 tokens in and out of two replicas at the same time, each on half of the GPUs."""

    def work(node: Node) -> dict[str, Any]:
        half = node.gpus // 2
        made = node.settings(model, **more) | forms_of(node.gpus)["halves"]
        tasks: dict[str, Task] = {
            f"replica {i}": (
                "load",
                made,
                ",".join(str(i * half + gpu) for gpu in range(half)),
            )
            for i in range(2)
        }
        found = node.run(tasks, **sizes(node, 64 * node.gpus, 1000, 1000))
        if failed := [x for x in found.values() if not isinstance(x, dict)]:
            return {"failed": failed[0]}
        rate = sum(x["tokens_a_second"] for x in found.values())
        return {**found, "tokens_a_second": rate, "tokens_a_second_a_gpu": rate / node.gpus}

    return work


def over_one(model: str, form: str, **more: Any) -> Callable[[Node], dict[str, Any]]:
    """Throughput of 1,000 tokens in and out over one device's."""

    def work(node: Node) -> dict[str, Any]:
        made, load = node.settings(model, **more), sizes(node, 128, 1000, 1000)
        found: dict[str, Any] = node.run({"one": ("load", made, 0)}, **load)
        found |= node.run({form: ("load", made | forms_of(node.gpus)[form], None)}, **load)
        return {**found, "times one": times(found["one"], found[form], "tokens_a_second")}

    return work


def context(node: Node) -> dict[str, Any]:
    """A prompt of 131,072 tokens and steps of 8 such sequences, by context and by one device."""
    more = {**FP8_ALL, "max_num_seqs": 8, "max_num_batched_tokens": 8192}
    made = node.settings("long-8b", **more)
    if not node.tiny:
        made["max_model_len"] = parallel.LONG + 1024
    load = {"requests": 2, "input": 64} if node.tiny else {"requests": 8}
    ways = {
        "context": ("long", made | forms_of(node.gpus)["context"], None),
        "one": ("long", made, 0),
    }
    found: dict[str, Any] = {}
    for name, task in ways.items():
        found |= node.run({name: task}, **load)
    one, other = found["one"], found["context"]
    return {
        **found,
        "prompt, times one": times(one, other, "first_token_s", slower=True),
        "step, times one": times(one, other, "ms_a_step", slower=True),
        "room, times one": times(one, other, "kv_tokens"),
    }


def apart(node: Node) -> dict[str, Any]:
    """Prompts and answers on the same replicas, and apart, over HTTP."""
    if node.tiny:
        return {"left out": "on CPUs it is benchmarks/fleet.py --study phases"}
    engine = node.settings("llama-3-8b", **FP8_ALL, gpu_memory_utilization=0.42)
    model = engine.pop("model")
    model = with_tokenizer(node, Path(model))
    engine["load_format"] = "dummy"
    engine["max_model_len"] = 16384
    output = node.folder / "apart.json"
    words = [str(common.HERE / "fleet.py"), "--study", "phases", "--model", model]
    words += ["--engine", json.dumps(engine), "--output", str(output), "--devices", "0,1"]
    words += ["--rounds=2", "--streams=32", "--tokens=256"]
    words += ["--prompts=40", "--prompt=8000", "--every=0.25"]
    code, said = command(words, node.left())
    if code:
        return {"failed": said[-1]}
    kept = json.loads(output.read_text())
    return {k: v for k, v in kept.items() if k not in ("environment", "versions", "machine")}


def agents(node: Node) -> dict[str, Any]:
    """Agents' sessions on a fleet of a replica a GPU, and 64 of them on one replica, over HTTP."""
    if node.tiny:
        return {"left out": "on CPUs it is slipstream bench serve --workload agents at a fleet"}
    engine = node.settings("llama-3-8b", **FP8_ALL) | {"load_format": "dummy"}
    model = with_tokenizer(node, Path(engine.pop("model")))
    engine["max_model_len"] = 16384
    vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    found: dict[str, Any] = {}
    for name, count in (("one", 1), ("all", node.gpus)):
        devices = [str(gpu) for gpu in range(count)]
        pool = {"name": "all", "replicas": count, "resources": {"devices": devices}}
        version = {"name": "v1", "model": model, "engine": engine, "pools": [pool]}
        with fleet_of(node, {"m": {"versions": [version]}}) as url:
            words = f"--vocab-size {vocab} --workload agents --sessions {64 * count} --concurrency {64 * count} "
            words += "--max-context 16384 --turns uniform:4-6 --task-tokens lognormal:3000:0.8 --answer-tokens 100 "
            words += "--turn-tokens lognormal:800:0.8 --pause lognormal:1:0.6"
            (level,) = common.slipstream(
                "bench", "serve", "--url", url, *words.split(), may_fail=True
            )["levels"]
        found[name] = level["results"]
    one, many = found["one"], found["all"]
    return {
        **found,
        "turns a minute, times one": many["turns_per_minute"] / one["turns_per_minute"],
        "hits, points below one": 100 * (one["hit_rate"] - many["hit_rate"]),
    }


@contextlib.contextmanager
def fleet_of(node: Node, models: dict[str, Any]) -> Iterator[str]:
    """The address of a fleet that serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, url = node.folder / "fleet.json", f"http://127.0.0.1:{port}"
    file.write_text(json.dumps({"port": port, "models": models}))  # JSON is YAML
    words = [
        "-m",
        "slipstream",
        "fleet",
        "up",
        str(file),
        "--state-dir",
        str(node.folder / "fleet"),
    ]
    log = node.folder / "fleet.log"
    with log.open("w") as out:
        head = subprocess.Popen(
            [sys.executable, *words], stdout=out, stderr=out, env=common.with_source()
        )
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/ready", timeout=2).close()
                break
            if head.poll() is not None or node.left() < 0:
                raise RuntimeError(log.read_text()[-500:])
            time.sleep(0.2)
        yield url
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(60)
        head.kill()


def with_tokenizer(node: Node, model: Path) -> str:
    """A copy of a model's config beside a tokenizer with as many words."""
    from cases.features.grammar import made_tokenizer

    folder = node.folder / "with-tokenizer"
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    made_tokenizer(folder, config["vocab_size"])
    return str(folder)


def deaths(node: Node) -> dict[str, Any]:
    """Ranks that are killed under 64 streams, on this machine's cores."""
    if node.tiny:
        return {"left out": "it is pytest -m slow tests/fleet/test_rank_deaths.py"}
    words = [*PYTEST, "slow", "tests/fleet/test_rank_deaths.py"]
    code, said = command(words, min(95.0, node.left()))
    turns = [line for line in said if line.startswith("turn ")]
    return {"turns": turns, **({"failed": said[-1]} if code else {"lost": "none"})}


def update(node: Node) -> dict[str, Any]:
    """Seconds of an update of an 8B's weights from another device, and whether a second one has the same checksum."""
    made = node.settings("llama-3-8b", dtype="bfloat16")
    if node.tiny:
        made["kernels"] = "cpu"  # torch's hold weights that can't be written in place
    found = node.run({"update": ("update", made, None)})["update"]
    return found if isinstance(found, dict) else {"failed": found}


def runs_of(gpus: int) -> list[Run]:
    """The runs of a machine with so many GPUs, in their order: checks, then what decides most."""
    checks = [
        Run("tests", "tests of several ranks", 100, tests, is_check=True),
        GREEDY,
        Run("deaths", "kill -9 of a rank under 64 streams, ten times", 100, deaths, is_check=True),
        Run("sums", "sums, gathers, scatters, exchanges", 40, sums,
            beside="those published, in parallel.py"),
    ]  # fmt: skip
    two = gpus == 2
    seventy_b = Run("70b", "70B FP8, 4 requests · 1,000/1,000", 90, large("llama-3-70b", "tensor", **FP8),
                    ("tensor",), "11.2 ms a token (parallel_70b)" if two else "")  # fmt: skip
    by_context = Run("context", "a prompt of 128k and steps of 8 × 128k over one GPU", 130, context, ("context",),
                     "1.71 · 1.33 × (parallel_context)" if two else "")  # fmt: skip

    def eight_b(*ways: str, beside: str = "") -> Run:
        return Run("8b", f"8B FP8 128/128 over one GPU: {' · '.join(ways)}", 30 * len({*ways, "replicas"}),
                   by_forms("llama-3-8b", ways, **FP8), tuple(way for way in ways if way != "replicas"),
                   beside)  # fmt: skip

    def moe(form: str) -> Run:
        return Run(
            "235b",
            f"Qwen3-235B FP8 1,000/1,000, {form}",
            120,
            large("qwen3-235b", form, **FP8),
            (form,),
        )

    two_replicas = Run("halves", f"Qwen3-235B FP8 1,000/1,000, two replicas of {gpus // 2}", 110,
                       halves("qwen3-235b", **FP8), ("halves",), extra=gpus == 4)  # fmt: skip
    sessions = Run(
        "agents", f"agents' sessions on {gpus} replicas of an 8B over one", 240, agents, extra=True
    )
    phases = Run("apart", "prefill and decode apart next to mixed replicas", 100, apart, extra=True)

    if two:
        return [
            *checks,
            seventy_b,
            by_context,
            eight_b("tensor", "stages", "replicas", beside="tensor 1.61 × (parallel_h200)"),
            Run("30b", "Qwen3-30B FP8 128/128 over one GPU", 80,
                by_forms("qwen3-30b-a3b", ("experts", "dealt"), **FP8), ("experts", "dealt"),
                "1.46 · 1.36 × (parallel_mixtures_dealt)"),
            Run("update", "update of an 8B's weights over NCCL", 40, update),
            phases,
            Run("120b", "gpt-oss-120b 1,000/1,000 over one GPU", 120, over_one("gpt-oss-120b", "experts"), ("experts",),
                extra=True),
            sessions,
        ]  # fmt: skip
    if gpus == 4:
        ways = ("tensor", "replicas", "stages of two")
        runs = [*checks, moe("experts"), seventy_b, by_context, eight_b(*ways)]
        return [*runs, two_replicas, phases, sessions]
    dealt = Run("671b", "DeepSeek-V3 FP8, requests dealt out, 4 requests · 1,000/1,000", 180,
                large("deepseek-v3", "dealt", **FP8), ("dealt",))  # fmt: skip
    others = [
        dataclasses.replace(run, extra=True) for run in (by_context, eight_b("replicas"), seventy_b)
    ]
    return [*checks, dealt, moe("experts"), two_replicas, sessions, *others]


def chosen(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[Run], set[str] | None]:
    """The runs with these names, before them the check of their forms, and these forms (None: all)."""
    kept = [run for run in runs if run.name in names]
    forms = {form for run in kept for form in run.forms}
    if GREEDY in kept or not forms:
        return kept, None
    return [GREEDY, *kept], forms


def table(runs: Sequence[Run], found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = ["| run | beside | measured | s |", "| --- | --- | --- | --- |"]
    for run in runs:
        if (result := found.get(run.name)) is None:
            continue
        shown = "; ".join(
            f"{key}: {value:,.4g}" if isinstance(value, int | float) else f"{key}: {value}"
            for key, value in result.items()
            if isinstance(value, int | float | str) and "KB" not in key and key != "took_s"
        )
        rows.append(
            f"| {run.name}: {run.what} | {run.beside or '–'} | {shown} | {result['took_s']:.0f} |"
        )
    return "\n".join(rows) + "\n"


def run_all(
    node: Node, runs: Sequence[Run], save: Callable[[dict[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """Results by run. What has no time left, or no form that gave one device's answers, is named and left out."""
    found: dict[str, dict[str, Any]] = {}

    def result_of(run: Run) -> dict[str, Any]:
        begin = node.clock()
        if run.forms and not node.equal.intersection(run.forms):
            unproven = ", ".join(run.forms)
            result: dict[str, Any] = {
                "left out": f"answers not shown to be one device's: {unproven}"
            }
        elif node.left() < 0.6 * run.seconds:
            result = {"left out": f"{max(0.0, node.left()):.0f} s left of {run.seconds} needed"}
        else:
            try:
                result = run.work(node)
            except Exception as error:  # one run's failure leaves the others
                result = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        took_s = node.clock() - begin
        print(f"[{run.name}: {took_s:.0f} s] {str(result)[:400]}", flush=True)
        return {**result, "took_s": took_s}

    for together in side_by_side(runs):
        with ThreadPoolExecutor(1 if node.tiny else len(together)) as pool:
            found |= zip([run.name for run in together], pool.map(result_of, together), strict=True)
        save(found)
    return found


def side_by_side(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in their order; checks next to each other belong together."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault("checks" if run.is_check else run.name, []).append(run)
    return list(found.values())


def seconds_of(runs: Sequence[Run]) -> int:
    """Seconds that runs may take together."""
    return sum(max(run.seconds for run in together) for together in side_by_side(runs))


def main() -> None:
    made = common.parser(__doc__, "nodes_GPUS")
    made.set_defaults(output=None)
    made.add_argument("--gpus", type=int, choices=(2, 4, 8), help="(default: as many as there are)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--seconds", type=int, default=SECONDS, help="for all runs together")
    made.add_argument("--only", default="", help="names of runs, with commas")
    made.add_argument("--all", action="store_true", help="also what does not fit into ten minutes")
    made.add_argument("--list", action="store_true", help="tell the runs and run nothing")
    args = made.parse_args()
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
        if args.gpus not in (2, 4, 8):
            made.error(f"{args.gpus} GPUs: there are runs for 2, 4 and 8 (--gpus)")
    runs, forms = runs_of(args.gpus), None
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {run.name for run in runs}:
            made.error(f"--only: there is no {', '.join(sorted(unknown))}")
        runs, forms = chosen(runs, names)
    elif not args.all and not args.list:
        runs = [run for run in runs if not run.extra]
    if args.list:
        for run in runs:
            print(f"{run.name:8} {run.seconds:4} s  {run.what}{' (--all)' if run.extra else ''}")
        usual = seconds_of([run for run in runs if not run.extra])
        print(f"{usual} s without those of --all, {seconds_of(runs)} s with them")
        return
    output = args.output or common.RESULTS / f"nodes_{args.gpus}.json"

    def save(found: dict[str, Any]) -> None:
        common.save(output, "nodes", gpus=args.gpus, device=args.device, runs=found)
        output.with_suffix(".md").write_text(table(runs, found))

    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + args.seconds
        node = Node(args.gpus, args.device, Path(folder), end, forms=forms)
        found = run_all(node, runs, save)
    print(table(runs, found))


if __name__ == "__main__":
    os.chdir(common.HERE.parent)
    main()
