"""Measures candidates, each measurement in its own process. Compression and quality are measured
once for all candidates that share them, speed for each. Results are stored in a folder, so that an
interrupted search continues."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.base.files import digest
from slipstream.bench.adapters import parse_parallel
from slipstream.compress.recipe import read_recipe
from slipstream.compress.steps import DraftHead
from slipstream.config import DeviceInfo, EngineArgs, num_ranks, resolve
from slipstream.costs.environment import plain
from slipstream.engine.folder import this_machine
from slipstream.errors import ConfigError, EngineError, SlipstreamError
from slipstream.hub import resolve_model
from slipstream.optimize.candidates import Candidate, Space, TrialResult
from slipstream.optimize.prior import guessed_kl
from slipstream.optimize.traffic import RecordedTraffic
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts.heads import FILE_METHODS
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.ranks.process_executor import check_devices

RESULTS_NAME = "results.jsonl"
SURE = 1.96
"""Half width of a 95 % interval in standard errors. A limit counts as met if the interval's upper end is below it."""

LIMITS = ("kl", "perplexity")
WITHOUT_FILES = ("ngram", "suffix", "mtp")
"""Draft methods that need only the model's checkpoint. Those of `FILE_METHODS` need a draft head's too."""

WORKER = (sys.executable, "-m", "slipstream.optimize.worker")
NOT_MEASURED = "random weights: quality is not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLoss:
    """Limits of quality loss: KL divergence in nats, relative rise of perplexity (0.02: 2 % more),
    and for each task a loss of score (0.01: one correct answer in a hundred fewer). Tasks are those
    of `evals.tasks`."""

    kl: float | None = None
    perplexity: float | None = None
    tasks: tuple[tuple[str, float], ...] = ()

    def faults(self, found: Mapping[str, Any]) -> list[str]:
        """Limits that the 95 % interval exceeds, as text."""
        faults = []
        if self.kl is not None and not (most := found["kl"] + SURE * found["kl_stderr"]) <= self.kl:
            faults.append(f"KL {found['kl']:.4g} (up to {most:.4g}), at most {self.kl:g} is wanted")
        ratio = found["perplexity_ratio"]
        if (
            self.perplexity is not None
            and not (most := ratio - 1 + SURE * found["perplexity_ratio_stderr"]) <= self.perplexity
        ):
            faults.append(
                f"perplexity {ratio - 1:+.2%} (up to {most:+.2%}), at most {self.perplexity:+.2%} is wanted"
            )
        for name, limit in self.tasks:
            task = found["tasks"][name]
            if not (most := task["loss"] + SURE * task["stderr"]) <= limit:
                faults.append(
                    f"{name}: {task['metric']} from {task['original']:.3f} to {task['value']:.3f}, {task['loss']:.3f} lost (up "
                    f"to {most:.3f}), at most {limit:g} is wanted"
                )
        return faults


def parse_quality_loss(text: str) -> QualityLoss:
    """Parse `kl=0.02,perplexity=2%,task=NAME:1%`, with any number of tasks."""
    found: dict[str, float] = {}
    tasks: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        task = ""
        if name == "task":
            task, _, value = value.rpartition(":")
        try:
            number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            number = -1.0
        if (name not in LIMITS and not task) or not number >= 0:
            raise ConfigError(
                f"max_quality_loss: {part!r} is not kl=NATS, perplexity=SHARE or task=NAME:SHARE, such as kl=0.02, "
                "perplexity=2% or task=questions.jsonl:1%",
                field="max_quality_loss",
            )
        if task:
            tasks[task] = number
        else:
            found[name] = number
    return QualityLoss(**found, tasks=tuple(tasks.items()))


def parse_seconds(text: str) -> float:
    """Parse `90s`, `20m` or `1.5h`."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"budget={text!r} is not a time such as 90s, 20m or 1h", field="budget")
    return seconds


def default_space(*, users: int, on_gpu: bool) -> Space:
    """The default space: compressions that the device's kernels support, and the settings that
    trade throughput for latency with `users` concurrent requests. It has no drafts: the traffic's
    tokens are random and do not repeat like those of text."""
    seqs = tuple(sorted({max(1, users // 4), max(1, users // 2), users}))
    if on_gpu:
        compressions: tuple[str, ...] = (
            "none",
            "fp8",
            "int8",
            "int4",
            "recipe:fp8",
            "recipe:int4-awq-gptq",
            "recipe:2:4",
        )
        axes: dict[str, tuple[Any, ...]] = {
            "kv_cache_dtype": ("auto", "fp8"),
            "max_num_batched_tokens": (2048, 8192, 16384),
        }
    else:
        compressions = ("none", "int8", "int4-g32", "recipe:int8", "recipe:int4-gptq")
        axes = {"kv_cache_dtype": ("auto", "int8"), "max_num_batched_tokens": (128, 512, 2048)}
    return Space(
        compressions=compressions, axes={**axes, "max_num_seqs": seqs, "speculative_model": (None,)}
    )


def check_compressions(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of compressions: `none`, a scheme applied at load, `recipe:NAME`, or a recipe's
    file (quantization, sparsity, pruning with distillation)."""
    for name in names:
        if name != "none" and name not in SCHEMES:
            try:
                recipe = read_recipe(name.removeprefix("recipe:"))
            except ConfigError as error:
                schemes = ", ".join(sorted(SCHEMES))
                what = f"{name!r} is neither none, nor a scheme applied at load ({schemes}), nor a recipe: {error}"
                raise ConfigError(what, field="compressions") from None
            if recipe.one(DraftHead) is not None or name.startswith("recipe:draft:"):
                what = f"{name} makes a draft for the model: `slipstream compress` it, and give the draft model to --drafts"
                raise ConfigError(what, field="compressions")
    if not names or len(set(names)) < len(names):
        raise ConfigError("compressions must be named, each once", field="compressions")
    return tuple(names)


def check_drafts(names: Sequence[str]) -> tuple[str | None, ...]:
    """Check names of drafts: `none`, `ngram`, `suffix`, `mtp`, METHOD:FOLDER of a draft head, or
    the folder of a draft model."""
    for name in names:
        path = None if name == "none" else draft_path(name)
        if path is not None and not path.exists():
            known = ", ".join(
                ("none", *WITHOUT_FILES, *(f"{method}:FOLDER" for method in FILE_METHODS))
            )
            what = f"drafts: {name!r} is none of {known}, and no checkpoint of a draft model"
            raise ConfigError(what, field="drafts")
    if not names or len(set(names)) < len(names):
        raise ConfigError("drafts must be named, each once", field="drafts")
    return tuple(None if name == "none" else name for name in names)


def draft_path(name: str) -> Path | None:
    """Checkpoint of a draft model or head; None for other methods."""
    method, _, path = name.partition(":")
    return (
        None
        if name in WITHOUT_FILES
        else Path(path if method in FILE_METHODS else name).expanduser()
    )


def draft_settings(name: str) -> dict[str, Any]:
    """Engine settings for this draft method."""
    method, path = name.partition(":")[0], draft_path(name)
    if method in FILE_METHODS:
        return {"speculative_config": {"method": method, "model": str(path)}}
    return (
        {"speculative_config": {"method": "mtp"}} if name == "mtp" else {"speculative_model": name}
    )


def check_parallel(
    names: Sequence[str], base: EngineArgs, description: ModelDescription, info: DeviceInfo
) -> tuple[str, ...]:
    """Check parallel forms such as `tp2`, `pp2` and `tp2pp2`: this machine must have the devices,
    and the model must be divisible."""
    forms = tuple(str(parse_parallel(name, "parallel")) for name in names)
    for form in forms:
        args = EngineArgs(**settings_of(base, Candidate("none", (("parallel", form),))))
        try:
            if num_ranks(args) > 1:
                check_devices(args, info)
            resolve(args, description, info)
        except ConfigError as error:
            raise ConfigError(f"parallel: {error} (leave out {form})", field="parallel") from None
    if len(set(forms)) < len(forms):
        raise ConfigError("parallel: forms must be named, each once", field="parallel")
    return forms


def refusals(
    space: Space, base: EngineArgs, description: ModelDescription, info: DeviceInfo
) -> dict[Candidate, str]:
    """Candidates that can't run on several ranks, for example with a draft model, with the engine's
    error message. Failures on one device are found by measuring."""
    found = {}
    for candidate in space.candidates():
        args = EngineArgs(**settings_of(base, candidate))
        if num_ranks(args) > 1:
            try:
                resolve(args, description, info)
            except ConfigError as error:
                found[candidate] = str(error)
    return found


def settings_of(base: EngineArgs, candidate: Candidate) -> dict[str, Any]:
    """Engine settings for a candidate, without the model if its compression is a checkpoint that has to be made."""
    given = dataclasses.asdict(base)
    settings = {name: value for name, value in candidate.settings if value is not None}
    if (draft := settings.pop("speculative_model", None)) is not None:
        settings |= draft_settings(draft)
    if (form := settings.pop("parallel", None)) is not None:
        settings |= parse_parallel(form, "parallel").settings
    if candidate.compression in SCHEMES:
        settings["quantization"] = candidate.compression
    return given | settings


@dataclass(kw_only=True)
class Measurer:
    """Measures candidates of `base`, the original model with the settings that all share. `folder`
    stores compressed checkpoints and results. Called with a candidate it returns the result, or
    raises an error if the engine fails."""

    base: EngineArgs
    traffic: RecordedTraffic
    objectives: Mapping[str, float]
    limits: QualityLoss
    folder: Path
    text: Mapping[str, Any]
    task_limit: int | None = None  # questions per task
    timeout_s: float = 1800.0
    # time limit for one compression, so that others get time too
    compress_s: float = math.inf
    deadline: float = math.inf  # on `time.monotonic()`; unfinished work is stopped then
    on_phase: Callable[[str], None] = lambda what: None
    files: Sequence[Path] = ()  # questions, texts and draft models that the results depend on
    _quality: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    @property
    def conditions(self) -> str:
        """Everything except the candidate on which results depend, as text. A search continues only
        if it is unchanged."""
        given = [
            self.base,
            self._files(),
            self.traffic,
            dict(self.objectives),
            self.limits,
            dict(self.text),
            self.task_limit,
        ]
        given += [dataclasses.asdict(_machine()), [files_of(path) for path in self.files]]
        return digest(given, default=plain)[:16]

    def __call__(self, candidate: Candidate) -> TrialResult:
        self.on_phase(candidate.name)
        try:
            quality = self.quality(candidate)
        except (
            SlipstreamError
        ) as error:  # the compression failed: all candidates that share it fail too
            return TrialResult(candidate=candidate, error=str(error), fits=False)
        if "not_measured" not in quality and (faults := self.limits.faults(quality)):
            return TrialResult(
                candidate=candidate,
                kl=quality["kl"],
                fits=False,
                error="; ".join(faults),
                figures=quality,
            )
        found = self.speed(self.args_of(candidate))
        return TrialResult(
            candidate=candidate,
            throughput=found["output_throughput"],
            tpot_s=found.get("tpot_s_p99"),
            kl=quality["kl"],
            figures={**quality, **found},
        )

    def speed(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Measure an engine with these settings under the traffic."""
        given = {**args, "skip_tokenizer_init": True}
        return self._run(
            {
                "kind": "speed",
                "args": given,
                "traffic": self.traffic,
                "objectives": dict(self.objectives),
            }
        )

    def replicas(self, args: Mapping[str, Any], prompts: int, answers: int) -> dict[str, Any]:
        """Measure replicas of an engine with these settings under the traffic (`optimize.replicas`)."""
        return self._run(
            {
                "kind": "replicas",
                "args": {**args, "skip_tokenizer_init": True},
                "arrangement": {"prompts": prompts, "answers": answers},
                "traffic": self.traffic,
                "objectives": dict(self.objectives),
            }
        )

    def folder_args(self, candidate: Candidate) -> tuple[EngineArgs, dict[str, Any]]:
        """Split settings into (those stored in the candidate's folder, those that each start must
        be given). A draft model or head is not stored."""
        args = EngineArgs(**self.args_of(candidate))
        draft = dict(candidate.settings).get("speculative_model")
        if draft is None or draft_path(draft) is None:
            return args, {}
        at_start = draft_settings(draft)
        left_out: dict[str, Any] = dict.fromkeys(at_start)
        return dataclasses.replace(args, **left_out), at_start

    def args_of(self, candidate: Candidate) -> dict[str, Any]:
        """Engine settings for a candidate. If its compression is a checkpoint, that is made first."""
        given = settings_of(self.base, candidate)
        if candidate.compression != "none" and candidate.compression not in SCHEMES:
            given["model"] = str(self.artefact(candidate.compression))
        return given

    def artefact(self, compression: str) -> Path:
        """Path of the compressed checkpoint, made if it does not exist. An interrupted compression
        continues."""
        recipe = compression.removeprefix("recipe:")
        out = self.folder / "checkpoints" / f"{Path(recipe).stem}-{self._made_of(compression)}"
        if not out.is_dir():
            self.on_phase(f"compressing, {compression}")
            out.parent.mkdir(parents=True, exist_ok=True)
            words = [
                *WORKER,
                "slipstream",
                "compress",
                self.base.model,
                "--recipe",
                recipe,
                "--out",
                str(out),
                "--no-report",
            ]
            words += ["--device", self.base.device]
            words += ["--download-dir", self.base.download_dir] if self.base.download_dir else []
            self._finish(words, None, f"compress --recipe {recipe}", most_s=self.compress_s)
        return out

    def _files(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times that identify the model's files."""
        return files_of(resolve_model(self.base.model, download_dir=self.base.download_dir))

    def _made_of(self, compression: str) -> str:
        """Hash of the model and the recipe that a compressed checkpoint is made from."""
        recipe = read_recipe(compression.removeprefix("recipe:")).as_data()
        return digest([self._files(), recipe], default=plain)[:12]

    def quality(self, candidate: Candidate) -> dict[str, Any]:
        key = candidate.quality_key
        settings = dict(key[1:])
        if self.base.load_format == "dummy":
            kl = guessed_kl(candidate.compression, settings.get("kv_cache_dtype", "auto"))
            return {
                "kl": kl,
                "kl_stderr": 0.0,
                "perplexity_ratio": None,
                "not_measured": NOT_MEASURED,
            }
        if candidate.compression == "none" and settings.get("kv_cache_dtype", "auto") == "auto":
            return {
                "kl": 0.0,
                "kl_stderr": 0.0,
                "perplexity_ratio": 1.0,
                "perplexity_ratio_stderr": 0.0,
                "top1_agreement": 1.0,
                "tasks": {name: {"loss": 0.0, "stderr": 0.0} for name, _ in self.limits.tasks},
            }
        if key not in self._quality:
            folder = self.receipt(candidate)
            kept = folder / "quality.json"
            told = {
                "conditions": self.conditions,
                "key": [list(x) if isinstance(x, tuple) else x for x in key],
            }
            if candidate.compression not in ("none", *SCHEMES):
                told["made_of"] = self._made_of(candidate.compression)
            if kept.is_file() and (known := json.loads(kept.read_text("utf-8"))).get("of") == told:
                self._quality[key] = known["found"]
                return self._quality[key]
            folder.mkdir(parents=True, exist_ok=True)
            of = Candidate(candidate.compression, tuple(settings.items()))
            args = self.args_of(of)
            self.on_phase(f"quality of {candidate.compression}")
            job: dict[str, Any] = {
                "kind": "quality",
                "original": dataclasses.asdict(self.base),
                "args": args,
            }
            job |= {
                "folder": str(folder),
                "text": dict(self.text),
                "name": of.name,
                "limit": self.task_limit,
            }
            job |= {
                "tasks": [name for name, _ in self.limits.tasks],
                "recipe": {"name": candidate.compression},
            }
            found = self._run(job)
            kept.write_text(json.dumps({"of": told, "found": found}), encoding="utf-8")
            self._quality[key] = found
        return self._quality[key]

    def receipt(self, candidate: Candidate) -> Path:
        """Path of the receipt of the candidate's quality."""
        name = hashlib.sha256(repr(candidate.quality_key).encode()).hexdigest()[:8]
        return (
            self.folder
            / "quality"
            / f"{candidate.compression.replace(':', '_').replace('/', '_')}-{name}"
        )

    def _run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self._finish(WORKER, json.dumps(job, default=plain), str(job["kind"]))
        )
        if "error" in found:
            raise EngineError(found["error"])
        return found

    def _finish(
        self, words: Sequence[str], given: str | None, what: str, most_s: float = math.inf
    ) -> str:
        """Run a process and return its output. EngineError if it fails or takes too long; then all
        processes that it started are ended too."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            left, most_s = self.deadline - time.monotonic(), min(self.timeout_s, most_s)
            out, said = process.communicate(given, timeout=max(0.0, min(most_s, left)))
        except subprocess.TimeoutExpired:
            over = (
                "the budget ended before it did"
                if left < most_s
                else f"it took more than {most_s:.1f} s"
            )
            raise EngineError(f"{what} was stopped: {over}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            lines = said.strip().splitlines() or ["it said nothing"]
            raise EngineError(
                f"{what} ended with exit code {process.returncode}: {lines[-1].removeprefix('slipstream: ')}"
            )
        return out


_machine = functools.cache(this_machine)


def files_of(source: Path) -> list[tuple[str, int, int]]:
    """Identity of a file or folder: names, sizes and times of its files."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    return [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]


# --- Stored results -----------------------------------------------------------------------------------------------------


def append_result(result: TrialResult, measurer: Measurer) -> None:
    row = {"conditions": measurer.conditions, **as_row(result)}
    with (measurer.folder / RESULTS_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=plain) + "\n")


def as_row(result: TrialResult) -> dict[str, Any]:
    c = result.candidate
    return {
        "compression": c.compression,
        "settings": dict(c.settings),
        **{name: getattr(result, name) for name in ("throughput", "tpot_s", "kl", "fits", "error")},
        "figures": dict(result.figures),
    }


def result_of(row: Mapping[str, Any], space: Space) -> TrialResult:
    """Read the result from a row of `as_row`. KeyError if the row is from another space."""
    candidate = Candidate(
        row["compression"], tuple((name, row["settings"][name]) for name in space.axes)
    )
    return TrialResult(
        candidate=candidate,
        **{name: v for name, v in row.items() if name not in ("compression", "settings")},
    )


def read_results(measurer: Measurer, space: Space) -> list[TrialResult]:
    """Stored results with the same conditions whose choices are still in the space; only the last
    one of each candidate."""
    file = measurer.folder / RESULTS_NAME
    found: dict[Candidate, TrialResult] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
            conditions, result = row.pop("conditions"), result_of(row, space)
        except (ValueError, KeyError):
            continue  # cut off when the search was interrupted, or from another space
        lost_too_much = result.kl is not None
        # other failed candidates are tried again
        if conditions == measurer.conditions and (result.error is None or lost_too_much):
            found[result.candidate] = result
    return list(found.values())


# --- Choosing ---------------------------------------------------------------------------------------------------------


def misses(result: TrialResult, objectives: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Objectives whose 99th percentile is too high: name → (measured, limit)."""
    found = {name: (result.figures.get(f"{name}_p99"), most) for name, most in objectives.items()}
    return {
        name: (value, most)
        for name, (value, most) in found.items()
        if value is not None and value > most
    }


def choose(results: Sequence[TrialResult], objectives: Mapping[str, float]) -> TrialResult | None:
    """Result on the Pareto front with the highest throughput among those that meet the objectives.
    If none does, the one that misses them least."""
    if not results:
        return None
    meeting = [r for r in results if not misses(r, objectives)]
    if meeting:
        return max(meeting, key=lambda r: r.throughput or 0)
    return min(
        results, key=lambda r: max(value / most for value, most in misses(r, objectives).values())
    )
