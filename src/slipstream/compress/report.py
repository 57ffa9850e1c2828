"""Reports the quality that a compression loses, and the bytes and time that it saves, as JSON and
as an HTML page.

`slipstream-report.json` has `Report.document`, with `kl` (mean, p99, …), `perplexity` (of the
compressed model) and `top1_agreement` at the top. `slipstream-report.html` shows the same. Both are
in the checkpoint's folder."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.base.files import write_whole
from slipstream.bench.workload import fixed, warmup
from slipstream.compress.run import zeros_of
from slipstream.compress.training.common import in_bfloat16
from slipstream.compress.verdict import QualityLimits, headline, is_worse
from slipstream.config import EngineArgs
from slipstream.costs.environment import environment, plain
from slipstream.costs.metrics import summarize
from slipstream.errors import BudgetError
from slipstream.evals.divergence import KL_EDGES, Divergence, compare
from slipstream.evals.scorer import Scorer
from slipstream.evals.tasks import TaskResult, run_tasks
from slipstream.evals.text import TextSettings, read_windows
from slipstream.hub import resolve_model
from slipstream.spec.model import ModelSpec
from slipstream.spec.stored.gguf_parts import parts_of
from slipstream.spec.stored.safetensors import weight_files
from slipstream.worker.start.canary import Canary, write_canary

JSON_NAME = "slipstream-report.json"
HTML_NAME = "slipstream-report.html"

LOAD_S, PASS_COST = 3.0, 2.0
"""Estimates for `report_seconds`, measured with a 135M model on two cores: seconds to load both
models, and time per operation of a forward pass relative to a large matrix product."""

SPEED_BATCHES = (1, 16)
SPEED_INPUT, SPEED_OUTPUT, SPEED_RUNS = 64, 64, 3

DEFINITIONS = {
    "perplexity": "exp of the mean of −ln p over the scored tokens of the text",
    "kl": "KL(A‖B) of the next token's distribution, in nats, over the scored tokens; A is the first model, B the second",
    "top1_agreement": "share of tokens for which both models rank the same token first",
    "top5_agreement": "mean share that the two models' five likeliest tokens have in common",
    "layers.own": "relative root mean square error of what the layer adds, when it reads the first model's residual",
    "layers.state": "relative root mean square error of the residual after the layer",
    "tokens_per_s": f"output tokens / wall time by number of concurrent requests, with {SPEED_INPUT} input and {SPEED_OUTPUT} "
    f"output tokens each; the median of {SPEED_RUNS} runs",
    "stderr": "standard error over windows of text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two models. `zeros` is the fraction of zeros in its sparsified linear layers, None if it has
    none. `tokens_per_s` is by number of concurrent requests, empty if speed was not measured."""

    model: str
    run_as: Mapping[str, Any]
    perplexity: float
    file_bytes: int
    weights_bytes: int  # in memory
    num_parameters: int
    kv_bytes_per_token: int
    zeros: float | None = None
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Comparison of both models.

    - `recipe`: JSON data.
    - `tried`: attempts above `max_kl`, with their mean KL.
    - `tasks`: the results (original, compressed) of each task.
    - `canary`: the compressed model's.
    - `limits`: when the compressed model counts as broken."""

    original: Side
    compressed: Side
    text: TextSettings
    divergence: Divergence
    recipe: Any = None
    max_kl: float | None = None
    limits: QualityLimits = field(default_factory=QualityLimits)
    tried: tuple[tuple[str, float], ...] = ()
    tasks: tuple[tuple[TaskResult, TaskResult], ...] = ()
    canary: Canary | None = None
    info: Mapping[str, Any] = field(default_factory=environment)

    @property
    def every_metric(self) -> list[tuple[TaskResult, TaskResult]]:
        """`tasks`, extended by the other metrics of each."""
        return [
            both for a, b in self.tasks for both in zip((a, *a.also), (b, *b.also), strict=True)
        ]

    @property
    def within_max_kl(self) -> bool | None:
        """Whether the KL is within `max_kl`; None without a limit. NaN counts as over the limit."""
        return None if self.max_kl is None else self.divergence.kl.mean <= self.max_kl

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons why the compressed model is broken; empty if it is not."""
        return self.limits.faults(self.divergence)

    @property
    def headline(self) -> str:
        return headline(
            self.original.file_bytes, self.compressed.file_bytes, self.divergence, self.faults
        )

    @property
    def document(self) -> dict[str, Any]:
        """The content of the JSON file."""
        d = self.divergence
        return {
            "format": 1,
            **self.info,
            "recipe": self.recipe,
            "verdict": {
                "headline": self.headline,
                "broken": bool(self.faults),
                "faults": list(self.faults),
                "larger": self.compressed.file_bytes > self.original.file_bytes,
                "worse": is_worse(d),
            },
            "limits": dataclasses.asdict(self.limits),
            "kl": {**dataclasses.asdict(d.kl), "edges": list(KL_EDGES)},
            "perplexity": d.perplexity_b,
            "perplexity_original": d.perplexity_a,
            "perplexity_ratio": d.perplexity_ratio,
            "perplexity_ratio_stderr": d.perplexity_ratio_stderr,
            "top1_agreement": d.top1_agreement,
            "top5_agreement": d.top5_agreement,
            "text": {
                **dataclasses.asdict(self.text),
                "num_tokens": d.num_tokens,
                "windows_scored": d.num_windows,
            },
            "original": dataclasses.asdict(self.original),
            "compressed": dataclasses.asdict(self.compressed),
            "tasks": [
                {
                    "name": a.name,
                    "metric": a.metric,
                    "num_questions": a.num_questions,
                    "num_pairs": a.num_pairs,
                    "scored": a.scored,
                    "original": a.value,
                    "original_stderr": a.stderr,
                    "compressed": b.value,
                    "compressed_stderr": b.stderr,
                }
                for a, b in self.every_metric
            ],
            "max_kl": self.max_kl,
            "within_max_kl": self.within_max_kl,
            "tried": [{"what": what, "kl_mean": kl} for what, kl in self.tried],
            "layers": [dataclasses.asdict(layer) for layer in d.layers],
            "why_no_layers": d.why_no_layers,
            "worst": [dataclasses.asdict(w) for w in d.worst],
            "definitions": DEFINITIONS,
        }

    def check(self) -> None:
        """Raise BudgetError if the KL is above `max_kl`."""
        if self.within_max_kl is False:
            raise BudgetError(
                f"the mean KL of {self.divergence.kl.mean:.4g} nats is above max_kl={self.max_kl:g}; use more bits or a better "
                "method, ignore the layers that add most of it, or raise the limit",
                field="max_kl",
            )


def report_seconds(spec: ModelSpec, num_tokens: int) -> float:
    """Estimate the seconds in which both models score the tokens on this CPU. A matrix product of
    the model's width is timed; a forward pass takes about `PASS_COST` times as long per
    operation."""
    width, rows = min(spec.hidden_size, 4096), 512
    dtype = torch.bfloat16 if in_bfloat16(torch.device("cpu")) else torch.float32
    x, weight = torch.ones(rows, width, dtype=dtype), torch.ones(4 * width, width, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    begin = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    rate = rows * weight.numel() / (time.perf_counter() - begin)
    return LOAD_S + 2 * PASS_COST * spec.num_parameters * num_tokens / rate


def measure(
    original: EngineArgs,
    compressed: EngineArgs,
    *,
    text: TextSettings | None = None,
    speed: bool = True,
    name: str | None = None,
    num_worst: int = 5,
    layers: bool = True,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    **more: Any,
) -> Report:
    """Compare both models on the text, and measure their speed. `name` is the compressed model's in the report, by default
    its path. `tasks` are names for `evals.tasks.run_tasks`, with the first `limit` questions of each. `more` are fields of
    `Report`: recipe, max_kl, limits, tried. `progress` is called with the phase, the steps done, and their total."""
    text = text or TextSettings()
    progress("loading", 0, 2)
    a = Scorer.load(original, context=text.context)
    progress("loading", 1, 2)
    if compressed.dtype == "auto":
        compressed = dataclasses.replace(compressed, dtype=a.settings["dtype"])
    b = Scorer.load(compressed, context=text.context)
    b.name = name or b.name  # for the page's messages
    windows = read_windows(text, a.tokenizer, download_dir=original.download_dir)
    divergence = compare(
        a,
        b,
        windows,
        num_worst=num_worst,
        layers=layers,
        progress=lambda done, total: progress("comparing", done, total),
    )
    canary = b.canary(max((w.token_ids for w in windows), key=len))
    sides = [
        _side(a, original, divergence.perplexity_a),
        _side(b, compressed, divergence.perplexity_b, name),
    ]
    del a, b
    # The values to which "auto" was resolved, so that both run as they were compared.
    settled = [
        dataclasses.replace(args, dtype=str(side.run_as["dtype"]))
        for args, side in zip((original, compressed), sides, strict=True)
    ]
    if speed:
        for i, args in enumerate(settled):
            progress("speed", i, 2)
            sides[i] = dataclasses.replace(sides[i], tokens_per_s=tokens_per_s(args))
    results: list[list[TaskResult]] = []
    for i, args in enumerate(settled if tasks else ()):
        from slipstream.engine.llm import LLM  # only speed and tasks need an engine

        progress("tasks", i, 2)
        gc.collect()
        with LLM.from_engine_args(args) as llm:
            results.append(run_tasks(llm, tasks, limit=limit, part=text.part))
    progress("done", 2, 2)
    return Report(
        original=sides[0],
        compressed=sides[1],
        text=text,
        divergence=divergence,
        tasks=tuple(zip(*results, strict=True)),
        canary=canary,
        **more,
    )


def write_receipt(report: Report, checkpoint: Path) -> tuple[Path, Path]:
    """Write the report into the compressed checkpoint's folder (`write_report`), with the canary
    that the engine checks at each start."""
    if report.canary is not None:
        write_canary(report.canary, checkpoint)
    return write_report(report, checkpoint)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write the JSON file and the page, each atomically. Returns their paths."""
    from slipstream.compress.page import render

    files = {
        folder / JSON_NAME: json.dumps(report.document, ensure_ascii=False, indent=2, default=plain)
        + "\n",
        folder / HTML_NAME: render(report.document),
    }
    for path, content in files.items():
        write_whole(path, content)
    return folder / JSON_NAME, folder / HTML_NAME


def tokens_per_s(args: EngineArgs, batches: tuple[int, ...] = SPEED_BATCHES) -> dict[str, float]:
    """Output tokens per second by number of concurrent requests (a string, since JSON's keys are strings)."""
    from slipstream.bench.adapters.slipstream import OfflineSlipstream

    gc.collect()  # free the models loaded before
    length = SPEED_INPUT + SPEED_OUTPUT
    args = dataclasses.replace(
        args,
        max_model_len=length,
        max_num_seqs=max(batches),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    engine = OfflineSlipstream(args)
    try:
        found = {}
        for batch in batches:
            vocab_size = engine.llm.core.description.spec.vocab_size
            work = fixed(batch, SPEED_INPUT, SPEED_OUTPUT, vocab_size=vocab_size)
            engine.run(warmup(work, batch))
            rates = sorted(
                summarize(engine.run(work.requests)).output_throughput for _ in range(SPEED_RUNS)
            )
            found[str(batch)] = rates[SPEED_RUNS // 2]
        return found
    finally:
        engine.close()


def _side(scorer: Scorer, args: EngineArgs, perplexity: float, name: str | None = None) -> Side:
    path = resolve_model(args.model, download_dir=args.download_dir)
    return Side(
        model=name or args.model,
        run_as=scorer.settings,
        perplexity=perplexity,
        file_bytes=model_bytes(path),
        weights_bytes=scorer.weights_bytes,
        num_parameters=scorer.spec.num_parameters,
        kv_bytes_per_token=scorer.kv_bytes_per_token,
        zeros=zeros_of(path),
    )


def model_bytes(path: Path) -> int:
    """Size in bytes on disk of a GGUF file, or of the weights in a folder."""
    files = parts_of(path) if path.is_file() else weight_files(path) or [*path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
