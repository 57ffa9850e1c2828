"""Searches the compression and settings that serve a given traffic best, and writes a folder with
them.

`prepare` checks the options before anything is measured. `Study.run` measures, chooses and writes
the folder. Results are stored next to it (`DIR.search`), so that an interrupted study continues."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.base.files import sole_writer, writing
from slipstream.bench.load import ClosedLoop, parse_arrivals
from slipstream.config import EngineArgs, num_ranks, resolve
from slipstream.config.settings import DeviceInfo
from slipstream.costs.metrics import parse_objectives
from slipstream.errors import ConfigError
from slipstream.evals.tasks import check_tasks
from slipstream.evals.text import TextSettings, check_text
from slipstream.hub import machine_folder, resolve_model
from slipstream.optimize import run as measuring
from slipstream.optimize.candidates import Candidate, Space, TrialResult
from slipstream.optimize.prior import simulated_prior
from slipstream.optimize.replicas import arrangements, verdict
from slipstream.optimize.search import Search, load_optuna
from slipstream.optimize.traffic import RecordedTraffic, parse_traffic
from slipstream.simulate.engines import this_hardware
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.device import detect

COMPRESS_SHARE = 1 / 3
"""Maximum fraction of the time budget for one compression. An interrupted one continues in the next run."""

TEXT_CONTEXT = 512
"""Number of tokens in a window of text for measuring quality."""

Say = Callable[[str], None]
"""Called with each line of output for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Options of a study, the same as of `slipstream optimize`. Those that are parsed later are strings."""

    model: str
    out: str
    traffic: str = "128/64"
    arrivals: str = "closed:8"
    num_requests: int = 32
    slo: str = ""
    max_quality_loss: str | None = None  # None: kl=0.05
    task_limit: int | None = None
    budget: str = "20m"
    device: str = "auto"
    compressions: str | None = None
    drafts: str | None = None
    kv_cache_dtypes: str | None = None
    parallel: str = "tp1"
    # number of replicas to measure, alike and with separate prefill and decode
    replicas: int | None = None
    load_format: str = "auto"
    max_model_len: int | None = None
    num_threads: int | None = None
    text: str = "sharegpt"
    eval_windows: int = 16
    seed: int = 0
    download_dir: str | None = None

    @property
    def has_weights(self) -> bool:
        return self.load_format != "dummy"

    def out_folder(self) -> Path:
        """Folder to make. ConfigError if it can't be made."""
        out = Path(self.out).expanduser().absolute()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"{out} exists already; give another --out, or remove it", field="out"
            )
        if out.is_mount():
            raise ConfigError(
                f"{out} is a mount point, and DIR is renamed when it is whole; give a folder in it",
                field="out",
            )
        return out

    def base(self) -> EngineArgs:
        """Engine settings that all candidates share."""
        names = ("device", "download_dir", "max_model_len", "num_threads", "load_format")
        given = {name: getattr(self, name) for name in names}
        return EngineArgs(
            model=self.model, **{name: value for name, value in given.items() if value is not None}
        )

    def check(self) -> None:
        """Check the options that do not depend on the model. ConfigError names the wrong option."""
        if not self.has_weights and self.max_quality_loss is not None:
            raise ConfigError(
                "max_quality_loss can't be kept with --load-format dummy: random weights have no quality; leave one of "
                "them out",
                field="max_quality_loss",
            )
        for name in ("eval_windows", "task_limit"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name}={count} must be above 0", field=name)
        if self.replicas is not None and self.replicas < 2:
            raise ConfigError(
                f"replicas={self.replicas}: prefill and decode apart take 2 or more; leave it out",
                field="replicas",
            )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be below 0", field="seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Result of a study. `again`: measurements of an engine from its folder; None for random weights.
    `replicas`: measurements of several (`optimize.replicas.arrangements`); empty if not requested."""

    search: Search
    chosen: TrialResult
    at_start: Mapping[str, Any]  # settings that the folder can't store: `serve` needs them
    again: dict[str, Any] | None
    replicas: Sequence[Mapping[str, Any]] = ()


def prepare(options: StudyOptions, say: Say) -> Study:
    """Check the options before anything is measured. ConfigError names the wrong one."""
    out, base = options.out_folder(), options.base()
    budget_s = measuring.parse_seconds(options.budget)
    limits = measuring.parse_quality_loss(options.max_quality_loss or "kl=0.05")
    objectives = parse_objectives(options.slo)
    options.check()
    description = read_spec(resolve_model(options.model, download_dir=options.download_dir))
    spec = description.spec
    if spec.kind != "a decoder":
        raise ConfigError(
            f"optimize is for models that answer; {options.model} is {spec.kind}", field="model"
        )
    info = detect(options.device, machine_folder())
    types = _kv_cache_dtypes(options, base, description, info)
    forms = measuring.check_parallel(options.parallel.split(","), base, description, info)
    context = min(TEXT_CONTEXT, spec.max_position)
    if options.replicas is not None:
        _check_handover(base, description, info, forms)
    text = TextSettings(
        source=options.text, context=context, stride=context, num_windows=options.eval_windows
    )
    if options.has_weights:
        check_text(text, download_dir=options.download_dir)
    longest = options.max_model_len or spec.max_position
    traffic = parse_traffic(
        options.traffic,
        options.arrivals,
        num_requests=options.num_requests,
        longest=longest,
        seed=options.seed,
    )
    if traffic.num_left_out:
        say(
            f"{traffic.num_left_out} requests of the traffic are longer than {longest} tokens and were left out"
        )
    space = _space(options, traffic, on_gpu=info.is_cuda)
    axes = {**space.axes, **({} if types is None else {"kv_cache_dtype": types}), "parallel": forms}
    space = dataclasses.replace(space, axes=axes)
    if limits.tasks:
        check_tasks([name for name, _ in limits.tasks])
    if not options.has_weights:
        space = _without_recipes(space, chosen=options.compressions is not None)
    refused = measuring.refusals(space, base, description, info)
    space = dataclasses.replace(space, left_out=frozenset(refused))
    reasons = "; ".join(dict.fromkeys(refused.values()))
    if not space.candidates():
        raise ConfigError(f"no engine starts with any candidate: {reasons}", field="parallel")
    if refused:
        say(f"{len(refused)} combinations are left out: {reasons}")
    load_optuna()  # raises an error before a folder is made
    return Study(
        options=options,
        out=out,
        base=base,
        description=description,
        traffic=traffic,
        objectives=objectives,
        limits=limits,
        text={
            "source": text.source,
            "context": context,
            "stride": context,
            "num_windows": text.num_windows,
        },
        space=space,
        budget_s=budget_s,
    )


def _check_handover(
    base: EngineArgs, description: ModelDescription, info: DeviceInfo, forms: Sequence[str]
) -> None:
    """Raise ConfigError if the engines of some parallel form have several ranks, or don't support hand-overs."""
    for form in forms:
        given = measuring.settings_of(base, Candidate("none", (("parallel", form),)))
        try:
            args = EngineArgs(**{**given, "kv_handover_address": "unix:optimize"})
            resolve(args, description, info)
            if num_ranks(args) > 1:
                raise ConfigError("engines of several ranks are not measured next to each other")
        except ConfigError as error:
            raise ConfigError(
                f"replicas: {error} (leave out replicas, or {form})", field="replicas"
            ) from None


def _kv_cache_dtypes(
    options: StudyOptions, base: EngineArgs, description: ModelDescription, info: DeviceInfo
) -> tuple[str, ...] | None:
    """Requested dtypes of the KV cache. ConfigError for one that the engine does not support."""
    given = options.kv_cache_dtypes
    types = None if given is None else tuple(dict.fromkeys(given.split(",")))
    for kind in types or ("auto",):
        resolve(dataclasses.replace(base, kv_cache_dtype=kind), description, info)
    return types


def _space(options: StudyOptions, traffic: RecordedTraffic, *, on_gpu: bool) -> Space:
    """Space of the compressions, drafts and step sizes to try."""
    arrivals = parse_arrivals(options.arrivals)
    users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else 32
    space = measuring.default_space(users=min(users, len(traffic.lengths)), on_gpu=on_gpu)
    if options.compressions is not None:
        found = measuring.check_compressions(options.compressions.split(","))
        space = dataclasses.replace(space, compressions=found)
    if options.drafts is not None:
        drafts = measuring.check_drafts(options.drafts.split(","))
        space = dataclasses.replace(space, axes={**space.axes, "speculative_model": drafts})
    return space


def _without_recipes(space: Space, *, chosen: bool) -> Space:
    """Space for random weights. ConfigError if the user chose a compression that needs trained
    ones."""
    kept = tuple(c for c in space.compressions if c == "none" or c in SCHEMES)
    if chosen and (no := [c for c in space.compressions if c not in kept]):
        raise ConfigError(
            f"{no[0]} needs weights, and --load-format dummy has none", field="compressions"
        )
    return dataclasses.replace(space, compressions=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A prepared study: the space to search, and the measurements in it."""

    options: StudyOptions
    out: Path
    base: EngineArgs
    description: ModelDescription
    traffic: RecordedTraffic
    objectives: Mapping[str, float]
    limits: measuring.QualityLoss
    text: Mapping[str, Any]
    space: Space
    budget_s: float

    def run(
        self, *, say: Say, on_phase: Say, on_result: Callable[[TrialResult], None]
    ) -> StudyResult:
        """Measure, choose and write the folder. ConfigError if no candidate is within the quality limits."""
        state = self.out.with_name(f"{self.out.name}.search")
        with writing(state, "out"):
            state.mkdir(parents=True, exist_ok=True)
        with sole_writer(self.out):
            measurer = self._measurer(state, on_phase)
            search = self._search(measurer, say, on_result)
            measurer.deadline = math.inf
            chosen = measuring.choose(search.front(), self.objectives)
            if chosen is None:
                raise ConfigError(_nothing(search), field="max_quality_loss")
            args, at_start = measurer.folder_args(chosen.candidate)
            replicas = self._replicas(chosen, measurer)
            again = self._write(chosen, measurer, search, args, at_start, replicas)
        return StudyResult(
            search=search, chosen=chosen, at_start=at_start, again=again, replicas=replicas
        )

    def _replicas(
        self, chosen: TrialResult, measurer: measuring.Measurer
    ) -> list[Mapping[str, Any]]:
        """Measure several replicas of the chosen engine, in all arrangements."""
        found: list[Mapping[str, Any]] = []
        args = measurer.args_of(chosen.candidate)
        for prompts, answers in arrangements(self.options.replicas or 0):
            measurer.on_phase(f"{prompts} + {answers} replicas")
            found.append(measurer.replicas(args, prompts, answers))
        return found

    def _measurer(self, state: Path, on_phase: Say) -> measuring.Measurer:
        options, drafts = self.options, self.space.axes.get("speculative_model", ())
        named = [options.text, *(name for name, _ in self.limits.tasks)]
        files = [Path(name).expanduser() for name in named]
        files += [path for d in drafts if d and (path := measuring.draft_path(d)) is not None]
        return measuring.Measurer(
            base=self.base,
            traffic=self.traffic,
            objectives=self.objectives,
            limits=self.limits,
            folder=state,
            text=self.text,
            task_limit=options.task_limit,
            files=[path for path in files if path.exists()],
            on_phase=on_phase,
        )

    def _search(
        self, measurer: measuring.Measurer, say: Say, on_result: Callable[[TrialResult], None]
    ) -> Search:
        """Run the search. Earlier results count; the time budget starts with the first result."""
        options = self.options
        hardware = this_hardware(options.device, options.num_threads)
        prior = simulated_prior(self.base, self.description, self.traffic, hardware)
        known = measuring.read_results(measurer, self.space)
        if known:
            say(f"{len(known)} candidates were measured before")
        kl_limit = self.limits.kl or 0.1
        search = Search(
            self.space, prior, measurer, known=known, seed=options.seed, kl_limit=kl_limit
        )
        begin, measurer.compress_s = time.monotonic(), self.budget_s * COMPRESS_SHARE
        if known:  # there is a result already
            measurer.deadline = begin + self.budget_s

        def keep(result: TrialResult) -> None:
            measurer.deadline = begin + self.budget_s
            measuring.append_result(result, measurer)
            on_result(result)

        search.run(budget_s=self.budget_s, on_result=keep)
        return search

    def _write(
        self,
        chosen: TrialResult,
        measurer: measuring.Measurer,
        search: Search,
        args: EngineArgs,
        at_start: dict[str, Any],
        replicas: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any] | None:
        """Write the chosen candidate's folder, with receipts and all measurements.

        Returns the measurements of an engine from the folder; None for random weights, which it
        does not store. The folder is made next to the results and renamed when it is complete, so
        that a killed search leaves no incomplete folder."""
        from slipstream.optimize.folder import build_folder
        from slipstream.optimize.page import render

        traffic = dataclasses.asdict(self.traffic)
        measured = {
            "chosen": measuring.as_row(chosen),
            "traffic": {**traffic, "lengths": len(self.traffic.lengths)},
            "objectives": dict(self.objectives),
            "limits": {
                **dataclasses.asdict(self.limits),
                "text": dict(self.text),
                "task_limit": measurer.task_limit,
            },
            "at_start": at_start,
        }
        again, made = None, measurer.folder / "folder"
        for left in (made, *measurer.folder.glob(".folder.*")):
            shutil.rmtree(left, ignore_errors=True)
        if not self.options.has_weights:
            made.mkdir()
        else:
            build_folder(args, made, measured=measured, progress=measurer.on_phase)
            measurer.on_phase("measuring the folder")
            settings = EngineArgs(model=str(made), device=self.base.device, **at_start)
            again = measurer.speed(dataclasses.asdict(settings))
        for name in ("slipstream-report.json", "slipstream-report.html", "slipstream-canary.json"):
            if (receipt := measurer.receipt(chosen.candidate) / name).is_file():
                shutil.copyfile(receipt, made / name)
        document: dict[str, Any] = {
            "front": [measuring.as_row(r) for r in search.front()],
            "results": [measuring.as_row(r) for r in search.results],
            **measured,
            "folder": again,
            "replicas": list(replicas),
            "apart": verdict(replicas, self.objectives) if replicas else None,
            "why_ended": search.why_ended,
            "traffic": traffic,
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (made / "optimize.json").write_text(text, encoding="utf-8")
        page = render(document, self.base.model)
        (made / "optimize.html").write_text(page, encoding="utf-8")
        with writing(self.out, "out"):
            if self.out.exists():
                self.out.rmdir()
            made.rename(self.out)
        return again


def _nothing(search: Search) -> str:
    failed = [r for r in search.results if r.error]
    reasons = dict.fromkeys(f"{r.candidate.compression}: {r.error}" for r in failed)
    why = "; ".join(reasons) or "none was measured in the time"
    return f"no candidate keeps to the limits: {why}"
