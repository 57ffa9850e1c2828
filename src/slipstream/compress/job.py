"""A job of `slipstream compress`: its options, the plan of a recipe for a model, and the work up to the report.

`Compression.of` plans without weights. `Compression.run` writes the checkpoint, measures it against the
original, and with `back_off` tries recipes with more bits until the KL is within `max_kl`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.compress.gguf.mix import GGUF
from slipstream.compress.planning import CompressionPlan, plan
from slipstream.compress.quantize_step import Budget
from slipstream.compress.recipe import Recipe, more_bits
from slipstream.compress.verdict import QualityLimits, check_max_kl, input_bytes, rounded_before
from slipstream.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    import torch

    from slipstream.compress.report import Report
    from slipstream.evals.text import TextSettings
    from slipstream.spec.description import ModelDescription

Progress = Callable[[str, int, int], None]
"""Called with the phase, the steps done, and their total."""

Say = Callable[[str], None]
"""Called with each line of output for the user."""

_LIMITS = QualityLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressOptions:
    """Options of `slipstream compress`, with its defaults."""

    model: str
    recipe: str
    out: str | None = None
    dry_run: bool = False
    restart: bool = False
    device: str = "auto"
    dtype: str = "auto"
    download_dir: str | None = None
    no_report: bool = False
    text: str = "sharegpt"
    max_kl: float | None = None
    back_off: bool = False
    eval_windows: int = 16
    speed: bool = False
    max_perplexity_ratio: float = _LIMITS.max_perplexity_ratio
    min_top1: float = _LIMITS.min_top1_agreement
    allow_any_quality: bool = False
    tasks: tuple[str, ...] = ()
    limit: int | None = None  # questions per task

    @property
    def limits(self) -> QualityLimits:
        return QualityLimits(
            max_perplexity_ratio=self.max_perplexity_ratio, min_top1_agreement=self.min_top1
        )

    def check(self) -> None:
        """Check the options that depend on neither the recipe nor the model. ConfigError names the
        wrong option."""
        if self.max_kl is not None and self.no_report:
            raise ConfigError(
                "--max-kl needs what --no-report leaves out; drop one", field="max_kl"
            )
        check_max_kl(self.max_kl)
        if self.no_report and (self.allow_any_quality or self.limits != _LIMITS):
            raise ConfigError(
                "--allow-any-quality, --max-perplexity-ratio and --min-top1 need what --no-report leaves out; drop one",
                field="no_report",
            )
        self.limits.check()
        if self.tasks and self.no_report:
            raise ConfigError(
                "--tasks are part of the report, which --no-report leaves out; drop one",
                field="tasks",
            )
        if self.back_off and self.max_kl is None:
            raise ConfigError(
                "--back-off needs --max-kl, the limit that it tries to meet", field="back_off"
            )

    def refuse_report(self, what: str) -> None:
        """Raise ConfigError if an option of the report is set, because `what` writes its own receipt."""
        names = (
            *("max_kl", "speed", "no_report", "back_off", "allow_any_quality", "dtype", "text"),
            *("eval_windows", "max_perplexity_ratio", "min_top1"),
        )
        unset = CompressOptions(model=self.model, recipe=self.recipe)
        given = [name for name in names if getattr(self, name) != getattr(unset, name)]
        if given := given or list(self.tasks):
            raise ConfigError(
                f"{given[0]} is for smaller models; {what} has a receipt of its own", field=given[0]
            )

    def text_for(self, source: ModelDescription) -> TextSettings:
        """Text on which the report is measured."""
        from slipstream.evals.text import TextSettings

        context = min(512, source.spec.max_position)
        return TextSettings(
            source=self.text, context=context, stride=context, num_windows=self.eval_windows
        )


@dataclass(frozen=True, slots=True)
class Input:
    """Input of a compression. `rounded`: how its weights were quantized before; None: they were not."""

    name: str
    num_bytes: int
    dense_bytes: int  # size in the dtype of the result's dense weights
    rounded: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished or planned compression. With `back_off` the recipe may have more bits than the user's."""

    recipe: Recipe
    plan: CompressionPlan
    report: Report | None = None

    def estimate(self, *, is_planned: bool) -> tuple[Counter[str], int, float]:
        """Returns (number of linear layers by format, bytes of the result, bits per weight). If a
        budget of bits `is_planned`, its average is used in place of bits not chosen yet."""
        kinds: Counter[str] = Counter()
        after, bits = self.plan.bytes_after, self.plan.bits_per_weight
        for p in self.plan.weights:
            if p.fmt is None:
                continue
            kind, budget = str(p.fmt), None if p.settings is None else p.settings.bits
            if is_planned and isinstance(budget, Budget):
                choices = ", ".join(map(str, budget.choices))
                kind = f"{choices} bits, as they are worth most, {budget.average:g} on average"
                after += int(budget.average * p.rows * p.inner / 8)
                after -= p.fmt.num_bytes(p.rows, p.inner, self.plan.scale_bytes)
                bits = budget.average
            kinds[kind] += 1
        matrices, blocks = [b for b in self.plan.blocks if b.type != "F32"], self.recipe.one(GGUF)
        if blocks is not None and blocks.bits is not None and is_planned:
            kinds[f"types, as they are worth most, {blocks.bits:g} bits on average"] = len(matrices)
            room = int(blocks.bits * sum(b.num_values for b in matrices) / 8)
            return kinds, after + room - sum(b.num_bytes for b in matrices), blocks.bits
        kinds.update(b.type for b in matrices)
        return kinds, after, bits


@dataclass(frozen=True, slots=True)
class Compression:
    """A planned compression. `source` is the original model with the shape after the recipe's first part (pruning,
    distillation)."""

    options: CompressOptions
    original: ModelDescription
    source: ModelDescription
    planned: Outcome
    input: Input

    @classmethod
    def of(
        cls, options: CompressOptions, recipe: Recipe, original: ModelDescription
    ) -> Compression:
        source = original
        if recipe.reshapes:
            from slipstream.compress.pipeline import reshaped_spec

            # The sizes after pruning are known before the weights are chosen.
            source = dataclasses.replace(original, spec=reshaped_spec(original, recipe))
        planned = plan(source, recipe)
        dense = planned.bytes_before
        if recipe.reshapes:
            dense = original.spec.num_parameters * planned.scale_bytes
        size, rounded = input_bytes(original) or dense, rounded_before(original)
        given = Input(options.model, size, dense, rounded)
        return cls(options, original, source, Outcome(recipe, planned), given)

    def check_report(self) -> None:
        """Raise ConfigError before the work if the report can't be made."""
        from slipstream.evals.tasks import check_tasks
        from slipstream.evals.text import read_documents

        if self.options.no_report:
            return
        text = self.options.text_for(self.original)
        found = read_documents(text.source, text.part, download_dir=self.options.download_dir)
        if next(iter(found), None) is None:
            raise ConfigError(
                f"the {text.part} part of {text.source} holds no text to score", field="text"
            )
        check_tasks(list(self.options.tasks), limit=self.options.limit, part=text.part)

    def run(self, out: Path, *, progress: Progress, say: Say) -> Outcome:
        """Write the checkpoint to `out`. BudgetError if no recipe stays within `max_kl`."""
        from slipstream.compress.run import resolve_device

        device, dtype = resolve_device(self.options.device, self.options.dtype)
        if device.type == "cpu" and not self.options.no_report:
            from slipstream.compress.report import report_seconds

            count = self.options.eval_windows
            tokens = count * self.options.text_for(self.original).context
            seconds = report_seconds(self.original.spec, tokens)
            say(
                f"the report at the end scores {count} windows with both models, some {seconds:.0f} s "
                "(*estimated* from one product timed here); --no-report leaves it out, --eval-windows shortens it"
            )
        return _JobRun(self, out, device, dtype, progress, say).run()


@dataclass(slots=True)
class _JobRun:
    job: Compression
    out: Path
    device: torch.device
    dtype: torch.dtype
    progress: Progress
    say: Say
    reports: list[Report] = field(default_factory=list)
    tried: list[tuple[str, float]] = field(default_factory=list)

    def run(self) -> Outcome:
        from slipstream.compress.pipeline import clean, layer_recipe, publish, reshape

        recipe, source = self.job.planned.recipe, self.job.source
        if recipe.reshapes:
            source = reshape(
                self.job.original,
                recipe,
                self.out,
                device=self.device,
                restart=self.job.options.restart,
                download_dir=self.job.options.download_dir,
                progress=self.progress,
            )
            if layer_recipe(recipe) is None:
                try:
                    publish(source, recipe, self.out, partial(self.measure, recipe))
                except BudgetError as error:
                    error.add_note(f"nothing was written to {self.out}")
                    raise
                return self.outcome(recipe, self.job.planned.plan)
        made = self.try_recipes(source, self.read_windows(source))
        if recipe.reshapes:
            clean(self.out)
        return made

    def outcome(self, recipe: Recipe, plan: CompressionPlan) -> Outcome:
        return Outcome(recipe, plan, self.reports[-1] if self.reports else None)

    def read_windows(self, source: ModelDescription) -> list[tuple[int, ...]]:
        """Token ids of the calibration text; empty if the plan needs none."""
        from slipstream.engine.text.tokenizer import Tokenizer
        from slipstream.evals.text import calibration_text

        if not self.job.planned.plan.needs_text:
            return []
        recipe = self.job.planned.recipe
        self.progress("reading text", 0, 0)
        return calibration_text(
            recipe.calibration.text,
            tokenizer=Tokenizer.for_model(source),
            num_windows=recipe.num_windows,
            context=min(recipe.calibration.context, source.spec.max_position),
            download_dir=self.job.options.download_dir,
        )

    def try_recipes(self, source: ModelDescription, windows: list[tuple[int, ...]]) -> Outcome:
        """Compress by the recipe; with `back_off`, retry with more bits until the KL is within
        `max_kl`. Attempts of an interrupted run are not repeated."""
        from slipstream.compress.checkpoint import Attempts
        from slipstream.compress.run import compress

        options, recipe = self.job.options, self.job.planned.recipe
        known = Attempts(self.out, restart=options.restart)
        conditions = self.conditions(source, windows)
        for attempt in [recipe, *(more_bits(recipe) if options.back_off else ())]:
            described = {**conditions, "recipe": attempt.as_data()}
            if options.back_off and (kl := known.cost(described)) is not None:
                assert options.max_kl is not None
                if not kl <= options.max_kl:
                    self.tried.append((attempt.name, kl))
                    self.say(f"{attempt.name}: the mean KL was found to be {kl:.4g} nats before")
                    continue
            try:
                planned = compress(
                    source,
                    attempt,
                    self.out,
                    windows=windows,
                    device=self.device,
                    dtype=self.dtype,
                    restart=options.restart,
                    progress=partial(self.progress, f"layers ({attempt.name})"),
                    finish=partial(self.measure, attempt),
                )
            except BudgetError as error:
                if not options.back_off:
                    error.add_note(
                        f"nothing was written to {self.out}; with another limit, only the measuring is done again"
                    )
                    raise
                self.tried.append((attempt.name, self.reports[-1].divergence.kl.mean))
                known.add(described, self.tried[-1][1])
                self.say(f"{attempt.name}: {error}")
            else:
                known.clear()
                return self.outcome(attempt, planned)
        told = ", ".join(f"{name}: {kl:.4g}" for name, kl in self.tried)
        raise BudgetError(
            f"no attempt keeps to max_kl={options.max_kl:g} nats ({told}); nothing was written to {self.out}; raise the limit",
            field="max_kl",
        )

    def conditions(
        self, source: ModelDescription, windows: list[tuple[int, ...]]
    ) -> dict[str, object]:
        """Everything except the recipe that an attempt's KL depends on."""
        from slipstream.compress.checkpoint import fingerprint

        options = self.job.options
        measured = Path(options.text).expanduser()
        changed = measured.stat().st_mtime_ns if measured.is_file() else None
        return {
            "models": [fingerprint(self.job.original), fingerprint(source)],
            "calibration": windows,
            "computed": [str(self.device), str(self.dtype)],
            "text": [options.text, changed, options.eval_windows],
        }

    def measure(self, attempt: Recipe, folder: Path) -> None:
        """Write the report of the checkpoint in `folder`. BudgetError if its KL is above `max_kl`."""
        from slipstream.compress.report import measure, write_receipt
        from slipstream.config import EngineArgs

        options = self.job.options
        if options.no_report:
            return
        # Both run as an engine would here: on a CPU, for example, float8 weights are expanded and inputs are not quantized.
        original = EngineArgs(
            model=options.model, device=options.device, download_dir=options.download_dir
        )
        # the folder will be renamed
        compressed = dataclasses.replace(original, model=str(folder), weights_cache="off")
        report = measure(
            original,
            compressed,
            name=str(self.out),
            text=options.text_for(self.job.original),
            speed=options.speed,
            tasks=list(options.tasks),
            limit=options.limit,
            recipe={"name": attempt.name, "steps": attempt.as_data()},
            max_kl=options.max_kl,
            limits=options.limits,
            tried=tuple(self.tried),
            progress=lambda phase, done, total: self.progress(f"report, {phase}", done, total),
        )
        self.reports.append(report)
        write_receipt(report, folder)
        report.check()
