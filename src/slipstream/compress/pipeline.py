"""The first part of a recipe, which changes the model's shape: prune and distill. The second part,
`run.py`, reads the resulting checkpoint like any other.

The first part stores its results in a folder next to the result, so that an interrupted run can
continue: the student is not pruned again, and training continues from its last saved step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.compress.checkpoint import claim, fingerprint, work_folder
from slipstream.compress.dense import DenseModel, load_dense
from slipstream.compress.prune import prune, pruned_spec
from slipstream.compress.recipe import RECIPE_NAME, Recipe
from slipstream.compress.steps import Distill, PruneSettings
from slipstream.compress.training.distill import DistillFiles, StepRecord, distill_files
from slipstream.compress.training.teacher import (
    Example,
    cache_logits,
    read_examples,
    read_questions,
    teacher_examples,
    text_examples,
    write_examples,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError
from slipstream.evals.text import Part, TextSettings, calibration_text, read_windows
from slipstream.model.save import check_writable, new_folder
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.spec.description import ModelDescription, huggingface_config, read_spec
from slipstream.spec.model import ModelSpec

Progress = Callable[[str, int, int], None]
"""Called with the phase, the steps done, and their total."""
BATCH_TOKENS = 2048
"""Number of tokens computed together while a model is measured."""


def layer_recipe(recipe: Recipe) -> Recipe | None:
    """The second part of a recipe, if it has one. ConfigError if the steps are in the wrong order."""
    kinds = [isinstance(step, (PruneSettings, Distill)) for step in recipe.steps]
    names = [type(step).__name__ for step in recipe.steps]
    others = [step for step, first in zip(recipe.steps, kinds, strict=True) if not first]
    acting = [i for i, step in enumerate(recipe.steps) if not kinds[i] and names[i] != "Calibrate"]
    if acting and any(kinds[acting[0] :]):
        raise ConfigError(
            "prune and distill come before the steps that round or zero weights", field="steps"
        )
    if (
        "Distill" in names
        and "PruneSettings" in names
        and names.index("Distill") < names.index("PruneSettings")
    ):
        raise ConfigError("distill comes after prune: it recovers what pruning lost", field="steps")
    if "Distill" in names and "PruneSettings" not in names:
        raise ConfigError("distill has nothing to recover: prune before it", field="steps")
    return Recipe(steps=tuple(others), name=recipe.name) if acting else None


def reshaped_spec(source: ModelDescription, recipe: Recipe) -> ModelSpec:
    """Model spec after the first part, computed without weights."""
    check_writable(source)
    layer_recipe(recipe)
    settings = recipe.one(PruneSettings)
    assert settings is not None, "`layer_recipe` refuses others"
    return pruned_spec(source.family, huggingface_config(source), source.spec, settings)


def reshape(
    source: ModelDescription,
    recipe: Recipe,
    out: Path,
    *,
    device: torch.device,
    restart: bool = False,
    download_dir: str | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> ModelDescription:
    """Run the first part. Returns the description of a dense checkpoint in the work folder,
    `.OUT.reshaped`. `publish` makes it the result of the recipe; `clean` removes the folder."""
    reshaped_spec(source, recipe)
    work = work_folder(out, "reshaped")
    claim(work, out, {"recipe": recipe.as_data(), "source": fingerprint(source)}, restart=restart)
    student = work / "student"
    if not student.is_dir():
        progress("pruning", 0, 0)
        _prune(source, recipe, student, device, download_dir, partial(progress, "pruning"))
    distill = recipe.one(Distill)
    if distill is None:
        return read_spec(student)
    done = work / "distilled"
    if not done.is_dir():
        progress("preparing training data", 0, 0)
        files = _prepare(source, distill, work, device, download_dir)

        def report(record: StepRecord) -> None:
            held = "" if record.held_out_kl is None else f", held-out KL {record.held_out_kl:.4f}"
            progress(
                f"distilling, loss {record.loss:.4f}{held}", record.step + 1, distill.num_steps
            )

        distill_files(
            files, distill, device=str(device), num_processes=distill.num_processes, progress=report
        )
    return read_spec(done)


def publish(
    made: ModelDescription, recipe: Recipe, out: Path, finish: Callable[[Path], None]
) -> None:
    """Publish the first part's checkpoint as the result. Before that, `finish` is called with the
    folder; if it raises, nothing is published."""
    with new_folder(out) as folder:
        shutil.copytree(made.path, folder, dirs_exist_ok=True)
        (folder / RECIPE_NAME).write_text(json.dumps(recipe.as_data(), indent=2) + "\n")
        finish(folder)
    clean(out)


def clean(out: Path) -> None:
    shutil.rmtree(work_folder(out, "reshaped"), ignore_errors=True)


def batches(windows: list[tuple[int, ...]], device: torch.device) -> list[SequenceBatch]:
    """Batches of whole windows, of at most `BATCH_TOKENS` tokens."""
    count = max(1, BATCH_TOKENS // max((len(w) for w in windows), default=1))
    return [SequenceBatch.of(windows[i : i + count], device) for i in range(0, len(windows), count)]


def _prune(
    source: ModelDescription,
    recipe: Recipe,
    student: Path,
    device: torch.device,
    download_dir: str | None,
    progress: Callable[[int, int], None],
) -> None:
    settings = recipe.one(PruneSettings)
    assert settings is not None
    model = load_dense(source.path, dtype=torch.float32, device=device)
    text = recipe.calibration
    windows: list[tuple[int, ...]] = []
    if settings.needs_text:
        context = min(text.context, source.spec.max_position)
        windows = calibration_text(
            text.text,
            tokenizer=Tokenizer.for_model(source),
            num_windows=recipe.calibration_windows,
            context=context,
            download_dir=download_dir,
        )
    found = prune(model, settings, batches(windows, device), progress=progress)
    with new_folder(student) as folder:
        found.model.write_into(folder, dtype=_written(source, recipe))
        about: dict[str, Any] = {"layers": found.kept.layers, "influence": found.influence}
        (folder / "slipstream-pruned.json").write_text(json.dumps(about))


def _written(source: ModelDescription, recipe: Recipe) -> torch.dtype:
    """Dtype of the pruned checkpoint: float32 if it will be trained."""
    if recipe.one(Distill) is not None:
        return torch.float32
    found = getattr(torch, source.dtype, None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _prepare(
    source: ModelDescription,
    settings: Distill,
    work: Path,
    device: torch.device,
    download_dir: str | None,
) -> DistillFiles:
    """Write the examples, and the teacher's logits if the recipe caches them."""
    tokenizer = Tokenizer.for_model(source)
    context = min(settings.context, source.spec.max_position)
    train, held = work / "examples.jsonl", work / "held-out.jsonl"

    def windows(part: Part, count: int) -> list[Example]:
        """Cut text into windows, also from short documents, because examples may differ in length."""
        asked = TextSettings(
            source=settings.text, part=part, context=context, stride=context, num_windows=count
        )
        return text_examples(
            w.token_ids for w in read_windows(asked, tokenizer, download_dir=download_dir)
        )

    if not train.is_file():
        examples = windows("calibration", settings.num_windows) if settings.num_windows else []
        if len(examples) < settings.num_windows:
            raise ConfigError(
                f"the calibration part of {settings.text} gives {len(examples)} windows, not {settings.num_windows}; ask for "
                "fewer or shorter ones, or give more text",
                field="num_windows",
            )
        if settings.num_answers:
            examples += _answers(source, settings, device, context, download_dir)
        if settings.held_out:
            write_examples(held, windows("evaluation", settings.held_out))
        write_examples(train, examples)
    about = json.loads((work / "student" / "slipstream-pruned.json").read_text())
    logits = None
    if settings.top_k is not None:
        logits = work / "logits"
        if not logits.is_dir():
            _keep_logits(source, settings, train, logits, device)
    return DistillFiles(
        teacher=source.path,
        student=work / "student",
        examples=train,
        held_out=held if held.is_file() else None,
        out=work / "distilled",
        work=work / "training",
        logits=logits,
        kept_layers=tuple(about["layers"]),
        dtype=source.dtype,
    )


def _answers(
    source: ModelDescription,
    settings: Distill,
    device: torch.device,
    context: int,
    download_dir: str | None,
) -> list[Example]:
    """Generate the teacher's answers to the first questions of the calibration text that leave room for an answer."""
    from slipstream.engine.llm import LLM

    # a limit in characters, because a token has at least one
    questions = read_questions(
        settings.text, "calibration", settings.num_answers, context, download_dir=download_dir
    )
    if len(questions) < settings.num_answers:
        raise ConfigError(
            f"{settings.text} holds {len(questions)} short questions, not {settings.num_answers}; ask for fewer",
            field="num_answers",
        )
    with LLM(
        str(source.path),
        device=str(device),
        max_model_len=min(source.spec.max_position, 4 * context),
    ) as llm:
        found = teacher_examples(
            llm,
            questions,
            max_tokens=min(settings.max_tokens, context),
            temperature=1.0,
            seed=settings.seed,
            rationale_weight=settings.rationale_weight,
        )
    return found


def _keep_logits(
    source: ModelDescription, settings: Distill, train: Path, folder: Path, device: torch.device
) -> None:
    assert settings.top_k is not None
    examples = read_examples(train)
    dtype = getattr(torch, settings.dtype)
    teacher: DenseModel = load_dense(source.path, dtype=dtype, device=device)
    longest = max(len(e.token_ids) for e in examples)
    model = WholeModel(teacher.spec, teacher.parameters, max_len=longest).requires_grad_(False)
    cache_logits(
        model,
        examples,
        folder,
        k=settings.top_k,
        temperature=settings.temperature,
        device=device,
        dtype=dtype,
    )
